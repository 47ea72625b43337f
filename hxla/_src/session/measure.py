"""Measures plans on the present devices, by compiling them and training some trial steps.

Some steps of training give the times of a plan.
"""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ..choose.apportionment import default_sizes, finish_seconds
from ..choose.make_plan import workloads
from ..choose.memory_model import tightest
from ..choose.planning import PlanRequest, plan_for
from ..choose.short_profile import everywhere, segment_profile, short_profile
from ..choose.workload import TriedSizes
from ..cluster.cluster import Cluster
from ..core.config import BalanceConfig
from ..core.errors import PlanError
from ..core.timing import middle_mean
from ..core.types import PyTree
from ..jax.devices import is_here, process_of
from ..job.agreement import facts_of_plan
from ..job.context import JobContext
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..profile.profile import Profile, Setting, together_key
from ..report.history import StepRecord
from .session import Session
from .values import SessionOptions
from .watch import FIRST_MEASURED, has_clocks

MOST_STEPS = 200
_WARM_STEPS = 2
_FEWEST_TIMED_STEPS = 10
_FEWEST_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedSteps:
    """Times of some training steps.

    Attributes:
        micro_seconds: Seconds of a microbatch's forward and backward, by device.
        counts: Microbatch counts of most of the steps.
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

    def __init__(self, fewest_seconds: float = _FEWEST_SECONDS) -> None:
        self._fewest_seconds = fewest_seconds
        self._num_warm = 0
        self._seconds: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)

    def has_enough_steps(self, record: StepRecord) -> bool:
        """Add a step; returns whether its counts have enough steps now."""
        if self._num_warm < _WARM_STEPS:
            self._num_warm += 1
            return False
        seconds = self._seconds[record.counts]
        seconds.append(record.seconds)
        return len(seconds) >= _FEWEST_TIMED_STEPS and sum(seconds) >= self._fewest_seconds

    @property
    def most(self) -> tuple[tuple[int, ...], float]:
        """The most frequent counts, and the mean of the middle half of their seconds."""
        counts, seconds = max(self._seconds.items(), key=lambda item: len(item[1]))
        return counts, middle_mean(seconds)


def run_trial(
    job: JobContext,
    plan: Plan,
    devices: tuple[jax.Device, ...],
    *,
    start: int = 0,
    batch: PyTree | None = None,
    fewest_seconds: float = _FEWEST_SECONDS,
) -> ObservedSteps:
    """Train a plan from a step on until enough steps are timed; every process takes part.

    Args:
        batch: The batch of every step; None: those of the data.
    """
    # Counts that follow small changes would leave too few steps of each.
    moves = job.settings.balance
    calm = BalanceConfig(
        min_gain=max(0.1, moves.min_gain),
        patience_steps=moves.patience_steps,
        window_steps=MOST_STEPS,
        retry_steps=moves.retry_steps,
    )
    observer = Observer(fewest_seconds)
    options = SessionOptions(
        steps=start + MOST_STEPS, balance=calm, first_step=start, is_trial=True
    )
    with Session(job, plan, devices, options) as session:
        if batch is None:
            for record in session:
                if observer.has_enough_steps(record):
                    session.stop()
        else:
            for _ in range(_num_steps(job, session, observer, batch, fewest_seconds)):
                observer.has_enough_steps(session.step(batch))
        counts, seconds = observer.most
        return ObservedSteps(
            micro_seconds=session.running_plan.balancer.seconds,
            update_seconds=session.running_plan.balancer.fixed,
            counts=counts,
            step_seconds=seconds,
            peak_bytes=session.running_plan.memory_bytes,
            end_step=session.step_number + job.settings.data.prefetch_steps,
            form=plan.memory_form,
        )


def _num_steps(
    job: JobContext, session: Session, observer: Observer, batch: PyTree, fewest_seconds: float
) -> int:
    """How many steps take so many seconds, the same on every process, by some first steps."""
    for _ in range(_WARM_STEPS + 1):
        record = session.step(batch)
        observer.has_enough_steps(record)
    slowest = max(map(float, job.gather("step of a trial", str(record.seconds))))
    return min(max(math.ceil(fewest_seconds / slowest), _FEWEST_TIMED_STEPS), MOST_STEPS)


_TRIAL_SECONDS = 1.0  # of steps as replicas
_SECONDS = 3.0  # of measured steps, within these numbers
_FEWEST_STEPS, _MOST_STEPS = 4, 24


@dataclasses.dataclass(frozen=True)
class SessionMeasure:
    """The `Measure` of a planner, by trial sessions.

    Attributes:
        devices: All devices of the job, by rank.
    """

    job: JobContext
    devices: tuple[jax.Device, ...]

    def microbatch_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Seconds of a microbatch on each replica."""
        options = SessionOptions(balance=self.job.settings.balance, is_trial=True)
        with Session(self.job, plan, self.devices, options) as trial:
            return trial.running_plan.balancer.seconds

    def split_sizes(self, plan: Plan) -> TriedSizes | None:
        """Sizes of an uneven split by the measured work of its devices; None without CPU times.

        If the sizes stay, training uses the compiled programs.
        """
        job, devices = self.job, self.devices
        processes = {rank: process_of(devices[rank]) for r in plan.replicas for rank in r.devices}
        if not has_clocks(plan, job.cluster(devices), processes):
            return None
        batch = job.first_batch(0, plan.batch_size)
        with Session(job, plan, devices, SessionOptions(is_trial=True)) as trial:
            for _ in range(FIRST_MEASURED):
                seconds = trial.step(batch).seconds
            slowest = max(map(float, job.gather("step of a trial", str(seconds))))
            num = math.ceil(_SECONDS / slowest)
            for _ in range(min(max(num, _FEWEST_STEPS), _MOST_STEPS)):
                trial.step(batch)
            work = trial.running_plan.split.measured()
        assert work is not None
        [axis] = plan.axes
        worked = ", ".join(
            f"{name} worked {busy / work.step_seconds:.0%}"
            for name, busy in zip(work.names, work.work_seconds, strict=True)
        )
        shares = work.better_shares or axis.shares
        mesh = {"data": len(plan.replicas), axis.name: shares}
        ratio = ":".join(map(str, axis.shares))
        return TriedSizes(
            shares=work.better_shares,
            reason=f"in {work.num_steps} steps of a trial with {ratio} over {axis.name} {worked} "
            f"of the time, so sizes {'move' if work.better_shares else 'stay'}: pass mesh={mesh} "
            "to get the same bits where a trial would tell otherwise",
        )

    def segment_seconds(
        self, cluster: Cluster, size: int, num_segments: int, sums: SumsForm
    ) -> Mapping[int, np.ndarray]:
        """Seconds [2, L] of the forwards and backwards of segments on each device, by rank."""
        local = {}
        for rank, device in enumerate(self.devices):
            if is_here(device):
                setting = Setting(cluster.devices[rank].label, size)
                measured = segment_profile(self.job, setting, num_segments, device, sums)
                local[rank] = [(t.forward, t.backward) for t in measured.times[setting]]
        times: dict[int, np.ndarray] = {}
        for text in self.job.gather("segments", json.dumps(local)):
            times |= {int(rank): np.array(rows).T for rank, rows in json.loads(text).items()}
        return times

    def profile(
        self, cluster: Cluster, sizes: Sequence[int], num_segments: int, sums: SumsForm
    ) -> Profile:
        """Times of the job's segments on each kind of device, of its training, and of its links."""
        job, devices = self.job, self.devices
        profile = short_profile(job, cluster, devices, sizes, num_segments, sums)
        usual = default_sizes(job.batch_size, 1)[0]
        size = usual if usual in sizes else sizes[len(sizes) // 2]
        try:
            request = PlanRequest(microbatch_size=size)
            plan = plan_for(workloads(job), request, cluster, sums, self)
        except PlanError:  # no device has room for a whole replica
            return profile
        if plan.axes:
            return profile
        batch = job.first_batch(0, plan.batch_size)
        trial = run_trial(job, plan, devices, batch=batch, fewest_seconds=_TRIAL_SECONDS)
        labels = [device.label for device in cluster.devices]
        # Each process has clocked its steps; all need one profile.
        return everywhere(job, in_training(profile, trial.by_kind(labels), labels, size))

    def compiled_lack(self, plan: Plan, cluster: Cluster) -> float:
        """The most bytes that a device lacks for a plan's compiled programs and their inputs.

        Returns:
            Bytes, equal on every process; at most 0 if the programs fit.
        """
        programs = self.job.programs(plan, self.devices, lambda _: None, keep=True)
        needed = programs.memory_bytes(programs.state_bytes)
        needed += programs.most_inputs * self.job.batch_bytes(plan.microbatch_size)
        lacks = []
        for replica in programs.reducer.local:
            rank = tightest(cluster, plan.replicas[replica.index])
            room = cluster.devices[rank].memory_bytes
            lacks.append(needed - (math.inf if room is None else room))
        return max(map(float, self.job.gather("bytes of the programs", str(max(lacks)))))

    def agree(self, plan: Plan) -> None:
        """Stop if processes have made different plans."""
        self.job.agree("a plan of the search", lambda: facts_of_plan(plan))


def in_training(
    profile: Profile, trial: ObservedSteps, labels: Sequence[str], size: int
) -> Profile:
    """Times of segments alone, as in a trial of replicas of one device each.

    A microbatch in training takes longer than its segments alone, by calls of programs and by the
    sums of its gradients. Neither depends on its size, so every size takes the same seconds more.

    Args:
        trial: Its times by kind of device.
        labels: The kind of each device.
        size: Examples of a microbatch in the trial.
    """
    alone = {
        setting: sum(t.forward + t.backward for t in times)
        for setting, times in profile.times.items()
    }
    times = dict(profile.times)
    spent = zip(trial.micro_seconds, trial.update_seconds, strict=True)
    by_kind = dict(zip(labels, spent, strict=True))
    rest = trial.rest_seconds
    for setting, layers in profile.times.items():
        micro, update = by_kind[setting.kind]
        before = alone[Setting(setting.kind, size)]
        if not micro or not before:
            continue  # a device without microbatches
        more = micro - before
        factor = 1 + more / alone[setting] if more > 0 else micro / before
        if len(labels) == 1:
            update += rest
        planned = sum(t.update for t in layers) or 1.0
        times[setting] = tuple(
            dataclasses.replace(
                t,
                forward=t.forward * factor,
                backward=t.backward * factor,
                update=t.update * update / planned,
            )
            for t in layers
        )
    sums = {together_key(labels): rest} if len(labels) > 1 else {}
    return dataclasses.replace(
        profile, times=times, reductions={**profile.reductions, **sums}, form=trial.form
    )
