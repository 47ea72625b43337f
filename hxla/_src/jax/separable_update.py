"""What of an optimizer's update can be done by itself: a parameter, or any slice of one.

The update is traced once for whole arrays. Parameters, gradients and state that no result brings
together are independent of each other, so different devices may own them; where all that is done
with an array is done element by element, they may own slices of it. Numbers that depend on no
parameter, such as a count of steps, are common: everybody has them.

References:
    Xu et al., "Automatic cross-replica sharding of weight update in data-parallel training", 2020.
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1).
"""

import dataclasses
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
    """The value of what another device owns."""


MISSING = _Missing()


class Part(Protocol):
    """What a device has of a function's arrays: flat slices of those that are cut."""

    def owns(self, domain: int) -> bool:
        """Whether it has a domain, or a slice of it."""

    def has_whole(self, domain: int) -> bool:
        """Whether it has the arrays of a domain whole, in their own shapes."""

    def piece(self, domain: int, x: Any) -> Any:
        """Its slice of a whole array of a domain that is cut."""

    def own(self, domain: int, x: Any) -> Any:
        """Its slice with zeros where it is padding."""


@dataclasses.dataclass(frozen=True)
class SeparableUpdate:
    """A traced function of several arrays, each with its result, and what of it is independent.

    Sums over all elements of an array are made elsewhere: their results are common numbers, so they
    tie nothing together.

    Attributes:
        closed: The program, jitted functions inlined: from the arrays of each domain, whose next
            values are its results, and after them other arguments.
        domain_of: For each argument the number of its domain; None: it is common.
        slices: For each domain whether its arrays may be cut anywhere, flattened.
        levels: Numbers of the equations that are such sums; those of a level need only the results
            of the levels before.
    """

    closed: ClosedJaxpr
    domain_of: tuple[int | None, ...]
    slices: tuple[bool, ...]
    levels: tuple[tuple[int, ...], ...] = ()

    @property
    def sums(self) -> tuple[int, ...]:
        """The equations of all levels, in the order of their numbers elsewhere."""
        return tuple(i for level in self.levels for i in level)

    def read_by_sums(self) -> set[int]:
        """The numbers of the arguments that some of `sums` needs, through others too."""
        jaxpr = self.closed.jaxpr
        wanted = [jaxpr.eqns[i].invars[0] for i in self.sums]
        read = variables(v for eqn in backward_slice(jaxpr.eqns, wanted) for v in eqn.invars)
        read.update(variables(wanted))
        return {k for k, v in enumerate(jaxpr.invars) if v in read}

    def run(
        self, arguments: Sequence[Any], part: Part, zero: jax.Array, sums: jax.Array
    ) -> list[Any]:
        """The results on a device: of domains that it owns, slices of those that are cut.

        Args:
            arguments: In the order of the program; flat slices where domains are cut, anything
                where they are not owned.
            zero: See `rounded`: how arrays are cut must not decide how products are rounded.
            sums: float32[S], the results of `sums`.

        Returns:
            In the order of the program; `MISSING` of what is not owned.
        """
        jaxpr = self.closed.jaxpr
        read, domains = self._env(arguments, part, zero, sums, jaxpr.outvars)
        return [
            MISSING
            if d is not None and not part.owns(d)
            else part.piece(d, read(v))
            if d is not None and self.slices[d] and domains.of(v) is None
            else read(v)
            for v, d in zip(jaxpr.outvars, self.domain_of, strict=False)
        ]

    def summed_domains(self, level: int) -> tuple[int, ...]:
        """The domains of the arrays that are summed."""
        domains = _Domains(self.closed, self.domain_of, self.sums)
        found = (domains.of(self.closed.jaxpr.eqns[i].invars[0]) for i in self.levels[level])
        return tuple(d for d in found if d is not None)

    def summed(
        self, level: int, arguments: Sequence[Any], part: Part, zero: jax.Array, sums: jax.Array
    ) -> list[Any]:
        """What a device has of the arrays that are summed.

        Args:
            arguments: See `run`.
            part: See `run`.
            zero: See `run`.
            sums: See `run`; those of this level and beyond are not read.

        Returns:
            For each sum of the level, in order; `MISSING` of what is not owned.
        """
        wanted = [self.closed.jaxpr.eqns[i].invars[0] for i in self.levels[level]]
        read, domains = self._env(arguments, part, zero, sums, wanted)
        found = []
        for v in wanted:
            domain, x = domains.of(v), read(v)
            assert domain is not None
            found.append(part.own(domain, x) if self.slices[domain] and x is not MISSING else x)
        return found

    def _env(
        self,
        arguments: Sequence[Any],
        part: Part,
        zero: jax.Array,
        sums: jax.Array,
        wanted: Sequence[Any],
    ) -> tuple[Callable[[Any], Any], "_Domains"]:
        """Values and domains of variables, run as far as some need it."""
        jaxpr, made = self.closed.jaxpr, self.sums
        domains = _Domains(self.closed, self.domain_of, made)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        env |= {jaxpr.eqns[i].outvars[0]: sums[k] for k, i in enumerate(made)}

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        given = {jaxpr.eqns[i].outvars[0] for i in made}
        needed = set(map(id, backward_slice(jaxpr.eqns, wanted, given)))
        chosen = to_round(self.closed)
        for i, eqn in enumerate(jaxpr.eqns):
            if i in made or id(eqn) not in needed:
                continue
            domain = domains.of_equation(eqn)
            operands = [read(v) for v in eqn.invars]
            if domain is not None and not part.owns(domain):
                found: list[Any] = [MISSING] * len(eqn.outvars)
            elif domain is None or not self.slices[domain]:
                found = run_equation(eqn, operands)
            else:
                own = [
                    part.piece(domain, x) if domains.of(v) is None and jnp.ndim(x) else x
                    for v, x in zip(eqn.invars, operands, strict=True)
                ]
                if is_division(eqn) and domains.of(eqn.invars[1]) is None:
                    x, number = map(jnp.asarray, own)
                    found = [divided(x, number, zero)]
                elif part.has_whole(domain):
                    found = run_equation(eqn, own)
                else:
                    found = _on_slices(eqn, own)
            if i in chosen and found[0] is not MISSING:
                found = [rounded(found[0], zero)]
            env.update(zip(eqn.outvars, found, strict=True))
        return read, domains


