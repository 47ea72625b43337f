"""The records of a session: shown on the terminal, written to files, and kept.

The learning rate of a step is computed before the update, from scalars that the last update has
left, and by a program of its own. So it costs no wait, and no program that trains is another one
for it.
"""

import dataclasses
import pathlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..core.errors import ConfigError
from ..core.format import gain, number, shares
from ..core.types import PyTree
from ..jax.jaxpr import ClosedJaxpr, as_function, inlined, part
from ..job.context import JobContext
from ..lower.determinism import Determinism
from ..lower.lower import Programs
from ..lower.store import Store
from ..plan.plan import Plan
from ..report.history import (
    EvalRecord,
    History,
    Rebalance,
    RunStart,
    RunState,
    StepRecord,
    run_start,
    scalars,
)
from ..report.run_tables import terminal_report
from ..report.terminal import LOGGER, Progress
from .step import Outcome
from .values import SessionOptions

if TYPE_CHECKING:
    from ..report.lanes import Lanes
    from ..report.metrics_file import MetricsWriter, Record

_PLACE = ("hyperparams", "learning_rate")  # in the state of optax.inject_hyperparams


class LearningRate:
    """Reads the learning rate of the next update.

    Args:
        given: A number, or an optax schedule; None: that of `optax.inject_hyperparams`, if the
            optimizer has one.

    Raises:
        ConfigError: If it is given and in the optimizer too.
    """

    def __init__(
        self, programs: Programs, store: Store, given: float | Callable[[int], Any] | None
    ):
        training = programs.training
        self._store, self._given = store, given
        self._read: tuple[int, ...] = ()
        self._program: Callable[..., Any] | None = None
        state = training.optimizer.state_shapes(training.model.trained)
        shapes, places = jax.tree.leaves(state), _places(state)
        if places and given is not None:
            raise ConfigError(
                "logged_learning_rate is for optimizers whose state has no learning rate; that of "
                "optax.inject_hyperparams is logged without it"
            )
        if len(places) == 1:  # of several no one is the learning rate
            closed, (updates, _) = training.optimizer.traced(training.model.trained)
            num = len(jax.tree.leaves(updates)), len(shapes)
            self._read, function = _from_state(closed, num, places[0])
            scalars = [shapes[k] for k in self._read]
            if function is not None and all(x.size == 1 for x in scalars):
                self._program = jax.jit(function).lower(*scalars).compile()

    def of_step(self, step: int) -> float | None:
        """The learning rate of a step, called before its update; None if it is unknown."""
        if callable(self._given):
            return float(self._given(step))
        if self._program is None:
            return self._given
        leaves = jax.tree.leaves(self._store.held[0].opt_state)
        scalars = [np.asarray(leaves[k].addressable_data(0)) for k in self._read]
        return float(np.asarray(self._program(*scalars)))


