"""Simulates jobs under a policy, with devices that come and go."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from ..core.errors import ScheduleError
from .elastic_jobs import ActiveJob, ElasticJob, Holdings, Nums, Situation, free_devices

#: Decides on the devices of each job; a pure function.
Policy = Callable[[Situation], Holdings]
_SOON = 1e-9  # remaining steps due to rounding alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold:
    """The devices of a job from one time to another.

    Attributes:
        nums: The devices of each kind.
        pause_seconds: The part of this time that was a move's pause.
    """

    name: str
    nums: Nums
    start_seconds: float
    end_seconds: float
    pause_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """The outcome of a simulation.

    Attributes:
        kinds: The names of the kinds of devices.
        capacity: The devices of each kind at first.
        jobs: The jobs, in the order of their arrival.
        starts: The time at which each job got its first devices.
        holds: In the order of their ends.
        num_moves: The changes of jobs' devices after their starts.
    """

    kinds: tuple[str, ...]
    capacity: Nums
    jobs: tuple[ElasticJob, ...]
    ends: tuple[float, ...]
    starts: tuple[float, ...]
    holds: tuple[Hold, ...]
    num_moves: int

    @property
    def completions(self) -> tuple[float, ...]:
        """Seconds from each job's arrival to its end."""
        return tuple(e - j.arrival_seconds for e, j in zip(self.ends, self.jobs, strict=True))

    @property
    def mean_completion(self) -> float:
        """Mean seconds from a job's arrival to its end."""
        return sum(self.completions) / len(self.jobs)

    @property
    def mean_wait(self) -> float:
        """Mean seconds from a job's arrival to its first devices."""
        waits = (s - j.arrival_seconds for s, j in zip(self.starts, self.jobs, strict=True))
        return sum(waits) / len(self.jobs)

    @property
    def makespan(self) -> float:
        """Seconds from the beginning to the last end."""
        return max(self.ends)

    @property
    def used_share(self) -> float:
        """The share of all devices' time, until the last end, in which jobs had them."""
        used_seconds = sum(sum(h.nums) * (h.end_seconds - h.start_seconds) for h in self.holds)
        return used_seconds / (sum(self.capacity) * self.makespan)


@dataclasses.dataclass(kw_only=True)
class _Running:
    """A job in mid-run."""

    job: ElasticJob
    remaining_steps: float
    nums: Nums
    pause_seconds: float = 0.0
    since_seconds: float = 0.0
    paused_seconds: float = 0.0

    def active(self) -> ActiveJob:
        return ActiveJob(
            job=self.job,
            remaining_steps=self.remaining_steps,
            nums=self.nums,
            pause_seconds=self.pause_seconds,
        )

    def end(self, now: float) -> float:
        """The time of the job's end if nothing changes."""
        if not any(self.nums):
            return math.inf
        return now + self.pause_seconds + self.job.seconds(self.remaining_steps, self.nums)

    def advance(self, seconds: float) -> None:
        if any(self.nums):
            pause = min(self.pause_seconds, seconds)
            self.pause_seconds -= pause
            self.paused_seconds += pause
            self.remaining_steps -= (seconds - pause) / self.job.step_seconds(self.nums)


def simulate(
    jobs: Sequence[ElasticJob],
    kinds: Sequence[str],
    capacity: Nums,
    policy: Policy,
    *,
    move_seconds: float,
    interval_seconds: float = 60.0,
    is_eager: bool = True,
    changes: Sequence[tuple[float, Nums]] = (),
    watch: Callable[[Situation, Holdings], None] | None = None,
) -> Simulation:
    """Replay jobs under a policy.

    The policy decides whenever a job arrives or ends, whenever the devices change, and at whole
    multiples of an interval. A job pauses when it starts, and when its devices change.

    Args:
        jobs: In any order.
        move_seconds: The pause of a job that starts, or whose devices change.
        interval_seconds: The time between decisions without events.
        is_eager: Whether the policy also decides at events.
        changes: Times, and the devices of each kind from then on.

    Raises:
        ScheduleError: If jobs share a name, or one can never run.
    """
    order = tuple(sorted(jobs, key=lambda job: job.arrival_seconds))
    _check(order, kinds, capacity)
    replay = _Replay(
        waiting=list(order), changes=sorted(changes), capacity=capacity, kinds=tuple(kinds)
    )
    while replay.waiting or replay.running:
        tick = (math.floor(replay.now / interval_seconds) + 1) * interval_seconds
        has_event = replay.advance(tick)
        if has_event and not is_eager:
            continue
        situation = replay.situation(move_seconds)
        holdings = policy(situation)
        assert min(free_devices(situation.capacity, holdings)) >= 0, (situation, holdings)
        if watch is not None:
            watch(situation, holdings)
        replay.give(holdings, move_seconds)
        replay.check_goes_on()
    return Simulation(
        kinds=tuple(kinds),
        capacity=capacity,
        jobs=order,
        ends=tuple(replay.ends[job.name] for job in order),
        starts=tuple(replay.starts[job.name] for job in order),
        holds=tuple(replay.holds),
        num_moves=replay.num_moves,
    )


