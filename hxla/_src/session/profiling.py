"""`hxla profile`: the segments of a job's model, measured on its devices and by training steps."""

import collections
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

import jax

from ..choose.counts import finish_seconds
from ..choose.make_plan import workloads
from ..choose.microbatch_sizes import candidate_sizes
from ..choose.planning import PlanRequest, check_enough, plan_for, size_asked
from ..choose.short_profile import everywhere, segment_profile
from ..choose.split_times import split_time
from ..cluster.cluster import Cluster
from ..core.config import BalanceConfig
from ..core.errors import PlanError
from ..core.timing import middle_mean
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..jax.devices import is_here
from ..job.context import JobContext
from ..plan.plan import Plan
from ..profile.profile import LayerSize, LayerTime, Profile, Setting, SplitTime, together_key
from ..profile.profile_file import dump_profile, load_profile, merge_profiles
from ..profile.segment_times import model_name
from ..report.history import StepRecord
from .measure import SessionMeasure
from .session import Session
from .values import SessionOptions

MOST_STEPS = 200
_WARM_STEPS = 2
_FEWEST_STEPS = 10
_FEWEST_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedSteps:
    """Some steps of training.

    Attributes:
        micro_seconds: One microbatch on each device, forward and backward.
        counts: Microbatches of each device in most of the steps.
        peak_bytes: See `Profile.peaks`.
        end_step: No step from here on was read.
        form: Of memory in which it trained, as `Plan.memory_form` names it.
    """

    micro_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    step_seconds: float
    peak_bytes: int
    end_step: int
    form: str = ""

    def by_kind(self, labels: Sequence[str]) -> "ObservedSteps":
        """With the mean of like devices for each of them."""

        def mean(values: Sequence[float]) -> tuple[float, ...]:
            of = collections.defaultdict(list)
            for label, value in zip(labels, values, strict=True):
                of[label].append(value)
            return tuple(statistics.mean(of[label]) for label in labels)

        return dataclasses.replace(
            self,
            micro_seconds=mean(self.micro_seconds),
            update_seconds=mean(self.update_seconds),
        )

    @property
    def rest_seconds(self) -> float:
        """Of a step beyond the slowest device's part: the sum, and what the loop does besides."""
        busy = finish_seconds(self.counts, self.micro_seconds, self.update_seconds)
        return max(0.0, self.step_seconds - max(busy))


class Observer:
    """Says when steps with the same counts have told enough."""

    def __init__(self) -> None:
        self._num_warm = 0
        self._seconds: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)

    def has_told_enough(self, record: StepRecord) -> bool:
        """Take in a step."""
        if self._num_warm < _WARM_STEPS:
            self._num_warm += 1
            return False
        own = self._seconds[record.counts]
        own.append(record.seconds)
        return len(own) >= _FEWEST_STEPS and sum(own) >= _FEWEST_SECONDS

    @property
    def most(self) -> tuple[tuple[int, ...], float]:
        """The counts that most steps had, and the mean of the middle half of those steps."""
        counts, seconds = max(self._seconds.items(), key=lambda item: len(item[1]))
        return counts, middle_mean(seconds)


def profile(
    job: JobContext,
    wishes: PlanRequest,
    *,
    file: str,
    microbatch_sizes: Sequence[int],
    num_segments: int,
) -> None:
    """Measure, write, and say where; every process of the job takes part.

    Args:
        wishes: Of the job's script. Where its mesh cuts a copy of the model over several devices
            by one axis, that split is measured too.
        file: Profile to write, and to resume from.
        microbatch_sizes: To measure; empty: those that the planner would try.
        num_segments: Most segments of the chain.

    Raises:
        PlanError: If a copy of the model takes several devices, or the file is of another model.
    """
    devices = job.all_devices()
    cluster = job.cluster(devices)
    asked = size_asked(workloads(job), wishes)
    sizes = tuple(sorted(microbatch_sizes)) or (
        (asked,) if asked else tuple(sorted(candidate_sizes(job.batch_size, len(devices))))
    )
    for own_size in sizes:
        size_asked(workloads(job), PlanRequest(microbatch_size=own_size))
        check_enough(job.batch_size, own_size, len(devices))
    labels = [device.label for device in cluster.devices]
    rank = next(i for i, d in enumerate(devices) if is_here(d))
    model = model_name(job.functional(sizes[0]).params)
    found: Profile | None = None
    if pathlib.Path(file).exists():
        found = load_profile(file, model=model)

    def kept(told: Profile) -> Profile:
        """What all processes have told, which an interrupted run finds in the file."""
        told = everywhere(job, told)
        if jax.process_index() == 0:
            dump_profile(told, file)
        return told

    next_step = 0
    for own_size in sizes:
        chain = segments(graph_of(job.graph(own_size)), num_segments)
        if found is not None and len(found.layers) != len(chain):
            raise PlanError(
                f"profile {file} has {len(found.layers)} segments, now there are "
                f"{len(chain)}: use the same number, or write to another file"
            )
        own = dataclasses.replace(wishes, microbatch_size=own_size)
        if found is None or _is_new(found, labels, own_size):
            trial = _trial(job, _alone(job, own, cluster), next_step).by_kind(labels)
            next_step = trial.end_step
            setting = Setting(labels[rank], own_size)
            mine = Profile(
                model=model,
                layers=tuple(s.name for s in chain),
                num_segments=num_segments,
                sizes={},
                times={},
                reductions={together_key(labels): trial.rest_seconds},
                form=trial.form,
            )
            mine = merge_profiles([*([found] if found is not None else []), mine])
            if setting not in mine.times:
                told = _progress(setting, len(chain))
                sums = job.sums(wishes.reduction)
                alone = segment_profile(job, setting, num_segments, devices[rank], sums, told)
                scaled = _scaled(alone.times[setting], alone.sizes[own_size, 1], trial, rank)
                peaks = {setting: trial.peak_bytes}
                alone = dataclasses.replace(alone, times={setting: scaled}, peaks=peaks)
                mine = merge_profiles([mine, alone])
            found = kept(mine)
        split = _new_split(job, own, cluster, found) if wishes.mesh is not None else None
        if split is not None:
            plan, told_of = split
            trial = _trial(job, plan, next_step)
            next_step = trial.end_step
            timed = dataclasses.replace(told_of, seconds=max(trial.micro_seconds))
            found = kept(dataclasses.replace(found, splits=(*found.splits, timed)))
    assert found is not None
    if jax.process_index() == 0:
        _show(found, file)


