"""A call of the model on its whole arrays, without gradients, for each replica."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.jaxpr import naming_axes, with_axes
from ..model.functional import Functional
from ..plan.parts import SumsForm
from .compile import compiler_options, extra_bytes, for_each, update_options
from .padding import StatePadding, unpadded
from .replica import Replica

#: `(params, aux, key, microbatch) -> results`.
Call = Callable[[PyTree, PyTree, jax.Array, PyTree], Any]


class Forward:
    """Runs a call on replicas, each with arrays as they lie there; results are whole.

    Args:
        name: Of the program, as a profile of it says.
        call: Of the model as pure functions.
        key: From what says which microbatch it is, int32 scalars or arrays, to its random key.
        model: Whose arrays the call is given.
        like: From the number of one to the shapes of its parameters and of its other variables, as
            they lie there.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        key: Callable[[Any], jax.Array],
        model: Functional,
        *,
        replicas: Sequence[Replica],
        like: Callable[[int], tuple[Any, Any]],
        sums: SumsForm,
        padding: StatePadding,
    ):
        self._replicas, self._like = tuple(replicas), like
        self._compiled: dict[Any, list[Any]] = {}  # for each replica, by the shapes of a microbatch
        param_def, aux_def = jax.tree.structure(model.params), jax.tree.structure(model.aux)

        def function(params: Any, aux: Any, where: Any, batch: PyTree) -> Any:
            params, aux = unpadded(params, padding.params), unpadded(aux, padding.aux)
            trees = jax.tree.unflatten(param_def, params), jax.tree.unflatten(aux_def, aux)
            axes: list[str] = []

            def run(params: PyTree, aux: PyTree) -> Any:
                return call(params, aux, key(where), batch)

            return naming_axes(lambda: with_axes(run, axes)(*trees), axes)

        function.__name__ = name
        self._function = function
        # What a copy of several devices has cut is gathered for its equation, and let go after it.
        options = update_options if replicas[0].axes else compiler_options
        self._options = options(replicas[0].devices[0].platform, sums)

    def shapes(self, where: Any, batch: PyTree) -> Any:
        """Those of the results."""
        return jax.eval_shape(self._function, *self._like(0), where, batch)

    def compile(self, where: Any, batch: PyTree) -> list[Any]:
        """The programs for a microbatch, of all replicas.

        Args:
            batch: Its arrays, or their shapes.
        """
        leaves, treedef = jax.tree.flatten(batch)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._compiled:

            def lowered(k: int) -> Any:
                own = self._replicas[k]
                run = jax.jit(
                    self._function,
                    compiler_options=self._options,
                    out_shardings=own.sharding(P()),
                )
                return run.lower(*self._like(k), where, jax.tree.map(own.like, batch))

            self._compiled[key] = for_each(self._replicas, lowered)
        return self._compiled[key]

    def is_led_here(self, i: int) -> bool:
        """Whether this process speaks for a local replica, which several may share."""
        return self._replicas[i].is_led_here

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state, of what is compiled so far."""
        return max((extra_bytes(own[0]) for own in self._compiled.values()), default=0)

    def run(self, i: int, params: Any, aux: Any, where: Any, batch: PyTree) -> Any:
        """The results of one microbatch; waits for nothing."""
        placed = self._replicas[i].put_tree(batch)
        return self.compile(where, placed)[i](params, aux, where, placed)
