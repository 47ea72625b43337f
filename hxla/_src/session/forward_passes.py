"""Passes without gradients: evaluation, and the first pass of a loss over the whole batch."""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..choose.microbatch_counts import own_ids
from ..core.errors import ConfigError
from ..core.types import PyTree
from ..data.data import eval_batches
from ..job.agreement import facts_of_data
from ..job.context import JobContext
from ..lower.forward import Begun, OverBatchPass, Work
from ..lower.lower import Programs
from ..lower.store import Store
from ..lower.sum import Reducer
from ..model.loss import MetricColumns, means, num_columns
from ..plan.plan import Plan
from ..report.history import EvalRecord, MetricValue

Evaluated = tuple[float, dict[str, MetricValue]]


class ForwardPasses:
    """Runs the present model on the local replicas.

    Args:
        pool: Threads that wait for devices.
        wait: Waits for the last update.
        wait_for_collectives: Waits until no other collective runs.
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

    def close(self) -> None:
        """Forget whom to wait for: a cycle would keep all arrays until Python looks for cycles."""
        self._wait = self._wait_for_collectives = lambda: None

    def _state(self) -> tuple[list[Any], list[Any]]:
        """Whole parameters and other variables of each local replica, all-gathered if sharded."""
        layered, replicas = self._programs.layered, self._store.held
        params = [replica.params for replica in replicas]
        self._wait()
        if layered is not None:
            params = list(layered.whole(replicas))
            layered.wait()
        return params, [replica.aux for replica in replicas]

    # -- the first pass of a step ----------------------------------------------------------------

    def second(
        self,
        step: int,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        on_phase: Callable[[str], object],
    ) -> Sequence[Sequence[PyTree]]:
        """The inputs of a step's programs from its microbatches.

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
                for i, batch in zip(replica_ids, arrays, strict=True)
            ]
            for replica_ids, arrays in zip(ids, batches, strict=True)
        ]
        on_reduce = functools.partial(on_phase, "reduce")
        gradients = first.gradients(self._embed(first, work, size, on_reduce))
        on_phase("microbatches")
        return first.second(ids, batches, gradients)

    def take_seconds(self) -> list[float]:
        """Take the seconds of each local replica in the last first pass, and reset them."""
        seconds, self._seconds = self._seconds, [0.0] * len(self._seconds)
        return seconds

    def time_first(self, i: int, batches: Sequence[PyTree]) -> None:
        """Run the first pass of microbatches on a local replica and wait for it, as a step does."""
        first, layered = self._programs.over_batch.first, self._programs.layered
        if first is None or layered is not None:  # a layerwise pass contains collectives
            return
        replica, where = self._store.held[i], (np.int32(0), np.int32(0))
        work = [(0, where, batch.batch) for batch in batches]
        jax.block_until_ready(
            [run for _, run, _ in first.begun(i, replica.params, replica.aux, work)]
        )

    def _embed(
        self,
        run: OverBatchPass,
        work: Sequence[Sequence[Work]],
        num_examples: int,
        on_reduce: Callable[[], object],
    ) -> list[np.ndarray]:
        params, aux = self._state()
        start = time.perf_counter()
        begun = [run.begun(i, params[i], aux[i], local) for i, local in enumerate(work)]

        def watch(passes: Sequence[Begun]) -> float:
            jax.block_until_ready([embedding for _, embedding, _ in passes])
            return time.perf_counter() - start if passes else 0.0

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
            num_microbatches: Microbatches of the whole set.
            ids: Microbatch ids of each local replica.
            fetch: Host arrays of a microbatch by its id.
            on_reduce: Called when the local microbatches are done and the sum begins.

        Returns:
            Loss and metrics, the same on every process and for every placement.
        """
        over_batch = self._programs.over_batch.of_evaluation(fetch(0))
        if over_batch is not None:
            return self._evaluate_over_batches(over_batch, num_microbatches, ids, fetch, on_reduce)
        evaluation, reducer = self._programs.evaluation, self._programs.reducer
        params, aux = self._state()
        local_sums = []
        for i, replica in enumerate(reducer.local):
            for index in ids[i]:
                sums = evaluation.run(i, params[i], aux[i], index, fetch(index))
                if replica.is_led_here:
                    local_sums.append((index, sums))
        width = num_columns(evaluation.metrics_of(fetch))
        rows = np.zeros((num_microbatches, width), np.float32)
        for index, sums in local_sums:
            rows[index] = np.asarray(sums)
        on_reduce()
        return _mean_loss(reducer.host.exchange(rows), evaluation.metrics, ids[0])

    def _evaluate_over_batches(
        self,
        run: OverBatchPass,
        num_microbatches: int,
        ids: Sequence[range],
        fetch: Callable[[int], PyTree],
        on_reduce: Callable[[], object],
    ) -> Evaluated:
        """Evaluate a loss over whole batches: embed every example, then cut into batches."""
        plan, last = self._programs.plan, num_microbatches - 1
        num = last * plan.microbatch_size + len(jax.tree.leaves(fetch(last))[0])
        work = [[(i, np.int32(i), fetch(i)) for i in replica_ids] for replica_ids in ids]
        embedded = self._embed(run, work, num, on_reduce)
        self.take_seconds()
        starts = range(0, num, plan.batch_size)
        rows = [run.row([x[start : start + plan.batch_size] for x in embedded]) for start in starts]
        return _mean_loss(np.stack(rows), run.metrics, range(len(rows)))


def _mean_loss(
    rows_MS: np.ndarray, metrics: Sequence[MetricColumns], ids: Sequence[int]
) -> Evaluated:
    """Loss and metrics of an evaluation, see `means`."""
    loss, weight, merged = means(rows_MS, metrics, ids)
    if not weight:
        raise ConfigError("every weight of the evaluation set is zero: it has no mean loss")
    return loss, merged


def evaluated(
    job: JobContext,
    forwards: ForwardPasses,
    reducer: Reducer,
    plan: Plan,
    data: Any,
    step: int,
    beat: Callable[[str], object],
) -> EvalRecord:
    """The mean loss and metrics over a data set, equal for every placement of the work.

    Args:
        data: Any kind of data of a job except an unbounded one.
        beat: Called with the phase that begins.

    Raises:
        DataError: If the data is empty or of an unknown kind.
    """
    began = time.perf_counter()
    size, fetch = eval_batches(data, plan.microbatch_size)
    facts = {"examples of the evaluation": str(size)}
    job.agree("evaluation", lambda: facts | facts_of_data(fetch(0), "evaluation: "))
    num = math.ceil(size / plan.microbatch_size)
    ids = own_ids(plan, reducer, num)
    on_reduce = functools.partial(beat, "evaluation's sum")
    loss, metrics = forwards.evaluate(num, ids, fetch, on_reduce=on_reduce)
    seconds = time.perf_counter() - began
    return EvalRecord(step=step, loss=loss, metrics=metrics, num_examples=size, seconds=seconds)
