"""One training step: microbatches on each local device, one exact sum, one update."""

import concurrent.futures
import dataclasses
import hashlib
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from .._errors import ConfigError
from .._lower import _exact, _replicate
from .._lower._reduce import Reducer
from .._types import PyTree
from ._loss import as_sums
from ._model import Functional, leaf_names, to_host

_MAX_REDOS = 3
_NUM_SHARED = 3  # numbers of each device that travel with the sum: busy, update, stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all devices know after the sum of a step, the same on every process.

    Attributes:
        loss: Mean over the global batch.
        weight: Sum of the weights of the global batch.
        metrics: Means over the global batch.
        busy_seconds: Time each device spent on its microbatches.
        update_seconds: Time each device spent on its previous update.
        stop: Whether any process asked to stop after this step.
        nonfinite: Names of tensors whose gradient was not finite in some microbatch.
        redone: How often the step was redone with other scales.
    """

    loss: float
    weight: float
    metrics: dict[str, float]
    busy_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    stop: bool
    nonfinite: tuple[str, ...]
    redone: int


@dataclasses.dataclass(kw_only=True)
class _DeviceState:
    params: list[jax.Array]
    opt_state: PyTree
    aux: list[jax.Array]
    sums: _replicate.Sums
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
    ):
        self._reducer = reducer
        self._num_microbatches = num_microbatches
        self._exact = reduction == "exact"
        self._bits = _exact.num_bits(num_microbatches) if self._exact else 0
        self._model = model
        platform = reducer.local[0].platform

        def sums_of(call: Any, *, whole: bool) -> Any:
            def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
                out, new_aux = call(params, aux, key, batch)
                num_examples = jax.tree.leaves(batch)[0].shape[0]
                sums = as_sums(out, num_examples, mean_weight=1 if whole else num_examples)
                parts = [sums.loss, sums.weight, *sums.metrics.values()]
                _check_aux(aux, new_aux)
                return sums.loss, jax.numpy.stack(parts), new_aux

            return run

        def names_of(call: Any) -> tuple[str, ...]:
            names: list[str] = []

            def run(params: PyTree, aux: PyTree, batch: PyTree) -> Any:
                out, _ = call(params, aux, jax.random.key(0), batch)
                names.extend(as_sums(out, microbatch_size).metrics)

            jax.eval_shape(run, model.params, model.aux, batch)
            return tuple(names)

        self._train_metrics = names_of(model.train)
        self._train_sums = sums_of(model.train, whole=True)
        self._eval_metrics: tuple[str, ...] | None = None
        self._eval_names = lambda: names_of(model.evaluate)
        eval_sums = sums_of(model.evaluate, whole=False)
        self._param_def = jax.tree.structure(model.params)
        self._aux_def = jax.tree.structure(model.aux)
        options = _replicate.compiler_options(platform, reduction)

        def evaluate(params: Any, aux: Any, index: jax.Array, batch: PyTree) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), index)
            tree = jax.tree.unflatten(self._param_def, params)
            return eval_sums(tree, jax.tree.unflatten(self._aux_def, aux), key, batch)[1]

        self._evaluate = jax.jit(evaluate, compiler_options=options)
        self._programs = _replicate.build(
            sums_of=self._train_sums,
            params=model.params,
            aux=model.aux,
            names=leaf_names(model.params) + leaf_names(model.aux),
            num_sums=2 + len(self._train_metrics),
            optimizer=optimizer,
            num_microbatches=num_microbatches,
            seed=seed,
            reduction=reduction,
            platform=platform,
        )
        self._sums = reducer.sums(self._programs.combine)
        self.exponents = np.zeros(self._programs.num_tensors, np.int32)
        opt_state = jax.jit(optimizer.init, compiler_options=options)(model.params)
        self._states = [
            _DeviceState(
                params=_copies(jax.tree.leaves(model.params), device),
                opt_state=_copies(opt_state, device),
                aux=_copies(jax.tree.leaves(model.aux), device),
                sums=jax.tree.map(
                    lambda x, d=device: jax.device_put(np.zeros(x.shape, x.dtype), d), shapes
                ),
            )
            for shapes in [jax.eval_shape(self._programs.zeros)]
            for device in reducer.local
        ]
        # Watched from threads: the main one goes on handing out microbatches meanwhile.
        self._pool = concurrent.futures.ThreadPoolExecutor(2 * len(reducer.local))
        self._updates: list[concurrent.futures.Future[tuple[float, float]]] = []
        self._update_seconds = [0.0] * len(reducer.local)

    # -- state ---------------------------------------------------------------------------------

    @property
    def params(self) -> PyTree:
        """Parameters in the user's own tree, on the first local device."""
        return jax.tree.unflatten(self._param_def, self._states[0].params)

    @property
    def aux(self) -> PyTree:
        """Auxiliary state in the user's own tree, on the first local device."""
        return jax.tree.unflatten(self._aux_def, self._states[0].aux)

    @property
    def opt_state(self) -> PyTree:
        """State of the optimizer, on the first local device."""
        return self._states[0].opt_state

    def load(self, params: PyTree, opt_state: PyTree, aux: PyTree, exponents: np.ndarray) -> None:
        """Take over a state, as a checkpoint or another process holds it."""
        for state, device in zip(self._states, self._reducer.local, strict=True):
            state.params = _copies(jax.tree.leaves(params), device)
            state.opt_state = _copies(opt_state, device)
            state.aux = _copies(jax.tree.leaves(aux), device)
        self._set_exponents(np.asarray(exponents, np.int32))

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
            state.sums = self._programs.clear(state.sums)
        self._sum_over_devices([np.zeros(_NUM_SHARED, np.float32)] * len(seconds))
        self._compile(batch)
        for _ in range(2 if self._exact else 1):  # again with scales that fit
            for i in range(len(self._states)):
                self._run_micro(i, 0, 0, batch, keep=0)
            self._adopt_scales()
        for _ in range(repeats):
            for i, times in enumerate(seconds):
                start = time.perf_counter()
                jax.block_until_ready(self._run_micro(i, 0, 0, batch, keep=0))
                times.append(time.perf_counter() - start)
        return [float(np.median(t)) if t else 0.0 for t in seconds]

    def _compile(self, batch: PyTree) -> None:
        """Compile ahead what the devices run, so that no step waits for a compiler."""
        lowered = []
        where, weight = np.zeros(3, np.int32), np.float32(1)
        for state, device in zip(self._states, self._reducer.local, strict=True):
            exponents, first = jax.device_put((self.exponents, batch), device)
            micro = self._programs.micro.lower(
                state.params, state.aux, state.sums, exponents, where, first
            )
            update = self._programs.update.lower(
                state.params, state.opt_state, state.aux, *state.totals, exponents, weight
            )
            lowered += [micro, update]
        self._micro_text = lowered[0].as_text()
        compiled = list(self._pool.map(lambda program: program.compile(), lowered))
        for state, micro, update in zip(self._states, compiled[::2], compiled[1::2], strict=True):
            state.micro, state.update = micro, update

    def _sum_over_devices(
        self, rows: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sum what the devices accumulated; the totals stay on the devices.

        Args:
            rows: float32[3] of each local device.

        Returns:
            The rows of all devices, float32[D, 3]; every microbatch's sums, float32[M, S]; the
            largest magnitude of each tensor, float32[T].
        """
        arguments = [
            (
                [jax.device_put(row.view(np.int32), device), s.sums.peaks_T],
                [s.sums.small_MS, *s.sums.ints],
                s.sums.values,
            )
            for row, device, s in zip(rows, self._reducer.local, self._states, strict=True)
        ]
        results = self._reducer.run(self._sums, arguments)
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
            state.exponents = jax.device_put(self.exponents, self._reducer.local[i])
        where = np.array([step, index, keep], np.int32)
        batch = jax.device_put(batch, self._reducer.local[i])
        state.sums, tick = state.micro(
            state.params, state.aux, state.sums, state.exponents, where, batch
        )
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
        ticks: list[jax.Array | None] = []
        for i, state in enumerate(self._states):
            tick = None
            for n, (index, batch) in enumerate(zip(ids[i], batches[i], strict=True)):
                tick = self._run_micro(i, step, index, batch, keep=int(n > 0))
            if tick is None:
                state.sums = self._programs.clear(state.sums)
            ticks.append(tick)
        watches = [self._pool.submit(self._watch, i, tick, start) for i, tick in enumerate(ticks)]
        busy = [watch.result() for watch in watches]
        rows = [
            np.array([busy[i], self._update_seconds[i], float(stop)], np.float32)
            for i in range(len(self._states))
        ]
        on_reduce()
        rows_D3, small_MS, maxima = self._sum_over_devices(rows)
        sums = [
            math.fsum(column) if np.isfinite(column).all() else math.nan for column in small_MS.T
        ]
        weight = sums[1]
        means = [s / weight if weight else math.nan for s in [sums[0], *sums[2:]]]
        nonfinite = tuple(
            name
            for name, peak in zip(self._programs.tensor_names, maxima, strict=True)
            if not np.isfinite(peak)
        )
        if not weight:
            nonfinite = ("the loss (every weight of the global batch is zero)",)
        elif not math.isfinite(means[0]):
            nonfinite = nonfinite or ("the loss",)
        outcome = Outcome(
            loss=means[0],
            weight=weight,
            metrics=dict(zip(self._train_metrics, means[1:], strict=True)),
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
        weight = np.float32(outcome.weight)
        begun = time.perf_counter()
        for i, state in enumerate(self._states):
            exponents = state.exponents
            if exponents is None:
                exponents = jax.device_put(self.exponents, self._reducer.local[i])
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

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, num_microbatches: int, ids: Sequence[range], fetch: Any
    ) -> tuple[float, dict[str, float], float]:
        """Mean loss and metrics over an evaluation set.

        Args:
            num_microbatches: Of the whole set.
            ids: Microbatch ids of each local device.
            fetch: `id -> host microbatch`.

        Returns:
            Loss, metrics, sum of weights. The same on every process and for every spread.
        """
        if self._eval_metrics is None:
            self._eval_metrics = self._eval_names()
        rows = np.zeros((num_microbatches, 2 + len(self._eval_metrics)), np.float32)
        results = []
        for i, state in enumerate(self._states):
            for index in ids[i]:
                batch = jax.device_put(fetch(index), self._reducer.local[i])
                size = jax.tree.leaves(batch)[0].shape[0]
                sums = self._evaluate(state.params, state.aux, np.int32(index), batch)
                results.append((index, size, sums))
        for index, _, sums in results:
            rows[index] = np.asarray(sums)
        rows = self._reducer.exchange(rows)
        sums = [math.fsum(column) for column in rows.T]
        if not sums[1]:
            raise ConfigError("every weight of the evaluation set is zero: it has no mean loss")
        means = [s / sums[1] for s in [sums[0], *sums[2:]]]
        return means[0], dict(zip(self._eval_metrics, means[1:], strict=True)), sums[1]

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
            for stats in (state.micro.memory_analysis(), state.update.memory_analysis())
            if stats is not None
        ]
        return sum(x.nbytes for x in held) + max(extra, default=0)

    def close(self) -> None:
        """End the threads that wait for devices."""
        self._pool.shutdown()


def _copies(tree: PyTree, device: jax.Device) -> PyTree:
    # A true copy: the engine donates its buffers, and the user's arrays must stay alive.
    return jax.tree.map(lambda x: jax.device_put(np.array(x, copy=True), device), tree)


def _check_aux(before: PyTree, after: PyTree) -> None:
    if str(jax.tree.structure(before)) != str(jax.tree.structure(after)):
        raise ConfigError(
            "the loss changed the structure of the model's variables: before\n"
            f"  {sorted(leaf_names(before))}\nafter\n  {sorted(leaf_names(after))}\n"
            "create every variable when the model is made"
        )
