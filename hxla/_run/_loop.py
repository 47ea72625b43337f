"""One run of training: set up, steps, the end."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from .._cluster import _job_devices as _devices
from .._cluster._cluster import Cluster
from .._core._config import Config
from .._core._errors import CheckpointError, ConfigError, NonFiniteError
from .._core._types import DATA_AXIS, EXIT_PREEMPTED, PyTree
from .._graph._factors import Patterns
from .._graph._graph import Graph, rows_read
from .._graph._trace import trace_functional
from .._jax import _coordination
from .._jax._compilation_events import num_compilations
from .._lower._reduce import Reducer
from .._lower._replica import Replica
from .._lower._replicate import Reduction, num_parts
from .._model._functional import Functional, Loss, functional
from .._plan._plan import Plan
from .._plan._rules import RuleSet
from .._profile._trial import MOST_STEPS, Observer, Trial
from .._report._history import EvalRecord, History, Rebalance, StepRecord, scalars
from .._report._metrics_file import MetricsWriter
from .._report._progress import Progress
from .._report._run_report import terminal_report, write_report
from . import _cut, _dry, _setup, _stages, _strategy
from ._balancer import Balancer
from ._checkpoints import Checkpoints
from ._data import Loader, eval_batches
from ._pipelines import Pipelines
from ._step import Engine
from ._strategy import Strategy
from ._watchdog import Watchdog

_FORMAT = 1  # of the checkpoint's own fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a callback sees after a step.

    The arrays live on the device and are overwritten by the next step: copy what you keep. They lie
    as training holds them. Where several processes share a copy of the model (a pipeline, rules),
    each has only a part of some: `jax.experimental.multihost_utils.process_allgather(x,
    tiled=True)`, called on every process, gives the whole.

    Attributes:
        step: Updates done.
        params: Parameters in the user's own tree.
        aux: Other variables (BatchNorm statistics) in the user's own tree.
        opt_state: State of the optimizer.
    """

    step: int
    params: PyTree
    aux: PyTree
    opt_state: PyTree