def _places(state: PyTree) -> list[int]:
    """The leaves of an optimizer's state that are learning rates."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    keys = [tuple(getattr(k, "name", getattr(k, "key", None)) for k in path[-2:]) for path in paths]
    return [place for place, names in enumerate(keys) if names == _PLACE]


def _from_state(
    closed: ClosedJaxpr, num: tuple[int, int], place: int
) -> tuple[tuple[int, ...], Callable[..., Any] | None]:
    """A leaf of the state after an update as a function of leaves before it.

    Args:
        closed: The update of gradients, state, parameters and loss.
        num: Arrays of the gradients, and leaves of the state.

    Returns:
        The leaves that it depends on, and the function; None: it depends on more than the state.
    """
    flat = inlined(closed)
    program = part(flat.jaxpr, [flat.jaxpr.outvars[num[0] + place]])
    state = flat.jaxpr.invars[num[0] : num[0] + num[1]]
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    read = tuple(k for k, v in enumerate(state) if v in program.invars)
    if len(read) + sum(v in constants for v in program.invars) < len(program.invars):
        return (), None
    run = as_function(ClosedJaxpr(program, ()))

    def function(*scalars: Any) -> Any:
        values = constants | dict(zip([state[k] for k in read], scalars, strict=True))
        [rate] = run(*[values[v] for v in program.invars])
        return rate

    return read, function


def step_record(
    step: int,
    outcome: Outcome,
    plan: Plan,
    epoch: float | None,
    *,
    seconds: float,
    tokens: int,
) -> StepRecord:
    """The record of a step.

    Args:
        step: Number of updates before it.
        seconds: Since the end of the step before.
    """
    busy = zip(outcome.busy_seconds, outcome.update_seconds, strict=True)
    return StepRecord(
        step=step + 1,
        loss=outcome.loss,
        metrics=outcome.metrics,
        seconds=seconds,
        num_examples=plan.batch_size,
        num_tokens=tokens,
        counts=plan.counts,
        busy_seconds=tuple(b + u for b, u in busy),
        redone=outcome.redone,
        skipped=bool(outcome.nonfinite),
        loss_scale=outcome.loss_scale,
        epoch=epoch,
        learning_rate=outcome.learning_rate,
        gradient_norm=outcome.gradient_norm,
    )


def recorder_of(
    plan: Plan, options: SessionOptions, start_step: int, job: JobContext, bits: Determinism
) -> "Recorder":
    """The recorder of a session that begins at a step; every process must call this."""
    start, is_main = None, jax.process_index() == 0 and not options.is_trial
    if options.run_dir is not None and not options.is_trial:
        hosts = job.gather("names of hosts", socket.gethostname())
        if is_main:
            kinds = [device.kind for device in plan.devices]
            words = job.arguments_in_words()
            start = run_start(start_step, options.steps, hosts=hosts, devices=kinds, job=words)
    return Recorder(
        plan.replica_names,
        start_step=start_step,
        start=start,
        bits=bits,
        last_step=options.steps,
        run_dir=options.run_dir if is_main else None,
        tensorboard=options.tensorboard,
        is_main=is_main,
        quiet=options.quiet,
        log_every=options.log_every,
    )


_PAGE_SECONDS = 60.0  # between reports of a run that goes on
_PAGE_SHARE = 0.01  # of the time, at most, for writing them


class Recorder:
    """Keeps all records of a session.

    Args:
        start_step: Number of updates before the session.
        start: How the run was started; None where nothing is written.
        bits: The determinism level of the plan.
        last_step: Last step of the run; None if not known.
        run_dir: Folder for `metrics.jsonl` and `report.html`; None writes nothing.
        is_main: Whether this process shows records.
        quiet: Whether only warnings are shown.
        log_every: Number of steps between lines, see `Progress`.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        start_step: int,
        start: RunStart | None,
        bits: Determinism,
        last_step: int | None,
        run_dir: pathlib.Path | None,
        tensorboard: bool,
        is_main: bool,
        quiet: bool,
        log_every: int | None,
    ):
        self._names, self._run_dir = names, run_dir
        self._steps: list[StepRecord] = []
        self._evaluations: list[EvalRecord] = []
        self._rebalances: list[Rebalance] = []
        self._is_main, self._is_shown = is_main, is_main and not quiet
        self.num_compilations = 0
        self._bits, self._page_due = bits, 0.0
        self._earlier = History(device_names=names)
        self._starts: tuple[RunStart, ...] = ()
        self._progress = None
        if self._is_shown:
            self._progress = Progress(last_step, names, log_every=log_every)
        self._metrics: MetricsWriter | None = None
        if run_dir is None:
            return
        from ..report import metrics_file

        self._metrics = metrics_file.MetricsWriter(
            run_dir, tensorboard=tensorboard, first_step=start_step
        )
        if self._metrics.earlier is not None:
            self.log(f"the metrics of an earlier run are now in {self._metrics.earlier}")
        if start is not None:
            self._write(start)
            try:
                self._earlier, self._starts = metrics_file.read_metrics(self._metrics.path)
            except ConfigError as error:
                self.log(f"the report begins after step {start_step}: {error}")
                self._starts = (start,)

    def close(self) -> None:
        """Release the terminal and the files."""
        if self._progress is not None:
            self._progress.close()
        if self._metrics is not None:
            self._metrics.close()

    def log(self, text: str) -> None:
        """Show lines."""
        if self._is_shown:
            LOGGER.info("%s", text)

    def warn(self, text: str) -> None:
        """Show lines, even if the session is quiet."""
        if self._is_main:
            LOGGER.warning("%s", text)

    def _write(self, record: "Record") -> None:
        if self._metrics is not None:
            self._metrics.write(record)

    def step(self, record: StepRecord) -> None:
        """Record a step."""
        self._steps.append(record)
        if self._progress is not None:
            self._progress.update(record)
        self._write(record)

    def rebalanced(self, change: Rebalance) -> None:
        """Record a rebalance."""
        self._rebalances.append(change)
        self.log(
            f"step {change.step}: counts {shares(change.before)} -> {shares(change.after)}, "
            f"{change.reason}; expected gain {gain(change.expected_gain)}"
        )
        self._write(change)

    def settled(self, change: Rebalance) -> None:
        """Record the achieved gain of a rebalance."""
        for i, earlier in enumerate(self._rebalances):
            if earlier.step == change.step:
                self._rebalances[i] = change
        self._write(change)

    def evaluated(self, record: EvalRecord) -> None:
        """Record an evaluation."""
        self._evaluations.append(record)
        if self._steps and self._steps[-1].step == record.step:
            self._steps[-1] = dataclasses.replace(self._steps[-1], evaluation=record)
        values = {"loss": record.loss, **scalars(record.metrics)}
        numbers = "  ".join(f"{k} {number(v)}" for k, v in values.items())
        self.log(f"step {record.step}: evaluation  {numbers}")
        self._write(record)

    def history(self, plans: Mapping[int, Plan]) -> History:
        """All records so far.

        Args:
            plans: The plans that ran, by their first step.
        """
        return History(
            device_names=self._names,
            steps=tuple(self._steps),
            evaluations=tuple(self._evaluations),
            rebalances=tuple(self._rebalances),
            num_compilations=self.num_compilations,
            plans=plans,
        )

    @property
    def is_page_due(self) -> bool:
        """Whether the report of a run that goes on is older than a minute."""
        return self._metrics is not None and time.monotonic() >= self._page_due

    def write_page(
        self,
        history: History,
        plan: Plan,
        state: RunState,
        pipelines: Mapping[int, Sequence["Lanes"]],
    ) -> None:
        """Write the report of all steps, with those before a resume."""
        assert self._run_dir is not None
        from ..report.page import write
        from ..report.run_page import html_report

        began = time.monotonic()
        self._page_due = began + _PAGE_SECONDS
        page = html_report(
            _joined(self._earlier, history),
            self._starts,
            state,
            title=self._run_dir.resolve().name,
            plan=plan,
            bits=self._bits,
            pipelines=pipelines,
        )
        write(self._run_dir / "report.html", page, ConfigError)
        self._page_due += (time.monotonic() - began) / _PAGE_SHARE

    def report(
        self,
        history: History,
        plan: Plan,
        state: RunState,
        pipelines: Mapping[int, Sequence["Lanes"]],
    ) -> None:
        """Print a summary and write the report, unless no step ran."""
        if self._progress is not None:
            self._progress.close()
        if not self._is_main or not history.steps:
            return
        self.log(terminal_report(history))
        if self._run_dir is not None:
            self.write_page(history, plan, state, pipelines)
            self.log(f"  report: {self._run_dir / 'report.html'}")


def _joined(earlier: History, history: History) -> History:
    """A history with the records before it, and one evaluation after each step."""
    evaluations = {e.step: e for e in (*earlier.evaluations, *history.evaluations)}
    return dataclasses.replace(
        history,
        steps=earlier.steps + history.steps,
        evaluations=tuple(evaluations.values()),
        rebalances=earlier.rebalances + history.rebalances,
    )
