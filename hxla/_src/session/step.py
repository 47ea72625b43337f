"""One training step: microbatches on each local replica, one exact sum, one update."""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..core.timing import Seconds, Spans, known_seconds, watched
from ..core.types import PyTree
from ..data.data import Epochs, Loader, cut_batch
from ..job.agreement import facts_of_data
from ..job.context import JobContext
from ..lower import exact
from ..lower.chain_runner import ChainRunner
from ..lower.contribution import DeviceSums, peaks_to_maxima
from ..lower.decisions import Decisions, Told
from ..lower.global_arrays import stat_rows
from ..lower.lower import Programs
from ..lower.pipeline import Pipeline
from ..lower.stage_chain import StageChain
from ..lower.step_program import StepProgram
from ..lower.store import Store
from ..lower.sum import Reduced
from ..lower.sum_layout import NUM_STATS
from ..lower.update import UpdateInputs
from ..model.loss import means
from ..model.loss_scale import ScaleState, sum_exponent
from ..plan.parts import ReplicaWork
from ..plan.plan import Plan
from ..plan.precision import MOST_SCALE_EXPONENT
from ..report.history import MetricValue
from .forward_passes import ForwardPasses


class Scales:
    """The scales with which the next microbatches join the sums.

    The store has their values, as int32[T] exponents of T tensors. Here they are placed on devices,
    so that a step sends none.

    Attributes:
        settles: Whether a step is run again until its scales are its own.
    """

    def __init__(self, programs: Programs, store: Store):
        self._programs, self._store, self._reducer = programs, store, programs.reducer
        self._num_params = len(programs.tensors.params)
        self._placed: list[tuple[jax.Array, ...] | None] = [None] * len(self._reducer.local)
        self.settles = False

    def exponents(self, i: int) -> jax.Array:
        """Exponents of a replica's microbatches: of gradients of the loss, which may be scaled."""
        return self.on(i)[0]

    def on(self, i: int) -> tuple[jax.Array, ...]:
        """`exponents`, and if the loss is scaled the exponent of its gradients, int32[1]."""
        placed = self._placed[i]
        if placed is None:
            exponents, scale = self._store.exponents, self._store.loss_scale
            put = self._reducer.local[i].put
            if scale is None:
                placed = (put(exponents),)
            else:
                exponent = self._sum_exponent(scale)
                used = exponents - self._param_exponents(exponent)
                placed = put(used), put(np.array([exponent], np.int32))
            self._placed[i] = placed
        return placed

    def replace(self, exponents: np.ndarray) -> None:
        """Scale the next microbatches by other exponents."""
        self._store.exponents = exponents
        self._placed = [None] * len(self._placed)

    def fit(self, sums: Sequence[DeviceSums | None]) -> None:
        """Take scales that fit the sums of all processes; every process calls this."""
        peaks_T = np.max([np.asarray(s.peaks_T) for s in sums if s is not None], axis=0)
        all_peaks = np.zeros((jax.process_count(), len(peaks_T)), np.int32)
        all_peaks[jax.process_index()] = peaks_T
        maxima = self._unscaled(peaks_to_maxima(self._reducer.host.exchange(all_peaks)))
        finite = np.where(np.isfinite(maxima), maxima, 0)
        limbs = self._programs.contribution.limbs
        self.replace(exact.next_exponents(self._store.exponents, finite, limbs))

    def summed(self, told: Told, decisions: Sequence[Decisions]) -> None:
        """Take the scales that follow from a sum, which are on the devices already."""
        self._store.exponents = told.next_T
        pairs = zip(decisions, map(self.on, range(len(decisions))), strict=True)
        self._placed = [(decided.next_used_T, *scales[1:]) for decided, scales in pairs]

    def restored(self) -> None:
        """Take over the scales of a state that was loaded into the store."""
        self.replace(self._store.exponents)
        self.settles = False

    def rescale(self, *, overflowed: bool) -> None:
        """Halve, double or keep the loss scale after a step."""
        before, policy = self._store.loss_scale, self._programs.plan.precision.loss_scale
        if before is None or policy is None:
            return
        after = before.after(
            overflowed=overflowed, growth_steps=policy.growth_steps, most=MOST_SCALE_EXPONENT
        )
        self._store.rescale(after)
        if after.exponent != before.exponent:
            self._placed = [None] * len(self._placed)

    def _param_exponents(self, exponent: int) -> np.ndarray:
        """int32[T]: the exponent for gradients, 0 for changes of other variables."""
        is_param = np.arange(len(self._store.exponents)) < self._num_params
        return np.where(is_param, exponent, 0).astype(np.int32)

    def _unscaled(self, maxima: np.ndarray) -> np.ndarray:
        """Maxima of gradients from those of a scaled loss."""
        scale = self._store.loss_scale
        if scale is None:
            return maxima
        return np.ldexp(maxima, -self._param_exponents(self._sum_exponent(scale)))

    def _sum_exponent(self, scale: ScaleState) -> int:
        """The exponent of the scale of a microbatch's sum of losses and of its gradient."""
        return sum_exponent(scale.exponent, self._programs.graph.num_losses)


