"""A session: a plan that runs. It alone has state; it is opened and closed, never changed into
another.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._cluster._job_devices import Devices
from .._core._errors import ConfigError
from .._core._fingerprint import fingerprint
from .._core._types import PyTree
from .._jax._compilation_events import num_compilations
from .._jax._heap import keep_heap_small
from .._jax._local_clients import is_here
from .._launch._member import own_member
from .._lower._determinism import determinism
from .._lower._state import State
from .._plan._plan import Plan
from .._planner._counts import best_counts
from .._report._history import EvalRecord, History, Rebalance, StepRecord
from ._agreement import facts_of_data
from ._balancer import Balancer
from ._beginning import Beginning
from ._copies import CopiesCheck
from ._counts_of_plan import (
    check_limits,
    count_limits,
    lack,
    own_ids,
    pooled,
    predicted,
    share_of,
    shared_numbers,
)
from ._data import Loader, cut_batch, eval_batches, num_tokens
from ._executors_of_plan import with_fastest_executors
from ._nonfinite import left_out
from ._pipeline_watch import PipelineWatch
from ._recorder import Recorder, step_record
from ._runnable import agree_on_asked, check_runnable
from ._session_member import LEAVE, MOVE, STOP, SessionMember, ran, rehearse
from ._session_values import (
    Result,
    SessionOptions,
    plans_to_table,
)
from ._signals import Preempted, Termination
from ._split_watch import SplitWatch
from ._step import Outcome, Stepper
from ._traced_job import TracedJob
from ._watchdog import Watchdog


class Session:
    """A plan that runs: made by `Job.open`, used in a `with` statement.

    Iterating trains to the last step and gives a record of each. A user's own loop may call `step`
    instead, with batches of its own. Every process of a job makes the same calls in the same order.

    Attributes:
        plan: The present plan; a re-balance makes another, with other counts.
        step_number: The updates done.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> with job.open(job.plan(microbatch_size=1), checkpoint_dir="checkpoints") as session:
        ...     for _ in range(3):
        ...         record = session.step(data)
        ...     whole = session.gather(session.state.params)
        ...     evaluation = session.evaluate(data)
        ...     session.save()
        ...     result = session.result()
        >>> evaluation.loss < record.loss, result.step
        (True, 3)
    """

    def __init__(self, job: TracedJob, plan: Plan, devices: Devices, options: SessionOptions):
        self._job, self._options = job, options
        self._cluster = job.cluster(devices)
        self._stack = contextlib.ExitStack()
        self._is_closed = False
        self._member: SessionMember | None = None
        with contextlib.ExitStack() as opening, options.waiting(plan) as told:
            opening.enter_context(self._stack)
            self._watchdog = self._stack.enter_context(
                Watchdog(
                    rank=jax.process_index(),
                    num_processes=jax.process_count(),
                    settings=job.settings.watchdog,
                )
            )
            opening.push(self._watchdog.left_by)
            self._watchdog.beat(-1, "compiling and measuring")
            self._termination = Termination()
            self._stack.callback(self._termination.close)
            self._stopping = 0.0
            agree_on_asked(plan, job, options)
            check_runnable(plan, job, self._cluster, devices)
            on_cpu = any(d is not None and is_here(d) and d.platform == "cpu" for d in devices)
            is_tight = on_cpu and plan.placement.sums == "released"
            if is_tight:
                keep_heap_small()
            member = own_member() if not options.is_trial and options.steps is not None else None
            begin = functools.partial(Beginning, job, plan, options, self._stack, is_tight=is_tight)
            beginning = begin() if member is None else None
            start = options.first_step if beginning is None else beginning.first_step
            resumed = None if beginning is None else beginning.step
            self._batch = job.first_batch(start, plan.microbatch_size)
            job.agree("data", lambda: facts_of_data(self._batch, f"data of step {start}: "))
            weights = job.opened_weights(plan.microbatch_size) if resumed is None else None
            self._programs = job.programs(plan, devices, told.tell, keep=options.is_trial)
            self._reducer = self._programs.reducer
            self._store = self._programs.store()
            self._stack.callback(self._store.close)
            told.tell("putting the state in its places")
            if beginning is None or not beginning.load(self._store):
                self._store.initialise(job.gather, weights)
            told.tell("running every program once")
            self._stepper = Stepper(self._programs, self._store)
            self._copies = CopiesCheck(
                self._store, self._reducer.ranks, job.settings.watchdog.compare_steps
            )
            self._stack.callback(self._stepper.close)
            self._stepper.use_executors(plan.replicas)
            own = self._stepper.warm_up(
                self._batch, repeats=3 if options.balance else 0, has_scales=resumed is not None
            )
            seconds = None
            if options.balance:
                if job.settings.cluster.executors == "auto" and options.steps is not None:
                    gain, left = job.settings.balance.min_gain, options.steps - start
                    plan, own = with_fastest_executors(
                        self._stepper, self._programs, plan, self._batch, own, gain, left
                    )
                seconds = pooled(shared_numbers(self._reducer, own), plan)
            if member is not None:
                rehearse(member, self._store, job)
                told.tell("waiting for the generation to be formed")
                beginning = begin(folders=member.wait_for_the_others())
                if beginning.load(self._store):
                    self._stepper.restored()
                self._member = SessionMember(member, self._store, self._termination, job, beginning)
            assert beginning is not None  # one of the two branches made it
            self._checkpoints, self._saved = beginning.checkpoints, beginning.saved_step
            self.step_number = self._first_step = start = beginning.first_step
            self._plans, self._beginning = beginning.plans, beginning
            held = self._store.num_bytes()
            self.memory_bytes = self._programs.memory_bytes(held)
            self._saves_alone = on_cpu and lack(devices, self._cluster, held + self.memory_bytes)
            own = [self.memory_bytes] * len(self._reducer.local)
            self._bytes_of_copies = shared_numbers(self._reducer, own)
            at_once = self._programs.most_inputs
            limits = count_limits(plan, self._cluster, self._bytes_of_copies, self._batch, at_once)
            counts = plan.counts
            if seconds is not None:
                counts = best_counts(plan.num_microbatches, seconds, None, limits)
            check_limits(counts, limits)
            moves = options.balance or job.settings.balance
            self.balancer = Balancer(moves, counts, limits, seconds)
            self.plan = plan if counts == plan.counts else plan.with_counts(counts)
            self._watch_pipelines = PipelineWatch(self._stepper, self._programs, job.gather)
            said = self._watch_pipelines.measure(self._batch, self.plan)
            self.plan = self._predicted(self.plan).replaced(reasons=(*plan.reasons, *said))
            self.split_watch = SplitWatch(self._programs, self._cluster, job)
            self._plans[start] = self.plan
            self._recorder = self._records(start)
            self._stack.callback(self._recorder.close)
            self._loader: Loader | None = None
            self._began = time.perf_counter()
            if self._member is not None:
                facts = self._meta() | {"numerics": self.plan.numerics}
                self._stack.enter_context(self._member.training(start, facts, self.plan))
            opening.pop_all()
        damaged = self._checkpoints.damaged if self._checkpoints is not None else ()
        for words in (*damaged, *(self._member.told() if self._member is not None else ())):
            self._recorder.log(words)
        for words in beginning.notes:
            self._recorder.log(words)
        promised = determinism(self._programs.graph, self.plan)
        self._recorder.log(f"{self.plan.explain()}\n  {promised}")

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self._member is not None:
            self._member.left_by(error)
        self._watchdog.left_by(kind, error, trace)
        self.close()

    def close(self) -> None:
        """Wait for what is being written, and let go of everything."""
        if not self._is_closed:
            self._is_closed = True
            self._stack.close()

    # -- opening ---------------------------------------------------------------------------------

    def _meta(self) -> dict[str, Any]:
        state = self._job.source.state(self.step_number)
        facts = self._beginning.facts | {"plans": plans_to_table(self._plans)}
        return facts if state is None else facts | {"data": state}

    def _records(self, start: int) -> Recorder:
        return Recorder(
            self.plan.replica_names,
            start_step=start,
            last_step=self._options.steps,
            run_dir=self._options.run_dir,
            tensorboard=self._options.tensorboard,
            is_main=jax.process_index() == 0 and not self._options.is_trial,
        )

    def _predicted(self, plan: Plan) -> Plan:
        prediction = predicted(
            plan,
            self.balancer.seconds,
            self.balancer.fixed,
            memory_bytes=self._bytes_of_copies,
            cluster=self._cluster,
        )
        return plan.replaced(prediction=self._watch_pipelines.predicted(prediction))

    # -- steps -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[StepRecord]:
        """Train to the last step, or until somebody asks to stop.

        Raises:
            ConfigError: If the session was opened without a number of steps.
        """
        if self._options.steps is None:
            raise ConfigError("a session without `steps` has no end: open it with steps=...")
        while self.step_number < self._options.steps and not self._is_stopped:
            yield self.step()

    @property
    def _is_stopped(self) -> bool:
        return self._stopping < 0

    def stop(self) -> None:
        """Ask all processes to end after the next step: iterating then ends."""
        if not self._is_stopped:
            self._stopping = max(self._stopping, STOP)

    def step(self, batch: PyTree | None = None) -> StepRecord:
        """Train one step.

        Args:
            batch: The global batch, the same on every process; None: the next one of the data.

        Returns:
            What happened.

        Raises:
            NonFiniteError: A gradient was not finite and the job says `nonfinite="stop"`.
            DataError: If the data ends, or the batch has another size.
            Preempted: After SIGTERM on any process, once a checkpoint is written.
        """
        step = self.step_number
        ids = own_ids(self.plan.counts, self._reducer)
        self._watchdog.beat(step, "data")
        batches = self._loaded(step, ids) if batch is None else cut_batch(batch, ids, self.plan)
        if batch is not None and (step == self._first_step or self._copies.is_due(step)):
            self._job.agree("batch", lambda: facts_of_data(batch, f"batch of step {step}: "))
        self._watchdog.beat(step, "microbatches")
        compiled = num_compilations()
        timed = step == self._first_step + 1 and self._options.run_dir is not None
        self._watch_pipelines.time_ticks(timed)
        outcome = self._stepper.accumulate(
            step,
            ids,
            batches,
            stop=max(self._stopping, self._asks),
            on_reduce=functools.partial(self._watchdog.beat, step, "reduce"),
        )
        if timed:
            self._watch_pipelines.tell_ticks()
        self._watchdog.beat(step, "update")
        with self._updating(outcome):
            if outcome.nonfinite:
                stops = self._job.nonfinite == "stop" and not self._options.is_trial
                self._recorder.log(left_out(step, outcome, self._stepper, stops=stops))
            else:
                self._stepper.update(outcome)
                self._stepper.rescale(overflowed=False)
        if step > self._first_step:
            self._recorder.num_compilations += num_compilations() - compiled
        record = self._recorded(step, outcome, batches)
        self._watchdog.beat(step, "between steps")
        self.step_number = step + 1
        self._copies.stepped(self.step_number)
        if self._member is not None and step + 1 != self._options.steps:
            self._member.copy()
        if outcome.stop in (LEAVE, MOVE):
            self._leave(moves=outcome.stop == MOVE)
        if outcome.stop:
            self._stopping = -1.0
        return record

    def _loaded(self, step: int, ids: Sequence[range]) -> list[list[PyTree]]:
        if self._loader is None:
            last = self._options.steps
            self._loader = self._stack.enter_context(
                Loader(
                    self._job.source,
                    microbatch_size=self.plan.microbatch_size,
                    num_steps=last if last is not None else 1 << 62,
                    depth=self._job.settings.data.prefetch_steps,
                )
            )
        loaded = iter(self._loader.get(step, list(itertools.chain(*ids))))
        return [[next(loaded) for _ in own] for own in ids]

    def _recorded(
        self,
        step: int,
        outcome: Outcome,
        batches: Sequence[Sequence[PyTree]],
    ) -> StepRecord:
        change = None
        if self._options.balance:
            change = self.balancer.observe(step, outcome.busy_seconds, outcome.update_seconds)
        now = time.perf_counter()
        tokens = num_tokens(batches, self.plan.num_microbatches)
        record = step_record(step, outcome, self.plan, seconds=now - self._began, tokens=tokens)
        self._began = now
        self._recorder.step(record)
        if change is not None:
            self._rebalance(change)
        elif self.balancer.counts != self.plan.counts:  # one step's trial of a parked device
            self.plan = self._predicted(self.plan.with_counts(self.balancer.counts))
        if advice := self.split_watch.stepped():
            self._recorder.log(f"step {step}: {advice}")
        settled = self.balancer.stepped(record.seconds)
        if settled is not None:
            self._recorder.settled(step, settled)
        return record

    def _rebalance(self, change: Rebalance) -> None:
        self.plan = self._predicted(self.plan.with_counts(self.balancer.counts))
        self._plans[change.step] = self.plan
        self._recorder.rebalanced(change)

    @property
    def _asks(self) -> float:
        """What this process asks of all besides the user's wish to end."""
        return LEAVE * self._termination.arrived if self._member is None else self._member.asks

    @contextlib.contextmanager
    def _updating(self, outcome: Outcome) -> Iterator[None]:
        """A state may be left before an update or after it, and not after half of one."""
        if self._member is None:
            yield
            return
        self._stepper.wait_for_sums()
        with self._member.updating(self._checkpoints, ran(self.plan, outcome.busy_seconds)):
            yield

    def _leave(self, *, moves: bool) -> None:
        if self.step_number == self._options.steps:
            return  # this was the last one anyway
        if moves and self._member is not None:
            self._member.move()
        elif self._checkpoints is not None:
            self.save()
            self._watchdog.beat(self.step_number, "checkpoint")
            self._checkpoints.wait()
        raise Preempted(self.step_number)

    # -- between steps ---------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state as it lies, whose arrays the next step overwrites; `gather` makes the whole."""
        return self._store.state(self.step_number)

    def gather(self, tree: PyTree) -> PyTree:
        """Make arrays of `state` whole in host memory, one after another.

        Args:
            tree: Any part of `state`.

        Returns:
            The same tree of numpy arrays.
        """
        return self._store.gather(tree)

    @property
    def history(self) -> History:
        """The records so far."""
        return self._recorder.history(dict(self._plans))

    def evaluate(self, data: Any) -> EvalRecord:
        """Find the mean loss and metrics over a data set, the same for every spread of the work.

        Args:
            data: The data, of any kind that a job takes but an unbounded one.

        Returns:
            The record of the evaluation.

        Raises:
            DataError: If it is empty or of no known kind.
        """
        began = time.perf_counter()
        with self._watchdog.phase(self.step_number, "evaluation") as beat:
            size, fetch = eval_batches(data, self.plan.microbatch_size)
            facts = {"examples of the evaluation": str(size)}
            self._job.agree("evaluation", lambda: facts | facts_of_data(fetch(0), "evaluation: "))
            num = math.ceil(size / self.plan.microbatch_size)
            ids = own_ids(share_of(num, self.plan.counts), self._reducer)
            loss, metrics = self._stepper.evaluate(
                num, ids, fetch, on_reduce=functools.partial(beat, "evaluation's sum")
            )
        record = EvalRecord(
            step=self.step_number,
            loss=loss,
            metrics=metrics,
            num_examples=size,
            seconds=time.perf_counter() - began,
        )
        self._recorder.evaluated(record)
        self._began = time.perf_counter()
        return record

    def save(self) -> None:
        """Write a checkpoint in the background: each process writes the parts that it owns.

        Raises:
            ConfigError: If the session was opened without a `checkpoint_dir`.
            CheckpointError: If an earlier one failed.
        """
        if self._checkpoints is None:
            raise ConfigError("there is no folder to save to: open the session with checkpoint_dir")
        if self._saved != self.step_number:
            with self._watchdog.phase(self.step_number, "checkpoint"):
                self._copies.compare(self.step_number)
                self._stepper.wait()
                self._checkpoints.save(self.step_number, self._store.saved(), self._meta())
                self._saved = self.step_number
                if self._saves_alone:
                    self._checkpoints.wait()

    def result(self) -> Result:
        """Write the last checkpoint and the report, and give the model its trained variables.

        Returns:
            The trained model and state, the history, the plan and the SHA-256 of the state.
        """
        self._watchdog.beat(self.step_number, "finishing")
        self._copies.compare(self.step_number)
        if self._checkpoints is not None:
            self.save()
            self._checkpoints.wait()
        self.plan = self._predicted(self.plan)
        history = dataclasses.replace(self.history, split=self.split_watch.measured())
        state = self.state
        sha256 = fingerprint((state.params, state.aux, state.opt_state), self._store.gather)
        training = self._programs.training
        model, trained = training.model.finish(self._store.here(state.params), state.aux)
        pictures = {}
        if self._options.run_dir is not None and jax.process_index() == 0:
            pictures = self._watch_pipelines.draw(self._options.run_dir, self.plan)
        self._recorder.report(history, self.plan, pictures)
        if self._member is not None:
            self._member.finished()
        return Result(
            model=model,
            state=trained,
            opt_state=training.optimizer.restored(state.opt_state, training.model.trained),
            step=self.step_number,
            history=history,
            plan=self.plan,
            sha256=sha256,
        )