def _alone(job: JobContext, wishes: PlanRequest, cluster: Cluster) -> Plan:
    """A plan of copies of one device each."""
    alone = PlanRequest(microbatch_size=wishes.microbatch_size, reduction=wishes.reduction)
    plan = _planned(job, alone, cluster)
    if plan.axes:
        raise PlanError(
            "hxla profile measures a model on one device, but annotations or stages put a copy of "
            f"this one on {len(plan.replicas[0].devices)}: profile it without them"
        )
    return plan


def _planned(
    job: JobContext, wishes: PlanRequest, cluster: Cluster, profile: Profile | None = None
) -> Plan:
    sums, measure = job.sums(wishes.reduction), SessionMeasure(job, job.all_devices())
    plan = plan_for(workloads(job), wishes, cluster, sums, measure, profile)
    return plan


def _new_split(
    job: JobContext, wishes: PlanRequest, cluster: Cluster, profile: Profile
) -> tuple[Plan, SplitTime] | None:
    """A split that is asked for and not known, and what to know of it but its seconds."""
    plan = _planned(job, wishes, cluster, profile)
    if plan.pipeline is not None or len(plan.axes) != 1:
        return None
    own = split_time(plan, cluster, 0.0)
    if own is None or own.split in {known.split for known in profile.splits}:
        return None
    return plan, own


def _trial(job: JobContext, plan: Plan, start: int) -> ObservedSteps:
    """Train as planned from some step on until the times of a step are known."""
    devices = job.all_devices()
    # Counts that follow every breath of a device would leave too few steps of each.
    moves = job.settings.balance
    calm = BalanceConfig(
        min_gain=max(0.1, moves.min_gain),
        patience_steps=moves.patience_steps,
        window_steps=MOST_STEPS,
        retry_steps=moves.retry_steps,
    )
    observer = Observer()
    options = SessionOptions(
        steps=start + MOST_STEPS, balance=calm, first_step=start, is_trial=True
    )
    with Session(job, plan, devices, options) as session:
        for record in session:
            if observer.has_told_enough(record):
                session.stop()
        counts, seconds = observer.most
        return ObservedSteps(
            micro_seconds=session.balancer.seconds,
            update_seconds=session.balancer.fixed,
            counts=counts,
            step_seconds=seconds,
            peak_bytes=session.memory_bytes,
            end_step=session.step_number + job.settings.data.prefetch_steps,
            form=plan.memory_form,
        )


def _is_new(profile: Profile, labels: Sequence[str], size: int) -> bool:
    settings = {Setting(label, size) for label in labels}
    return not settings <= profile.times.keys() or together_key(labels) not in profile.reductions


def _scaled(
    times: Sequence[LayerTime], sizes: Sequence[LayerSize], trial: ObservedSteps, own: int
) -> tuple[LayerTime, ...]:
    """Segments measured alone, in proportion to what all of them take together.

    The update is shared out by bytes of parameters. A device that trains alone has no sum over
    devices: the rest of its step comes with its update.
    """
    alone = sum(t.forward + t.backward for t in times) or 1.0
    whole_bytes = sum(s.parameter_bytes for s in sizes) or 1.0
    micro, update = trial.micro_seconds[own], trial.update_seconds[own]
    if len(trial.micro_seconds) == 1:
        update += trial.rest_seconds
    return tuple(
        LayerTime(
            forward=t.forward * micro / alone,
            backward=t.backward * micro / alone,
            update=update * s.parameter_bytes / whole_bytes,
        )
        for t, s in zip(times, sizes, strict=True)
    )


def _progress(setting: Setting, num: int) -> Callable[[int], None]:
    where = f"{setting.kind}, microbatch of {setting.microbatch_size}"
    return lambda done: print(f"{where}: {done} of {num} segments", file=sys.stderr, flush=True)


def _show(profile: Profile, file: str) -> None:
    print(f"{'kind':<24} {'microbatch':>10} {'forward':>10} {'backward':>10} {'update':>10}")
    for setting, times in sorted(profile.times.items()):
        row = [sum(getattr(t, part) for t in times) for part in ("forward", "backward", "update")]
        seconds = " ".join(f"{1e3 * s:>7.2f} ms" for s in row)
        print(f"{setting.kind:<24} {setting.microbatch_size:>10} {seconds}")
    for own in profile.splits:
        parts = ", ".join(f"{kind} {p:.0%}" for kind, p in zip(own.kinds, own.parts, strict=True))
        seconds = f"{1e3 * own.seconds:.2f} ms a microbatch of {own.microbatch_size}"
        print(f"cut over {parts}: {seconds}")
    print(f"{len(profile.layers)} segments of model {profile.model}, written to {file}")