_TIMED_SECONDS = 0.1  # of a timed run of microbatches that share a call, about


class Feed:
    """Loads the job's data ahead of the step, or cuts the user's batches.

    Args:
        first: The first examples of the data, whose shapes the programs are compiled for.
        num_steps: Steps of the run; None if not known.
        epochs: The epochs of the job's data; None if its length is unknown.

    Attributes:
        epoch: The passes over the job's data after the step that was loaded; None: they are
            unknown, or the user passed the batch.
    """

    def __init__(
        self, job: JobContext, first: PyTree, num_steps: int | None, epochs: Epochs | None
    ):
        self._job, self._first, self._epochs = job, first, epochs
        self.epoch: float | None = None
        self._num_steps = num_steps if num_steps is not None else 1 << 62
        self._loader: Loader | None = None

    def close(self) -> None:
        """End the loading thread."""
        if self._loader is not None:
            self._loader.close()

    def load(self, step: int, ids: Sequence[range], plan: Plan) -> list[list[PyTree]]:
        """Microbatches of the job's data, for each local replica.

        Raises:
            DataError: Or any other error of the user's data.
        """
        if self._loader is None:
            self._loader = Loader(
                self._job.source,
                microbatch_size=plan.microbatch_size,
                num_steps=self._num_steps,
                depth=self._job.settings.data.prefetch_steps,
            )
        self.epoch = None if self._epochs is None else self._epochs.done(step + 1)
        microbatches = iter(self._loader.get(step, list(itertools.chain(*ids))))
        return [[next(microbatches) for _ in replica_ids] for replica_ids in ids]

    def cut(
        self, batch: PyTree, step: int, ids: Sequence[range], plan: Plan, *, compares: bool
    ) -> list[list[PyTree]]:
        """Microbatches of a global batch that the user passes, for each local replica.

        Args:
            batch: The same on every process.
            compares: Whether processes compare their batches.

        Raises:
            DataError: If the batch is malformed, or its shapes are not those of the job's data.
            LaunchError: If the batches of processes differ.
        """
        self.epoch = None
        microbatches = cut_batch(batch, ids, plan, f"the batch of step {step + 1}", self._first)
        if compares:
            self._job.agree("batch", lambda: facts_of_data(batch, f"batch of step {step + 1}: "))
        return microbatches


