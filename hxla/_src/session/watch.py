"""Measured times of pipelines and uneven splits, beside the predicted ones, and better sizes.

A pipeline's step is predicted from the measured times of its pieces. Devices of a replica wait for
each other inside its programs, so a step's seconds do not show the work of one device. The CPU time
of a process with one device and a share of a core does. An accelerator has no such clock, so
nothing is reported for it.
"""

import ast
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..choose.inner_split import BetterShares, better_shares, state_factor
from ..cluster.cluster import Cluster
from ..core.format import span
from ..jax.devices import is_here, process_of, share_cores
from ..job.context import JobContext
from ..lower.layerwise import ZeroPipeline
from ..lower.lower import Programs
from ..lower.pipeline import PieceTimes, Pipeline, piece_times
from ..lower.store import Store
from ..plan.parts import Prediction
from ..plan.plan import Plan
from ..report.history import SplitWork
from ..schedule.replay import Timeline, measured_timeline, perfetto, replay_ticks
from ..schedule.schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from .step import Stepper

if TYPE_CHECKING:
    from ..report.lanes import Lanes

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


def times_as_text(measured: Mapping[int, PieceTimes]) -> str:
    """One process's measurements by replica, as text for the other processes."""
    return repr({replica: dataclasses.asdict(times) for replica, times in measured.items()})


def times_from_texts(texts: Sequence[str]) -> dict[int, PieceTimes]:
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


