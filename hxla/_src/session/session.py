"""A session: a plan that runs. It alone has state."""

import contextlib
import dataclasses
import functools
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..choose.microbatch_counts import own_ids
from ..cluster.job_devices import Devices
from ..core.errors import ConfigError, NonFiniteError
from ..core.format import plural
from ..core.types import PyTree
from ..data.data import epochs_of, num_tokens
from ..jax.portable import num_compilations
from ..job.context import JobContext
from ..lower.determinism import determinism
from ..lower.initial_state import State
from ..plan.plan import Plan
from ..plan.precision import LEAST_SCALE_EXPONENT
from ..report.history import EvalRecord, History, StepRecord
from ..weights.weights import weights_of
from .ending import LEAVE, MOVE, Ending, Requests, Termination
from .forward_passes import evaluated
from .island_steps import check_options
from .opening import opened_session
from .recorder import LearningRate, recorder_of, step_record
from .running_plan import RunningPlan
from .saved_state import Saver
from .state_access import ReplicaChecksum, StateAccess, agreed_arrays
from .step import Feed, Outcome, Stepper
from .values import Result, SessionOptions, result_of
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..checkpoint.checkpoints import Checkpoints
    from .member import SessionMember


class Session:
    """A plan that runs: made by `Job.open`, used in a `with` statement.

    Iterating trains to the last step and yields the record of each step. A user's loop may call
    `step` instead, and pass its own batches. Every process of a job must make the same calls in the
    same order.

    Attributes:
        step_number: The number of updates done.
        num_steps: The total number of updates; None if the session was opened without one.
        checkpoint_dir: The folder for checkpoints, or None.
        run_dir: The folder for metrics and the report, or None.
        metadata: A dictionary of JSON values that every checkpoint keeps and a resumed session has
            again. Every process must write the same values.
        after_save: Functions without arguments that are called whenever a checkpoint was begun.

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

    def __init__(self, job: JobContext, plan: Plan, devices: Devices, options: SessionOptions):
        self._job, self._options, self.num_steps = job, options, options.steps
        self.checkpoint_dir, self.run_dir = options.checkpoint_dir, options.run_dir
        self._stack = contextlib.ExitStack()
        self._is_closed, self._is_settled = False, True
        self._handed_out = StateAccess()
        self._rate: float | None = None
        check_options(plan, options)
        with contextlib.ExitStack() as opening, options.waiting(plan) as waiting:
            opening.enter_context(self._stack)
            self._watchdog = self._stack.enter_context(Watchdog.of_job(job.settings.watchdog))
            opening.push(self._watchdog.left_by)
            self._watchdog.beat(-1, "compiling and measuring")
            self._termination = Termination()
            self._stack.callback(self._termination.close)
            asked = job, plan, devices, options
            opened = opened_session(*asked, self._termination, self._stack, waiting.tell)
            self._programs, self._store = opened.programs, opened.store
            self._stepper, self._reducer = opened.stepper, opened.programs.reducer
            self._member, source = opened.member, opened.source
            self._checkpoints, self.metadata = source.checkpoints, source.metadata
            self.step_number = self._first_step = start = source.first_step
            every = job.settings.watchdog.compare_steps
            self._checksum = ReplicaChecksum(self._store, self._reducer.ranks, every)
            saves = source, self._store, options.checkpoint_every
            self._saver = Saver(*saves, is_alone=opened.waits_for_saves)
            self.after_save = self._saver.after_save
            asks = (self._member or self._termination).request
            self._requests = Requests(asks, self._saver.request, is_member=bool(self._member))
            self.running_plan = RunningPlan(opened, job, options)
            self._islands = opened.islands
            self._learning_rate = LearningRate(self._programs, self._store, options.learning_rate)
            bits = determinism(self._programs.graph, self.plan)
            self._recorder = recorder_of(self.plan, options, start, job, bits)
            self._stack.callback(self._recorder.close)
            self.epochs = epochs_of(job.source, plan.batch_size)
            self._feed = Feed(job, opened.first_batch, options.steps, self.epochs)
            self._stack.callback(self._feed.close)
            shows = self._recorder, self.running_plan.pipelines
            self._ending = Ending(*shows, self._termination, options)
            self._began = time.perf_counter()
            if self._member is None:
                self._termination.heed_interrupts(meets=plan.islands is not None)
            else:
                facts = source.facts_at(start, self.running_plan.plans)
                self._stack.enter_context(self._member.training(start, facts, self.plan))
            opening.pop_all()
        for words in (*(self._member.notes() if self._member else ()), *source.notes):
            self._recorder.log(words)
        self._recorder.log(f"{self.plan.explain()}\n  {bits.summary}")

    def __repr__(self) -> str:
        return f"Session(step {self.step_number}, {self.plan!r})"

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
        if error is not None:
            may_save = self._islands.are_one and self._saver.may_save(self.step_number)
            save = self._save_and_wait if may_save else None
            self._ending.left_by(error, self.history, self.plan, self.step_number, save)
        self._watchdog.left_by(kind, error, trace)
        with self._ending.noting(error):
            self.close()

    def close(self) -> None:
        """Wait for checkpoints, write the report, and release threads, files and arrays."""
        if not self._is_closed:
            self._is_closed = True
            with self._stack:
                self._ending.report(self.history, self.plan, self.step_number)
            self.after_save.clear()  # a callback that knows the session would keep its arrays

    @property
    def plan(self) -> Plan:
        """The present plan; a rebalance replaces it by one with other counts."""
        return self.running_plan.plan

    def __iter__(self) -> Iterator[StepRecord]:
        """Train to the last step, or until a process asks to stop.

        Raises:
            ConfigError: If the session was opened without a number of steps.
        """
        if (steps := self._options.steps) is None:
            raise ConfigError("a session without `steps` has no end: open it with steps=...")
        while self.step_number < steps and not (self._requests.agreed and self._islands.are_one):
            yield self.step()
            self._settle()

    def agree(self, facts: Mapping[str, object]) -> None:
        """Stop every process with an error if processes disagree.

        Every process of the job must call this equally often, at the same places.

        Args:
            facts: The values to compare, by name; they are compared as text.

        Raises:
            LaunchError: With every difference, and the value of each rank.
        """
        texts = {name: str(value) for name, value in facts.items()}
        self._job.agree("what the script compares", lambda: texts)

    def stop(self) -> None:
        """Ask all processes to stop: iterating ends after one more step, in which they agree."""
        self._requests.stop()

    def step(self, batch: PyTree | None = None) -> StepRecord:
        """Train one step.

        Args:
            batch: The global batch, the same on every process; None takes the next one of the data.

        Returns:
            The record of the step.

        Raises:
            NonFiniteError: If a gradient was not finite and the job has `nonfinite="stop"`.
            DataError: If the data ends, or the batch has another size.
            Preempted: After SIGTERM or Ctrl-C on a process, once a checkpoint is written.
        """
        self._settle()
        step = self.step_number
        ids = own_ids(self.plan, self._reducer)
        self._watchdog.beat(step, "data")
        if batch is None:
            batches = self._feed.load(step, ids, self.plan)
        else:
            compares = step == self._first_step or self._checksum.is_due(step)
            batches = self._feed.cut(batch, step, ids, self.plan, compares=compares)
        self._watchdog.beat(step, "microbatches")
        compiled = num_compilations()
        timed = step == self._first_step + 1 and self._options.run_dir is not None
        self.running_plan.pipelines.time_ticks(timed)
        waits = self._member is not None or self._stepper.waits
        with contextlib.ExitStack() as updating:
            outcome = self._stepper.accumulate(
                step,
                ids,
                batches,
                request=lambda: self._requests.present,
                on_phase=functools.partial(self._watchdog.beat, step),
                on_update=None if waits else functools.partial(self._begin_update, updating),
            )
        if timed:
            self.running_plan.pipelines.tell_ticks()
        self._watchdog.beat(step, "update")
        with _updating(self._member, self._stepper, self._checkpoints, self.plan):
            if outcome.nonfinite:
                stops = self._job.nonfinite == "stop" and not self._options.is_trial
                self._recorder.warn(_left_out(step, outcome, self._stepper, stops=stops))
            else:
                with contextlib.ExitStack() as updating:
                    if waits:
                        self._begin_update(updating)
                        self._stepper.update()
                    norm = self._programs.gradient_norm
                    self._stepper.scales.rescale(overflowed=False)
                outcome = dataclasses.replace(outcome, learning_rate=self._rate, gradient_norm=norm)
            self._islands.updated(step + 1)
            self.step_number = step + 1
        if step > self._first_step:
            self._recorder.num_compilations += num_compilations() - compiled
        record = self._record(step, outcome, batches)
        self._watchdog.beat(step, "callback")
        self._checksum.stepped(self.step_number, are_one=self._islands.are_one)
        self._saver.heed(outcome.stop)
        self._requests.agree(outcome.stop)
        self._is_settled = False
        return record

    def _begin_update(self, updating: contextlib.ExitStack) -> None:
        """Before an update; `updating` ends when it is known whether the update counts."""
        self._rate = self._learning_rate.of_step(self.step_number)
        updating.enter_context(self._ending.halfway())

    def _settle(self) -> None:
        """Close the step before: save or leave after its callbacks have run."""
        self._handed_out.take_back()
        if self._is_settled:
            return
        self._is_settled = True
        self._requests.settle()
        if not self._islands.are_one:
            return
        if self._saver.is_due(self.step_number):
            self.save()
        is_last = self.step_number == self._options.steps
        if self._member is not None and not is_last:
            self._member.copy()
        if self._requests.agreed in (LEAVE, MOVE) and not is_last:
            self._end_early(moves=self._requests.agreed == MOVE)

    def _record(self, step: int, outcome: Outcome, batches: Sequence[Any]) -> StepRecord:
        now = time.perf_counter()
        tokens = num_tokens(batches, self.plan.num_microbatches)
        (seconds, self._began), epoch = (now - self._began, now), self._feed.epoch
        record = step_record(step, outcome, self.plan, epoch, seconds=seconds, tokens=tokens)
        self._recorder.step(record)
        self.running_plan.stepped(record, outcome, self._recorder)
        if self._recorder.is_page_due:
            self._ending.show(self.history, self.plan)
            self._began = time.perf_counter()
        return record

    def _end_early(self, *, moves: bool) -> None:
        if moves and self._member is not None:
            self._member.move()
        else:
            self._save_and_wait()
        raise self._termination.left(self.step_number, is_kept=moves or bool(self._checkpoints))

    def _save_and_wait(self) -> None:
        if self._checkpoints is not None:
            self.save()
            self._watchdog.beat(self.step_number, "checkpoint")
            self._checkpoints.wait()

    @property
    def state(self) -> State:
        """The sharded state, read only; the next step overwrites its arrays.

        `gather` makes whole arrays of any part of it, and `replace` replaces arrays. Islands have
        one after a meeting only.
        """
        self._islands.check("session.state")
        return self._handed_out.state or self._handed_out.hand_out(
            self._store.state(self.step_number)
        )

    @property
    def weights(self) -> PyTree:
        """The sharded parameters and other variables of `state`, in the model's own tree."""
        return weights_of(self.state)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What a step returns: `loss`, and the names of the metrics."""
        return ("loss", *(metric.name for metric in self._programs.graph.metrics))

    def log(self, text: str) -> None:
        """Show lines on the terminal of rank 0.

        Args:
            text: One line, or several with line ends between them.
        """
        self._recorder.log(text)

    def gather(self, tree: PyTree) -> PyTree:
        """Gather arrays of `state` whole into host memory, one after another.

        Args:
            tree: Any part of `state`.

        Returns:
            The same tree with numpy arrays.
        """
        return self._store.gather(tree)

    def replace(
        self,
        *,
        params: PyTree | None = None,
        aux: PyTree | None = None,
        opt_state: PyTree | None = None,
    ) -> None:
        """Replace arrays of the state; every process must call this with equal ones.

        Arrays that come from `state` stay on their devices. Others go through host memory to each
        device with a shard of them, one after another. Results that are computed from whole arrays,
        as from those of `gather`, are the same for every placement of the work.

        Args:
            params: The parameters: a tree like `state.params`, whose leaves are JAX or NumPy
                arrays or numbers of the same shapes and dtypes. None keeps the present ones, here
                and in the next two arguments.
            aux: The other variables, a tree like `state.aux`.
            opt_state: The state of the optimizer, a tree like `state.opt_state`.

        Raises:
            ConfigError: With every leaf that differs from the state in name, shape or dtype.
            LaunchError: If the arrays of processes differ.
        """
        self._islands.check("session.replace")
        self._handed_out.check()
        parts = {"params": params, "aux": aux, "opt_state": opt_state}
        arrays = agreed_arrays(parts, self._store, self._handed_out, self._job)
        self._stepper.wait()
        with self._member.changing if self._member is not None else contextlib.nullcontext():
            self._store.replace(arrays)
        self._islands.begin(anew=params is not None)
        self._handed_out.take_back()
        self._saver.change()

    @property
    def history(self) -> History:
        """The records of this session so far."""
        return self._recorder.history(dict(self.running_plan.plans))

    def evaluate(self, data: Any) -> EvalRecord:
        """Compute the mean loss and metrics over a data set, equal for every placement of the work.

        Args:
            data: The data, of any kind that a job takes but an unbounded one.

        Returns:
            The record of the evaluation.

        Raises:
            DataError: If the data is empty or of an unknown kind.
        """
        self._islands.check("session.evaluate")
        step, forwards = self.step_number, self._stepper.forwards
        parts = self._job, forwards, self._reducer, self.plan
        with self._watchdog.phase(step, "evaluation") as beat:
            record = evaluated(*parts, data, step, beat)
        self._recorder.evaluated(record)
        self._began = time.perf_counter()
        return record

    def save(self) -> None:
        """Write a checkpoint in the background; each process writes its shards.

        Raises:
            ConfigError: If the session was opened without a `checkpoint_dir`.
            CheckpointError: If an earlier checkpoint failed.
        """
        if self._checkpoints is None:
            raise ConfigError("there is no folder to save to: open the session with checkpoint_dir")
        self._islands.check("session.save")
        if not self._saver.is_saved(self.step_number):
            with self._watchdog.phase(self.step_number, "checkpoint"):
                self._checksum.compare(self.step_number)
                self._stepper.wait()
                self._saver.save(self.step_number, self.running_plan.plans)
            for after_save in self.after_save:
                after_save()

    def result(self) -> Result:
        """Write the last checkpoint and the report, and put the trained variables into the model.

        Returns:
            The trained model and state, the history, the plan and the SHA-256 of the state.
        """
        self._islands.check("session.result")
        self._watchdog.beat(self.step_number, "finishing")
        self._handed_out.take_back()
        self._checksum.compare(self.step_number)
        self._save_and_wait()
        self.running_plan.predict()
        history = dataclasses.replace(self.history, split=self.running_plan.split.measured())
        result = result_of(self._programs, self._store, self.step_number, history, self.plan)
        self._ending.report(history, self.plan, self.step_number)
        if self._member is not None:
            self._member.finished()
        return result


def _updating(
    member: "SessionMember | None",
    stepper: Stepper,
    checkpoints: "Checkpoints | None",
    plan: Plan,
) -> contextlib.AbstractContextManager[None]:
    """Keep an elastic run from taking the state in the middle of an update."""
    if member is None:
        return contextlib.nullcontext()
    stepper.wait_for_sums()
    [seconds] = stepper.busy_seconds_here()
    return member.updating(checkpoints, plan, seconds)


def _left_out(step: int, outcome: Outcome, stepper: Stepper, *, stops: bool) -> str:
    """Skip the update of a step, and halve the loss scale if there is one.

    Returns:
        A line for the log.

    Raises:
        NonFiniteError: If `stops`, or the scale is the least already.
    """
    names = outcome.nonfinite
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    message = f"step {step + 1}: not finite in the gradient of {shown}"
    if stops:
        raise NonFiniteError(
            f"{message}; the parameters are those after {plural(step, 'step')}. Lower the learning "
            "rate, clip, or pass nonfinite='skip' to leave such updates out"
        )
    scale = outcome.loss_scale
    if scale is not None and outcome.overflowed:
        if scale <= 2.0**LEAST_SCALE_EXPONENT:
            raise NonFiniteError(
                f"{message}, though the loss is scaled by 2^{LEAST_SCALE_EXPONENT}, the least: it "
                "is not the scale that overflows. Lower the learning rate, clip, or use "
                "precision='bf16'"
            )
        stepper.scales.rescale(overflowed=True)
        message += f"; loss scale halved to {scale / 2:g}"
    return f"{message}; update skipped"
