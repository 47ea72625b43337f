"""The independent domains of an optimizer's update: parameters, or any slices of them.

The update is traced once for whole arrays. Parameters, gradients and state that no result combines
are independent, so different devices may own them. If the update of an array is element-wise,
devices may own slices of it. Scalars that depend on no parameter, such as a count of steps, are
common to all devices.

References:
    Xu et al., "Automatic cross-replica sharding of weight update in data-parallel training", 2020.
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from .jaxpr import (
    BY_ELEMENT,
    ClosedJaxpr,
    Literal,
    backward_slice,
    inlined,
    inner_jaxpr,
    kind_of,
    run_equation,
    variables,
)
from .rounded import divided, is_division, rounded, to_round

#: Equations that keep the elements of an array and their order.
_SAME_ORDER = ("reshape", "expand_dims", "squeeze")


class _Missing:
    """The value of an array that another device owns."""


MISSING = _Missing()


class Part(Protocol):
    """A device's shard of a function's arrays: whole domains, and flat slices of others."""

    def owns(self, domain: int) -> bool:
        """Whether the device has a domain, or a slice of it."""

    def has_whole(self, domain: int) -> bool:
        """Whether the device has the arrays of a domain whole, in their shapes."""

    def piece(self, domain: int, x: Any) -> Any:
        """The device's slice of a whole array of a sliced domain."""

    def own(self, domain: int, x: Any) -> Any:
        """The device's slice with zeros in the padding."""


@dataclasses.dataclass(frozen=True)
class SeparableUpdate:
    """A traced update of several arrays, and its independent domains.

    Sums over all elements of an array are computed outside: their results are common scalars, so
    they join no domains.

    Attributes:
        closed: The program, jitted functions inlined, from arrays and other arguments to the
            arrays' next values.
        domain_of: The domain of each argument; None: it is common.
        slices: For each domain whether its flattened arrays may be cut anywhere.
        levels: Indices of the equations that are such sums; a level depends only on the results of
            earlier levels.
    """

    closed: ClosedJaxpr
    domain_of: tuple[int | None, ...]
    slices: tuple[bool, ...]
    levels: tuple[tuple[int, ...], ...] = ()

    @property
    def sums(self) -> tuple[int, ...]:
        """The equations of all levels, in the order of the argument `sums`."""
        return tuple(i for level in self.levels for i in level)

    @functools.cached_property
    def _domains(self) -> "_Domains":
        return _Domains(self.closed, self.domain_of, self.sums)

    @functools.cached_property
    def _to_round(self) -> set[int]:
        return to_round(self.closed)

    def read_by_sums(self) -> set[int]:
        """The indices of the arguments that `sums` depend on."""
        jaxpr = self.closed.jaxpr
        wanted = [jaxpr.eqns[i].invars[0] for i in self.sums]
        read = variables(v for eqn in backward_slice(jaxpr.eqns, wanted) for v in eqn.invars)
        read.update(variables(wanted))
        return {k for k, v in enumerate(jaxpr.invars) if v in read}

    def run(
        self, arguments: Sequence[Any], part: Part, zero: jax.Array, sums: jax.Array
    ) -> list[Any]:
        """The results on a device, flat slices for sliced domains.

        Args:
            arguments: In the order of the program; flat slices for sliced domains, anything for
                domains of other devices.
            zero: See `rounded`: the rounding of products must not depend on the slices.
            sums: float32[S], the results of `self.sums`.

        Returns:
            In the order of the program; `MISSING` for domains of other devices.
        """
        jaxpr = self.closed.jaxpr
        read, domains = self._env(arguments, part, zero, sums, jaxpr.outvars), self._domains
        return [
            MISSING
            if d is not None and not part.owns(d)
            else part.piece(d, read(v))
            if d is not None and self.slices[d] and domains.of(v) is None
            else read(v)
            for v, d in zip(jaxpr.outvars, self.domain_of, strict=False)
        ]

    def summed_domains(self, level: int) -> tuple[int, ...]:
        """The domains of the arrays that a level sums."""
        eqns = self.closed.jaxpr.eqns
        of_level = (self._domains.of(eqns[i].invars[0]) for i in self.levels[level])
        return tuple(d for d in of_level if d is not None)

    def summed(
        self, level: int, arguments: Sequence[Any], part: Part, zero: jax.Array, sums: jax.Array
    ) -> list[Any]:
        """A device's shards of the arrays that a level sums.

        Args:
            sums: See `run`; those of this level and later ones are not read.

        Returns:
            For each sum of the level, in order; `MISSING` for domains of other devices.
        """
        wanted = [self.closed.jaxpr.eqns[i].invars[0] for i in self.levels[level]]
        read, domains = self._env(arguments, part, zero, sums, wanted), self._domains
        shards = []
        for v in wanted:
            domain, x = domains.of(v), read(v)
            assert domain is not None
            shards.append(part.own(domain, x) if self.slices[domain] and x is not MISSING else x)
        return shards

    def _env(
        self,
        arguments: Sequence[Any],
        part: Part,
        zero: jax.Array,
        sums: jax.Array,
        wanted: Sequence[Any],
    ) -> Callable[[Any], Any]:
        """Values of variables, after running all equations that `wanted` needs."""
        jaxpr, are_sums, domains = self.closed.jaxpr, set(self.sums), self._domains
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        env |= {jaxpr.eqns[i].outvars[0]: sums[k] for k, i in enumerate(self.sums)}

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        sum_results = {jaxpr.eqns[i].outvars[0] for i in are_sums}
        needed = set(map(id, backward_slice(jaxpr.eqns, wanted, sum_results)))
        for i, eqn in enumerate(jaxpr.eqns):
            if i in are_sums or id(eqn) not in needed:
                continue
            domain = domains.of_equation(eqn)
            operands = [read(v) for v in eqn.invars]
            if domain is not None and not part.owns(domain):
                results: list[Any] = [MISSING] * len(eqn.outvars)
            elif domain is None or not self.slices[domain]:
                results = run_equation(eqn, operands)
            else:
                pieces = [
                    part.piece(domain, x) if domains.of(v) is None and jnp.ndim(x) else x
                    for v, x in zip(eqn.invars, operands, strict=True)
                ]
                if is_division(eqn) and domains.of(eqn.invars[1]) is None:
                    x, number = map(jnp.asarray, pieces)
                    results = [divided(x, number, zero)]
                elif part.has_whole(domain):
                    results = run_equation(eqn, pieces)
                else:
                    results = _on_slices(eqn, pieces)
            if i in self._to_round and results[0] is not MISSING:
                results = [rounded(results[0], zero)]
            env.update(zip(eqn.outvars, results, strict=True))
        return read


