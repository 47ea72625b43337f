"""`hxla schedule`: simulates policies on a trace of jobs, and explains their decisions."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from ..core.errors import ScheduleError
from ..core.format import clock, percent
from ..report.page import Table, as_text
from .allocation_picture import write_picture
from .elastic_jobs import ActiveJob, ElasticJob, Holdings, Nums, Situation, free_devices
from .job_files import read_jobs
from .policies import (
    backfill,
    easyscale,
    easyscale_alike,
    one_at_a_time,
    proposals,
    shortest_remaining,
    weighing,
)
from .simulator import Policy, Simulation, simulate

#: Policies by their names on the command line, in the order of the tables.
POLICIES: Mapping[str, Policy] = {
    "one-at-a-time": one_at_a_time,
    "backfill": backfill,
    "shortest-remaining": shortest_remaining,
    "easyscale-alike": easyscale_alike,
    "easyscale": easyscale,
    "weighing": weighing,
}
#: Policies of fixed sets of devices.
GANGS = ("one-at-a-time", "backfill", "shortest-remaining")
_WIDTH = 110


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The options of the command line.

    Attributes:
        devices: The number of devices by kind; empty for those of a published trace.
        policies: Names of policies; empty for all.
        move_seconds: The pause of a move.
        is_eager: Whether events also lead to decisions.
        gangs: See `read_jobs`.
        is_cut: See `read_jobs`.
    """

    trace: str
    devices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    policies: tuple[str, ...] = ()
    move_seconds: float
    interval_seconds: float
    is_eager: bool = True
    gangs: str = "asked"
    is_cut: bool = True


def simulate_command(
    options: ScheduleOptions, *, write_json: str | None = None, draw: str | None = None
) -> str:
    """Run policies over a trace.

    Args:
        draw: File for the picture, `.png` or `.svg`.

    Raises:
        ScheduleError: If the trace or the options are wrong.
    """
    jobs, kinds, capacity = _read(options)
    simulations = {
        name: _simulate(options, jobs, kinds, capacity, POLICIES[name])
        for name in options.policies or POLICIES
    }
    if write_json is not None:
        figures = {name: _figures(simulation) for name, simulation in simulations.items()}
        pathlib.Path(write_json).write_text(json.dumps(figures, indent=1) + "\n")
    if draw is not None:
        write_picture(simulations, draw)
    devices = ", ".join(f"{n} {k}" for k, n in zip(kinds, capacity, strict=True))
    title = f"{len(jobs)} jobs on {devices}; a move takes {options.move_seconds:g} s"
    return as_text([title, ("", _table(simulations), len(POLICIES))], _WIDTH)


def explain_command(options: ScheduleOptions, at_seconds: float) -> str:
    """Explain a policy's decision in a trace: each job's devices, proposals, and the reasons.

    Args:
        options: With one policy.
        at_seconds: The last decision until then is explained.

    Raises:
        ScheduleError: If the trace or the options are wrong, or no job has arrived by then.
    """
    if len(options.policies) != 1:
        raise ScheduleError(
            f"explain tells the decision of one policy: give --policy one of {', '.join(POLICIES)}"
        )
    jobs, kinds, capacity = _read(options)
    seen: list[tuple[Situation, Holdings]] = []
    until = [job for job in jobs if job.arrival_seconds <= at_seconds]
    if not until:
        first = min(job.arrival_seconds for job in jobs)
        raise ScheduleError(
            f"at {at_seconds:g} s no job has arrived: the first does at {first:g} s"
        )

    def watch(situation: Situation, holdings: Holdings) -> None:
        if situation.at_seconds <= at_seconds and situation.jobs:
            seen.append((situation, holdings))

    # Later jobs do not change earlier decisions.
    _simulate(options, until, kinds, capacity, POLICIES[options.policies[0]], watch)
    situation, holdings = seen[-1]
    return _explanation(situation, holdings, options.policies[0])


def _read(options: ScheduleOptions) -> tuple[tuple[ElasticJob, ...], tuple[str, ...], Nums]:
    unknown = [name for name in options.policies if name not in POLICIES]
    if unknown:
        raise ScheduleError(f"no policy {', '.join(unknown)}: there are {', '.join(POLICIES)}")
    if not (options.move_seconds >= 0 and options.interval_seconds > 0):
        raise ScheduleError(
            f"a move of {options.move_seconds:g} s and {options.interval_seconds:g} s between "
            "decisions: give at least 0 s, and more than 0 s"
        )
    jobs, devices = read_jobs(options.trace, gangs=options.gangs, is_cut=options.is_cut)
    kinds = jobs[0].kinds
    devices = dict(options.devices) or devices
    wrong = sorted(set(devices) - set(kinds))
    if wrong or not devices or min(devices.values()) < 0:
        raise ScheduleError(
            f"devices {devices or 'none'}: the trace has speeds on {', '.join(kinds)}; give "
            f"--devices {','.join(f'{kind}=4' for kind in kinds)}"
        )
    return jobs, kinds, tuple(devices.get(kind, 0) for kind in kinds)


