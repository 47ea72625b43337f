"""The records of a session: shown on the terminal, written to files, and kept."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

import jax

from ..core.errors import ConfigError
from ..core.format import shares
from ..plan.plan import Plan
from ..report.history import EvalRecord, History, Rebalance, StepRecord, scalars
from ..report.metrics_file import MetricsWriter
from ..report.progress import Progress
from ..report.run_tables import terminal_report
from .step import Outcome
from .values import SessionOptions


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
        seconds: Since the end of the step before.
    """
    busy = zip(outcome.busy_seconds, outcome.update_seconds, strict=True)
    return StepRecord(
        step=step,
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


def recorder_of(plan: Plan, options: SessionOptions, start: int) -> "Recorder":
    """The recorder of a session that begins at step `start`."""
    return Recorder(
        plan.replica_names,
        start_step=start,
        last_step=options.steps,
        run_dir=options.run_dir,
        tensorboard=options.tensorboard,
        is_main=jax.process_index() == 0 and not options.is_trial,
    )


class Recorder:
    """Keeps all records of a session.

    Args:
        last_step: Last step of the run; None if not known.
        run_dir: Folder for `metrics.jsonl` and `report.html`; None writes nothing.
        is_main: Whether this process shows and writes records.
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
    ):
        self._names, self._run_dir = names, run_dir
        self._steps: list[StepRecord] = []
        self._evaluations: list[EvalRecord] = []
        self._rebalances: list[Rebalance] = []
        self._is_main = is_main
        self.num_compilations = 0
        self._metrics = None
        if run_dir is not None and is_main:
            self._metrics = MetricsWriter(run_dir, tensorboard=tensorboard, first_step=start_step)
        self._null_stream = None if is_main else open(os.devnull, "w")  # noqa: SIM115
        self._progress = Progress(last_step, names, start_step=start_step, stream=self._null_stream)
        if self._metrics is not None and self._metrics.earlier is not None:
            self.log(f"the metrics of an earlier run are now in {self._metrics.earlier}")

    def close(self) -> None:
        """Release the terminal and the files."""
        self._progress.close()
        if self._null_stream is not None:
            self._null_stream.close()
        if self._metrics is not None:
            self._metrics.close()

    def log(self, text: str) -> None:
        """Show a line on the terminal."""
        self._progress.log(text)

    def _write(self, record: StepRecord | EvalRecord | Rebalance) -> None:
        if self._metrics is not None:
            self._metrics.write(record)

    def step(self, record: StepRecord) -> None:
        """Record a step."""
        self._steps.append(record)
        self._progress.update(record)
        self._write(record)

    def rebalanced(self, change: Rebalance) -> None:
        """Record a rebalance."""
        self._rebalances.append(change)
        self.log(
            f"step {change.step}: counts {shares(change.before)} -> {shares(change.after)}, "
            f"{change.reason}; expected gain {change.expected_gain:.0%}"
        )
        self._write(change)

    def settled(self, step: int, change: Rebalance) -> None:
        """Record the achieved gain of a rebalance."""
        for i, earlier in enumerate(self._rebalances):
            if earlier.step == change.step:
                self._rebalances[i] = change
        self.log(
            f"step {step}: counts {shares(change.after)} gained {change.achieved_gain:.0%} "
            f"(expected {change.expected_gain:.0%})"
        )
        self._write(change)

    def evaluated(self, record: EvalRecord) -> None:
        """Record an evaluation."""
        self._evaluations.append(record)
        if self._steps and self._steps[-1].step + 1 == record.step:
            self._steps[-1] = dataclasses.replace(self._steps[-1], evaluation=record)
        values = {"loss": record.loss, **scalars(record.metrics)}
        numbers = "  ".join(f"{k} {v:.4f}" for k, v in values.items())
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
        self._progress.close()
        if not self._is_main or not history.steps:
            return
        print(terminal_report(history))
        if self._run_dir is not None:
            from ..report.page import write
            from ..report.run_page import html_report

            path = self._run_dir / "report.html"
            notes = {"Plan": plan.explain()}
            page = html_report(history, title=self._run_dir.name, notes=notes, pictures=pictures)
            write(path, page, ConfigError)
            print(f"report: {path}")
