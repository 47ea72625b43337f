"""An update of padded arrays for the one device of a copy that a process has: of its own part only.

An element-wise update needs of other devices no more than sums of all elements, as the global norm
of the gradients. So a process that knows its device runs the update on arrays without padding, and
puts them where they were. Sums that wait for nothing of each other travel as one vector: so the
collectives of a program are in one order, whatever sizes a process has.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..jax.jaxpr import BY_ELEMENT, ClosedJaxpr, Literal, inlined, run_equation
from ..plan.layout import from_spec
from .padding import Padding
from .uneven_collectives import narrow, replaced

_ALSO_BY_ELEMENT = ("bitcast_convert_type", "reshape")


class Lies(NamedTuple):
    """How an array lies on a copy.

    Attributes:
        spec: On its one axis.
    """

    spec: P
    padding: Padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnevenUpdate:
    """The one device of a copy that a process has.

    Attributes:
        place: Of the device on its one axis.
    """

    mesh: Mesh
    place: int

    def like(self, x: Any, lies: Lies) -> jax.ShapeDtypeStruct:
        """The shape of its own part of a padded array, without padding."""
        names = from_spec(lies.spec, len(x.shape))
        parts = lies.padding.parts or ((),) * len(x.shape)
        shape = tuple(
            own[self.place] if own else size // self.mesh.size if cutting else size
            for size, own, cutting in zip(x.shape, parts, names, strict=True)
        )
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def run(
        self,
        function: Callable[..., list[Any]],
        arrays: Sequence[Any],
        lies: Sequence[Lies],
        results: Sequence[int | None],
    ) -> list[Any]:
        """A function of arrays without padding, of its own parts of padded ones.

        Args:
            function: By element but for sums of all elements.
            lies: How each of them does.
            results: For each result the array whose part it replaces; None: it is whole.
        """
        [axis] = self.mesh.axis_names
        specs = [own.spec for own in lies]

        def local(*arrays: jax.Array) -> list[Any]:
            own = [self._narrowed(x, p) for x, (_, p) in zip(arrays, lies, strict=True)]
            closed = inlined(jax.make_jaxpr(function)(*own))
            found = _run(closed, own, list(map(any, specs)), axis)
            return [
                x if k is None else replaced(arrays[k], x)
                for k, x in zip(results, found, strict=True)
            ]

        return jax.shard_map(  # type: ignore[no-any-return]
            local,
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=[P() if k is None else specs[k] for k in results],
            check_vma=False,
        )(*arrays)

    def _narrowed(self, x: jax.Array, padding: Padding) -> jax.Array:
        for dim, parts in enumerate(padding.parts):
            if parts:
                x = narrow(x, dim, parts[self.place])
        return x


def _run(
    closed: ClosedJaxpr, arrays: Sequence[Any], is_cut: Sequence[bool], axis: str
) -> list[Any]:
    """The program, sums of what is cut completed: one after another only where they must be."""
    jaxpr = closed.jaxpr
    cut = {v for v, own in zip(jaxpr.invars, is_cut, strict=True) if own}
    rounds: dict[Any, int] = {}  # after how many collectives a value is there
    sums, order = set(), []
    for eqn in jaxpr.eqns:
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        first = max((rounds.get(v, 0) for v in read), default=0)
        is_sum = False
        if any(v in cut for v in read):
            is_sum = eqn.primitive.name == "reduce_sum" and not eqn.outvars[0].aval.shape
            assert (
                is_sum
                or eqn.primitive.name in BY_ELEMENT
                or (eqn.primitive.name in _ALSO_BY_ELEMENT)
            ), eqn.primitive.name
        if is_sum:
            sums.add(eqn.outvars[0])
        elif any(v in cut for v in read):
            cut.update(eqn.outvars)
        rounds.update(dict.fromkeys(eqn.outvars, first + is_sum))
        order.append((first, eqn))
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, arrays, strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for n in range(max((first for first, _ in order), default=0) + 1):
        partial = []
        for first, eqn in order:
            if first == n:
                env.update(
                    zip(eqn.outvars, run_equation(eqn, list(map(value, eqn.invars))), strict=True)
                )
                partial += [v for v in eqn.outvars if v in sums]
        for dtype in dict.fromkeys(v.aval.dtype for v in partial):
            alike = [v for v in partial if v.aval.dtype == dtype]
            whole = jax.lax.psum(jnp.stack([env[v] for v in alike]), axis)
            env.update(zip(alike, whole, strict=True))
    return list(map(value, jaxpr.outvars))