@dataclasses.dataclass(kw_only=True)
class _Replay:
    """The state of the simulator."""

    waiting: list[ElasticJob]
    changes: list[tuple[float, Nums]]
    capacity: Nums
    kinds: tuple[str, ...]
    now: float = 0.0
    running: list[_Running] = dataclasses.field(default_factory=list)
    starts: dict[str, float] = dataclasses.field(default_factory=dict)
    ends: dict[str, float] = dataclasses.field(default_factory=dict)
    holds: list[Hold] = dataclasses.field(default_factory=list)
    num_moves: int = 0

    def advance(self, tick: float) -> bool:
        """Advance to the next event, at most to the tick; returns whether it is before the tick."""
        until = min(
            self.waiting[0].arrival_seconds if self.waiting else math.inf,
            self.changes[0][0] if self.changes else math.inf,
            min((r.end(self.now) for r in self.running), default=math.inf),
            tick if self.running else math.inf,
        )
        for r in self.running:
            r.advance(until - self.now)
        self.now = until
        for r in [r for r in self.running if r.remaining_steps <= _SOON * r.job.num_steps]:
            self.holds += _finished_hold(r, until)
            self.running.remove(r)
            self.ends[r.job.name] = until
        while self.changes and self.changes[0][0] <= until:
            self.capacity = self.changes.pop(0)[1]
        while self.waiting and self.waiting[0].arrival_seconds <= until:
            job = self.waiting.pop(0)
            nothing = (0,) * len(self.kinds)
            self.running.append(_Running(job=job, remaining_steps=job.num_steps, nums=nothing))
        return until < tick

    def situation(self, move_seconds: float) -> Situation:
        return Situation(
            at_seconds=self.now,
            kinds=self.kinds,
            capacity=self.capacity,
            jobs=tuple(r.active() for r in self.running),
            move_seconds=move_seconds,
        )

    def give(self, holdings: Holdings, move_seconds: float) -> None:
        for r in self.running:
            nums = holdings.get(r.job.name, (0,) * len(self.kinds))
            if nums == r.nums:
                continue
            self.holds += _finished_hold(r, self.now)
            self.num_moves += r.job.name in self.starts
            r.nums, r.since_seconds, r.paused_seconds = nums, self.now, 0.0
            r.pause_seconds = move_seconds if any(nums) else 0.0
            if any(nums):
                self.starts.setdefault(r.job.name, self.now)

    def check_goes_on(self) -> None:
        is_moving = self.waiting or self.changes or any(any(r.nums) for r in self.running)
        if self.running and not is_moving:
            names = ", ".join(sorted(r.job.name for r in self.running)[:5])
            raise ScheduleError(
                f"after {self.now:.0f} s nothing runs and nothing will change: {names} get none of "
                f"{dict(zip(self.kinds, self.capacity, strict=True))}; give more devices"
            )


def _finished_hold(r: _Running, now: float) -> Iterator[Hold]:
    if any(r.nums) and now > r.since_seconds:
        yield Hold(
            name=r.job.name,
            nums=r.nums,
            start_seconds=r.since_seconds,
            end_seconds=now,
            pause_seconds=r.paused_seconds,
        )


def _check(jobs: Sequence[ElasticJob], kinds: Sequence[str], capacity: Nums) -> None:
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    wrong = [f"{name}: several jobs of this name" for name in twice]
    for job in jobs:
        if job.kinds != tuple(kinds):
            wrong.append(f"{job.name}: its speed is known on {job.kinds}, the devices are {kinds}")
        elif not job.mixed and capacity[job.alone] < job.min_devices:
            wrong.append(
                f"{job.name}: needs {job.min_devices} {kinds[job.alone]}, there are "
                f"{capacity[job.alone]}"
            )
        elif sum(capacity) < job.min_devices:
            wrong.append(f"{job.name}: needs {job.min_devices} devices of {sum(capacity)}")
    if wrong or not jobs:
        raise ScheduleError("jobs cannot be scheduled:\n  " + "\n  ".join(wrong or ["no job"]))