def _simulate(
    options: ScheduleOptions,
    jobs: Sequence[ElasticJob],
    kinds: tuple[str, ...],
    capacity: Nums,
    policy: Policy,
    watch: Callable[[Situation, Holdings], None] | None = None,
) -> Simulation:
    return simulate(
        jobs,
        kinds,
        capacity,
        policy,
        move_seconds=options.move_seconds,
        interval_seconds=options.interval_seconds,
        is_eager=options.is_eager,
        watch=watch,
    )


def _figures(simulation: Simulation) -> dict[str, object]:
    ranks = sorted(simulation.completions)
    return {
        "num_jobs": len(simulation.jobs),
        "mean_completion_seconds": round(simulation.mean_completion, 1),
        "median_completion_seconds": round(ranks[len(ranks) // 2], 1),
        "p99_completion_seconds": round(ranks[min(len(ranks) - 1, int(0.99 * len(ranks)))], 1),
        "mean_wait_seconds": round(simulation.mean_wait, 1),
        "makespan_seconds": round(simulation.makespan, 1),
        "num_moves": simulation.num_moves,
        "held_share": round(simulation.used_share, 3),
    }


def _table(simulations: Mapping[str, Simulation]) -> Table:
    best = min(
        (simulation.mean_completion for name, simulation in simulations.items() if name in GANGS),
        default=None,
    )
    rows = [
        (
            name,
            f"{simulation.mean_completion:,.0f} s",
            f"{best / simulation.mean_completion:.2f}x" if best is not None else "",
            f"{simulation.mean_wait:,.0f} s",
            clock(simulation.makespan),
            f"{simulation.num_moves:,}",
            percent(simulation.used_share),
        )
        for name, simulation in simulations.items()
    ]
    heads = (
        "policy",
        "mean completion",
        "best gang / it",
        "mean wait",
        "last end",
        "moves",
        "used",
    )
    return Table(heads, rows)


def _explanation(situation: Situation, holdings: Holdings, policy: str) -> str:
    free = free_devices(situation.capacity, holdings)
    words = ", ".join(
        f"{f} of {c} {k}" for f, c, k in zip(free, situation.capacity, situation.kinds, strict=True)
    )
    head = f"{policy} at {situation.at_seconds:,.0f} s; free: {words}"
    rows, offers = [], []
    for active in situation.jobs:
        nums = holdings.get(active.name, (0,) * len(free))
        after = active.job.configuration(nums)
        rows.append(
            (
                active.name,
                _devices(active.nums, situation.kinds),
                _devices(nums, situation.kinds),
                "/".join(map(str, after.threads)) if after else "",
                percent(after.waste) if after else "",
                _left(active, active.nums, situation.move_seconds),
                _left(active, nums, situation.move_seconds),
                _why(active, nums, situation.move_seconds),
            )
        )
        moved = dataclasses.replace(active, nums=nums)
        offers += [
            (
                p.name,
                f"+{p.num_more} {situation.kinds[p.kind]}",
                f"{p.speedup:.2f}x",
                f"{p.speedup_per_device:.2f}",
                percent(p.after.waste),
            )
            for p in (proposals(moved, situation.capacity) if any(nums) else ())
        ]
    heads = ("job", "before", "now", "microbatches", "waste", "left", "left now", "why")
    table = Table(heads, rows, (0, 1, 2, 7))
    more = Table(("job", "would use", "faster", "per device", "waste"), offers, (0, 1))
    return as_text([head, ("", table, 100), ("proposals for more devices:", more, 100)], _WIDTH)


def _devices(nums: Nums, kinds: Sequence[str]) -> str:
    return " + ".join(f"{n} {k}" for n, k in zip(nums, kinds, strict=True) if n) or "-"


def _left(active: ActiveJob, nums: Nums, move_seconds: float) -> str:
    return clock(active.seconds_left(nums, move_seconds)) if any(nums) else "-"


def _why(active: ActiveJob, nums: Nums, move_seconds: float) -> str:
    if nums == active.nums:
        return "keeps" if any(nums) else "waits"
    if not any(nums):
        return "stops for others"
    if not active.is_running:
        return "starts"
    gain = active.seconds_left(active.nums, move_seconds) - active.seconds_left(nums, move_seconds)
    word = f"{clock(abs(gain))} {'sooner' if gain > 0 else 'later'} with its move"
    return f"moves: {word}" if gain > 0 else f"gives to others: {word}"