def _predicted_step(
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


def _in_words(replica: int, predicted: PredictedStep, measured: PieceTimes) -> str:
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


def _timelines(
    predicted: PredictedStep, took: Sequence[Sequence[tuple[float, float]]] | None
) -> dict[str, Timeline]:
    measured = {} if took is None else {"measured": measured_timeline(predicted.schedule, took)}
    return {"planned": predicted.timeline, **measured}


_REPEATS = 11  # a throttled process runs and pauses in turns


class PipelineWatch:
    """Compares a session's pipelines with their prediction; does nothing without stages.

    Args:
        gather: All-gathers a text under a name.
    """

    def __init__(
        self,
        stepper: Stepper,
        programs: Programs,
        store: Store,
        gather: Callable[[str, str], tuple[str, ...]],
    ):
        self._stepper, self._store = stepper, store
        self._pipelines, self._layered = programs.pipelines, programs.layered
        self._replicas = programs.reducer.replicas
        self._starts = [replica.start_seconds for replica in programs.plan.replicas]
        self._gather = gather
        self._predicted: dict[int, PredictedStep] = {}
        self._ticks: dict[int, list[list[tuple[float, float]]]] = {}

    def measure(self, batch: Any, plan: Plan) -> tuple[str, ...]:
        """Predict each pipeline's step from the measured times of its pieces; lines for the log.

        Stages on shared cores slow each other down, so nothing is predicted for them.
        """
        if plan.pipeline is None or plan.stage_forms:
            return ()
        if share_cores(d for r in self._replicas for d in r.devices):
            return ()
        texts = self._gather("pipeline times", times_as_text(self.times_here(batch)))
        some = next(iter(self._pipelines.values()))
        fractions = plan.prediction.stage_fractions if plan.prediction is not None else ()
        lines = []
        for replica, times in sorted(times_from_texts(texts).items()):
            if not plan.counts[replica]:
                continue  # it has no step
            predicted = _predicted_step(some, times, plan.counts[replica], fractions)
            if predicted.has_times:
                self._predicted[replica] = predicted
            lines.append(_in_words(replica, predicted, times))
        return tuple(lines)

    def times_here(self, batch: Any) -> dict[int, PieceTimes]:
        """Times of the pieces of every local pipeline's step, by replica."""
        self._stepper.wait()  # collectives must not overlap with the last update
        times, held = {}, self._store.held
        for i, (index, pipeline) in enumerate(self._pipelines.items()):
            fill = functools.partial(self._filled, i, pipeline)
            arguments = held[i].aux, self._stepper.scales.exponents(i)
            times[index] = piece_times(pipeline, fill, *arguments, batch, repeats=_REPEATS)
        return times

    def _filled(self, i: int, pipeline: Pipeline) -> list[jax.Array]:
        """The slots of a local pipeline; with ZeRO every process must call this."""
        if isinstance(self._layered, ZeroPipeline):
            return self._layered.filled(self._store.held)[i]
        return pipeline.filled(self._store.held[i].params)

    def predicted(self, prediction: Prediction) -> Prediction:
        """Replace the predicted step and its bound by those of measured pipelines.

        In a pipeline one more microbatch costs less than a microbatch's share of the step.
        """
        if not self._predicted:
            return prediction
        fixed = prediction.fixed_seconds or (0.0,) * len(self._replicas)
        steps = [self._starts[r] + p.busy_seconds + fixed[r] for r, p in self._predicted.items()]
        bounds = [p.bound_seconds for p in self._predicted.values()]
        return prediction.model_copy(
            update={
                "step_seconds": max(steps),
                "bound_seconds": max(bounds),
                "bound_over": "cuts",
            }
        )

    def time_ticks(self, on: bool) -> None:
        """Time the ticks of the next step one by one, or not; results are the same."""
        for pipeline in self._pipelines.values():
            pipeline.timed = on and bool(self._predicted)

    def tell_ticks(self) -> None:
        """All-gather the tick times of the last step."""
        if not self._predicted:
            return
        local_ticks = {
            replica: [stage, pipeline.times]
            for replica, pipeline in self._pipelines.items()
            for stage, devices in enumerate(self._replicas[replica].rows)
            if any(is_here(d) for d in devices)
        }
        for text in self._gather("ticks", json.dumps(local_ticks)):
            for replica, (stage, times) in json.loads(text).items():
                num = len(self._replicas[int(replica)].rows)
                rows = self._ticks.setdefault(int(replica), [[] for _ in range(num)])
                # Clocks differ between hosts, so times start at the first tick of each stage.
                rows[stage] = [(a - times[0][0], b - times[0][0]) for a, b in times]

    def lanes(self, plan: Plan) -> dict[int, tuple["Lanes", ...]]:
        """The planned and the measured step of each pipeline."""
        if not self._predicted:
            return {}
        from ..report.lanes import lanes_of_timeline

        names = _labels(plan)
        return {
            replica: tuple(
                lanes_of_timeline(
                    timeline,
                    names[replica],
                    title=f"{which}: {span(timeline.makespan_seconds)}",
                )
                for which, timeline in _timelines(predicted, self._ticks.get(replica)).items()
            )
            for replica, predicted in self._predicted.items()
        }

    def write_traces(self, folder: pathlib.Path, plan: Plan) -> None:
        """Write the same steps as Perfetto traces, and remove those of an earlier run."""
        for path in folder.glob("pipeline[0-9]*-*.perfetto.json"):
            path.unlink()
        names = _labels(plan)
        for replica, predicted in self._predicted.items():
            for which, timeline in _timelines(predicted, self._ticks.get(replica)).items():
                path = folder / f"pipeline{replica}-{which}.perfetto.json"
                path.write_text(perfetto(timeline, names[replica]))


def _labels(plan: Plan) -> dict[int, list[str]]:
    """The names of the stages of each replica."""
    return {
        replica: [f"stage {stage}: {name}" for stage, name in enumerate(names)]
        for replica, names in enumerate(plan.stage_names)
    }


FIRST_MEASURED = 2  #: Earlier steps may compile and load.
_ADVISED_AFTER = 8  # measured steps


def has_clocks(plan: Plan, cluster: Cluster, process_of: Mapping[int, int]) -> bool:
    """Whether each device of a split has a process with CPU time of its own.

    Args:
        process_of: The process of each rank of the plan; equal on every process, as the answer.
    """
    return (
        plan.pipeline is None
        and len(plan.axes) == 1
        and len(set(process_of.values())) == len(process_of)
        and all(cluster.devices[rank].core_share is not None for rank in process_of)
    )


class SplitWatch:
    """Measures a split over processes with a share of a core each; does nothing otherwise."""

    def __init__(self, programs: Programs, cluster: Cluster, job: JobContext):
        self._programs, self._cluster, self._job = programs, cluster, job
        self._plan = programs.plan
        replicas = zip(self._plan.replicas, programs.reducer.replicas, strict=True)
        #: The process of each device, by rank.
        self._process = {
            rank: process_of(device)
            for planned, replica in replicas
            for rank, device in zip(planned.devices, replica.devices, strict=True)
        }
        self._is_on = has_clocks(self._plan, cluster, self._process)
        self._num_seen = 0
        self._begun = self._cpu_begun = 0.0

    def stepped(self) -> str:
        """Count a step; returns advice about the sizes of the parts, mostly empty."""
        if not self._is_on:
            return ""
        self._num_seen += 1
        if self._num_seen == FIRST_MEASURED:
            self._begun, self._cpu_begun = time.perf_counter(), time.process_time()
        if self._num_seen != FIRST_MEASURED + _ADVISED_AFTER:
            return ""
        work = self.measured()
        return work.advice if work is not None else ""

    def measured(self) -> SplitWork | None:
        """The work of all devices since the first measured step; every process must call this."""
        num_steps = self._num_seen - FIRST_MEASURED
        if not self._is_on or num_steps < 1:
            return None
        seconds = (time.perf_counter() - self._begun) / num_steps
        cpu = (time.process_time() - self._cpu_begun) / num_steps
        texts = self._job.gather("work of a split", json.dumps([jax.process_index(), seconds, cpu]))
        times_of_process = {process: times for process, *times in map(json.loads, texts)}
        work = {}
        for rank, process in self._process.items():
            share = self._cluster.devices[rank].core_share
            assert share is not None
            work[rank] = times_of_process[process][1] / share
        step = max(wall for wall, _ in times_of_process.values())
        places = zip(*(r.devices for r in self._plan.replicas), strict=True)
        slowest = [max(work[rank] for rank in ranks) for ranks in places]
        better = self._better(slowest)
        return SplitWork(
            num_steps=num_steps,
            step_seconds=step,
            names=tuple(f"device {rank}" for rank in sorted(work)),
            work_seconds=tuple(work[rank] for rank in sorted(work)),
            better_shares=() if better is None else better.shares,
            advice="" if better is None else self._in_words(better, slowest, step),
        )

    def _better(self, slowest: Sequence[float]) -> BetterShares | None:
        programs, plan = self._programs, self._plan
        assert programs.sharded is not None
        optimizer_bytes = self._job.optimizer_bytes(plan.microbatch_size)
        factor = state_factor(programs.graph, optimizer_bytes, plan.sums)
        better = better_shares(
            programs.graph, programs.sharded, plan, self._cluster, slowest, factor
        )
        least = self._job.settings.balance.min_gain
        return better if better is not None and better.gain >= least else None

    def _in_words(self, better: BetterShares, slowest: Sequence[float], step: float) -> str:
        [axis] = self._plan.axes
        now = ", ".join(f"place {k} works {s / step:.0%}" for k, s in enumerate(slowest))
        mesh = {"data": len(self._plan.replicas), axis.name: better.shares}
        return (
            f"of a step, {now}: with mesh={mesh} the slowest would work "
            f"{1 - 1 / (1 + better.gain):.0%} less. That is another plan, with other bits: a "
            "checkpoint resumes with it"
        )
