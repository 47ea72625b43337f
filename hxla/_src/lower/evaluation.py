"""The program that evaluates one microbatch on a replica."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..core.types import PyTree
from ..model.functional import Functional
from ..model.loss import MetricColumns, as_sums
from ..model.plain_arrays import root_key
from .forward import Forward


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