def independent(
    function: Callable[..., Any], arrays: Sequence[Any], others: Sequence[Any], same: Sequence[int]
) -> SeparableUpdate:
    """Find the independent domains of a function.

    Args:
        function: From `arrays` and `others` to the arrays' next values.
        same: For each of the others the array in whose domain it is, such as a gradient's
            parameter; -1: none.
    """
    closed = inlined(jax.make_jaxpr(function)(*arrays, *others))
    jaxpr, num = closed.jaxpr, len(arrays)
    levels = _levels(jaxpr, num, [s >= 0 for s in same])
    made = {i for level in levels for i in level}
    reads = _inputs_read(jaxpr, made)
    owner = [*range(num), *(s if s >= 0 else None for s in same)]
    met = [{owner[i] for i in reads(v)} | {k} for k, v in enumerate(jaxpr.outvars)]
    is_param = {s for s in same if s >= 0}
    common = {k for k in range(num) if k not in is_param}
    while True:  # drop arrays that depend on an array that is not common
        fewer = {k for k in common if met[k] - {None} <= common}
        if fewer == common:
            break
        common = fewer
    roots = list(range(num))

    def root(k: int) -> int:
        while roots[k] != k:
            k = roots[k]
        return k

    for together in met:
        first, *rest = [root(k) for k in sorted(x for x in together if x is not None)] or [0]
        joined = [k for k in (first, *rest) if k not in common]
        for k in joined[1:]:
            roots[root(k)] = root(joined[0])
    numbers = {
        r: i for i, r in enumerate(dict.fromkeys(root(k) for k in range(num) if k not in common))
    }
    each = [None if k in common else numbers[root(k)] for k in range(num)]
    domain_of = (*each, *(each[s] if s >= 0 else None for s in same))
    domains = _Domains(closed, domain_of, made)
    slices = [True] * len(numbers)
    sizes: dict[int, set[int]] = {}
    for v, d in zip(jaxpr.invars, domain_of, strict=True):
        if d is not None:
            sizes.setdefault(d, set()).add(math.prod(v.aval.shape))
    needed = set(map(id, backward_slice(jaxpr.eqns, jaxpr.outvars)))
    for i, eqn in enumerate(jaxpr.eqns):
        if i in made or id(eqn) not in needed:
            continue
        d = domains.of_equation(eqn)
        if d is not None and not _is_element_wise(eqn, domains):
            slices[d] = False
    slices = [s and len(sizes[d]) == 1 for d, s in enumerate(slices)]
    return SeparableUpdate(closed, domain_of, tuple(slices), levels)


