"""A pipeline's step: predicted from the measured times of its pieces, and as measured."""

import ast
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from ..core.format import span
from ..lower.pipeline import PieceTimes, Pipeline
from ..schedule.replay import Timeline, measured_timeline, perfetto, replay_ticks
from ..schedule.schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from .lanes import Lanes, lanes_of_timeline

_KINDS = (FORWARD, BACKWARD, WEIGHT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The predicted step of one pipeline.

    Attributes:
        timeline: Replayed with the measured times.
        fixed_seconds: Before and after the ticks.
        bound_seconds: A lower bound for any cut: every device is busy at its speed from filling to
            draining. 0: the devices' speeds are not known.
    """

    schedule: Schedule
    timeline: Timeline
    fixed_seconds: float
    bound_seconds: float = 0.0

    @property
    def has_times(self) -> bool:
        """Whether any piece took longer than the overhead of its measurement."""
        return self.timeline.makespan_seconds > 0

    @property
    def busy_seconds(self) -> float:
        """Seconds from the preparation of the first tick to the all-reduce."""
        return self.timeline.makespan_seconds + self.fixed_seconds


def to_text(measured: Mapping[int, PieceTimes]) -> str:
    """One process's measurements by replica, as text for the other processes."""
    return repr({replica: dataclasses.asdict(times) for replica, times in measured.items()})


def from_texts(texts: Sequence[str]) -> dict[int, PieceTimes]:
    """All processes' measurements by replica: of shared times the slowest process's count."""
    by_replica: dict[int, PieceTimes] = {}
    for text in texts:
        for replica, fields in ast.literal_eval(text).items():
            times = PieceTimes(**fields)
            before = by_replica.get(replica, times)
            slowest = {
                b: max(took, before.meeting_seconds.get(b, 0.0))
                for b, took in times.meeting_seconds.items()
            }
            by_replica[replica] = PieceTimes(
                seconds=before.seconds | times.seconds,
                meeting_seconds=before.meeting_seconds | slowest,
                fixed_seconds=max(times.fixed_seconds, before.fixed_seconds),
            )
    return by_replica


def predict(
    pipeline: Pipeline, measured: PieceTimes, num_microbatches: int, fractions: Sequence[float]
) -> PredictedStep:
    """Replay the schedule with measured times.

    Args:
        pipeline: Any pipeline of the job, for the schedule.
        measured: Times of the pieces on this pipeline's devices.
        fractions: Each stage's part of the work, by its device's times; empty: not known.
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
        if all(busy):  # pieces shorter than the overhead of their measurement have no time
            per_second = sum(f / b for f, b in zip(fractions, busy, strict=True))
            bound = (num_microbatches + schedule.num_stages - 1) / per_second
    return PredictedStep(
        schedule=schedule,
        timeline=timeline,
        fixed_seconds=measured.fixed_seconds,
        bound_seconds=bound,
    )


def explain(replica: int, predicted: PredictedStep, measured: PieceTimes) -> str:
    """One line about the prediction, for the plan."""
    num, num_microbatches = predicted.schedule.num_stages, predicted.schedule.num_microbatches
    if not predicted.has_times:
        return (
            f"pipeline {replica}: {num_microbatches} microbatches; its pieces take less than the "
            "overhead of measuring them, so no step is predicted"
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


def lanes(
    planned: Mapping[int, PredictedStep],
    took: Mapping[int, Sequence[Sequence[tuple[float, float]]]],
    names: Mapping[int, Sequence[str]],
) -> dict[int, tuple[Lanes, ...]]:
    """The planned step of every pipeline, and the measured one if there is one.

    Args:
        planned: By replica.
        took: By replica, start and end of each tick on each stage.
        names: By replica, the name of each stage.
    """
    return {
        replica: tuple(
            lanes_of_timeline(
                timeline,
                names[replica],
                title=f"{which}: {span(timeline.makespan_seconds)}",
            )
            for which, timeline in _timelines(predicted, took.get(replica)).items()
        )
        for replica, predicted in planned.items()
    }


def write_traces(
    folder: pathlib.Path,
    planned: Mapping[int, PredictedStep],
    took: Mapping[int, Sequence[Sequence[tuple[float, float]]]],
    names: Mapping[int, Sequence[str]],
) -> None:
    """Write Perfetto traces of what `lanes` returns, in place of those of an earlier run."""
    for path in folder.glob("pipeline[0-9]*-*.perfetto.json"):
        path.unlink()
    for replica, predicted in planned.items():
        for which, timeline in _timelines(predicted, took.get(replica)).items():
            path = folder / f"pipeline{replica}-{which}.perfetto.json"
            path.write_text(perfetto(timeline, names[replica]))


def _timelines(
    predicted: PredictedStep, took: Sequence[Sequence[tuple[float, float]]] | None
) -> dict[str, Timeline]:
    measured = {} if took is None else {"measured": measured_timeline(predicted.schedule, took)}
    return {"planned": predicted.timeline, **measured}
