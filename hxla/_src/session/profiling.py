"""`hxla profile`: measure the segments of a job's model alone and in training steps."""

import collections
import dataclasses
import pathlib
import statistics
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
from ..report.terminal import LOGGER, print_result
from .measure import SessionMeasure
from .session import Session
from .values import SessionOptions

MOST_STEPS = 200
_WARM_STEPS = 2
_FEWEST_STEPS = 10
_FEWEST_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedSteps:
    """Times of some training steps.

    Attributes:
        micro_seconds: Seconds of a microbatch's forward and backward, by device.
        counts: Microbatch counts of most of the steps.
        peak_bytes: See `Profile.peaks`.
        end_step: First step whose data was not read.
        form: The memory layout, as `Plan.memory_form` names it.
    """

    micro_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    step_seconds: float
    peak_bytes: int
    end_step: int
    form: str = ""

    def by_kind(self, labels: Sequence[str]) -> "ObservedSteps":
        """Average times over the devices of each kind."""

        def mean(values: Sequence[float]) -> tuple[float, ...]:
            by_label = collections.defaultdict(list)
            for label, value in zip(labels, values, strict=True):
                by_label[label].append(value)
            return tuple(statistics.mean(by_label[label]) for label in labels)

        return dataclasses.replace(
            self,
            micro_seconds=mean(self.micro_seconds),
            update_seconds=mean(self.update_seconds),
        )

    @property
    def rest_seconds(self) -> float:
        """Seconds of a step beyond the slowest device's work: the all-reduce and the loop."""
        busy = finish_seconds(self.counts, self.micro_seconds, self.update_seconds)
        return max(0.0, self.step_seconds - max(busy))


class Observer:
    """Collects steps until enough of them have the same counts."""

    def __init__(self) -> None:
        self._num_warm = 0
        self._seconds: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)

    def has_enough_steps(self, record: StepRecord) -> bool:
        """Add a step; returns whether its counts have enough steps now."""
        if self._num_warm < _WARM_STEPS:
            self._num_warm += 1
            return False
        seconds = self._seconds[record.counts]
        seconds.append(record.seconds)
        return len(seconds) >= _FEWEST_STEPS and sum(seconds) >= _FEWEST_SECONDS

    @property
    def most(self) -> tuple[tuple[int, ...], float]:
        """The most frequent counts, and the mean of the middle half of their seconds."""
        counts, seconds = max(self._seconds.items(), key=lambda item: len(item[1]))
        return counts, middle_mean(seconds)


def profile(
    job: JobContext,
    request: PlanRequest,
    *,
    file: str,
    microbatch_sizes: Sequence[int],
    num_segments: int,
) -> None:
    """Measure the segments and write a profile; every process of the job must call this.

    Args:
        request: If its mesh shards a replica over one axis, that split is measured too.
        file: Profile to write, and to resume from.
        microbatch_sizes: If empty, the sizes that the planner would try.
        num_segments: Most segments of the chain.

    Raises:
        PlanError: If a replica needs several devices, or the file is of another model.
    """
    devices = job.all_devices()
    cluster = job.cluster(devices)
    asked = size_asked(workloads(job), request)
    sizes = tuple(sorted(microbatch_sizes)) or (
        (asked,) if asked else tuple(sorted(candidate_sizes(job.batch_size, len(devices))))
    )
    for size in sizes:
        size_asked(workloads(job), PlanRequest(microbatch_size=size))
        check_enough(job.batch_size, size, len(devices))
    labels = [device.label for device in cluster.devices]
    rank = next(i for i, d in enumerate(devices) if is_here(d))
    model = model_name(job.functional(sizes[0]).params)
    measured: Profile | None = None
    if pathlib.Path(file).exists():
        measured = load_profile(file, model=model)

    def write(local: Profile) -> Profile:
        """Merge the profiles of all processes and write them, so that a run can resume."""
        local = everywhere(job, local)
        if jax.process_index() == 0:
            dump_profile(local, file)
        return local

    next_step = 0
    for size in sizes:
        chain = segments(graph_of(job.graph(size)), num_segments)
        if measured is not None and len(measured.layers) != len(chain):
            raise PlanError(
                f"profile {file} has {len(measured.layers)} segments, now there are "
                f"{len(chain)}: use the same number, or write to another file"
            )
        sized = dataclasses.replace(request, microbatch_size=size)
        if measured is None or _is_new(measured, labels, size):
            trial = _run_trial(job, _single_device_plan(job, sized, cluster), next_step).by_kind(
                labels
            )
            next_step = trial.end_step
            setting = Setting(labels[rank], size)
            local = Profile(
                model=model,
                layers=tuple(s.name for s in chain),
                num_segments=num_segments,
                sizes={},
                times={},
                reductions={together_key(labels): trial.rest_seconds},
                form=trial.form,
            )
            local = merge_profiles([*([measured] if measured is not None else []), local])
            if setting not in local.times:
                show_progress = _progress(setting, len(chain))
                sums = job.sums(request.reduction)
                alone = segment_profile(
                    job, setting, num_segments, devices[rank], sums, show_progress
                )
                scaled = _scaled(alone.times[setting], alone.sizes[size, 1], trial, rank)
                peaks = {setting: trial.peak_bytes}
                alone = dataclasses.replace(alone, times={setting: scaled}, peaks=peaks)
                local = merge_profiles([local, alone])
            measured = write(local)
        split = _new_split(job, sized, cluster, measured) if request.mesh is not None else None
        if split is not None:
            plan, split_times = split
            trial = _run_trial(job, plan, next_step)
            next_step = trial.end_step
            timed = dataclasses.replace(split_times, seconds=max(trial.micro_seconds))
            measured = write(dataclasses.replace(measured, splits=(*measured.splits, timed)))
    assert measured is not None
    if jax.process_index() == 0:
        _show(measured, file)


