"""An element-wise update of which each device does as much as its own part is large.

The traced update is run on slices of one size (`_granules`): an equation on what is cut waits until
a result or a sum of all its elements is asked for, and is then run for one slice after another,
with all that the slice needs still in the cache. What is whole is computed as it stands.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax._jaxpr import ClosedJaxpr, Literal, inlined, run_equation, variables
from ._across import Cut
from ._granules import Granules
from ._padding_kept import BY_ELEMENT

_ALSO_BY_ELEMENT = frozenset({"bitcast_convert_type"})


class NotByElementError(Exception):
    """A device would need what others have."""


def on_own_parts(
    function: Callable[..., list[Any]], cuts: Sequence[Cut | None], axis: str
) -> Callable[..., list[Any]]:
    """A function of a device's padded arrays whose work follows the sizes of its own parts.

    Args:
        function: From arrays to as many new ones as come first among them.
        cuts: How each argument is cut; None: every device has it whole.
        axis: Name of the mesh axis that cuts them, for sums of all elements.

    Returns:
        The same function, inside a `shard_map` over the axis.

    Raises:
        NotByElementError: While it is traced, if it is not of elements and sums alone.
    """

    def run(*arrays: jax.Array) -> list[Any]:
        closed = inlined(jax.make_jaxpr(function)(*arrays))
        return _Slices(closed, arrays, cuts, axis).results()

    return run


class _Slices:
    """A program whose cut values are not there but slice by slice.

    Args:
        closed: The program.
        arrays: Its arguments on this device.
        cuts: How each is cut.
        axis: Name of the mesh axis.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        arrays: Sequence[Any],
        cuts: Sequence[Cut | None],
        axis: str,
    ):
        jaxpr = closed.jaxpr
        self._axis, self._arguments, self._outputs = axis, jaxpr.invars, jaxpr.outvars
        self._known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._known |= dict(zip(jaxpr.invars, arrays, strict=True))
        self._granules = {
            v: Granules.of(cut) for v, cut in zip(jaxpr.invars, cuts, strict=True) if cut
        }
        self._roots = {v: frozenset([v]) for v in self._granules}
        self._waiting: dict[Any, Any] = {}  # the equation of each value that is not computed
        for eqn in jaxpr.eqns:
            self._take_in(eqn)

    def _take_in(self, eqn: Any) -> None:
        read = variables(eqn.invars)
        cut = [v for v in read if v in self._granules]
        name = eqn.primitive.name
        if not cut:
            is_spread = name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
            if is_spread or (name in BY_ELEMENT and any(v in self._waiting for v in read)):
                self._waiting[eqn.outvars[0]] = eqn
            else:
                found = run_equation(eqn, list(map(self._whole, eqn.invars)))
                self._known.update(zip(eqn.outvars, found, strict=True))
            return
        kinds = {self._granules[v] for v in cut}
        shape = cut[0].aval.shape
        others = [v for v in read if v not in self._granules and v not in self._waiting]
        if len(kinds) > 1 or len(eqn.outvars) > 1 or any(v.aval.shape for v in others):
            raise NotByElementError(name)
        [out] = eqn.outvars
        if name == "reduce_sum" and not out.aval.shape:
            self._known[out] = jax.lax.psum(self._total(eqn, kinds.pop()), self._axis)
        elif name in BY_ELEMENT | _ALSO_BY_ELEMENT and out.aval.shape == shape:
            self._waiting[out] = eqn
            self._granules[out] = kinds.pop()
            self._roots[out] = frozenset().union(*(self._roots[v] for v in cut))
        else:
            raise NotByElementError(name)

    def _whole(self, v: Any) -> Any:
        if isinstance(v, Literal):
            return v.val
        if v not in self._known:
            eqn = self._waiting[v]
            [self._known[v]] = run_equation(eqn, list(map(self._whole, eqn.invars)))
        return self._known[v]

    def _slice(self, v: Any, granules: Granules, i: Any, found: dict[Any, Any]) -> Any:
        """One slice of a value, with those that it is made of."""
        if isinstance(v, Literal):
            return v.val
        if v not in found:
            if v in self._granules and v not in self._waiting:
                found[v] = granules.take(self._known[v], i)
            elif v in self._waiting and self._waiting[v].primitive.name != "broadcast_in_dim":
                eqn = self._waiting[v]
                own = [self._slice(x, granules, i, found) for x in eqn.invars]
                [found[v]] = run_equation(eqn, own)
            elif v in self._waiting:
                shape = list(v.aval.shape)
                shape[granules.cut.dim] = granules.size
                found[v] = jnp.broadcast_to(self._whole(self._waiting[v].invars[0]), shape)
            else:
                found[v] = self._known[v]
        return found[v]

    def _total(self, eqn: Any, granules: Granules) -> Any:
        def add(i: Any, _: Any, total: Any) -> tuple[list[Any], Any]:
            [own] = run_equation(eqn, [self._slice(eqn.invars[0], granules, i, {})])
            return [], total + own

        return granules.loop(add, [], jnp.zeros((), eqn.outvars[0].aval.dtype))[1]

    def results(self) -> list[Any]:
        """In the places of the arguments that they replace."""
        out: dict[int, Any] = {}
        groups: list[tuple[frozenset[Any], list[int]]] = []
        for k, v in enumerate(self._outputs):
            own = self._arguments[k]
            if own not in self._granules:
                out[k] = self._whole(v)
                continue
            roots = frozenset([own]) | (frozenset() if isinstance(v, Literal) else self._of(v))
            near = [g for g in groups if g[0] & roots]
            groups = [g for g in groups if g not in near]
            places = [*itertools.chain.from_iterable(g[1] for g in near), k]
            groups.append((roots.union(*(g[0] for g in near)), places))
        for _, places in groups:
            out |= self._replaced(places)
        return [out[k] for k in range(len(self._outputs))]

    def _of(self, v: Any) -> frozenset[Any]:
        return self._roots.get(v, frozenset())

    def _replaced(self, places: Sequence[int]) -> dict[int, Any]:
        arguments = [self._arguments[k] for k in places]
        granules = self._granules[arguments[0]]

        def step(i: Any, slices: list[Any], carry: Any) -> tuple[list[Any], Any]:
            found = dict(zip(arguments, slices, strict=True))
            return [self._slice(self._outputs[k], granules, i, found) for k in places], carry

        arrays, _ = granules.loop(step, [self._known[v] for v in arguments], ())
        return dict(zip(places, arrays, strict=True))
