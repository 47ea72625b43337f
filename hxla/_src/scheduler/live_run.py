"""Jobs that really run, and a policy that decides which devices each of them holds."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ..core.types import EXIT_PREEMPTED
from .device_proposals import ExecutorTime, learned
from .elastic_jobs import ActiveJob, Situation, free_devices
from .live_jobs import LiveJob
from .live_record import Arrived, Began, Decided, Ended, Entry, Holds
from .simulator import Policy
from .waste import Nums

#: Devices that are alike, by what their fleet calls them: how many of each.
Places = collections.Counter[str]
_MEET_SECONDS = 120.0  # a job that has not met its new devices by then may be stopped
_STOPPED = (EXIT_PREEMPTED, -15)  # SIGTERM also ends one that has not yet begun to train


class Fleet(Protocol):
    """Where devices come from."""

    def offered(self) -> Mapping[str, tuple[str, int]]:
        """The devices that are there, now: the kind, and how many, of each that has a name.

        Devices that nobody can tell apart have one name, a node of a cluster has one of its own.
        """

    def keep(self, names: Collection[str]) -> None:
        """Jobs have devices of these names, and of no others: nobody else may take them.

        One that a job gives up for another is among them all the while.
        """


class RunningJob(Protocol):
    """A job's processes, from their start to their end."""

    def give(self, places: Places) -> None:
        """From now on these devices are its own: no others."""

    def hear(self) -> None:
        """Take note of what it said since."""

    @property
    def num_done(self) -> float | None:
        """The steps that are done; None: it has not said."""

    @property
    def times(self) -> Sequence[ExecutorTime]:
        """What microbatches took lately, the kind of a device being the fleet's name for it."""

    @property
    def used(self) -> Places:
        """The devices that it has not released, also such as are not its own any more."""

    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""

    def stop(self) -> None:
        """Let it save a checkpoint after the step at hand, and end."""


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A job in mid-run."""

    job: LiveJob
    wanted: Nums  # by the newest decision
    own: Places = dataclasses.field(default_factory=Places)
    process: RunningJob | None = None
    is_stopping: bool = False
    num_done: float = 0
    moved_at: float = 0.0
    held: Nums = ()  # as it was recorded last

    def active(self, now: float, move_seconds: float) -> ActiveJob:
        pause = max(0.0, self.moved_at + move_seconds - now) if any(self.wanted) else 0.0
        left = self.job.job.num_steps - self.num_done
        if left <= 0:  # it has made all its steps, and has still to end
            left = 1
        return ActiveJob(
            job=self.job.job, remaining_steps=left, nums=self.wanted, pause_seconds=pause
        )

    @property
    def met(self) -> Places:
        """Its own devices that it uses, or is getting ready to use."""
        return self.own & self.process.used if self.process is not None else Places()

    @property
    def unmet(self) -> Places:
        """Its own devices that it has not met yet."""
        return self.own - self.met

    def occupied(self, place: str) -> int:
        """How many devices of a name nobody else can have."""
        return max(self.own[place], self.process.used[place] if self.process else 0)


def _arrival(one: LiveJob) -> float:
    return one.job.arrival_seconds


class LiveSchedule:
    """Starts jobs, tells them their devices as a policy decides, and stops them.

    It decides nothing itself: a policy is shown what is there, how fast jobs have been and what
    they have still to do, when a job arrives or ends, when devices come or go, and at whole
    multiples of an interval. A job that is to have fewer devices is told at once; another gets them
    when they are released. A job that is to have none is stopped, and started again when it gets
    some.

    Args:
        policy: The policy, and its name.
        start: Starts a job on devices.
        record: Is given what was seen, decided and done.
        move_seconds: How long a job is taken to pause when its devices change.
        interval_seconds: The time between decisions when nothing happens.
        learns_speeds: Whether a job's speeds are those of its run, once there is one.
    """

    def __init__(
        self,
        jobs: Sequence[LiveJob],
        fleet: Fleet,
        policy: tuple[str, Policy],
        *,
        start: Callable[[LiveJob, Places], RunningJob],
        record: Callable[[Entry], None],
        move_seconds: float,
        interval_seconds: float,
        learns_speeds: bool = False,
    ):
        self._waiting = sorted(jobs, key=_arrival)
        self._known = {one.name for one in jobs}
        self._active: list[_Live] = []
        self._fleet, self._start, self._record = fleet, start, record
        self._move_seconds, self._interval = move_seconds, interval_seconds
        self._learns = learns_speeds
        self._tick = 0
        self.kinds = self._waiting[0].job.kinds
        self._nothing = (0,) * len(self.kinds)
        name, self._policy = policy
        self._offered = dict(fleet.offered())
        self._kind_of: dict[str, int] = {}  # of all that were ever there
        self._capacity = self._counted()
        self._is_asked_to_end = False
        self.failed: list[str] = []
        record(
            Began(
                policy=name,
                kinds=self.kinds,
                capacity=self._capacity,
            )
        )

    def step(self, now: float) -> bool:
        """Look, decide if there is something to decide, and carry it out.

        Args:
            now: Seconds since the beginning.

        Returns:
            Whether all jobs have ended.
        """
        happened = self._hear(now)
        tick = math.floor(now / self._interval)
        if not self._is_asked_to_end:
            happened |= self._arrive(now)
            happened |= self._look()
            if self._active and (happened or tick > self._tick):
                self._decide(now)
        self._tick = tick
        self._carry_out(now)
        self._note(now)
        return not self._active and (not self._waiting or self._is_asked_to_end)

    def submit(self, jobs: Sequence[LiveJob], now: float) -> None:
        """Take jobs in addition: those whose name is new, which arrive now, or later.

        Args:
            jobs: The jobs, with speeds on the same kinds as those before.
            now: Seconds since the beginning.
        """
        for one in jobs:
            if one.name not in self._known:
                at = max(now, one.job.arrival_seconds)
                later = dataclasses.replace(one.job, arrival_seconds=at)
                self._waiting.append(dataclasses.replace(one, job=later))
                self._known.add(one.name)
        self._waiting.sort(key=_arrival)

    def end(self) -> None:
        """Stop all jobs; later steps wait for their ends."""
        self._is_asked_to_end = True
        for live in self._active:
            live.wanted = self._nothing

    def _hear(self, now: float) -> bool:
        """What jobs say; returns whether one has ended."""
        has_ended = False
        for live in list(self._active):
            if live.process is None:
                continue
            code = live.process.exit_code()
            live.process.hear()
            if live.process.num_done is not None:
                live.num_done = live.process.num_done
            if code is None:
                continue
            live.process, live.own = None, Places()
            if live.is_stopping and code in _STOPPED:
                live.is_stopping = False
                continue
            has_ended = True
            self._active.remove(live)
            self._record(Ended(at_seconds=now, name=live.job.name, code=code))
            if code:
                self.failed.append(live.job.name)
        if self._is_asked_to_end:
            self._active = [live for live in self._active if live.process is not None]
        return has_ended

    def _learn(self, live: _Live, times: Sequence[ExecutorTime]) -> None:
        """Speeds as its run shows them, in place of those that its user expected."""
        if not times:
            return
        of_kinds = [
            dataclasses.replace(time, kind=self.kinds[self._kind_of[time.kind]]) for time in times
        ]
        known = learned(live.job.job.capabilities, of_kinds)
        own = dataclasses.replace(live.job.job, capabilities=known)
        live.job = dataclasses.replace(live.job, job=own)

    def _arrive(self, now: float) -> bool:
        arrived = [one for one in self._waiting if one.job.arrival_seconds <= now]
        self._waiting = self._waiting[len(arrived) :]
        for one in arrived:
            self._record(Arrived(at_seconds=now, job=one.job))
        self._active += [
            _Live(job=one, wanted=self._nothing, held=self._nothing) for one in arrived
        ]
        return bool(arrived)

    def _look(self) -> bool:
        """What devices are there; returns whether there are others than before, by kind."""
        before = self._capacity
        self._offered = dict(self._fleet.offered())
        self._capacity = self._counted()
        return self._capacity != before

    def _counted(self) -> Nums:
        nums = [0] * len(self.kinds)
        for place, (kind, num) in self._offered.items():
            self._kind_of[place] = self.kinds.index(kind)
            nums[self.kinds.index(kind)] += num
        return tuple(nums)

    def _decide(self, now: float) -> None:
        for live in self._active:
            if self._learns and live.process is not None:
                self._learn(live, live.process.times)
        situation = Situation(
            at_seconds=now,
            kinds=self.kinds,
            capacity=self._capacity,
            jobs=tuple(live.active(now, self._move_seconds) for live in self._active),
            move_seconds=self._move_seconds,
        )
        held = self._policy(situation)
        assert min(free_devices(situation.capacity, held)) >= 0, (situation, held)
        self._record(Decided(situation=situation, held=held))
        for live in self._active:
            nums = held.get(live.job.name, self._nothing)
            if nums != live.wanted:
                live.wanted, live.moved_at = nums, now

    # -- carrying it out -----------------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        before = {live.job.name: live.own.copy() for live in self._active}
        for live in self._active:
            self._take_back(live)
        for live in self._active:
            self._hand_out(live)
        if not self._is_asked_to_end:
            self._untie(now, before)
        self._fleet.keep({p for p in self._kind_of if any(x.occupied(p) for x in self._active)})
        for live in self._active:
            if live.process is None:
                if any(live.wanted) and self._nums(live.own) == live.wanted:
                    live.process = self._start(live.job, live.own.copy())
            elif not live.is_stopping and not any(live.wanted):
                self._stop(live)
            elif live.own != before[live.job.name] and not live.is_stopping:
                live.process.give(live.own.copy())

    def _take_back(self, live: _Live) -> None:
        """Devices that are gone, and those that it holds beyond its own, down to its fewest.

        Those that it uses are counted: one that goes over to other devices gives back the last of
        the old ones when it has met the new ones, and trains in between.
        """
        for place in [place for place in live.own if place not in self._offered]:
            del live.own[place]
        fewest = live.job.job.min_devices if live.process is not None and any(live.wanted) else 0
        for place in list(live.own):
            kind = self._kind_of[place]
            while (
                live.own[place]
                and self._nums(live.own)[kind] > live.wanted[kind]
                and live.own.total() > fewest
                and (live.unmet[place] or live.met.total() > fewest)
            ):
                live.own[place] -= 1
        live.own += Places()  # without those of which there is none

    def _hand_out(self, live: _Live) -> None:
        if live.is_stopping:
            return
        for place, (_, num) in self._offered.items():
            kind = self._kind_of[place]
            taken = sum(one.occupied(place) for one in self._active if one is not live)
            # What it has not released it may have back at once.
            room = num - taken - live.own[place]
            more = min(room, live.wanted[kind] - self._nums(live.own)[kind])
            if more > 0:
                live.own[place] += more

    def _untie(self, now: float, before: Mapping[str, Places]) -> None:
        """Jobs that wait for each other's last devices: the one that came last is stopped."""
        running = [live for live in self._active if live.process is not None]
        is_under_way = any(
            live.is_stopping
            or any(live.occupied(p) > live.own[p] for p in self._kind_of)
            or (live.unmet and now < live.moved_at + _MEET_SECONDS)
            for live in running
        ) or any(live.own != before[live.job.name] for live in self._active)
        tied = [
            live
            for live in running
            if any(n > w for n, w in zip(self._nums(live.own), live.wanted, strict=True))
        ]
        if tied and not is_under_way:
            self._stop(tied[-1])

    def _stop(self, live: _Live) -> None:
        assert live.process is not None
        live.is_stopping, live.own = True, Places()
        live.process.stop()

    def _nums(self, places: Places) -> Nums:
        nums = [0] * len(self.kinds)
        for place, num in places.items():
            nums[self._kind_of[place]] += num
        return tuple(nums)

    def _note(self, now: float) -> None:
        for live in self._active:
            held = Places({place: live.occupied(place) for place in self._kind_of})
            nums = self._nums(held)
            if nums != live.held:
                live.held = nums
                self._record(Holds(at_seconds=now, name=live.job.name, nums=nums))