Callback = Callable[[StepRecord, TrainState], bool | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What `hxla.train` returns.

    Attributes:
        model: The NNX model that was passed, updated in place; or the Linen module.
        state: Trained variables in the user's own tree (an `nnx.State`, or Linen's variables).
        opt_state: State of the optimizer.
        step: Updates done in all, those before a resume included.
        history: What happened in this call.
        plan: The plan of the last step.
        sha256: Of the bytes of parameters, other variables and optimizer state: equal means equal
            to the last bit.
    """

    model: Any
    state: PyTree
    opt_state: PyTree
    step: int
    history: History
    plan: Plan
    sha256: str


@dataclasses.dataclass(kw_only=True)
class Run:
    """One call of `train`, with its arguments."""

    model: Any
    source: Any
    loss: Loss
    eval_loss: Loss
    optimizer: optax.GradientTransformation
    batch_size: int
    microbatch_size: int | None
    last_step: int
    seed: int
    devices: tuple[jax.Device, ...]
    mesh: jax.sharding.Mesh | None
    rules: RuleSet | None
    patterns: Patterns
    stages: int | Sequence[float] | None
    cluster: Cluster | None
    split: Any
    reduction: Reduction
    nonfinite: str
    variables: PyTree | None
    eval_data: Any
    eval_every: int | None
    checkpoint_dir: Any
    checkpoint_every: int | None
    run_dir: pathlib.Path | None
    tensorboard: bool
    callbacks: tuple[Callback, ...]
    settings: Config

    def job(self) -> _dry.Job:
        """What `hxla profile` and `hxla plan` need to know."""
        return _dry.Job(
            model=self._read_model(0),
            optimizer=self.optimizer,
            batch=functools.partial(self._first_batch, 0),
            batch_size=self.batch_size,
            microbatch_size=self.microbatch_size,
            devices=self.devices,
            known=_devices.described(self.devices, self.cluster),
            reduction=self.reduction,
        )

    def run(self, stack: contextlib.ExitStack) -> Result:
        """Set up, train, tidy up."""
        self.main = jax.process_index() == 0
        self.stopping = False
        self.sigterm = False
        self.history: dict[str, list[Any]] = {"steps": [], "evaluations": [], "rebalances": []}
        self.checkpoints: Checkpoints | None = None
        if self.checkpoint_dir is not None:
            self.checkpoints = stack.enter_context(
                Checkpoints(
                    self.checkpoint_dir, keep=self.settings.checkpoint.keep, writer=self.main
                )
            )
        self.metrics: MetricsWriter | None = None
        if self.run_dir is not None and self.main:
            self.metrics = MetricsWriter(self.run_dir, tensorboard=self.tensorboard)
            stack.callback(self.metrics.close)
        self.watchdog: Watchdog | None = None
        if jax.process_count() > 1:
            self.watchdog = stack.enter_context(
                Watchdog(
                    rank=jax.process_index(),
                    num_processes=jax.process_count(),
                    heartbeat_timeout_seconds=self.settings.watchdog.heartbeat_timeout_seconds,
                    progress_timeout_seconds=self.settings.watchdog.progress_timeout_seconds,
                )
            )
        self._beat(-1, "compiling and measuring")
        start = self.saved = self._restore_meta()
        self.known = _devices.described(self.devices, self.cluster)
        self.listed = self.devices  # stages may take them in another order
        self._functional = self._read_model(start)
        _setup.check_groups(self.settings.optimizer.num_apply_groups, self._functional.params)
        self.strategy = dataclasses.replace(self._choose_strategy(start), patterns=self.patterns)
        replicas = self.strategy.replicas
        if self.split == "measured" and _strategy.share_cores(replicas):
            # Their programs run one after another: a time would say where in the queue, not how
            # fast.
            self.split = "even"
            reason = "even counts: the replicas share the cores of one process"
            self.strategy = dataclasses.replace(
                self.strategy, reasons=(*self.strategy.reasons, reason)
            )
        _setup.check_batch(self.batch_size, self.microbatch_size, len(replicas))
        self._check_stages(len(replicas))
        communication = self.settings.communication
        if communication.dtype != "float32" and self.reduction == "exact":
            raise ConfigError(
                f"communication.dtype={communication.dtype!r} rounds what exact sums keep: pass "
                "reduction='float' with it, or leave it at 'float32'"
            )
        self.reducer = Reducer(replicas, communication.bucket_mib << 18, communication.dtype)
        self.rows, reasons = self._rows_to_send()
        self.strategy = dataclasses.replace(
            self.strategy, reasons=(*self.strategy.reasons, *reasons)
        )
        self.names = _devices.replica_names(replicas, self.listed, self.known)
        request = _dry.requested()
        if isinstance(request, _dry.ProfileRequest):
            _dry.profile(request, self.job(), self.reducer, self._trial)
            raise SystemExit(0)
        with contextlib.nullcontext() if self.checkpoints is None else _sigterm(self):
            done = self._train(start, stack)
            self._beat(done, "finishing")
            result = self._finish(done)
        if self.sigterm_agreed and done < self.last_step:
            raise SystemExit(EXIT_PREEMPTED)
        return result

    def _train(self, start: int, stack: contextlib.ExitStack) -> int:
        self._build(start, stack)
        self.progress = Progress(
            self.last_step,
            self.names,
            start_step=start,
            stream=None if self.main else open(os.devnull, "w"),  # noqa: SIM115
        )
        stack.enter_context(self.progress)
        if start and self.checkpoints is not None:
            self.progress.log(f"resumed from step {start} in {self.checkpoint_dir}")
        self.progress.log(self.plan.explain())
        return self._steps(start, stack)

    def _trial(self, start: int, size: int) -> Trial:
        """Train with microbatches of a size until the times of a step are known.

        The user's callbacks, evaluations and checkpoints are left out.
        """
        run = copy.copy(self)
        observer = Observer()
        run.microbatch_size, run.split = size, "measured"
        run.last_step = start + MOST_STEPS
        run.callbacks, run.eval_every, run.checkpoints = (observer,), None, None
        run.history = {key: [] for key in self.history}
        # Counts that follow every breath of a device would leave too few steps of each.
        calm = {"window_steps": MOST_STEPS, "min_gain": max(0.1, self.settings.balance.min_gain)}
        balance = self.settings.balance.model_copy(update=calm)
        run.settings = self.settings.model_copy(update={"balance": balance})
        with contextlib.ExitStack() as stack:
            if self.metrics is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                run.metrics = MetricsWriter(folder, tensorboard=self.tensorboard)
                stack.callback(run.metrics.close)
            done = run._train(start, stack)
        counts, seconds = observer.most
        return Trial(
            micro_seconds=run.balancer.seconds,
            update_seconds=run.balancer.fixed,
            counts=counts,
            step_seconds=seconds,
            peak_bytes=run.engine.memory_bytes(),
            end_step=done + self.settings.data.prefetch_steps,
        )

    # -- before the first step -------------------------------------------------------------------

    def _meta(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "batch_size": self.batch_size,
            "microbatch_size": self.microbatch_size,
            "seed": self.seed,
            "reduction": self.reduction,
        }

    def _restore_meta(self) -> int:
        """Take the microbatch size of the checkpoint to resume from; returns its step."""
        latest = self.checkpoints.latest() if self.checkpoints is not None else None
        self._agree("checkpoint to resume from", str(latest))
        if latest is None or self.checkpoints is None:
            return 0
        meta = self.checkpoints.meta(latest)
        asked = self._meta()
        if self.microbatch_size is None:
            asked["microbatch_size"] = meta.get("microbatch_size")
        wrong = [
            f"  {key}: {meta.get(key)!r} in the checkpoint, {value!r} asked"
            for key, value in asked.items()
            if meta.get(key) != value
        ]
        if wrong:
            raise CheckpointError(
                f"{self.checkpoint_dir} holds step {latest} of another run:\n"
                + "\n".join(wrong)
                + "\nresume with the checkpoint's values or use another checkpoint_dir"
            )
        self.microbatch_size = asked["microbatch_size"]
        if latest > self.last_step:
            raise CheckpointError(
                f"{self.checkpoint_dir} holds step {latest}, beyond the {self.last_step} asked: "
                "raise steps or use another checkpoint_dir"
            )
        return int(latest)

    def _first_batch(self, start: int, size: int) -> PyTree:
        return self.source.fetch(start, np.arange(size))

    def _read_model(self, start: int) -> Functional:
        return functional(
            self.model,
            self.loss,
            self.eval_loss,
            variables=self.variables,
            seed=self.seed,
            example=self._first_batch(start, self.microbatch_size or 1),
        )

    def _choose_strategy(self, start: int) -> Strategy:
        """Trace the loss once to see what its annotations ask for."""
        size = self.microbatch_size or max(1, self.batch_size // len(self.devices))
        graph = trace_functional(self._functional, self._first_batch(start, size), self.patterns)
        self.rows_read = (
            {p: n * (self.batch_size // size) for p, n in rows_read(graph).items()}
            if self.settings.communication.sparse_embeddings
            else None
        )
        pipeline = _stages.asked(self.stages, self.settings.pipeline)
        if self.mesh is not None and set(self.mesh.axis_names) != {DATA_AXIS}:
            return _strategy.from_mesh(graph, self.mesh, self.rules, pipeline)
        if self.rules is not None:
            raise ConfigError(
                f"rules {self.rules.name!r} need a mesh whose axes they name, such as "
                f"mesh=jax.make_mesh(({len(self.devices)}, 1), ('data', 'tensor'))"
            )
        cluster = self.settings.cluster
        if self.stages is not None:
            _stages.check_unannotated(graph, pipeline.num)
            return self._pipelined(graph, pipeline, self._first_batch(start, size))
        hosts = self._gather("hosts", platform.node())
        if self.settings.auto.auto_parallel:
            sizes = self._gather("memory", str(_setup.smallest_memory(self.devices, self.known)))
            return _strategy.automatic(
                graph,
                self.devices,
                hosts=hosts,
                memory_bytes=min((int(s) for s in sizes if s != "None"), default=None),
                optimizer_bytes=_setup.optimizer_bytes(self.optimizer, self._functional.params),
                parts=num_parts(self.reduction),
                num_microbatches=self.batch_size // size,
            )
        return _strategy.from_annotations(
            graph,
            self.devices,
            hosts=hosts,
            share=cluster.share_devices,
            prefer_intra_node=cluster.prefer_intra_node,
            layout=cluster.layout,
            stages=pipeline,
        )

    def _pipelined(self, graph: Graph, stages: _stages.Stages, batch: PyTree) -> Strategy:
        """Pipelines cut by the times of their devices, where these say something."""
        strategy = _strategy.pipelined(self.devices, stages)
        if (
            self.split == "even"
            or stages.shares is not None
            or stages.num_chunks > 1
            or _strategy.stages_share_cores(strategy.replicas)
        ):
            return strategy
        self._beat(-1, "measuring segments")
        own = _cut.measure_segments(
            graph, stages, self._functional, batch, self.devices, self.reduction
        )
        cut = _cut.best_cut(
            graph,
            stages,
            self._gather("segments", own),
            memory_bytes={
                i: self.known[d].memory_bytes if d in self.known else None
                for i, d in enumerate(self.devices)
            },
            num_microbatches=self.batch_size // jax.tree.leaves(batch)[0].shape[0],
            optimizer_bytes=_setup.optimizer_bytes(self.optimizer, self._functional.params),
            reduction=self.reduction,
        )
        self.devices = tuple(self.devices[i] for i in cut.order)
        stages = dataclasses.replace(stages, layers=cut.layers, fractions=cut.fractions)
        strategy = _strategy.pipelined(self.devices, stages)
        return dataclasses.replace(strategy, reasons=(cut.reason,))

    def _check_stages(self, num_pipelines: int) -> None:
        stages = self.strategy.stages
        if stages is None:
            return
        if self.settings.communication.clip_norm is not None and (
            self.settings.communication.clip == "before"
        ):
            raise ConfigError(
                "communication.clip='before' needs the whole gradient of a microbatch, which no "
                "stage of a pipeline has: use clip='after'"
            )
        if self.microbatch_size is None:
            size, reason = _stages.microbatch_size(stages, self.batch_size, num_pipelines)
            self.microbatch_size = size
            self.strategy = dataclasses.replace(
                self.strategy, reasons=(*self.strategy.reasons, reason)
            )
        if stages.needs_even_counts:
            num = self.batch_size // self.microbatch_size
            _stages.check_even(stages, num, num_pipelines, self.split)
            if self.split == "measured":
                self.split = "even"

    def _rows_to_send(self) -> tuple[dict[int, int], tuple[str, ...]]:
        if self.rows_read is None:
            return {}, ()
        if self.strategy.axes:
            return {}, ("sparse_embeddings: whole, for the devices of a copy share them",)
        return _setup.rows_to_send(
            self.rows_read,
            self._functional.params,
            num_replicas=len(self.strategy.replicas),
            num_parts=num_parts(self.reduction),
        )

    def _clip(self) -> dict[str, float]:
        communication = self.settings.communication
        if communication.clip_norm is None:
            return {}
        return {f"clip_{communication.clip}": communication.clip_norm}

    def _make_engine(self, start: int, size: int) -> Engine:
        engine = Engine(
            self._functional,
            self.optimizer,
            self.reducer,
            batch=self._first_batch(start, size),
            num_microbatches=self.batch_size // size,
            microbatch_size=size,
            seed=self.seed,
            reduction=self.reduction,
            shard=self.strategy.shard,
            stage=self.strategy.stage,
            gradient=self.settings.communication.gradient,
            clip=self._clip(),
            rows=self.rows,
            num_groups=self.settings.optimizer.num_apply_groups,
        )
        engine.broadcast()
        return engine

    def _build(self, start: int, stack: contextlib.ExitStack) -> None:
        first = functools.partial(self._first_batch, start)
        chosen = _setup.choose(
            functools.partial(self._make_engine, start),
            first,
            self.reducer,
            batch_size=self.batch_size,
            microbatch_size=self.microbatch_size,
            measure=self.split == "measured",
        )
        self.engine, self.microbatch_size = chosen.engine, chosen.microbatch_size
        stack.callback(self.engine.close)
        self._agree("lowered program", self.engine.fingerprint())
        if start and self.checkpoints is not None:
            self._restore(start)
        limits = _setup.count_limits(
            self.engine, first(chosen.microbatch_size), self.reducer, self.known
        )
        counts = _setup.starting_counts(
            self.split, self.batch_size // chosen.microbatch_size, chosen.seconds, limits
        )
        self.reasons = (*self.strategy.reasons, *chosen.engine.reasons, *chosen.reasons)
        self.pipelines = Pipelines(self.engine, self.strategy, self._gather)
        self.reasons += self.pipelines.measure(first(chosen.microbatch_size), counts)
        self.balancer = Balancer(self.settings.balance, counts, limits, chosen.seconds)
        self._set_plan()

    def _stage_names(self) -> dict[int, tuple[str, ...]]:
        """Of each pipeline's stages, as the mesh file numbers their devices."""
        return {
            r.index: _devices.replica_names(
                [Replica(s, row) for s, row in enumerate(r.rows)], self.listed, self.known
            )
            for r in self.strategy.replicas
        }

    def _set_plan(self) -> None:
        assert self.microbatch_size is not None
        self.plan = _setup.make_plan(
            names=self.names,
            batch_size=self.batch_size,
            microbatch_size=self.microbatch_size,
            counts=self.balancer.counts,
            reduction=self.reduction,
            seconds=self.balancer.seconds,
            fixed=self.balancer.fixed,
            reasons=self.reasons,
        )
        self.plan = self.pipelines.planned(self.plan)

    def _gather(self, what: str, text: str) -> tuple[str, ...]:
        timeout_seconds = self.settings.watchdog.progress_timeout_seconds
        return _coordination.gather(what, text, timeout_seconds=timeout_seconds)

    def _agree(self, what: str, text: str) -> None:
        if jax.process_count() > 1:
            _coordination.same_everywhere(
                what,
                text,
                rank=jax.process_index(),
                num_processes=jax.process_count(),
                timeout_seconds=self.settings.watchdog.progress_timeout_seconds,
            )

    def _save(self, done: int) -> None:
        # Every process takes part: a replica's arrays may lie on several. What is on disk by now
        # would not do to decide it, for it is not the same to all of them.
        assert self.checkpoints is not None
        self.checkpoints.save(done, self._tree(), self._meta())
        self.saved = done

    def _tree(self) -> dict[str, PyTree]:
        return {
            "params": self.engine.params,
            "aux": self.engine.aux,
            "opt_state": self.engine.opt_state,
            "exponents": self.engine.exponents,
        }

    def _restore(self, step: int) -> None:
        assert self.checkpoints is not None
        tree = self.checkpoints.restore(self._tree(), step).tree
        self.engine.load(tree["params"], tree["opt_state"], tree["aux"], tree["exponents"])
        self.engine.broadcast()

    # -- steps -----------------------------------------------------------------------------------

    def _beat(self, step: int, phase: str) -> None:
        if self.watchdog is not None:
            self.watchdog.beat(step, phase)

    def _steps(self, start: int, stack: contextlib.ExitStack) -> int:
        assert self.microbatch_size is not None
        self.sigterm_agreed = False
        self.recompilations = 0
        loader = stack.enter_context(
            Loader(
                self.source,
                batch_size=self.batch_size,
                microbatch_size=self.microbatch_size,
                num_steps=self.last_step,
                depth=self.settings.data.prefetch_steps,
            )
        )
        if start < self.last_step:
            loader.start(start, _span(_setup.own_ids(self.balancer.counts, self.reducer)))
        began = time.perf_counter()
        for step in range(start, self.last_step):
            counts = self.balancer.counts
            ids = _setup.own_ids(counts, self.reducer)
            self._beat(step, "data")
            loaded = iter(loader.get(step, _span(ids)))
            batches = [[next(loaded) for _ in own] for own in ids]
            self._beat(step, "microbatches")
            compiled = num_compilations()
            timed = step == start + 1 and self.run_dir is not None
            self.pipelines.time_ticks(timed)
            outcome = self.engine.accumulate(
                step,
                ids,
                batches,
                stop=self.stopping or self.sigterm,
                on_reduce=functools.partial(self._beat, step, "reduce"),
            )
            if timed:
                self.pipelines.tell_ticks()
            self._beat(step, "update")
            if outcome.nonfinite:
                self._nonfinite(step, outcome.nonfinite)
            else:
                self.engine.update(outcome)
            if step > start:
                self.recompilations += num_compilations() - compiled
            change = None
            if self.split == "measured":
                change = self.balancer.observe(step, outcome.busy_seconds, outcome.update_seconds)
            now = time.perf_counter()
            record = StepRecord(
                step=step,
                loss=outcome.loss,
                metrics=outcome.metrics,
                seconds=now - began,
                num_examples=self.batch_size,
                num_tokens=self._num_tokens(batches),
                counts=counts,
                busy_seconds=tuple(
                    b + u for b, u in zip(outcome.busy_seconds, outcome.update_seconds, strict=True)
                ),
                redone=outcome.redone,
                skipped=bool(outcome.nonfinite),
            )
            began = now
            self._record(record, change)
            done = step + 1
            for callback in self.callbacks:
                state = TrainState(step=done, **self.engine.stored)
                self.stopping |= bool(callback(record, state))
            if self.eval_every and done % self.eval_every == 0 and done < self.last_step:
                self._evaluate(done)
                began = time.perf_counter()
            if (
                self.checkpoints is not None
                and self.checkpoint_every
                and done % self.checkpoint_every == 0
            ):
                self._beat(done, "checkpoint")
                self._save(done)
            if outcome.stop:
                self.sigterm_agreed = True
                return done
        return self.last_step

    def _num_tokens(self, batches: list[list[PyTree]]) -> int:
        """Entries of the largest integer matrix of a global batch: its tokens, if it has any."""
        some = next((b for own in batches for b in own), None)
        leaves = [x for x in jax.tree.leaves(some) if hasattr(x, "dtype")]
        sizes = [x.size for x in leaves if x.ndim == 2 and np.issubdtype(x.dtype, np.integer)]
        return max(sizes, default=0) * self.plan.num_microbatches

    def _nonfinite(self, step: int, names: tuple[str, ...]) -> None:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        message = f"step {step}: not finite in the gradient of {shown}"
        if self.nonfinite == "stop":
            raise NonFiniteError(
                f"{message}; the parameters are those of step {step}. Lower the learning rate, "
                "clip, or pass nonfinite='skip' to leave such updates out"
            )
        self.progress.log(f"{message}; update skipped")

    def _record(self, record: StepRecord, change: Rebalance | None) -> None:
        self.history["steps"].append(record)
        self.progress.update(record)
        if self.metrics is not None:
            self.metrics.step(record)
        if change is not None:
            self.history["rebalances"].append(change)
            self._set_plan()
            self.progress.log(
                f"step {change.step}: counts {_counts(change.before)} -> {_counts(change.after)}, "
                f"{change.reason}; expected gain {change.expected_gain:.0%}"
            )
            if self.metrics is not None:
                self.metrics.rebalance(change)
        settled = self.balancer.stepped(record.seconds)
        if settled is not None:
            for i, earlier in enumerate(self.history["rebalances"]):
                if earlier.step == settled.step:
                    self.history["rebalances"][i] = settled
            self.progress.log(
                f"step {record.step}: counts {_counts(settled.after)} gained "
                f"{settled.achieved_gain:.0%} (expected {settled.expected_gain:.0%})"
            )
            if self.metrics is not None:
                self.metrics.rebalance(settled)

    # -- evaluation and the end ------------------------------------------------------------------

    def _evaluate(self, done: int) -> None:
        self._beat(done, "evaluation")
        assert self.microbatch_size is not None
        began = time.perf_counter()
        size, fetch = eval_batches(self.eval_data, self.microbatch_size)
        num = math.ceil(size / self.microbatch_size)
        share = _setup.share_of(num, self.balancer.counts)
        loss, metrics, _ = self.engine.evaluate(num, _setup.own_ids(share, self.reducer), fetch)
        record = EvalRecord(
            step=done,
            loss=loss,
            metrics=metrics,
            num_examples=size,
            seconds=time.perf_counter() - began,
        )
        self.history["evaluations"].append(record)
        numbers = "  ".join(f"{k} {v:.4f}" for k, v in {"loss": loss, **scalars(metrics)}.items())
        self.progress.log(f"step {done}: evaluation  {numbers}")
        if self.metrics is not None:
            self.metrics.evaluation(record)

    def _finish(self, done: int) -> Result:
        if self.eval_data is not None and done == self.last_step:
            self._evaluate(done)
        if self.checkpoints is not None:
            if self.saved != done:
                self._save(done)
            self._beat(done, "checkpoint")
            self.checkpoints.wait()
        self._set_plan()
        model, state = self.engine.finish()
        history = History(
            device_names=self.names,
            num_compilations=self.recompilations,
            **{k: tuple(v) for k, v in self.history.items()},
        )
        self.progress.close()
        if self.main and history.steps:
            print(terminal_report(history, title="hxla"))
        if self.main and self.run_dir is not None and history.steps:
            path = self.run_dir / "report.html"
            write_report(
                path,
                history,
                title=self.run_dir.name,
                notes={"Plan": self.plan.explain()},
                pictures=self.pipelines.draw(self.run_dir, self._stage_names()),
            )
            print(f"report: {path}")
        return Result(
            model=model,
            state=state,
            opt_state=self.engine.opt_state,
            step=done,
            history=history,
            plan=self.plan,
            sha256=fingerprint((state, self.engine.opt_state)),
        )


def fingerprint(tree: PyTree) -> str:
    """SHA-256 of the shapes, dtypes and bytes of all leaves in order.

    Args:
        tree: Any pytree of arrays.

    Returns:
        64 hexadecimal digits: two trees agree in them only if they agree to the last bit.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _span(ids: list[range]) -> range:
    """Local devices take consecutive runs, so together they are one."""
    return range(ids[0].start, ids[-1].stop)


def _counts(counts: tuple[int, ...]) -> str:
    return "/".join(map(str, counts))


@contextlib.contextmanager
def _sigterm(run: Run) -> Iterator[None]:
    """SIGTERM asks for a checkpoint at the next step's end, on all processes at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals; the caller keeps its own handling
        return

    def handle(number: int, frame: Any) -> None:
        run.sigterm = True

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
