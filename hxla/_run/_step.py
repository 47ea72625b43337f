"""One training step: microbatches on each local device, one exact sum, one update."""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from .._core._errors import ConfigError
from .._core._types import PyTree
from .._lower import _exact, _replicate
from .._lower._pipeline import Measured, Pipeline, PipelineSpec
from .._lower._reduce import Reducer
from .._lower._replica import Replica
from .._model._functional import Functional, leaf_names, to_host
from .._model._loss import Part, as_sums, merge_parts
from .._plan._sharding import Sharded
from .._report._history import Metric

Shard = Callable[[Callable[..., Any], PyTree, PyTree, PyTree, Any], Sharded]

Stage = Callable[..., PipelineSpec]

_MAX_REDOS = 3
_NUM_SHARED = 3  # numbers of each device that travel with the sum: busy, update, stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all devices know after the sum of a step, the same on every process.

    Attributes:
        loss: Mean over the global batch.
        weight: Sum of the weights of the global batch.
        metrics: The user's own, merged as asked.
        busy_seconds: Time each device spent on its microbatches.
        update_seconds: Time each device spent on its previous update.
        stop: Whether any process asked to stop after this step.
        nonfinite: Names of tensors whose gradient was not finite in some microbatch.
        redone: How often the step was redone with other scales.
    """

    loss: float
    weight: float
    metrics: dict[str, Metric]
    busy_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    stop: bool
    nonfinite: tuple[str, ...]
    redone: int


@dataclasses.dataclass(kw_only=True)
class _ReplicaState:
    programs: _replicate.Programs
    sums: _replicate.Sums
    params: list[jax.Array] = dataclasses.field(default_factory=list)
    opt_state: PyTree = None
    aux: list[jax.Array] = dataclasses.field(default_factory=list)
    totals: tuple[list[jax.Array], list[jax.Array]] = ([], [])
    exponents: jax.Array | None = None
    micro: Any = None  # compiled ahead by `calibrate`, as is `update`
    update: Any = None


class Engine:
    """Holds the state of training on the local devices and runs steps on it.

    Args:
        model: The model as pure functions; its arrays are copied to each local device.
        optimizer: The user's own.
        reducer: Knows all devices.
        batch: One microbatch (host arrays), for shapes.
        num_microbatches: Microbatches in a global batch.
        microbatch_size: Examples in a microbatch.
        seed: Root of all random keys.
        reduction: `exact` or `float`.
        shard: Plans the axes inside a replica, where there are any.
        stage: Plans a replica's stages, where it is a pipeline: see `Stages.spec`.
        gradient: Whether the update sees the gradient of the batch's mean loss or of its sum.
        clip: `clip_before` or `clip_after` of `_replicate.build`.
        rows: Parameters whose gradient has few rows, with the most that a global batch touches.
        num_groups: That of `_replicate.build`.

    Raises:
        LossError: If the loss returns something else than documented.
    """

    def __init__(
        self,
        model: Functional,
        optimizer: optax.GradientTransformation,
        reducer: Reducer,
        *,
        batch: PyTree,
        num_microbatches: int,
        microbatch_size: int,
        seed: int,
        reduction: _replicate.Reduction,
        shard: Shard | None = None,
        stage: Stage | None = None,
        gradient: Literal["mean", "sum"] = "mean",
        clip: Mapping[str, float] | None = None,
        rows: Mapping[int, int] | None = None,
        num_groups: int = 1,
    ):
        self._reducer = reducer
        self._mean = gradient == "mean"
        self._num_microbatches = num_microbatches
        self._exact = reduction == "exact"
        self._model = model
        platform = reducer.devices[0].platform

        def sums_of(call: Any, *, whole: bool) -> Any:
            def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
                out, new_aux = call(params, aux, key, batch)
                num_examples = jax.tree.leaves(batch)[0].shape[0]
                sums = as_sums(
                    out,
                    num_examples,
                    mean_weight=1 if whole else num_examples,
                    num_columns=microbatch_size,
                )
                first = jax.numpy.stack([sums.loss, sums.weight])
                columns = [part.columns for part in sums.metrics.values()]
                _check_aux(aux, new_aux)
                return sums.loss, jax.numpy.concatenate([first, *columns]), new_aux

            return run

        def metrics_of(call: Any) -> dict[str, Part]:
            found: dict[str, Part] = {}

            def run(params: PyTree, aux: PyTree, batch: PyTree) -> Any:
                out, _ = call(params, aux, jax.random.key(0), batch)
                num_examples = jax.tree.leaves(batch)[0].shape[0]
                found.update(as_sums(out, num_examples, num_columns=microbatch_size).metrics)

            jax.eval_shape(run, model.params, model.aux, batch)
            return found

        self._train_metrics = metrics_of(model.train)
        self._train_sums = sums_of(model.train, whole=True)
        self._eval_metrics: dict[str, Part] | None = None
        self._read_eval_metrics = lambda: metrics_of(model.evaluate)
        eval_sums = sums_of(model.evaluate, whole=False)
        self._param_def = jax.tree.structure(model.params)
        self._aux_def = jax.tree.structure(model.aux)
        options = _replicate.compiler_options(platform, reduction)

        def hxla_evaluate(params: Any, aux: Any, index: jax.Array, batch: PyTree) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), index)
            tree = jax.tree.unflatten(self._param_def, params)
            return eval_sums(tree, jax.tree.unflatten(self._aux_def, aux), key, batch)[1]

        self._evaluate = jax.jit(hxla_evaluate, compiler_options=options)
        opt_state = jax.jit(optimizer.init, compiler_options=options)(model.params)
        self._sharded: Sharded | None = None
        self.reasons: tuple[str, ...] = ()
        self._batch_specs: list[P] | None = None
        self._specs: _Specs | None = None
        self._pipelines: list[Pipeline] = []
        num_terms = num_microbatches
        if stage is not None:
            pipeline = stage(
                self._train_sums,
                model,
                batch,
                num_microbatches=num_microbatches,
                num_sums=_num_sums(self._train_metrics),
                seed=seed,
                reduction=reduction,
            )
            num_terms = pipeline.num_terms
            specs = pipeline.slots.specs
            self._specs = _Specs(
                params=specs,
                opt_state=_opt_state_specs(optimizer, opt_state, model.params, specs),
                aux=[P()] * len(jax.tree.leaves(model.aux)),
            )
            self._pipelines = [Pipeline(pipeline, r, model.aux, batch) for r in reducer.local]
            self.reasons = self._pipelines[0].explain()
        elif reducer.replicas[0].axes:
            assert shard is not None
            self._sharded = shard(self._train_sums, model.params, model.aux, batch, model.logical)
            self.reasons = self._sharded.explain()
            self._batch_specs = self._sharded.batch_specs()
            self._specs = _Specs(
                params=self._sharded.param_specs(),
                opt_state=_opt_state_specs(
                    optimizer, opt_state, model.params, self._sharded.param_specs()
                ),
                aux=self._sharded.aux_specs(),
            )
        self._all_programs = [
            _replicate.build(
                sums_of=self._sums_on(replica),
                params=model.params,
                aux=model.aux,
                names=leaf_names(model.params) + leaf_names(model.aux),
                num_sums=_num_sums(self._train_metrics),
                optimizer=optimizer,
                num_microbatches=num_microbatches,
                num_terms=num_terms,
                seed=seed,
                reduction=reduction,
                platform=platform,
                layout=self._specs.layout(replica) if self._specs else None,
                bucket_elements=reducer.bucket_elements,
                alone=rows or (),
                mean=self._mean,
                num_groups=num_groups,
                **(clip or {}),
            )
            for replica in (reducer.local if self._specs else reducer.local[:1])
        ]
        self._bits = _exact.num_bits(num_terms) if self._exact else 0
        programs = self._all_programs[0]
        self._sums = reducer.sums(
            programs.combine,
            num_own=2,
            num_ints=1 + programs.float_aux.count(False),
            specs=programs.specs,
            num_parts=programs.num_parts,
            rows=rows,
        )
        self.exponents = np.zeros(programs.num_tensors, np.int32)
        shapes = jax.eval_shape(programs.zeros)
        sums_specs = _sums_specs(shapes, programs) if self._specs else None
        self._states = []
        for i, replica in enumerate(reducer.local):
            state = _ReplicaState(
                programs=self._all_programs[i if self._specs else 0],
                sums=replica.put_tree(
                    jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), sums_specs
                ),
            )
            self._states.append(state)
        self._put(model.params, opt_state, model.aux)
        # Watched from threads: the main one goes on handing out microbatches meanwhile.
        self._pool = concurrent.futures.ThreadPoolExecutor(2 * len(reducer.local))
        self._updates: list[concurrent.futures.Future[tuple[float, float]]] = []
        self._update_seconds = [0.0] * len(reducer.local)

    # -- state ---------------------------------------------------------------------------------

    @property
    def params(self) -> PyTree:
        """Parameters in the user's own tree, on the first local replica."""
        return self._whole(self.stored["params"])

    @property
    def aux(self) -> PyTree:
        """Auxiliary state in the user's own tree, on the first local replica."""
        return self._whole(self.stored["aux"])

    @property
    def opt_state(self) -> PyTree:
        """State of the optimizer, on the first local replica."""
        return self._whole(self.stored["opt_state"])

    @property
    def stored(self) -> dict[str, PyTree]:
        """`params`, `aux` and `opt_state` like those above, as they lie: nothing is gathered."""
        state = self._states[0]
        return {
            "params": jax.tree.unflatten(self._param_def, state.params),
            "aux": jax.tree.unflatten(self._aux_def, state.aux),
            "opt_state": state.opt_state,
        }

    def _whole(self, tree: PyTree) -> PyTree:
        return self._reducer.local[0].whole(tree)

    def load(self, params: PyTree, opt_state: PyTree, aux: PyTree, exponents: np.ndarray) -> None:
        """Take over a state, as a checkpoint or another process holds it."""
        self._put(params, opt_state, aux)
        self._set_exponents(np.asarray(exponents, np.int32))

    def _put(self, params: PyTree, opt_state: PyTree, aux: PyTree) -> None:
        specs = self._specs or _Specs(params=None, opt_state=None, aux=None)
        for state, replica in zip(self._states, self._reducer.local, strict=True):
            state.params = _copies(jax.tree.leaves(params), replica, specs.params)
            state.opt_state = _copies(opt_state, replica, specs.opt_state)
            state.aux = _copies(jax.tree.leaves(aux), replica, specs.aux)

    def _sums_on(self, replica: Replica) -> Any:
        if self._sharded is None:
            return self._train_sums
        tree = jax.tree.structure((0, 0, self._model.aux))
        return self._sharded.function(replica.mesh, tree)

    def broadcast(self) -> None:
        """Every device takes the state of the first device of process 0, bit for bit."""
        if jax.process_count() == 1:
            return
        tree = (self.params, self.opt_state, self.aux, self.exponents)
        leaves, treedef = jax.tree.flatten(tree)
        hosts = [np.asarray(x, order="C") for x in leaves]
        data = b"".join(x.tobytes() for x in hosts)
        data += b"\0" * (-len(data) % 4)
        flat = np.frombuffer(data, np.int32)
        flat = self._reducer.exchange(flat if jax.process_index() == 0 else np.zeros_like(flat))
        data, offset, out = flat.tobytes(), 0, []
        for x in hosts:
            out.append(np.frombuffer(data, x.dtype, x.size, offset).reshape(x.shape))
            offset += x.nbytes
        self.load(*jax.tree.unflatten(treedef, out))

    def _set_exponents(self, exponents: np.ndarray) -> None:
        self.exponents = exponents
        for state in self._states:
            state.exponents = None

    # -- steps ---------------------------------------------------------------------------------

    def calibrate(self, batch: PyTree, *, repeats: int) -> list[float]:
        """Compile all programs, time a microbatch on each local device, take its scales.

        Args:
            batch: Microbatch 0 of step 0, the same on every process.
            repeats: Timed runs after the first.

        Returns:
            Seconds of a microbatch per local device, the median.
        """
        seconds: list[list[float]] = [[] for _ in self._states]
        for state in self._states:
            state.sums = state.programs.clear(state.sums)
        self._sum_over_devices([np.zeros(_NUM_SHARED, np.float32)] * len(seconds), self._stack())
        self._compile(batch)
        unit = self._pipelines[0].spec.unit if self._pipelines else 1
        for _ in range(2 if self._exact else 1):  # again with scales that fit
            for i in range(len(self._states)):
                self._run_own(i, 0, range(unit), [batch] * unit)
            self._adopt_scales()
        # A pipeline's time for one microbatch says little: most of it is bubble.
        even = self._num_microbatches // len(self._reducer.replicas)
        num = max(unit, even - even % unit) if self._pipelines else 1
        for _ in range(repeats):
            for i, times in enumerate(seconds):
                start = time.perf_counter()
                jax.block_until_ready(self._run_own(i, 0, range(num), [batch] * num))
                times.append((time.perf_counter() - start) / num)
        return [float(np.median(t)) if t else 0.0 for t in seconds]

    @property
    def pipelines(self) -> Mapping[int, Pipeline]:
        """Those with a device here, by replica."""
        return {r.index: p for r, p in zip(self._reducer.local, self._pipelines, strict=False)}

    def measure_pipelines(self, batch: PyTree, *, repeats: int) -> dict[int, Measured]:
        """Times of the pieces of every local pipeline's step, by replica."""
        found = {}
        for i, pipeline in enumerate(self._pipelines):
            state, replica = self._states[i], self._reducer.local[i]
            exponents = replica.put(self.exponents)
            found[replica.index] = pipeline.measure(
                state.params, state.aux, exponents, batch, repeats=repeats
            )
        return found

    def _compile(self, batch: PyTree) -> None:
        """Compile ahead what the devices run, so that no step waits for a compiler."""
        lowered = []
        where, weight = np.zeros(3, np.int32), np.float32(1)
        for i, (state, replica) in enumerate(zip(self._states, self._reducer.local, strict=True)):
            exponents = replica.put(self.exponents)
            update = state.programs.update.lower(
                state.params, state.opt_state, state.aux, *state.totals, exponents, weight
            )
            if self._pipelines:
                own = self._pipelines[i].lower(state.params, state.aux, exponents)
            else:
                first = replica.put_tree(batch, self._batch_specs)
                own = [
                    state.programs.micro.lower(
                        state.params, state.aux, state.sums, exponents, where, first
                    )
                ]
            lowered.append([update, *own])
        # Of pipelines, processes must agree on every program.
        text = itertools.chain(*lowered) if self._pipelines else lowered[0][1:]
        self._micro_text = "".join(program.as_text() for program in text)
        flat = iter(self._pool.map(lambda program: program.compile(), itertools.chain(*lowered)))
        for i, (state, programs) in enumerate(zip(self._states, lowered, strict=True)):
            state.update, *own = itertools.islice(flat, len(programs))
            if self._pipelines:
                self._pipelines[i].adopt(own)
            else:
                [state.micro] = own

    def _stack(self) -> Any:
        """The sums of the local devices as the reducer takes them, without `rows`."""
        held = [
            ([s.sums.peaks_T], [s.sums.small_MS, *s.sums.ints], s.sums.values) for s in self._states
        ]
        return self._reducer.stack(self._sums.argument_specs[1:], held)

    def _sum_over_devices(
        self, rows: Sequence[np.ndarray], held: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sum what the devices accumulated; the totals stay on the devices.

        Args:
            rows: float32[3] of each local device.
            held: From `_stack`.

        Returns:
            The rows of all devices, float32[D, 3]; every microbatch's sums, float32[M, S]; the
            largest magnitude of each tensor, float32[T].
        """
        local = zip(rows, self._reducer.local, strict=True)
        put = [replica.put(row.view(np.int32)) for row, replica in local]
        rows_D3 = self._reducer.stack(self._sums.argument_specs[:1], put)
        own, ints, values = held
        results = self._reducer.run(self._sums, ([rows_D3, *own], ints, values))
        for state, (_, ints, totals) in zip(self._states, results, strict=True):
            state.totals = totals, ints[1:]
        (rows_D3, peaks_DT), (small_MS, *_), _ = results[0]
        maxima_T = _replicate.peaks_to_maxima(np.asarray(peaks_DT))
        return np.asarray(rows_D3).view(np.float32), np.asarray(small_MS).view(np.float32), maxima_T

    def _adopt_scales(self) -> None:
        if not self._exact:
            return
        peaks_T = np.max([np.asarray(s.sums.peaks_T) for s in self._states], axis=0)
        all_peaks = np.zeros((jax.process_count(), len(peaks_T)), np.int32)
        all_peaks[jax.process_index()] = peaks_T
        maxima = _replicate.peaks_to_maxima(self._reducer.exchange(all_peaks))
        finite = np.where(np.isfinite(maxima), maxima, 0)
        self._set_exponents(_exact.next_exponents(self.exponents, finite, self._bits))

    def _run_micro(self, i: int, step: int, index: int, batch: PyTree, *, keep: int) -> jax.Array:
        state = self._states[i]
        if state.exponents is None:
            state.exponents = self._reducer.local[i].put(self.exponents)
        where = np.array([step, index, keep], np.int32)
        batch = self._reducer.local[i].put_tree(batch, self._batch_specs)
        state.sums, tick = state.micro(
            state.params, state.aux, state.sums, state.exponents, where, batch
        )
        return tick

    def _run_own(
        self, i: int, step: int, ids: range, batches: Sequence[PyTree]
    ) -> jax.Array | None:
        """All microbatches of a replica; returns an array to wait on, None if there are none."""
        state = self._states[i]
        if not ids:
            state.sums = state.programs.clear(state.sums)
            return None
        tick = None
        if self._pipelines:
            if state.exponents is None:
                state.exponents = self._reducer.local[i].put(self.exponents)
            state.sums, tick = self._pipelines[i].run(
                state.params, state.aux, state.exponents, step, ids, batches
            )
            return tick
        for n, (index, batch) in enumerate(zip(ids, batches, strict=True)):
            tick = self._run_micro(i, step, index, batch, keep=int(n > 0))
        return tick

    def accumulate(
        self,
        step: int,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        *,
        stop: bool = False,
        on_reduce: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run the microbatches of a step and sum them over all devices.

        Args:
            step: Number of the step.
            ids: Microbatch ids of each local device.
            batches: Host arrays of those microbatches.
            stop: Ask all processes to stop after this step.
            on_reduce: Called when the local microbatches are done and the sum begins.

        Returns:
            The outcome; call `update` to apply it.
        """
        for redone in range(_MAX_REDOS + 1):
            outcome, maxima = self._accumulate_once(step, ids, batches, stop, redone, on_reduce)
            if outcome.nonfinite or not self._exact:
                return outcome
            if not _exact.out_of_window(self.exponents, maxima, self._bits).any():
                self._next_exponents = _exact.next_exponents(self.exponents, maxima, self._bits)
                return outcome
            self._set_exponents(_exact.next_exponents(self.exponents, maxima, self._bits))
        raise AssertionError("a redo with scales taken from the step itself fits")

    def _accumulate_once(
        self,
        step: int,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        stop: bool,
        redone: int,
        on_reduce: Callable[[], None],
    ) -> tuple[Outcome, np.ndarray]:
        start = time.perf_counter()
        ticks = [self._run_own(i, step, ids[i], batches[i]) for i in range(len(self._states))]
        watches = [self._pool.submit(self._watch, i, tick, start) for i, tick in enumerate(ticks)]
        held = self._stack()  # while the devices are busy: some hundred arrays take milliseconds
        busy = [watch.result() for watch in watches]
        rows = [
            np.array([busy[i], self._update_seconds[i], float(stop)], np.float32)
            for i in range(len(self._states))
        ]
        on_reduce()
        rows_D3, small_MS, maxima = self._sum_over_devices(rows, held)
        loss, weight, metrics = _means(small_MS, self._train_metrics, ids[0])
        nonfinite = tuple(
            name
            for name, peak in zip(self._all_programs[0].tensor_names, maxima, strict=True)
            if not np.isfinite(peak)
        )
        if not weight:
            nonfinite = ("the loss (every weight of the global batch is zero)",)
        elif not math.isfinite(loss):
            nonfinite = nonfinite or ("the loss",)
        outcome = Outcome(
            loss=loss,
            weight=weight,
            metrics=metrics,
            busy_seconds=tuple(map(float, rows_D3[:, 0])),
            update_seconds=tuple(map(float, rows_D3[:, 1])),
            stop=bool(rows_D3[:, 2].any()),
            nonfinite=nonfinite,
            redone=redone,
        )
        return outcome, maxima

    def _watch(self, i: int, tick: jax.Array | None, start: float) -> float:
        """Wait for a device; returns the seconds it spent on its microbatches."""
        if self._updates:
            begun, done = self._updates[i].result()
            self._update_seconds[i] = done - begun
            start = max(start, done)
        if tick is None:
            return 0.0
        jax.block_until_ready(tick)
        return time.perf_counter() - start

    def update(self, outcome: Outcome) -> None:
        """Apply the sums of the last `accumulate`; returns before the devices are done."""
        ticks = []
        weight = np.float32(outcome.weight if self._mean else 1)
        begun = time.perf_counter()
        for i, state in enumerate(self._states):
            exponents = state.exponents
            if exponents is None:
                exponents = self._reducer.local[i].put(self.exponents)
            state.params, state.opt_state, state.aux, tick = state.update(
                state.params, state.opt_state, state.aux, *state.totals, exponents, weight
            )
            state.totals = [], []
            ticks.append(tick)

        def wait(tick: jax.Array) -> tuple[float, float]:
            jax.block_until_ready(tick)
            return begun, time.perf_counter()

        self._updates = [self._pool.submit(wait, tick) for tick in ticks]
        if self._exact and (self._next_exponents != self.exponents).any():
            self._set_exponents(self._next_exponents)

    def wait(self) -> None:
        """Until the last update is done on every local device."""
        for update in self._updates:
            update.result()

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, num_microbatches: int, ids: Sequence[range], fetch: Any
    ) -> tuple[float, dict[str, Metric], float]:
        """Mean loss and metrics over an evaluation set.

        Args:
            num_microbatches: Of the whole set.
            ids: Microbatch ids of each local device.
            fetch: `id -> host microbatch`.

        Returns:
            Loss, metrics, sum of weights. The same on every process and for every spread.
        """
        if self._eval_metrics is None:
            self._eval_metrics = self._read_eval_metrics()
        rows = np.zeros((num_microbatches, _num_sums(self._eval_metrics)), np.float32)
        results = []
        for i, state in enumerate(self._states):
            for index in ids[i]:
                batch = self._reducer.local[i].put_tree(fetch(index))
                size = jax.tree.leaves(batch)[0].shape[0]
                sums = self._evaluate(state.params, state.aux, np.int32(index), batch)
                if self._reducer.local[i].is_led_here:
                    results.append((index, size, sums))
        for index, _, sums in results:
            rows[index] = np.asarray(sums)
        rows = self._reducer.exchange(rows)
        loss, weight, metrics = _means(rows, self._eval_metrics, ids[0])
        if not weight:
            raise ConfigError("every weight of the evaluation set is zero: it has no mean loss")
        return loss, metrics, weight

    # -- facts ---------------------------------------------------------------------------------

    def finish(self) -> tuple[Any, PyTree]:
        """The user's model and its state, on the host's default device."""
        params, aux = to_host((self.params, self.aux))
        return self._model.finish(*jax.tree.map(jax.numpy.asarray, (params, aux)))

    def fingerprint(self) -> str:
        """Text of the lowered microbatch program, for comparison between processes."""
        text = self._micro_text
        digest = hashlib.sha256(text.encode()).hexdigest()
        # The text of a large model is megabytes: its operations in order are enough to read.
        operations = re.findall(r"= \"?(stablehlo\.\w+|call \S+)", text)
        return "\n".join([digest, *operations])

    def memory_bytes(self) -> int:
        """Bytes that one device needs for its state and the larger of both programs."""
        state = self._states[0]
        held = jax.tree.leaves((state.params, state.opt_state, state.aux, state.sums))
        extra = [
            stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
            for stats in (
                program.memory_analysis() for program in (state.micro, state.update) if program
            )
            if stats is not None
        ]
        if self._pipelines:
            extra.append(self._pipelines[0].memory_bytes())
        own = [x.addressable_shards[0].data.nbytes for x in held]
        return sum(own) + max(extra, default=0)

    def close(self) -> None:
        """End the threads that wait for devices."""
        self._pool.shutdown()


