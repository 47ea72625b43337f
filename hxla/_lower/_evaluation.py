"""The program that evaluates one microbatch on a replica."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._core._types import PyTree
from .._jax._axis_names import naming_axes, with_axes
from .._model._functional import Functional
from .._model._loss import MetricColumns, as_sums
from .._model._plain_arrays import root_key
from .._plan._plan_parts import SumsForm
from ._options import compiler_options, update_options
from ._padding import StatePadding, unpadded
from ._per_kind import for_each
from ._replica import Replica


class Evaluation:
    """Evaluates microbatches on replicas, each with arrays as they lie there.

    Args:
        model: The model as pure functions.
        seed: Root of all random keys.
        microbatch_size: Examples of a microbatch; the last one may have fewer.
        replicas: The local ones.
        like: From the number of one to the shapes of its parameters and of its other variables, as
            they lie there.
        sums: The plan's.
        padding: Of the arrays.
    """

    def __init__(
        self,
        model: Functional,
        *,
        seed: int,
        microbatch_size: int,
        replicas: Sequence[Replica],
        like: Callable[[int], tuple[Any, Any]],
        sums: SumsForm,
        padding: StatePadding,
    ):
        self.metrics: tuple[MetricColumns, ...] = ()
        self._replicas, self._like = tuple(replicas), like
        self._compiled: dict[Any, list[Any]] = {}  # for each replica, by the shapes of a microbatch
        self._shapes = model.params, model.aux
        param_def, aux_def = jax.tree.structure(model.params), jax.tree.structure(model.aux)

        def hxla_evaluate(params: Any, aux: Any, index: jax.Array, batch: PyTree) -> jax.Array:
            key = jax.random.fold_in(root_key(seed), index)
            params, aux = unpadded(params, padding.params), unpadded(aux, padding.aux)
            trees = jax.tree.unflatten(param_def, params), jax.tree.unflatten(aux_def, aux)
            size = jax.tree.leaves(batch)[0].shape[0]

            def row(params: PyTree, aux: PyTree) -> jax.Array:
                out, _ = model.evaluate(params, aux, key, batch)
                sums = as_sums(out, size, mean_weight=size, padded_size=microbatch_size)
                self.metrics = sums.metrics  # the same in every trace
                return sums.row

            axes: list[str] = []
            return naming_axes(lambda: with_axes(row, axes)(*trees), axes)  # type: ignore[no-any-return]

        # What a copy of several devices has cut is gathered for its equation, and let go after it.
        options = update_options if replicas[0].axes else compiler_options
        platform = replicas[0].devices[0].platform
        self._run = jax.jit(hxla_evaluate, compiler_options=options(platform, sums))

    def metrics_of(self, fetch: Callable[[int], PyTree]) -> tuple[MetricColumns, ...]:
        """What the columns are, also where this process evaluates no microbatch."""
        if not self.metrics:
            params, aux = self._like(0)
            jax.eval_shape(self._run, params, aux, np.int32(0), fetch(0))
        return self.metrics

    def run(self, i: int, params: Any, aux: Any, index: int, batch: PyTree) -> jax.Array:
        """The sums of one microbatch, float32[2 + columns of metrics]; waits for nothing.

        Args:
            i: Of the local replica.
            params: As they lie there.
            aux: Other variables, likewise.
            index: Of the microbatch.
            batch: Its arrays.
        """
        placed = self._replicas[i].put_tree(batch)
        leaves, treedef = jax.tree.flatten(placed)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._compiled:

            def lowered(k: int) -> Any:
                here = jax.tree.map(self._replicas[k].like, placed)
                return self._run.lower(*self._like(k), np.int32(0), here)

            self._compiled[key] = for_each(self._replicas, lowered)
        return self._compiled[key][i](params, aux, np.int32(index), placed)  # type: ignore[no-any-return]