def _levels(jaxpr: Any, num: int, belongs: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The sums over all elements of arrays, by depth of their dependences on each other."""
    level: dict[Any, int] = {}  # by variable, the first level that may sum it
    of_arrays = {*jaxpr.invars[:num], *(v for v, b in zip(jaxpr.invars[num:], belongs) if b)}  # noqa: B905
    sums: dict[int, list[int]] = {}
    needed = set(map(id, backward_slice(jaxpr.eqns, jaxpr.outvars)))
    for i, eqn in enumerate(jaxpr.eqns):
        read = variables(eqn.invars)
        depth = max((level.get(v, 0) for v in read), default=0)
        is_of_arrays = not of_arrays.isdisjoint(read)
        if id(eqn) in needed and is_of_arrays and _is_sum(eqn):
            sums.setdefault(depth, []).append(i)
            level[eqn.outvars[0]] = depth + 1
            continue
        level.update((v, depth) for v in eqn.outvars)
        if is_of_arrays:
            of_arrays.update(eqn.outvars)
    return tuple(tuple(sums[k]) for k in sorted(sums))


def _is_sum(eqn: Any) -> bool:
    """Whether an equation sums all elements of a float32 array."""
    if eqn.primitive.name != "reduce_sum":
        return False
    aval = eqn.invars[0].aval
    return len(eqn.params["axes"]) == aval.ndim and aval.dtype == jnp.float32


def _inputs_read(jaxpr: Any, made: Container[int]) -> Callable[[Any], frozenset[int]]:
    """Map a variable to the arguments that it depends on, except through `made` equations."""
    known: dict[Any, frozenset[int]] = {v: frozenset((i,)) for i, v in enumerate(jaxpr.invars)}
    none: frozenset[int] = frozenset()

    def read_by(v: Any) -> frozenset[int]:
        return none if isinstance(v, Literal) else known.get(v, none)

    for i, eqn in enumerate(jaxpr.eqns):
        if i in made:
            continue
        read = none.union(*map(read_by, eqn.invars))
        known.update((v, read) for v in eqn.outvars)
    return read_by


class _Domains:
    """The domain of each variable of a program; None: it is common."""

    def __init__(
        self, closed: ClosedJaxpr, of_inputs: Iterable[int | None], made: Container[int] = ()
    ):
        self._known: dict[Any, int | None] = dict(zip(closed.jaxpr.invars, of_inputs, strict=True))
        for i, eqn in enumerate(closed.jaxpr.eqns):
            if i in made:
                continue
            read = {d for v in eqn.invars if (d := self.of(v)) is not None}
            self._known.update((v, min(read, default=None)) for v in eqn.outvars)

    def of(self, v: Any) -> int | None:
        return None if isinstance(v, Literal) else self._known.get(v)

    def of_equation(self, eqn: Any) -> int | None:
        """The domain of an equation's results."""
        return self.of(eqn.outvars[0]) if eqn.outvars else None


def _is_element_wise(eqn: Any, domains: _Domains) -> bool:
    inner = inner_jaxpr(eqn)
    if inner is not None:
        if kind_of(eqn) not in ("inlined", "custom"):
            return False
        inner_domains = _Domains(inner, [domains.of(v) for v in eqn.invars])
        return all(
            inner_domains.of_equation(e) is None or _is_element_wise(e, inner_domains)
            for e in inner.jaxpr.eqns
        )
    name = eqn.primitive.name
    sizes = {
        math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars) if domains.of(v) is not None
    }
    others = {v.aval.shape for v in eqn.invars if domains.of(v) is None} - {()}
    shapes = {v.aval.shape for v in eqn.outvars}
    if name in _SAME_ORDER:
        return len(sizes) == 1
    return name in BY_ELEMENT and len(sizes) == 1 and others <= shapes


def _on_slices(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run an element-wise equation on flat slices."""
    inner = inner_jaxpr(eqn)
    if inner is None:
        if eqn.primitive.name in _SAME_ORDER:
            return [operands[0]]
        if not eqn.outvars[0].aval.shape:  # scalars, or flat slices of arrays of one element
            operands = jnp.broadcast_arrays(*operands)
        outputs = eqn.primitive.bind(*operands, **eqn.params)
        return list(outputs) if eqn.primitive.multiple_results else [outputs]
    env: dict[Any, Any] = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
    env |= dict(zip(inner.jaxpr.invars, operands, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for e in inner.jaxpr.eqns:
        env.update(zip(e.outvars, _on_slices(e, [read(v) for v in e.invars]), strict=True))
    return [read(v) for v in inner.jaxpr.outvars]