def _num_sums(metrics: Mapping[str, Part]) -> int:
    return 2 + sum(part.width for part in metrics.values())


def _means(
    rows_MS: np.ndarray, metrics: Mapping[str, Part], own: Sequence[int]
) -> tuple[float, float, dict[str, Metric]]:
    """Loss, weight and metrics of a batch from those of its microbatches, added in order."""
    losses_M, weights_M = rows_MS[:, 0], rows_MS[:, 1]
    weight = math.fsum(weights_M) if np.isfinite(weights_M).all() else math.nan
    loss = math.fsum(losses_M) if np.isfinite(losses_M).all() else math.nan
    merged: dict[str, Metric] = {}
    start = 2
    for name, part in metrics.items():
        columns = rows_MS[:, start : start + part.width]
        merged[name] = merge_parts(part, columns, weights_M, own)
        start += part.width
    return loss / weight if weight else math.nan, weight, merged


def _copies(tree: PyTree, replica: Replica, specs: list[P] | None) -> PyTree:
    # A true copy: the engine donates its buffers, and the user's arrays must stay alive.
    return replica.put_tree(jax.tree.map(lambda x: np.array(x, copy=True), tree), specs)


def _sums_specs(shapes: _replicate.Sums, programs: _replicate.Programs) -> list[P]:
    each = [s for s in programs.specs for _ in range(programs.num_parts)]
    return [P(), P(), *each, *[P()] * len(shapes.ints)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Specs:
    params: list[P] | None
    opt_state: list[P] | None
    aux: list[P] | None

    def layout(self, replica: Replica) -> _replicate.Layout:
        return _replicate.Layout(
            mesh=replica.mesh,
            params=tuple(self.params or ()),
            aux=tuple(self.aux or ()),
            opt_state=tuple(self.opt_state or ()),
        )


@dataclasses.dataclass(frozen=True)
class _Like:
    """A parameter's shape and spec, as one leaf of a tree."""

    shape: tuple[int, ...]
    spec: P


def _opt_state_specs(
    optimizer: optax.GradientTransformation, opt_state: PyTree, params: PyTree, specs: list[P]
) -> list[P]:
    """Leaves of the optimizer's state lie as the parameter of their shape that they belong to."""
    leaves, treedef = jax.tree.flatten(params)
    like = jax.tree.unflatten(
        treedef, [_Like(tuple(x.shape), spec) for x, spec in zip(leaves, specs, strict=True)]
    )

    def of_leaf(x: Any, like: _Like) -> _Like:
        return like if tuple(x.shape) == like.shape else _Like((), P())

    found = optax.tree_utils.tree_map_params(
        optimizer, of_leaf, opt_state, like, transform_non_params=lambda _: _Like((), P())
    )
    return [x.spec for x in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, _Like))]


def _check_aux(before: PyTree, after: PyTree) -> None:
    if str(jax.tree.structure(before)) != str(jax.tree.structure(after)):
        raise ConfigError(
            "the loss changed the structure of the model's variables: before\n"
            f"  {sorted(leaf_names(before))}\nafter\n  {sorted(leaf_names(after))}\n"
            "create every variable when the model is made"
        )
