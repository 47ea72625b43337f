"""Programs without gradients for each replica: a call of the model, and one microbatch's loss."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.jaxpr import naming_axes, with_axes
from ..jax.ordered_adds import ordered
from ..model.functional import Functional
from ..model.loss import MetricColumns, as_sums
from ..model.plain_arrays import root_key
from ..plan.parts import SumsForm
from .compile import adds_in_order, compiler_options, extra_bytes, for_each, update_options
from .padding import StatePadding, unpadded
from .replica import Replica

#: `(params, aux, key, microbatch) -> results`.
Call = Callable[[PyTree, PyTree, jax.Array, PyTree], Any]


class Forward:
    """Runs a call on replicas, each with its sharded arrays; results are whole.

    Args:
        name: Name of the program in profiles.
        key: From `where`, int32 scalars or arrays that identify a microbatch, to its random key.
        model: The model whose parameters and other variables are the call's arguments.
        like: From a replica's number to the shapes and shardings of its parameters and of its
            other variables.
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
        platform = replicas[0].devices[0].platform
        self._function = ordered(function) if adds_in_order(platform, sums) else function
        # A replica of several devices gathers shards for each equation, then frees them.
        options = update_options if replicas[0].axes else compiler_options
        self._options = options(platform, sums)

    def shapes(self, where: Any, batch: PyTree) -> Any:
        """Shapes of the results."""
        return jax.eval_shape(self._function, *self._like(0), where, batch)

    def compile(self, where: Any, batch: PyTree) -> list[Any]:
        """The programs of all replicas for a microbatch.

        Args:
            batch: Arrays of the microbatch, or their shapes.
        """
        leaves, treedef = jax.tree.flatten(batch)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._compiled:

            def lowered(k: int) -> Any:
                replica = self._replicas[k]
                run = jax.jit(
                    self._function,
                    compiler_options=self._options,
                    out_shardings=replica.sharding(P()),
                )
                return run.lower(*self._like(k), where, jax.tree.map(replica.like, batch))

            self._compiled[key] = for_each(self._replicas, lowered)
        return self._compiled[key]

    def is_led_here(self, i: int) -> bool:
        """Whether this process leads a local replica, which several processes may share."""
        return self._replicas[i].is_led_here

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state, for the programs compiled so far."""
        return max((extra_bytes(programs[0]) for programs in self._compiled.values()), default=0)

    def run(self, i: int, params: Any, aux: Any, where: Any, batch: PyTree) -> Any:
        """The results of one microbatch; waits for nothing."""
        placed = self._replicas[i].put_tree(batch)
        return self.compile(where, placed)[i](params, aux, where, placed)


def evaluation_key(seed: int, index: jax.Array) -> jax.Array:
    """The random key of a microbatch of an evaluation, a function of seed and number."""
    return jax.random.fold_in(root_key(seed), index)


class Evaluation:
    """Evaluates microbatches on replicas, each with its sharded arrays.

    Args:
        microbatch_size: Examples of a microbatch; the last one may have fewer.
        forward: Makes a `Forward` for the replicas from its first three arguments.
    """

    def __init__(
        self, model: Functional, seed: int, microbatch_size: int, forward: Callable[..., Forward]
    ):
        self.metrics: tuple[MetricColumns, ...] = ()

        def row(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> jax.Array:
            size = jax.tree.leaves(batch)[0].shape[0]
            out, _ = model.evaluate(params, aux, key, batch)
            sums = as_sums(out, size, mean_weight=size, padded_size=microbatch_size)
            self.metrics = sums.metrics  # the same in every trace
            return sums.row

        self._forward = forward("hxla_evaluate", row, lambda index: evaluation_key(seed, index))

    def metrics_of(self, fetch: Callable[[int], PyTree]) -> tuple[MetricColumns, ...]:
        """The columns of metrics, also in a process that evaluates no microbatch."""
        if not self.metrics:
            self._forward.shapes(np.int32(0), fetch(0))
        return self.metrics

    def run(self, i: int, params: Any, aux: Any, index: int, batch: PyTree) -> jax.Array:
        """The sums of one microbatch, float32[2 + columns of metrics]; waits for nothing."""
        return self._forward.run(i, params, aux, np.int32(index), batch)  # type: ignore[no-any-return]
