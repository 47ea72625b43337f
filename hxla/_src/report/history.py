"""The records of a run as values: the training loop writes them, reports read them.

`RunStart` says how a run was started, and begins its lines in `metrics.jsonl`.
"""

import collections
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from ... import __version__
from ..core.format import number, plural
from ..plan.plan import Plan

#: A metric over the global batch: one number, or one for each example.
MetricValue: TypeAlias = float | tuple[float, ...]


def scalars(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """The metrics that are one number, which curves and tables can show."""
    return {name: value for name, value in metrics.items() if not isinstance(value, tuple)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step.

    Attributes:
        step: The number of updates done with this step: 1 after the first.
        loss: The mean loss of the global batch, before the step's update.
        metrics: The user's metrics, merged over the global batch as `hxla.metric` says; a
            concatenation is a tuple with one number for each example.
        seconds: The wall time of the step, as this process saw it.
        num_examples: The examples in the global batch.
        num_tokens: The tokens in the global batch (0 if the batch holds no integer sequences).
        counts: The microbatch counts of the replicas.
        busy_seconds: The seconds that each replica computed in this step (microbatches and update).
            If several processes have GPUs, those of the step before, and zeros in the first.
        redone: How often the step was redone with other scales of the exact sums.
        skipped: Whether the update was skipped because a gradient was not finite.
        loss_scale: The factor on the mean loss of a microbatch for its gradient; None: the loss was
            not scaled.
        epoch: The passes over the data after the step, such as 1.5; None: the length of the data is
            unknown, or the batch was passed to `Session.step`.
        learning_rate: The learning rate of the step's update: that of `optax.inject_hyperparams` in
            the optimizer, or of `logged_learning_rate`; None: neither is there, or the update was
            skipped.
        gradient_norm: The global norm of the mean gradient, before clipping; None: the optimizer
            does not compute it, or islands have one each. An optimizer with
            `optax.clip_by_global_norm` does.
        evaluation: The evaluation after the step; None: there was none.
    """

    step: int
    loss: float
    metrics: Mapping[str, MetricValue]
    seconds: float
    num_examples: int
    num_tokens: int
    counts: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    redone: int = 0
    skipped: bool = False
    loss_scale: float | None = None
    epoch: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    evaluation: "EvalRecord | None" = None

    def __repr__(self) -> str:
        return f"StepRecord(step={self.step}, {_numbers(self)}, seconds={self.seconds:.3g})"

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """The seconds of the step in which each replica waited for the others."""
        return tuple(max(0.0, self.seconds - busy) for busy in self.busy_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation.

    Attributes:
        step: The number of updates before the evaluation.
        loss: The mean loss over the data.
        metrics: The user's metrics over the data, as in a `StepRecord`.
        num_examples: The examples of the data.
        seconds: The wall time of the evaluation.
    """

    step: int
    loss: float
    metrics: Mapping[str, MetricValue]
    num_examples: int
    seconds: float

    def __repr__(self) -> str:
        return f"EvalRecord(step={self.step}, {_numbers(self)}, num_examples={self.num_examples})"


def _numbers(record: StepRecord | EvalRecord) -> str:
    values = {"loss": record.loss, **scalars(record.metrics)}
    return ", ".join(f"{name}={value:.4g}" for name, value in values.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rebalance:
    """One change of the microbatch counts.

    Attributes:
        step: The number of updates before the first step with the new counts.
        before: The counts before.
        after: The counts after.
        reason: The reason in words.
        expected_gain: The predicted step time before over after, minus one (0.25: a quarter
            faster).
        achieved_gain: The same ratio as measured; None until enough steps have run.
    """

    step: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    reason: str
    expected_gain: float
    achieved_gain: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitWork:
    """The seconds of a step that the devices of a split worked, and waited for each other.

    Attributes:
        num_steps: The steps that were measured.
        step_seconds: The mean wall time of a step.
        names: The names of the devices.
        work_seconds: The mean seconds of a step that each device worked; it waited for the rest.
        better_shares: A ratio that would clearly be better; empty: there is none.
        advice: The better ratio in words.
    """

    num_steps: int
    step_seconds: float
    names: tuple[str, ...]
    work_seconds: tuple[float, ...]
    better_shares: tuple[int, ...] = ()
    advice: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """All records of one run, in order.

    Attributes:
        device_names: The names of the replicas, in the order of `counts`.
        steps: One record for each training step of this run (not of the run it resumed).
        evaluations: One record for each evaluation.
        rebalances: One record for each change of counts.
        num_compilations: The XLA compilations after the first completed step.
        plans: The plans that ran, by the number of updates before their first step: one at the
            start, one for each resume and one for each change of counts. Plans before a resume come
            from its checkpoint.
        split: The measured work of the devices of a split; None: there is no split, or no clock for
            it. A `Result` has it; while a session runs it is None.
    """

    device_names: tuple[str, ...]
    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvalRecord, ...] = ()
    rebalances: tuple[Rebalance, ...] = ()
    num_compilations: int = 0
    plans: Mapping[int, Plan] = dataclasses.field(default_factory=dict)
    split: SplitWork | None = None

    def __repr__(self) -> str:
        parts = [plural(len(self.steps), "step"), plural(len(self.evaluations), "evaluation")]
        if self.rebalances:
            parts.append(plural(len(self.rebalances), "rebalance"))
        if self.steps:
            parts.append(f"loss {number(self.steps[0].loss)} to {number(self.steps[-1].loss)}")
        return f"History({', '.join(parts)})"


_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_GIT_SECONDS = 5.0  # a large repository on a slow disk


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of a run, or of its continuation from a checkpoint.

    Attributes:
        step: The number of updates before the start; 0 unless the run resumes.
        num_steps: The planned total number of updates; None if there is no end.
        time: The date and time with the offset of the local zone, in ISO 8601.
        command: The command line of the process, or of its `hxla run`.
        commit: The git commit of the script, with `+ changes` for an edited tree; empty without a
            repository.
        hosts: The names of the hosts.
        devices: The number of devices of each kind.
        job: The arguments of the job that describe it, by name.
        versions: The version of each package.
    """

    step: int
    num_steps: int | None
    time: str
    command: str
    commit: str
    hosts: tuple[str, ...]
    num_processes: int
    devices: Mapping[str, int]
    job: Mapping[str, str]
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """Whether a run goes on or how it ended.

    Attributes:
        kind: `stopped` is an end before the last step without an error.
        why: The error or signal that ended the run; empty if there was none.
    """

    kind: Literal["running", "finished", "stopped", "failed"]
    why: str = ""


def run_start(
    step: int,
    num_steps: int | None,
    *,
    hosts: Sequence[str],
    devices: Iterable[str],
    job: Mapping[str, str],
) -> RunStart:
    """The start of a run by this process at this moment.

    Args:
        hosts: The host of each process.
        devices: The kind of each device.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return RunStart(
        step=step,
        num_steps=num_steps,
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        command=_command(),
        commit=_commit(),
        hosts=tuple(dict.fromkeys(hosts)),
        num_processes=len(hosts),
        devices=dict(collections.Counter(devices)),
        job=dict(job),
        versions={"hxla": __version__, **versions, "Python": platform.python_version()},
    )


def _command() -> str:
    if launched := os.environ.get("HXLA_COMMAND"):
        return launched
    interpreter, *arguments = sys.orig_argv or [sys.executable]
    return shlex.join([pathlib.Path(interpreter).name, *arguments])


def _commit() -> str:
    """The commit of the script's folder; in a notebook, of the current folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = pathlib.Path(script).resolve().parent if script else pathlib.Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*command, "--dirty= + changes"],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def named_scalars(record: StepRecord | EvalRecord) -> dict[str, float]:
    """The numbers of a record by their names in TensorBoard."""
    which = "train" if isinstance(record, StepRecord) else "eval"
    out = {f"{which}/{key}": value for key, value in scalars(record.metrics).items()}
    out[f"{which}/loss"] = record.loss
    if isinstance(record, EvalRecord):
        return out
    for name in ("epoch", "learning_rate", "gradient_norm"):
        if (value := getattr(record, name)) is not None:
            out[f"train/{name}"] = value
    out["speed/step_seconds"] = record.seconds
    if record.seconds:
        out["speed/examples_per_second"] = record.num_examples / record.seconds
        if record.num_tokens:
            out["speed/tokens_per_second"] = record.num_tokens / record.seconds
    for d, (count, idle) in enumerate(zip(record.counts, record.idle_seconds, strict=True)):
        out[f"microbatches/device{d}"] = float(count)
        out[f"idle_seconds/device{d}"] = idle
    return out
