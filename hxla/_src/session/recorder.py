"""The records of a session: shown on the terminal, written to files, and kept."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax

from ..core.errors import ConfigError
from ..core.format import gain, number, shares
from ..plan.plan import Plan
from ..report.history import EvalRecord, History, Rebalance, StepRecord, scalars
from ..report.metrics_file import MetricsWriter
from ..report.progress import Progress
from ..report.run_tables import terminal_report
from ..report.terminal import LOGGER
from .step import Outcome
from .values import SessionOptions


def step_record(
    step: int,
    outcome: Outcome,
    plan: Plan,
    applied: Mapping[str, float | None],
    *,
    seconds: float,
    tokens: int,
) -> StepRecord:
    """The record of a step.

    Args:
        step: Number of updates before it.
        applied: Epoch, learning rate and gradient norm, by the record's names.
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
        **applied,
    )


def recorder_of(plan: Plan, options: SessionOptions, start: int) -> "Recorder":
    """The recorder of a session that begins at step `start`."""
    return Recorder(
        plan.replica_names,
        start_step=start,
        last_step=options.steps,
        run_dir=options.run_dir,
        tensorboard=options.tensorboard,
        is_main=jax.process_index() == 0 and not options.is_trial,
        quiet=options.quiet,
        log_every=options.log_every,
    )


class Recorder:
    """Keeps all records of a session.

    Args:
        start_step: Number of updates before the session.
        last_step: Last step of the run; None if not known.
        run_dir: Folder for `metrics.jsonl` and `report.html`; None writes nothing.
        is_main: Whether this process shows and writes records.
        quiet: Whether only warnings are shown.
        log_every: Number of steps between lines, see `Progress`.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        start_step: int,
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
        self._metrics = None
        if run_dir is not None and is_main:
            self._metrics = MetricsWriter(run_dir, tensorboard=tensorboard, first_step=start_step)
        self._progress = None
        if self._is_shown:
            self._progress = Progress(last_step, names, log_every=log_every)
        if self._metrics is not None and self._metrics.earlier is not None:
            self.log(f"the metrics of an earlier run are now in {self._metrics.earlier}")

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

    def _write(self, record: StepRecord | EvalRecord | Rebalance) -> None:
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

    def report(self, history: History, plan: Plan, pictures: Mapping[str, pathlib.Path]) -> None:
        """Print a summary and write the report, unless no step ran."""
        if self._progress is not None:
            self._progress.close()
        if not self._is_main or not history.steps:
            return
        self.log(terminal_report(history))
        if self._run_dir is not None:
            from ..report.page import write
            from ..report.run_page import html_report

            path = self._run_dir / "report.html"
            notes = {"Plan": plan.explain()}
            page = html_report(history, title=self._run_dir.name, notes=notes, pictures=pictures)
            write(path, page, ConfigError)
            self.log(f"  report: {path}")