def _single_device_plan(job: JobContext, request: PlanRequest, cluster: Cluster) -> Plan:
    """A plan with replicas of one device each."""
    single = PlanRequest(microbatch_size=request.microbatch_size, reduction=request.reduction)
    plan = _make_plan(job, single, cluster)
    if plan.axes:
        raise PlanError(
            "hxla profile measures a model on one device, but annotations or stages put a replica "
            f"of this one on {len(plan.replicas[0].devices)}: profile it without them"
        )
    return plan


def _make_plan(
    job: JobContext, request: PlanRequest, cluster: Cluster, profile: Profile | None = None
) -> Plan:
    sums, measure = job.sums(request.reduction), SessionMeasure(job, job.all_devices())
    plan = plan_for(workloads(job), request, cluster, sums, measure, profile)
    return plan


def _new_split(
    job: JobContext, request: PlanRequest, cluster: Cluster, profile: Profile
) -> tuple[Plan, SplitTime] | None:
    """The plan of a requested split that the profile lacks, and its entry without seconds."""
    plan = _make_plan(job, request, cluster, profile)
    if plan.pipeline is not None or len(plan.axes) != 1:
        return None
    timed = split_time(plan, cluster, 0.0)
    if timed is None or timed.split in {known.split for known in profile.splits}:
        return None
    return plan, timed


def _run_trial(job: JobContext, plan: Plan, start: int) -> ObservedSteps:
    """Train a plan from a step on until enough steps are timed."""
    devices = job.all_devices()
    # Counts that follow small changes would leave too few steps of each.
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
            if observer.has_enough_steps(record):
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
    times: Sequence[LayerTime], sizes: Sequence[LayerSize], trial: ObservedSteps, rank: int
) -> tuple[LayerTime, ...]:
    """Scale times of segments measured alone to their time in a training step.

    The update is divided by bytes of parameters. A device that trains alone has no all-reduce, so
    the rest of its step counts as update.
    """
    total_seconds = sum(t.forward + t.backward for t in times) or 1.0
    total_bytes = sum(s.parameter_bytes for s in sizes) or 1.0
    micro, update = trial.micro_seconds[rank], trial.update_seconds[rank]
    if len(trial.micro_seconds) == 1:
        update += trial.rest_seconds
    return tuple(
        LayerTime(
            forward=t.forward * micro / total_seconds,
            backward=t.backward * micro / total_seconds,
            update=update * s.parameter_bytes / total_bytes,
        )
        for t, s in zip(times, sizes, strict=True)
    )


def _progress(setting: Setting, num: int) -> Callable[[int], None]:
    where = f"{setting.kind}, microbatch of {setting.microbatch_size}"
    return lambda done: LOGGER.info("%s: %d of %d segments", where, done, num)


def _show(profile: Profile, file: str) -> None:
    print_result(f"{'kind':<24} {'microbatch':>10} {'forward':>10} {'backward':>10} {'update':>10}")
    for setting, times in sorted(profile.times.items()):
        row = [sum(getattr(t, part) for t in times) for part in ("forward", "backward", "update")]
        seconds = " ".join(f"{1e3 * s:>7.2f} ms" for s in row)
        print_result(f"{setting.kind:<24} {setting.microbatch_size:>10} {seconds}")
    for split in profile.splits:
        parts = ", ".join(
            f"{kind} {p:.0%}" for kind, p in zip(split.kinds, split.parts, strict=True)
        )
        seconds = f"{1e3 * split.seconds:.2f} ms a microbatch of {split.microbatch_size}"
        print_result(f"cut over {parts}: {seconds}")
    print_result(f"{len(profile.layers)} segments of model {profile.model}, written to {file}")
