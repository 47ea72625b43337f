"""What runs without gradients: evaluations, and the first pass of a loss over the whole batch."""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import ConfigError
from ..core.types import PyTree
from ..lower.first_pass import Begun, OverBatchPass, Work
from ..lower.lower import Programs
from ..lower.store import Store
from ..model.loss import MetricColumns, means, num_columns
from ..report.history import MetricValue

Evaluated = tuple[float, dict[str, MetricValue]]


class ForwardPasses:
    """Runs the model as it is on the local replicas.

    Args:
        pool: Of threads that wait for devices.
        wait: Until the last update is done.
        wait_for_collectives: Until no other collective is on its way.
    """

    def __init__(
        self,
        programs: Programs,
        store: Store,
        pool: concurrent.futures.Executor,
        wait: Callable[[], None],
        wait_for_collectives: Callable[[], None],
    ):
        self._programs, self._store, self._pool = programs, store, pool
        self._wait, self._wait_for_collectives = wait, wait_for_collectives
        self._seconds = [0.0] * len(programs.reducer.local)

    def _state(self) -> tuple[list[Any], list[Any]]:
        """Whole parameters and other variables of each local replica; a share may be all it has."""
        layered, held = self._programs.layered, self._store.held
        params = [own.params for own in held]
        self._wait()
        if layered is not None:
            params = list(layered.whole(held))
            layered.wait()
        return params, [own.aux for own in held]

    # -- the first pass of a step ----------------------------------------------------------------

    def second(
        self,
        step: int,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        on_phase: Callable[[str], object],
    ) -> Sequence[Sequence[PyTree]]:
        """The microbatches of a step as its programs take them.

        Args:
            ids: Microbatch ids of each local replica.
            batches: Host arrays of those microbatches.
            on_phase: Called with the phase that begins.
        """
        first, size = self._programs.over_batch.first, self._programs.plan.batch_size
        if first is None:
            return batches
        work = [
            [
                (i, (np.int32(step), np.int32(i)), batch)
                for i, batch in zip(own, arrays, strict=True)
            ]
            for own, arrays in zip(ids, batches, strict=True)
        ]
        on_reduce = functools.partial(on_phase, "reduce")
        found = first.gradients(self._embedded(first, work, size, on_reduce))
        on_phase("microbatches")
        return first.second(ids, batches, found)

    def take_seconds(self) -> list[float]:
        """Those that each local replica spent on the last first pass, once."""
        found, self._seconds = self._seconds, [0.0] * len(self._seconds)
        return found

    def time_first(self, i: int, batches: Sequence[PyTree]) -> None:
        """Run the first pass of microbatches on a local replica and wait for it, as a step does."""
        first, layered = self._programs.over_batch.first, self._programs.layered
        if first is None or layered is not None:  # which takes part in collectives
            return
        held, where = self._store.held[i], (np.int32(0), np.int32(0))
        work = [(0, where, batch.batch) for batch in batches]
        jax.block_until_ready([run for _, run, _ in first.begun(i, held.params, held.aux, work)])

    def _embedded(
        self,
        run: OverBatchPass,
        work: Sequence[Sequence[Work]],
        num_examples: int,
        on_reduce: Callable[[], object],
    ) -> list[np.ndarray]:
        params, aux = self._state()
        start = time.perf_counter()
        begun = [run.begun(i, params[i], aux[i], own) for i, own in enumerate(work)]

        def watch(own: Sequence[Begun]) -> float:
            jax.block_until_ready([found for _, found, _ in own])
            return time.perf_counter() - start if own else 0.0

        self._seconds = list(self._pool.map(watch, begun))
        on_reduce()
        self._wait_for_collectives()
        return run.exchanged(begun, num_examples)

    # -- evaluation ------------------------------------------------------------------------------

    def evaluate(
        self,
        num_microbatches: int,
        ids: Sequence[range],
        fetch: Callable[[int], PyTree],
        *,
        on_reduce: Callable[[], object] = lambda: None,
    ) -> Evaluated:
        """Mean loss and metrics over an evaluation set.

        Args:
            num_microbatches: Of the whole set.
            ids: Microbatch ids of each local replica.
            fetch: From a microbatch's id to its host arrays.
            on_reduce: Called when the local microbatches are done and the sum begins.

        Returns:
            Loss and metrics, the same on every process and for every spread.
        """
        over_batch = self._programs.over_batch.of_evaluation(fetch(0))
        if over_batch is not None:
            return self._evaluate_batches(over_batch, num_microbatches, ids, fetch, on_reduce)
        evaluation, reducer = self._programs.evaluation, self._programs.reducer
        params, aux = self._state()
        found = []
        for i, replica in enumerate(reducer.local):
            for index in ids[i]:
                sums = evaluation.run(i, params[i], aux[i], index, fetch(index))
                if replica.is_led_here:
                    found.append((index, sums))
        width = num_columns(evaluation.metrics_of(fetch))
        rows = np.zeros((num_microbatches, width), np.float32)
        for index, sums in found:
            rows[index] = np.asarray(sums)
        on_reduce()
        return _mean_loss(reducer.host.exchange(rows), evaluation.metrics, ids[0])

    def _evaluate_batches(
        self,
        run: OverBatchPass,
        num_microbatches: int,
        ids: Sequence[range],
        fetch: Callable[[int], PyTree],
        on_reduce: Callable[[], object],
    ) -> Evaluated:
        """The same of a loss over whole batches: all is embedded, and then cut into batches."""
        plan, last = self._programs.plan, num_microbatches - 1
        num = last * plan.microbatch_size + len(jax.tree.leaves(fetch(last))[0])
        work = [[(i, np.int32(i), fetch(i)) for i in own] for own in ids]
        embedded = self._embedded(run, work, num, on_reduce)
        self.take_seconds()
        starts = range(0, num, plan.batch_size)
        rows = [run.row([x[start : start + plan.batch_size] for x in embedded]) for start in starts]
        return _mean_loss(np.stack(rows), run.metrics, range(len(rows)))


def _mean_loss(
    rows_MS: np.ndarray, metrics: Sequence[MetricColumns], own: Sequence[int]
) -> Evaluated:
    """Loss and metrics of an evaluation, see `means`."""
    loss, weight, merged = means(rows_MS, metrics, own)
    if not weight:
        raise ConfigError("every weight of the evaluation set is zero: it has no mean loss")
    return loss, merged
