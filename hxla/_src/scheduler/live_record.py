"""The record of a live run: its events and decisions, which a policy can repeat."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import pydantic

from ..core.errors import ScheduleError
from ..core.files import MOST_JSON_BYTES, named, parse_json, read_text
from .elastic_jobs import ActiveJob, ElasticJob, Holdings, Nums, Situation
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