_MAX_REDOS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a step's all-reduce, equal on every process.

    Attributes:
        loss: Mean over the global batch.
        weight: Sum of the weights of the global batch.
        metrics: The user's metrics, merged as asked.
        busy_seconds: Time each replica spent on its microbatches.
        update_seconds: Time each replica spent on the update before these.
        stop: The largest request of a process: see `accumulate`.
        nonfinite: Names of tensors whose gradient, or change, was not finite in some microbatch.
        redone: How often the step was run again with other scales.
        overflowed: Whether a gradient or the loss was not finite.
        loss_scale: The scale of the loss in this step; None if it is not scaled.
        learning_rate: Of the update, if it is known; None before an update.
        gradient_norm: Of the mean gradient, if the update computes it; None before an update.
    """

    loss: float
    weight: float
    metrics: dict[str, MetricValue]
    busy_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    stop: float
    nonfinite: tuple[str, ...]
    redone: int
    overflowed: bool
    loss_scale: float | None
    learning_rate: float | None = None
    gradient_norm: float | None = None


def use_executors(programs: Programs, replicas: Sequence[ReplicaWork]) -> None:
    """Set the number of concurrent microbatches of each local replica."""
    keeps = not programs.reducer.releases
    for replica, runner in zip(programs.reducer.local, programs.runners, strict=True):
        if isinstance(runner, ChainRunner):
            runner.use_executors(replicas[replica.index].executors, keeps=keeps)


class Stepper:
    """Runs steps on the local replicas and puts the results into the store.

    Attributes:
        scales: The scales of the sums and of the loss.
        bounds: Of islands the first microbatch of each and their number, on each local replica.
        is_late: Whether the times of an outcome are of the step before. Where no host waits for its
            microbatches, processes send the times of a step with the sums of the next one.
    """

    def __init__(self, programs: Programs, store: Store):
        self._programs, self._store = programs, store
        self._reducer = programs.reducer
        num = len(self._reducer.local)
        self._sums: list[DeviceSums | None] = [None] * num
        self.scales = Scales(programs, store)
        self._reduced: Reduced | None = None
        self._group_totals: list[list[jax.Array]] = []
        # Threads wait for devices; the main thread goes on dispatching.
        forms, runners = programs.plan.unlike_replicas, programs.runners
        #: Runs replicas of unlike form, which all are one local replica; empty: they are alike.
        self._chains = [x for x in runners if forms and isinstance(x, StageChain)]
        self._pool = concurrent.futures.ThreadPoolExecutor(3 * num + len(forms))
        waits = self.wait, self._wait_for_collectives
        self.forwards = ForwardPasses(programs, store, self._pool, *waits)
        #: When each local replica's last update began and ended.
        self._updates: list[Seconds] = []
        #: Of each local replica's last microbatches the seconds, and those of the update before.
        self._watches: list[Seconds] = []
        self._first_seconds = [0.0] * num
        self._is_alone = jax.process_count() == 1
        self.is_late = not self._is_alone and not programs.waits
        self._tells_nothing = self._stats([(0.0, 0.0)] * num, 0.0)
        self._rows = [
            tuple(map(replica.put, np.arange(programs.num_rows, dtype=np.int32)))
            for replica in self._reducer.local
        ]
        replicas = programs.plan.replicas
        self._start_seconds = [replicas[r.index].start_seconds for r in self._reducer.local]
        self.bounds: list[tuple[jax.Array, ...]] = [()] * num

    def close(self) -> None:
        """End the waiting threads, and let go of what would keep the state alive."""
        self._pool.shutdown()
        self.forwards.close()

    def warm_up(self, batch: PyTree, *, repeats: int, has_scales: bool = False) -> list[float]:
        """Run everything once, take the first scales, and time a microbatch on each replica.

        Args:
            batch: Microbatch 0 of step 0, the same on every process.
            repeats: Timed runs after the first.
            has_scales: Whether the store has the scales of a checkpoint, which are kept: others
                would round elements far below their tensor's largest differently.

        Returns:
            Median seconds of a microbatch on each local replica.
        """
        runners = self._programs.runners
        unit = runners[0].unit
        seeks = self._programs.contribution.is_exact and not has_scales
        each = range(len(runners))

        def some(num: int) -> Any:
            return 0, [range(num) for _ in each], [[batch] * num for _ in each], False

        once, one = some(unit), self._step_program
        for _ in range(1 + seeks):  # a second time with fitting scales
            if one is None:
                self._run_all(*once)
            else:
                self._run_at_once(one, *once[:3], counts=False)
            if seeks:
                self.scales.fit(self._sums)
        # How many microbatches a pipeline warms up with depends on its schedule.
        self.scales.settles = seeks and isinstance(runners[0], Pipeline)
        if one is None:
            self.seconds_of_sums()
        if self._programs.layered is not None:
            # Every process takes part in each of its collectives.
            num = self._num_timed(0, batch)
            runs = range(repeats)
            times = [[watch.result()[0] / num for watch in self._run_all(*some(num))] for _ in runs]
            return [float(np.median([run[i] for run in times] or [0.0])) for i in each]
        seconds = [
            self.seconds_of_microbatches(i, batch, self._num_timed(i, batch), repeats=repeats)
            for i in each
        ]
        return [float(np.median(times or [0.0])) for times in seconds]

    def seconds_of_sums(self) -> float:
        """Time the reduction of the last microbatches' sums; every process calls this."""
        sums = jax.block_until_ready(self._local_sums())
        start = time.perf_counter()
        reduced, self._reduced = self._reduce(self._tells_nothing, sums), None
        jax.block_until_ready((reduced.totals, reduced.words))
        return time.perf_counter() - start

    def _num_timed(self, i: int, batch: PyTree) -> int:
        """Microbatches in one timed run: of small ones a step's, as in a step they share a call."""
        runner, num = self._programs.runners[i], self._programs.plan.num_microbatches
        if isinstance(runner, ChainRunner):
            most, least = min(runner.per_call, num), min(runner.num_executors, num)
            if most <= least or self._programs.layered is not None:
                return max(most, least)
            [seconds] = self.seconds_of_microbatches(i, batch, 1, repeats=1)
            return max(least, min(most, math.ceil(_TIMED_SECONDS / seconds)))
        # One microbatch alone in a pipeline is mostly bubble.
        even = num // len(self._reducer.replicas)
        return max(runner.unit, even - even % runner.unit)

    def seconds_of_microbatches(
        self, i: int, batch: PyTree, num: int, *, repeats: int, apart: bool = False
    ) -> list[float]:
        """Time microbatches on a local replica.

        Args:
            apart: Whether without the sum and the update, also where a step is one program.

        Returns:
            Seconds of a microbatch in each run.
        """
        one = None if apart else self._step_program
        if one is None:
            self._programs.compile_each()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.forwards.time_first(i, [batch] * num)
            if one is None:
                jax.block_until_ready(self._run(i, 0, range(num), [batch] * num))
            else:
                self._run_at_once(one, 0, [range(num)], [[batch] * num], counts=False)
            times.append((time.perf_counter() - start) / num)
        return times

    def accumulate(
        self,
        step: int,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        *,
        request: Callable[[], float] = lambda: 0.0,
        on_phase: Callable[[str], object] = lambda _: None,
        on_update: Callable[[], object] | None = None,
    ) -> Outcome:
        """Run the microbatches of a step, sum them over all replicas, and update.

        Args:
            ids: Microbatch ids of each local replica.
            batches: Host arrays of those microbatches.
            request: Returns the request of this process to all, of which the largest wins. It is
                called as late as the sums allow, so that a signal ends the step that it meets.
            on_phase: Called with the phase that begins; in `reduce` processes wait for each other.
            on_update: Called before an update, which counts only if the sums do. It is called again
                if the step is redone. None: the caller updates after this.

        Returns:
            The outcome of sums that count, or are not finite.
        """
        inputs = self.forwards.second(step, ids, batches, on_phase)
        on_reduce = functools.partial(on_phase, "reduce")
        for redone in range(_MAX_REDOS + 1):
            before, settles = self._store.exponents, self.scales.settles
            if on_update is not None and self._step_program is not None:
                on_update()
                decisions = self._run_at_once(self._step_program, step, ids, inputs)
            else:
                decisions = self._sum(step, ids, inputs, request, on_reduce)
                if on_update is not None and not settles:
                    on_update()
                    self.update()
            told = self._reducer.told(decisions[0])
            self.scales.summed(told, decisions)
            is_settled = not settles or np.array_equal(before, told.next_T)
            if not told.is_finite or (told.fits and is_settled):
                self.scales.settles = settles and not told.is_finite
                if on_update is not None and settles:
                    on_update()
                    self.update()
                return self._outcome(told, ids, request, redone)
        raise AssertionError("a redo with scales taken from the step itself fits")

    @property
    def waits(self) -> bool:
        """Whether an update may begin only when the host knows that it counts."""
        return self._programs.waits and self._step_program is None

    @property
    def _step_program(self) -> StepProgram | None:
        """The program of a whole step; None: a step is several."""
        one = self._programs.step_program
        return one if one is not None and one.is_usable else None

    def _run_at_once(
        self,
        one: StepProgram,
        step: int,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        *,
        counts: bool = True,
    ) -> tuple[Decisions, ...]:
        """A step as one program, whose seconds are those of its microbatches; see its `run`."""
        start = time.perf_counter()
        arrays = self._store.held[0], self._sums[0], self.scales.on(0)
        self._sums[0], decisions = one.run(*arrays, step, ids[0], batches[0], counts=counts)
        self._first_seconds = self.forwards.take_seconds()
        jax.block_until_ready(decisions.told)
        self._watches, self._updates = [known_seconds(time.perf_counter() - start)], []
        return (decisions,)

    def _sum(
        self,
        step: int,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        request: Callable[[], float],
        on_reduce: Callable[[], object],
    ) -> tuple[Decisions, ...]:
        """Dispatch the microbatches and their sums; the decisions on each local replica."""
        stats = self._tells_nothing
        if self.is_late:
            stats = self._stats(self._seconds() or [(0.0, 0.0)] * len(ids), request())
        self._watches = self._run_all(step, ids, batches, True)
        sums = self._local_sums()  # while the devices are busy
        self._first_seconds = self.forwards.take_seconds()
        if not self._is_alone and not self.is_late:
            stats = self._stats(self._seconds(), request())
        on_reduce()
        return self._reduce(stats, sums).decisions

    def _seconds(self) -> list[tuple[float, float]]:
        """Seconds of each local replica's last microbatches, and of the update before them."""
        results = (watch.result() for watch in self._watches)  # none before the first step
        pairs = zip(results, self._first_seconds, strict=False)
        return [(busy + first, update) for (busy, update), first in pairs]

    def _stats(self, seconds: Sequence[tuple[float, float]], stop: float) -> list[jax.Array]:
        """What each local replica tells all others with its sums."""
        reducer, forms = self._reducer, self._seconds_of_forms
        stats = [np.array([*pair, stop, *forms], np.float32) for pair in seconds]
        return stat_rows(stats, reducer.local, len(reducer.replicas))

    @property
    def _seconds_of_forms(self) -> list[float]:
        return [seconds for chain in self._chains for seconds in chain.pipeline_seconds]

    def busy_seconds_here(self) -> list[float]:
        """Seconds of the last microbatches of each local replica."""
        return [busy for busy, _ in self._seconds()]

    def _outcome(
        self, told: Told, ids: Sequence[range], request: Callable[[], float], redone: int
    ) -> Outcome:
        loss, weight, metrics = means(told.rows_MS, self._programs.graph.metrics, ids[0])
        names, scale = self._programs.tensors.float_names, self._store.loss_scale
        nonfinite = _nonfinite(told, weight, names, self.bounds[0])
        seconds = np.array(self._seconds()) if self._is_alone else told.stats_DN
        busy, updates = seconds[:, 0], seconds[:, 1]
        if self._chains:
            alone = np.array(self._seconds_of_forms)
            busy = alone if self._is_alone else told.stats_DN[0, NUM_STATS:]
            # What all do together: parameters go to the stages, and sums come back.
            updates = (updates + max(0.0, seconds[0, 0] - busy.max())).repeat(busy.size)
        return Outcome(
            loss=loss,
            weight=weight,
            metrics=metrics,
            busy_seconds=tuple(map(float, busy)),
            update_seconds=tuple(map(float, updates)),
            stop=request() if self._is_alone else float(told.stats_DN[:, 2].max()),
            nonfinite=nonfinite,
            redone=redone,
            overflowed=bool(nonfinite and weight),
            loss_scale=None if scale is None else scale.scale,
        )

    def _run_all(
        self, step: int, ids: Sequence[range], batches: Sequence[Sequence[PyTree]], in_turn: bool
    ) -> list[Seconds]:
        """Dispatch the microbatches of the local replicas; see `_watches`."""
        start, layered = time.perf_counter(), self._programs.layered
        starts = self._start_seconds if in_turn else [0.0] * len(ids)
        spans: list[Spans[Any]] = [Spans() for _ in ids]
        watches = [
            self._pool.submit(watched, replica_spans, start, update)
            for replica_spans, update in itertools.zip_longest(spans, self._updates)
        ]
        for chain in self._chains if in_turn else ():
            chain.watch(self._pool)
        try:
            if layered is None:
                for i in sorted(range(len(ids)), key=starts.__getitem__):
                    begins = self._begin(i, start, starts[i]) if ids[i] else start
                    tick = self._run(i, step, ids[i], batches[i])
                    if tick is not None:
                        spans[i].put((begins, tick))
            else:
                self._wait_for_collectives()
                scales = [self.scales.exponents(i) for i in range(len(ids))]
                replicas, self._group_totals = self._store.held, []
                sums, self._group_totals = layered.run(replicas, scales, step, ids, batches, spans)
                self._sums = list(sums)
        finally:
            for replica_spans in spans:  # ends the watch, also after an error
                replica_spans.put(None)
            for chain in self._chains:
                chain.end_watch()
        return watches

    def _begin(self, i: int, start: float, seconds: float) -> float:
        """Delay the start of a local replica by some seconds; returns the time of the start."""
        if not seconds:
            return start
        free = max(start, self._updates[i].result()[1]) if self._updates else start
        time.sleep(max(0.0, free + seconds - time.perf_counter()))
        return time.perf_counter()

    def _run(self, i: int, step: int, ids: range, batches: Sequence[PyTree]) -> jax.Array | None:
        """Dispatch a local replica's microbatches; an array to block on, or None without any."""
        if not ids:
            self._sums[i] = self._programs.runners[i].empty()
            return None
        replica = self._store.held[i]
        self._sums[i], tick = self._programs.runners[i].run(
            replica.params, replica.aux, self._sums[i], self.scales.exponents(i), step, ids, batches
        )
        return tick

    def _local_sums(self) -> Any:
        return self._reducer.hold([sums for sums in self._sums if sums is not None])

    def _reduce(self, stats: Sequence[jax.Array], sums: Any) -> Reduced:
        self._wait_for_collectives()
        scales = [(*self.scales.on(i), *bounds) for i, bounds in enumerate(self.bounds)]
        self._reduced = self._reducer.reduce(stats, sums, scales, self._group_totals)
        self._group_totals = []
        if self._reducer.releases:
            self._sums = [None] * len(self._sums)
        return self._reduced

    def _wait_for_collectives(self) -> None:
        """Let earlier collectives finish, because Gloo mixes up independent ones."""
        if self._programs.gather is not None and self._reducer.arrays.is_ring:
            self._programs.gather.wait()
        if self._programs.layered is not None:
            self._programs.layered.wait()

    def update(self) -> None:
        """Apply the sums of the last `accumulate` if they count; waits for no device."""
        assert self._reduced is not None
        reduced, self._reduced = self._reduced, None
        ticks = []
        places, gather = self._programs.trained, self._programs.gather
        old = [[replica.params[k] for k in places] for replica in self._store.held]
        local = []
        each = zip(self._store.held, reduced.totals, reduced.words, reduced.decisions, strict=True)
        for i, (replica, totals, words, decided) in enumerate(each):
            inputs = UpdateInputs(
                totals,
                words,
                decided.exponents_T,
                decided.weight,
                decided.value,
                decided.is_accepted if self._programs.is_guarded else None,
                rows=self._rows[i],
            )
            local.append((old[i], replica.opt_state, replica.aux, inputs))
        updated = []  # for each replica its parameters, or the shard that it updated
        for replica, result in zip(self._store.held, self._programs.update(local), strict=True):
            params, replica.opt_state, replica.aux, tick = result
            updated.append(params)
            ticks.append(tick)
        new = updated if gather is None else gather.run(updated, old)
        for i, (replica, params) in enumerate(zip(self._store.held, new, strict=True)):
            for k, x in zip(places, params, strict=True):
                replica.params[k] = self._store.put(i, k, x)
        if gather is not None and self._programs.is_of_unlike_devices:
            gather.wait()
            self._store.hand_on()

        def wait(decided: jax.Array, tick: jax.Array) -> tuple[float, float]:
            jax.block_until_ready(decided)
            begun = time.perf_counter()
            jax.block_until_ready(tick)
            return begun, time.perf_counter()

        pairs = zip(reduced.decisions, ticks, strict=True)
        self._updates = [self._pool.submit(wait, d.is_accepted, tick) for d, tick in pairs]

    def wait_for_sums(self) -> None:
        """Wait for the sums of `accumulate`, whose failure would take the state with it."""
        if self._reduced is not None:
            jax.block_until_ready(self._reduced.totals)

    def wait(self) -> None:
        """Wait for the last update on every local replica."""
        for update in self._updates:
            update.result()


def _nonfinite(
    told: Told, weight: float, names: Sequence[str], bounds: Sequence[jax.Array]
) -> tuple[str, ...]:
    """What is not finite, in words or by the names of tensors.

    Args:
        bounds: Of islands the first microbatch of each and their number; empty: there are none.
    """
    if told.is_finite:
        return ()
    if not weight:
        return ("the loss (every weight of the global batch is zero)",)
    for starts in bounds:
        for i, (a, b) in enumerate(itertools.pairwise(np.asarray(starts))):
            if not told.rows_MS[a:b, 1].any():
                return (f"the loss of island {i} (every weight of its examples is zero)",)
    pairs = zip(names, told.maxima_T, strict=True)
    return tuple(name for name, most in pairs if not np.isfinite(most)) or ("the loss",)