def independent(
    function: Callable[..., Any], arrays: Sequence[Any], others: Sequence[Any], same: Sequence[int]
) -> SeparableUpdate:
    """Find what of a function is independent.

    Args:
        function: From arrays and others to the arrays' next values.
        same: For each of the others the array that it belongs to, such as a parameter's gradient;
            -1: none.
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
    while True:  # what depends only on what is common
        fewer = {k for k in common if met[k] - {None} <= common}
        if fewer == common:
            break
        common = fewer
    roots = list(range(num))

    def root(k: int) -> int:
        while roots[k] != k:
            k = roots[k]
        return k

    for found in met:
        first, *rest = [root(k) for k in sorted(x for x in found if x is not None)] or [0]
        own = [k for k in (first, *rest) if k not in common]
        for k in own[1:]:
            roots[root(k)] = root(own[0])
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
        if d is not None and not _is_by_element(eqn, domains):
            slices[d] = False
    slices = [s and len(sizes[d]) == 1 for d, s in enumerate(slices)]
    return SeparableUpdate(closed, domain_of, tuple(slices), levels)


def _levels(jaxpr: Any, num: int, belongs: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The sums over all elements of arrays, those first that need no others."""
    level: dict[Any, int] = {}  # of what is needed for a variable
    of_arrays = {*jaxpr.invars[:num], *(v for v, b in zip(jaxpr.invars[num:], belongs) if b)}  # noqa: B905
    found: dict[int, list[int]] = {}
    needed = set(map(id, backward_slice(jaxpr.eqns, jaxpr.outvars)))
    for i, eqn in enumerate(jaxpr.eqns):
        read = variables(eqn.invars)
        own = max((level.get(v, 0) for v in read), default=0)
        is_of_arrays = not of_arrays.isdisjoint(read)
        if id(eqn) in needed and is_of_arrays and _is_sum(eqn):
            found.setdefault(own, []).append(i)
            level[eqn.outvars[0]] = own + 1
            continue
        level.update((v, own) for v in eqn.outvars)
        if is_of_arrays:
            of_arrays.update(eqn.outvars)
    return tuple(tuple(found[k]) for k in sorted(found))


def _is_sum(eqn: Any) -> bool:
    """Whether it adds up all elements of an array of float32."""
    if eqn.primitive.name != "reduce_sum":
        return False
    aval = eqn.invars[0].aval
    return len(eqn.params["axes"]) == aval.ndim and aval.dtype == jnp.float32


def _inputs_read(jaxpr: Any, made: Container[int]) -> Callable[[Any], frozenset[int]]:
    known: dict[Any, frozenset[int]] = {v: frozenset((i,)) for i, v in enumerate(jaxpr.invars)}
    none: frozenset[int] = frozenset()

    def of(v: Any) -> frozenset[int]:
        return none if isinstance(v, Literal) else known.get(v, none)

    for i, eqn in enumerate(jaxpr.eqns):
        if i in made:
            continue
        found = none.union(*map(of, eqn.invars))
        known.update((v, found) for v in eqn.outvars)
    return of


class _Domains:
    """To which domain each variable of a program belongs; None: it is common."""

    def __init__(
        self, closed: ClosedJaxpr, of_inputs: Iterable[int | None], made: Container[int] = ()
    ):
        self._known: dict[Any, int | None] = dict(zip(closed.jaxpr.invars, of_inputs, strict=True))
        for i, eqn in enumerate(closed.jaxpr.eqns):
            if i in made:
                continue
            found = {d for v in eqn.invars if (d := self.of(v)) is not None}
            self._known.update((v, min(found, default=None)) for v in eqn.outvars)

    def of(self, v: Any) -> int | None:
        return None if isinstance(v, Literal) else self._known.get(v)

    def of_equation(self, eqn: Any) -> int | None:
        """Of its results."""
        return self.of(eqn.outvars[0]) if eqn.outvars else None


def _is_by_element(eqn: Any, domains: _Domains) -> bool:
    inner = inner_jaxpr(eqn)
    if inner is not None:
        if kind_of(eqn) not in ("inlined", "custom"):
            return False
        within = _Domains(inner, [domains.of(v) for v in eqn.invars])
        return all(
            within.of_equation(own) is None or _is_by_element(own, within)
            for own in inner.jaxpr.eqns
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
    """An equation by element, of flat slices."""
    inner = inner_jaxpr(eqn)
    if inner is None:
        if eqn.primitive.name in _SAME_ORDER:
            return [operands[0]]
        if not eqn.outvars[0].aval.shape:  # numbers, of which the arrays' own are flat slices
            operands = jnp.broadcast_arrays(*operands)
        found = eqn.primitive.bind(*operands, **eqn.params)
        return list(found) if eqn.primitive.multiple_results else [found]
    env: dict[Any, Any] = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
    env |= dict(zip(inner.jaxpr.invars, operands, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for own in inner.jaxpr.eqns:
        env.update(zip(own.outvars, _on_slices(own, [read(v) for v in own.invars]), strict=True))
    return [read(v) for v in inner.jaxpr.outvars]
