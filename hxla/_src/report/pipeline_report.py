"""What a pipeline's step should take, by the measured times of its pieces, and what one took."""

import ast
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from ..lower.pipeline import PieceTimes, Pipeline
from ..schedule.replay import Timeline, measured_timeline, replay_ticks
from ..schedule.schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from ..schedule.timeline import perfetto
from .lanes import lanes_of_timeline, write_picture

_KINDS = (FORWARD, BACKWARD, WEIGHT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The step of one pipeline.

    Attributes:
        timeline: Replayed with the measured times.
        fixed_seconds: Before and after the ticks.
        bound_seconds: No cut can be faster: every device busy from the pipeline's filling to its
            draining, at its own speed (0: the devices' speeds are not known).
    """

    schedule: Schedule
    timeline: Timeline
    fixed_seconds: float
    bound_seconds: float = 0.0

    @property
    def has_times(self) -> bool:
        """Whether any piece took longer than what is measured around it."""
        return self.timeline.makespan_seconds > 0

    @property
    def busy_seconds(self) -> float:
        """From the first tick's preparation to the sums."""
        return self.timeline.makespan_seconds + self.fixed_seconds


def to_text(measured: Mapping[int, PieceTimes]) -> str:
    """One process's measurements by replica, for the others."""
    return repr({replica: dataclasses.asdict(times) for replica, times in measured.items()})


def from_texts(texts: Sequence[str]) -> dict[int, PieceTimes]:
    """What all processes measured, by replica: each stage by its own, the rest by the slowest."""
    found: dict[int, PieceTimes] = {}
    for text in texts:
        for replica, fields in ast.literal_eval(text).items():
            own = PieceTimes(**fields)
            before = found.get(replica, own)
            slowest = {
                b: max(took, before.meeting_seconds.get(b, 0.0))
                for b, took in own.meeting_seconds.items()
            }
            found[replica] = PieceTimes(
                seconds=before.seconds | own.seconds,
                meeting_seconds=before.meeting_seconds | slowest,
                fixed_seconds=max(own.fixed_seconds, before.fixed_seconds),
            )
    return found


def predict(
    pipeline: Pipeline, measured: PieceTimes, num_microbatches: int, fractions: Sequence[float]
) -> PredictedStep:
    """Replay the schedule of so many microbatches.

    Args:
        pipeline: Any of the job, for the schedule.
        measured: Times of the pieces on this one's devices.
        fractions: Of the whole work on each stage, by its own device's times; none: not known.
    """
    schedule = pipeline.spec.schedule(num_microbatches)
    timeline = replay_ticks(
        schedule,
        measured.seconds,
        pipeline.crossed(schedule),
        transfer_seconds=measured.transfer_seconds(schedule.num_stages),
    )
    bound = 0.0
    if fractions and all(fractions):
        busy = [0.0] * schedule.num_stages
        for (_, part), took in measured.seconds.items():
            busy[part % schedule.num_stages] += took
        if all(busy):  # pieces that are shorter than what is measured around them have no time
            per_second = sum(f / b for f, b in zip(fractions, busy, strict=True))
            bound = (num_microbatches + schedule.num_stages - 1) / per_second
    return PredictedStep(
        schedule=schedule,
        timeline=timeline,
        fixed_seconds=measured.fixed_seconds,
        bound_seconds=bound,
    )


def explain(replica: int, predicted: PredictedStep, measured: PieceTimes) -> str:
    """One line for the plan."""
    num, num_microbatches = predicted.schedule.num_stages, predicted.schedule.num_microbatches
    if not predicted.has_times:
        return (
            f"pipeline {replica}: {num_microbatches} microbatches; its pieces take less than what "
            "is measured around them, so no step is predicted"
        )
    parts = sorted({part for _, part in measured.seconds})
    stages = []
    for part in parts:
        times = [measured.seconds.get((kind, part)) for kind in _KINDS]
        shown = "/".join(f"{t * 1e3:.3g}" for t in times if t is not None)
        stages.append(f"{part % num}: {shown}")
    crossing = measured.transfer_seconds(num)
    transfers = "/".join(f"{crossing[b] * 1e3:.3g}" for b in sorted(crossing))
    idle = 1 - sum(predicted.timeline.busy_seconds) / (num * predicted.timeline.makespan_seconds)
    return (
        f"pipeline {replica}: {num_microbatches} microbatches in "
        f"{predicted.busy_seconds:.3g} s, idle {idle:.0%}; forward/backward of stage "
        f"{', '.join(stages)} ms; between them {transfers} ms"
    )


def write(
    folder: pathlib.Path,
    planned: Mapping[int, PredictedStep],
    took: Mapping[int, Sequence[Sequence[tuple[float, float]]]],
    names: Mapping[int, Sequence[str]],
) -> dict[str, pathlib.Path]:
    """Draw the planned and the measured step of every pipeline.

    Args:
        planned: By replica.
        took: By replica, start and end of each tick on each stage.

    Returns:
        Headings and pictures; beside each lies a Perfetto trace.
    """
    pictures = {}
    for replica, predicted in planned.items():
        labels = [f"stage {s}: {name}" for s, name in enumerate(names[replica])]
        lines = {"planned": predicted.timeline}
        if replica in took:
            lines["measured"] = measured_timeline(predicted.schedule, took[replica])
        for which, timeline in lines.items():
            path = folder / f"pipeline{replica}-{which}.svg"
            title = f"pipeline {replica}, {which}: {timeline.makespan_seconds:.4g} s"
            write_picture(lanes_of_timeline(timeline, labels, title=title), path)
            path.with_suffix(".perfetto.json").write_text(perfetto(timeline, labels))
            pictures[f"Pipeline {replica}, {which}"] = path
    return pictures
