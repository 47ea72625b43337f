"""Runs jobs on devices that a policy shares out.

The record of a run has its events and decisions, which a policy can repeat.
"""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Protocol

import pydantic

from ..core.errors import ScheduleError
from ..core.files import MOST_JSON_BYTES, named, parse_json, read_text
from ..core.types import EXIT_PREEMPTED
from .elastic_jobs import ActiveJob, ElasticJob, Holdings, Nums, Situation, free_devices
from .job_files import LiveJob
from .policies import ExecutorTime, learned
from .simulator import Hold, Policy, Simulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Began:
    """A live run began.

    Attributes:
        policy: The name of its policy.
        kinds: The names of the kinds of devices.
        capacity: The devices of each kind at the start.
    """

    policy: str
    kinds: tuple[str, ...]
    capacity: Nums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrived:
    """A job arrived."""

    at_seconds: float
    job: ElasticJob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
    """A decision: the policy's input and output.

    Attributes:
        holdings: The devices of each job; a job that is not named gets none. The file's key is
            `held`.
    """

    situation: Situation
    holdings: Mapping[str, Nums]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holds:
    """The devices that a job occupies changed.

    Attributes:
        nums: The devices of each kind that are assigned to it or still run its processes.
    """

    at_seconds: float
    name: str
    nums: Nums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A job ended.

    Attributes:
        code: The exit code; 0: the job has trained.
    """

    at_seconds: float
    name: str
    code: int


Entry = Began | Arrived | Decided | Holds | Ended
_KINDS: Mapping[str, type[Entry]] = {
    one.__name__: one for one in (Began, Arrived, Decided, Holds, Ended)
}


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(extra="forbid"))
class _Seen:
    """An `ActiveJob` with the name of its job, which its line of arrival describes."""

    name: str
    remaining_steps: float
    nums: Nums
    pause_seconds: float


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(extra="forbid"))
class _DecidedLine:
    what: Literal["Decided"]
    at_seconds: float
    capacity: Nums
    move_seconds: float
    jobs: tuple[_Seen, ...]
    held: dict[str, Nums]


def as_line(entry: Entry) -> str:
    """An entry as a line of JSON; reading it gives an equal entry."""
    if isinstance(entry, Decided):
        situation = entry.situation
        fields = {
            "at_seconds": situation.at_seconds,
            "capacity": situation.capacity,
            "move_seconds": situation.move_seconds,
            "jobs": [
                {
                    "name": one.name,
                    "remaining_steps": one.remaining_steps,
                    "nums": one.nums,
                    "pause_seconds": one.pause_seconds,
                }
                for one in situation.jobs
            ],
            "held": dict(entry.holdings),
        }
    else:
        fields = dataclasses.asdict(entry)
    return json.dumps({"what": type(entry).__name__, **fields})


def read_record(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
    """The entries of a record, in order.

    Raises:
        ScheduleError: If the file is no record.
    """
    refuse = named("record", path, ScheduleError)
    lines = read_text(path, MOST_JSON_BYTES, refuse).splitlines()
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        value, _ = parse_json(line, refuse)
        try:
            entries.append(_entry(value, entries))
        except (pydantic.ValidationError, ScheduleError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise refuse(f"has a line {number} that cannot be read: {first}") from None
    if not entries:
        raise refuse("is empty")
    return tuple(entries)


def _entry(value: object, before: Sequence[Entry]) -> Entry:
    kind = str(value.get("what")) if isinstance(value, dict) else ""
    if not isinstance(value, dict) or kind not in _KINDS or (kind == "Began") == bool(before):
        raise ScheduleError(
            f"{kind!r}: the first line says Began, others one of {', '.join(_KINDS)}"
        )
    if kind != "Decided":
        fields = {k: v for k, v in value.items() if k != "what"}
        entry: Entry = pydantic.TypeAdapter(_KINDS[kind]).validate_python(fields)
        return entry
    line = pydantic.TypeAdapter(_DecidedLine).validate_python(value)
    began = before[0]
    assert isinstance(began, Began)
    jobs = {entry.job.name: entry.job for entry in before if isinstance(entry, Arrived)}
    situation = Situation(
        at_seconds=line.at_seconds,
        kinds=began.kinds,
        capacity=line.capacity,
        jobs=tuple(
            ActiveJob(
                job=jobs[one.name],
                remaining_steps=one.remaining_steps,
                nums=one.nums,
                pause_seconds=one.pause_seconds,
            )
            for one in line.jobs
        ),
        move_seconds=line.move_seconds,
    )
    return Decided(situation=situation, holdings=line.held)


def decided_otherwise(
    entries: Sequence[Entry], policy: Policy
) -> tuple[tuple[Decided, Holdings], ...]:
    """Repeat the recorded decisions; returns those that come out differently, with the new ones."""
    decisions = [entry for entry in entries if isinstance(entry, Decided)]
    again = [(entry, policy(entry.situation)) for entry in decisions]
    return tuple(
        (entry, holdings)
        for entry, holdings in again
        if _without_none(holdings) != _without_none(entry.holdings)
    )


def _without_none(holdings: Holdings) -> dict[str, Nums]:
    """Holdings without jobs that have no device."""
    return {name: nums for name, nums in holdings.items() if any(nums)}


def as_simulation(entries: Sequence[Entry]) -> Simulation:
    """A live run as a simulation, for pictures.

    The capacity is the largest number of devices of each kind at any time.
    """
    began = entries[0]
    assert isinstance(began, Began)
    last = max((_time(entry) for entry in entries), default=0.0)
    nothing = (0,) * len(began.kinds)
    jobs = tuple(entry.job for entry in entries if isinstance(entry, Arrived))
    holds, now = list[Hold](), {job.name: (0.0, nothing) for job in jobs}
    starts, ends = dict[str, float](), dict[str, float]()
    num_moves = 0
    capacities = [began.capacity, began.capacity]
    capacities += [e.situation.capacity for e in entries if isinstance(e, Decided)]
    changes = [(e.at_seconds, e.name, e.nums) for e in entries if isinstance(e, Holds)]
    changes += [(e.at_seconds, e.name, nothing) for e in entries if isinstance(e, Ended)]
    for at, name, nums in [*changes, *((last, job.name, nothing) for job in jobs)]:
        since, before = now[name]
        if nums == before:
            continue
        if any(before):
            holds.append(
                Hold(name=name, nums=before, start_seconds=since, end_seconds=at, pause_seconds=0.0)
            )
        num_moves += any(before) and any(nums)
        now[name] = at, nums
        starts.setdefault(name, at)
        ends[name] = at
    return Simulation(
        kinds=began.kinds,
        capacity=tuple(map(max, *capacities)),
        jobs=jobs,
        ends=tuple(ends.get(job.name, last) for job in jobs),
        starts=tuple(starts.get(job.name, last) for job in jobs),
        holds=tuple(holds),
        num_moves=num_moves,
    )


def _time(entry: Entry) -> float:
    match entry:
        case Began():
            return 0.0
        case Decided(situation=situation):
            return situation.at_seconds
        case _:
            return entry.at_seconds


#: The number of devices by the fleet's names for them; devices of one name are alike.
Places = collections.Counter[str]
_MEET_SECONDS = 120.0  # a job that does not use its new devices by then may be stopped
_STOPPED = (EXIT_PREEMPTED, -15)  # before training begins SIGTERM itself ends a job


class Fleet(Protocol):
    """A source of devices."""

    def offered(self) -> Mapping[str, tuple[str, int]]:
        """The current devices: kind and number by name.

        Indistinguishable devices share a name; each node of a cluster has one.
        """

    def keep(self, names: Collection[str]) -> None:
        """Reserve devices of these names, and release all others.

        A device that moves from one job to another stays among them.
        """


class RunningJob(Protocol):
    """A job's processes, from their start to their end."""

    def give(self, places: Places) -> None:
        """Assign these devices, and no others."""

    def hear(self) -> None:
        """Read new events."""

    @property
    def num_done(self) -> float | None:
        """The number of steps done; None if not known yet."""

    @property
    def times(self) -> Sequence[ExecutorTime]:
        """Recent times of microbatches; a device's kind is the fleet's name for it."""

    @property
    def used(self) -> Places:
        """The devices that the job has not released, also those no longer assigned."""

    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""

    def stop(self) -> None:
        """Ask the job to save a checkpoint after the current step, and to end."""


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A job in mid-run."""

    job: LiveJob
    wanted: Nums  # by the newest decision
    assigned: Places = dataclasses.field(default_factory=Places)
    process: RunningJob | None = None
    is_stopping: bool = False
    num_done: float = 0
    moved_at: float = 0.0
    recorded: Nums = ()  # occupied devices in its last record

    def active(self, now: float, move_seconds: float) -> ActiveJob:
        pause = max(0.0, self.moved_at + move_seconds - now) if any(self.wanted) else 0.0
        left = self.job.job.num_steps - self.num_done
        if left <= 0:  # all steps are done, but the process has not ended
            left = 1
        return ActiveJob(
            job=self.job.job, remaining_steps=left, nums=self.wanted, pause_seconds=pause
        )

    @property
    def in_use(self) -> Places:
        """Assigned devices that the job uses or prepares to use."""
        return self.assigned & self.process.used if self.process is not None else Places()

    @property
    def pending(self) -> Places:
        """Assigned devices that the job does not use yet."""
        return self.assigned - self.in_use

    def occupied(self, place: str) -> int:
        """The devices of a name that no other job can have."""
        return max(self.assigned[place], self.process.used[place] if self.process else 0)


def _arrival(one: LiveJob) -> float:
    return one.job.arrival_seconds


class LiveSchedule:
    """Starts and stops jobs, and assigns devices to them as a policy decides.

    The policy decides when a job arrives or ends, when devices come or go, and at whole multiples
    of an interval. It knows the devices, and the speed and the remaining steps of each job. A job
    that gets fewer devices gives them up at once; another gets them when they are released. A job
    that gets none is stopped, and started again when it gets some.

    Args:
        policy: Its name and the function.
        start: Starts a job on devices.
        record: Called with every entry of the record.
        move_seconds: The assumed pause of a job when its devices change.
        interval_seconds: The time between decisions without events.
        learns_speeds: Whether measured speeds replace a job's expected ones.
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
        self._kind_of: dict[str, int] = {}  # of all names ever seen
        self._capacity = self._count_devices()
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
        """Poll jobs and devices, decide if something has changed, and carry the decision out.

        Args:
            now: Seconds since the beginning.

        Returns:
            Whether all jobs have ended.
        """
        has_event = self._poll_jobs(now)
        tick = math.floor(now / self._interval)
        if not self._is_asked_to_end:
            has_event |= self._arrive(now)
            has_event |= self._poll_devices()
            if self._active and (has_event or tick > self._tick):
                self._decide(now)
        self._tick = tick
        self._carry_out(now)
        self._record_holdings(now)
        return not self._active and (not self._waiting or self._is_asked_to_end)

    def submit(self, jobs: Sequence[LiveJob], now: float) -> None:
        """Add the jobs with new names; they arrive now or later.

        Args:
            jobs: With speeds on the same kinds as the first ones.
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
        """Stop all jobs; further steps wait for their ends."""
        self._is_asked_to_end = True
        for live in self._active:
            live.wanted = self._nothing

    def _poll_jobs(self, now: float) -> bool:
        """Read the jobs' events; returns whether a job has ended."""
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
            live.process, live.assigned = None, Places()
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
        """Replace the job's expected speeds by measured ones."""
        if not times:
            return
        times_by_kind = [
            dataclasses.replace(time, kind=self.kinds[self._kind_of[time.kind]]) for time in times
        ]
        capabilities = learned(live.job.job.capabilities, times_by_kind)
        elastic_job = dataclasses.replace(live.job.job, capabilities=capabilities)
        live.job = dataclasses.replace(live.job, job=elastic_job)

    def _arrive(self, now: float) -> bool:
        arrived = [one for one in self._waiting if one.job.arrival_seconds <= now]
        self._waiting = self._waiting[len(arrived) :]
        for one in arrived:
            self._record(Arrived(at_seconds=now, job=one.job))
        self._active += [
            _Live(job=one, wanted=self._nothing, recorded=self._nothing) for one in arrived
        ]
        return bool(arrived)

    def _poll_devices(self) -> bool:
        """Read the fleet's devices; returns whether their numbers by kind have changed."""
        before = self._capacity
        self._offered = dict(self._fleet.offered())
        self._capacity = self._count_devices()
        return self._capacity != before

    def _count_devices(self) -> Nums:
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
        holdings = self._policy(situation)
        assert min(free_devices(situation.capacity, holdings)) >= 0, (situation, holdings)
        self._record(Decided(situation=situation, holdings=holdings))
        for live in self._active:
            nums = holdings.get(live.job.name, self._nothing)
            if nums != live.wanted:
                live.wanted, live.moved_at = nums, now

    def _carry_out(self, now: float) -> None:
        before = {live.job.name: live.assigned.copy() for live in self._active}
        for live in self._active:
            self._take_back(live)
        for live in self._active:
            self._hand_out(live)
        if not self._is_asked_to_end:
            self._break_deadlock(now, before)
        self._fleet.keep({p for p in self._kind_of if any(x.occupied(p) for x in self._active)})
        for live in self._active:
            if live.process is None:
                if any(live.wanted) and self._nums(live.assigned) == live.wanted:
                    live.process = self._start(live.job, live.assigned.copy())
            elif not live.is_stopping and not any(live.wanted):
                self._stop(live)
            elif live.assigned != before[live.job.name] and not live.is_stopping:
                live.process.give(live.assigned.copy())

    def _take_back(self, live: _Live) -> None:
        """Unassign lost devices, and those above the job's wanted ones, down to its fewest.

        Devices in use count: a job that moves to other devices trains on the last old ones until it
        uses the new ones.
        """
        for place in [place for place in live.assigned if place not in self._offered]:
            del live.assigned[place]
        fewest = live.job.job.min_devices if live.process is not None and any(live.wanted) else 0
        for place in list(live.assigned):
            kind = self._kind_of[place]
            while (
                live.assigned[place]
                and self._nums(live.assigned)[kind] > live.wanted[kind]
                and live.assigned.total() > fewest
                and (live.pending[place] or live.in_use.total() > fewest)
            ):
                live.assigned[place] -= 1
        live.assigned += Places()  # drops names without devices

    def _hand_out(self, live: _Live) -> None:
        if live.is_stopping:
            return
        for place, (_, num) in self._offered.items():
            kind = self._kind_of[place]
            taken = sum(one.occupied(place) for one in self._active if one is not live)
            # Devices that the job has not released yet can be assigned to it again at once.
            room = num - taken - live.assigned[place]
            more = min(room, live.wanted[kind] - self._nums(live.assigned)[kind])
            if more > 0:
                live.assigned[place] += more

    def _break_deadlock(self, now: float, before: Mapping[str, Places]) -> None:
        """Stop the last of the jobs that wait for each other's last devices."""
        running = [live for live in self._active if live.process is not None]
        is_under_way = any(
            live.is_stopping
            or any(live.occupied(p) > live.assigned[p] for p in self._kind_of)
            or (live.pending and now < live.moved_at + _MEET_SECONDS)
            for live in running
        ) or any(live.assigned != before[live.job.name] for live in self._active)
        waiting = [
            live
            for live in running
            if any(n > w for n, w in zip(self._nums(live.assigned), live.wanted, strict=True))
        ]
        if waiting and not is_under_way:
            self._stop(waiting[-1])

    def _stop(self, live: _Live) -> None:
        assert live.process is not None
        live.is_stopping, live.assigned = True, Places()
        live.process.stop()

    def _nums(self, places: Places) -> Nums:
        nums = [0] * len(self.kinds)
        for place, num in places.items():
            nums[self._kind_of[place]] += num
        return tuple(nums)

    def _record_holdings(self, now: float) -> None:
        for live in self._active:
            nums = self._nums(Places({place: live.occupied(place) for place in self._kind_of}))
            if nums != live.recorded:
                live.recorded = nums
                self._record(Holds(at_seconds=now, name=live.job.name, nums=nums))
