"""`hxla schedule`: simulates and explains policies, runs jobs, and replays a recorded run.

One picture shows the jobs' devices over time under each policy, of waiting and completion.
"""

import colorsys
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..core.errors import ScheduleError
from ..core.format import clock, percent
from ..core.types import EXIT_PREEMPTED
from ..launch.cleanup import start_janitor
from ..launch.ending import Wakeup
from ..report.page import Table, as_text
from .elastic_jobs import ActiveJob, ElasticJob, Holdings, Nums, Situation, free_devices
from .job_files import LiveJob, read_jobs, read_live_jobs
from .live_hosts import JobFleet, JobProcess, MeshFleet
from .live_run import (
    Began,
    Decided,
    Ended,
    Entry,
    Holds,
    LiveSchedule,
    Places,
    as_line,
    as_simulation,
    decided_otherwise,
    read_record,
)
from .policies import (
    backfill,
    easyscale,
    easyscale_alike,
    one_at_a_time,
    proposals,
    shortest_remaining,
    weighing,
)
from .simulator import Hold, Policy, Simulation, simulate

_GOLDEN = 0.618033988749895  # such steps around the colour circle keep neighbours distinct
_LINES = ("#888888", "#c46a1b", "#8a4fbf", "#2f9e44", "#1c7ed6", "#d6336c")


def write_picture(simulations: Mapping[str, Simulation], path: str) -> None:
    """Draw simulations of the same jobs.

    Args:
        path: Of the file; its ending is the format.
    """
    from matplotlib.figure import Figure

    num = len(simulations)
    end = max(simulation.makespan for simulation in simulations.values())
    figure = Figure(figsize=(11, 1.7 * num + 2.6), layout="constrained")
    grid = figure.add_gridspec(num + 1, 2, height_ratios=[1.7] * num + [2.6])
    first = None
    for row, (name, simulation) in enumerate(simulations.items()):
        panel = figure.add_subplot(grid[row, :], sharex=first)
        first = first or panel
        _draw_holds(panel, simulation)
        title = f"{name}: mean completion {simulation.mean_completion:,.0f} s"
        panel.set_title(f"{title}, {simulation.num_moves} moves", loc="left", fontsize=9)
        panel.set_xlim(0, end)
        panel.tick_params(labelbottom=row == num - 1, labelsize=8)
    panel.set_xlabel("seconds; a row is a device, a colour a job", fontsize=8)
    _draw_waiting(figure.add_subplot(grid[num, 0]), simulations)
    _draw_completions(figure.add_subplot(grid[num, 1]), simulations)
    figure.savefig(path, dpi=110)


def _draw_holds(panel: Any, simulation: Simulation) -> None:
    """Draw a row for each device, grouped by kind; a job keeps its rows as far as possible."""
    colors = {job.name: _color(i) for i, job in enumerate(simulation.jobs)}
    base = 0
    for kind, num in enumerate(simulation.capacity):
        for hold, rows in _rows(simulation, kind, num):
            for start, count in _runs(rows):
                bar = [(hold.start_seconds, hold.end_seconds - hold.start_seconds)]
                where = (base + start, count)
                panel.broken_barh(bar, where, color=colors[hold.name], lw=0)
        base += num
        panel.axhline(base, color="black", lw=0.6)
    edges = [0, *itertools.accumulate(simulation.capacity)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    panel.set_ylim(0, base)
    panel.set_yticks(middles, simulation.kinds)


def _rows(simulation: Simulation, kind: int, num: int) -> Iterator[tuple[Hold, list[int]]]:
    free = set(range(num))
    taken: list[tuple[float, list[int]]] = []
    last: dict[str, list[int]] = {}
    holds = [h for h in simulation.holds if h.nums[kind]]
    for hold in sorted(holds, key=lambda h: h.start_seconds):
        ended = [t for t in taken if t[0] <= hold.start_seconds + 1e-9]
        taken = [t for t in taken if t[0] > hold.start_seconds + 1e-9]
        free |= {row for _, rows in ended for row in rows}
        same_rows = [row for row in last.get(hold.name, []) if row in free][: hold.nums[kind]]
        rows = same_rows + sorted(free - set(same_rows))[: hold.nums[kind] - len(same_rows)]
        free -= set(rows)
        taken.append((hold.end_seconds, rows))
        last[hold.name] = rows
        yield hold, rows


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    for _, group in itertools.groupby(enumerate(sorted(rows)), key=lambda pair: pair[1] - pair[0]):
        members = [row for _, row in group]
        yield members[0], len(members)


def _color(index: int) -> tuple[float, float, float]:
    return colorsys.hls_to_rgb(index * _GOLDEN % 1, 0.45 + 0.2 * (index % 3) / 2, 0.6)


def _draw_waiting(panel: Any, simulations: Mapping[str, Simulation]) -> None:
    for simulation, color in zip(simulations.values(), itertools.cycle(_LINES), strict=False):
        waiting: Counter[float] = Counter(job.arrival_seconds for job in simulation.jobs)
        waiting.update(hold.end_seconds for hold in simulation.holds)
        waiting.subtract(hold.start_seconds for hold in simulation.holds)
        waiting.subtract(simulation.ends)
        times = sorted(waiting)
        nums = list(itertools.accumulate(waiting[time] for time in times))
        panel.step(times, nums, where="post", lw=1, color=color)
    panel.set(xlabel="seconds", ylabel="jobs without devices")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def _draw_completions(panel: Any, simulations: Mapping[str, Simulation]) -> None:
    for (name, simulation), color in zip(
        simulations.items(), itertools.cycle(_LINES), strict=False
    ):
        ranks = sorted(simulation.completions)
        share = [(i + 1) / len(ranks) for i in range(len(ranks))]
        panel.step(ranks, share, where="post", lw=1.3, color=color, label=name)
    panel.set(xlabel="seconds from arrival to end", ylabel="share of jobs", xscale="log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


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
                _devices(active.nums, situation.kinds) or "-",
                _devices(nums, situation.kinds) or "-",
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
    return " + ".join(f"{n} {k}" for n, k in zip(nums, kinds, strict=True) if n)


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


#: Policies for jobs with changing devices.
LIVE_POLICIES = tuple(name for name in POLICIES if name not in GANGS)
_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """The options of the command line.

    Attributes:
        mesh: Name or path of a mesh file of this machine's CPU devices, read again when it changes.
        ray: Address of a Ray cluster, instead of a mesh file.
        move_seconds: The assumed pause of a job when its devices change.
        interval_seconds: The time between decisions without events.
        learns_speeds: Whether measured speeds replace the expected ones.
        folder: A new folder for the record and the jobs' output.
    """

    jobs: str
    mesh: str | None
    ray: str | None = None
    policies: tuple[str, ...]
    move_seconds: float
    interval_seconds: float
    learns_speeds: bool = False
    folder: str


def run_command(options: LiveOptions) -> int:
    """Run jobs, on devices shared by a policy, until all have ended.

    Returns:
        The exit code: 0 if all jobs have trained, 1 if one failed; else that of the user's signal.

    Raises:
        ScheduleError: If the jobs or the options are wrong.
        MeshError: If the mesh file is wrong.
    """
    _check(options)
    file_of_jobs = _JobsFile(options.jobs)
    kinds = file_of_jobs.kinds
    with contextlib.ExitStack() as stack:
        fleet = _fleet(options, kinds, stack)
        folder = pathlib.Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((folder / "record.jsonl").open("w", buffering=1))
        janitor = start_janitor()
        stack.callback(janitor.close)
        processes: list[JobProcess] = []

        def note(line: str) -> None:
            janitor.write(f"{line}\n".encode())

        def start(job: LiveJob, places: Places) -> JobProcess:
            processes.append(JobProcess(job, fleet, places, folder, note))
            return processes[-1]

        def record(entry: Entry) -> None:
            file.write(as_line(entry) + "\n")
            for line in _lines(entry, kinds):
                _say(line)

        stack.callback(lambda: note("done"))
        stack.callback(_close, processes)
        [name] = options.policies
        schedule = LiveSchedule(
            file_of_jobs.jobs,
            fleet,
            (name, POLICIES[name]),
            start=start,
            record=record,
            move_seconds=options.move_seconds,
            interval_seconds=options.interval_seconds,
            learns_speeds=options.learns_speeds,
        )
        number = _run_until_ended(schedule, file_of_jobs.more, stack)
    if number is not None:
        return EXIT_PREEMPTED if number == signal.SIGTERM else 128 + number
    if schedule.failed:
        _say(f"failed: {', '.join(schedule.failed)}; {options.folder}/NAME.log says why")
        return 1
    return 0


def replay_command(path: str, *, draw: str | None = None) -> tuple[str, int]:
    """Make the decisions of a recorded run again.

    Args:
        draw: File for a picture of the jobs' devices over time, `.png` or `.svg`.

    Returns:
        The text to print, and 0 if all decisions are equal, else 1.

    Raises:
        ScheduleError: If the file is no record.
    """
    entries = read_record(path)
    began = entries[0]
    assert isinstance(began, Began)
    if began.policy not in POLICIES:
        raise ScheduleError(f"record {path}: no policy {began.policy}: there are {_names()}")
    if draw is not None:
        write_picture({began.policy: as_simulation(entries)}, draw)
    num = sum(isinstance(entry, Decided) for entry in entries)
    others = decided_otherwise(entries, POLICIES[began.policy])
    lines = [f"{began.policy}: {num - len(others)} of {num} decisions are made again as recorded"]
    for decided, holdings in others:
        at = decided.situation.at_seconds
        lines.append(
            f"at {at:.1f} s: recorded {_all(decided.holdings, began.kinds)}; decided again "
            f"{_all(holdings, began.kinds)}"
        )
    return "\n".join(lines) + "\n", int(bool(others))


def _close(processes: Sequence[JobProcess]) -> None:
    for process in processes:
        process.stop()
    for process in processes:
        process.close()


def _check(options: LiveOptions) -> None:
    if len(options.policies) != 1 or options.policies[0] not in LIVE_POLICIES:
        raise ScheduleError(f"run follows one policy: give --policy one of {_names()}")
    if not (options.move_seconds >= 0 and options.interval_seconds > 0):
        raise ScheduleError(
            f"a move of {options.move_seconds:g} s and {options.interval_seconds:g} s between "
            "decisions: give at least 0 s, and more than 0 s"
        )
    if (options.mesh is None) == (options.ray is None):
        raise ScheduleError("say where devices are: give --mesh FILE or --ray ADDRESS")
    if os.path.exists(options.folder) and (
        not os.path.isdir(options.folder) or os.listdir(options.folder)
    ):
        raise ScheduleError(f"--out {options.folder}: it is not empty; name a new folder")


def _fleet(options: LiveOptions, kinds: tuple[str, ...], stack: contextlib.ExitStack) -> JobFleet:
    if options.mesh is not None:
        return MeshFleet(options.mesh, kinds, _say)
    assert options.ray is not None
    try:
        from .live_hosts import RayFleet
    except ModuleNotFoundError:
        raise ScheduleError("--ray needs Ray: pip install 'hxla[ray]', on every node") from None
    fleet = RayFleet(options.ray, kinds, _say)
    stack.callback(fleet.close)
    return fleet


class _JobsFile:
    """A file of jobs that may grow during the run."""

    def __init__(self, path: str):
        self._path = path
        self._changed_at = self._modified_at()
        self.jobs = read_live_jobs(path)
        self.kinds = self.jobs[0].job.kinds

    def more(self) -> Sequence[LiveJob]:
        """All jobs of the file if it has changed and can be read, else none."""
        now = self._modified_at()
        if now in (self._changed_at, 0):
            return ()
        self._changed_at = now
        try:
            jobs = read_live_jobs(self._path)
        except ScheduleError as error:
            _say(f"jobs stay as they are: {error}")
            return ()
        kinds = jobs[0].job.kinds
        if kinds == self.kinds:
            return jobs
        old, new = ", ".join(self.kinds), ", ".join(kinds)
        _say(f"jobs stay as they are: {self._path} has seconds on {new}, in this order, not {old}")
        return ()

    def _modified_at(self) -> int:
        """The file's time of modification in nanoseconds; 0 if it is not there."""
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return 0


def _run_until_ended(
    schedule: LiveSchedule, more: Callable[[], Sequence[LiveJob]], stack: contextlib.ExitStack
) -> int | None:
    """Run all jobs to their end; returns the first signal of the user, or None."""
    received: list[int] = []
    wake = Wakeup()

    def receive(number: int, _: object) -> None:
        received.append(number)
        wake.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        stack.callback(signal.signal, number, signal.signal(number, receive))
    began = time.monotonic()
    while not schedule.step(time.monotonic() - began):
        schedule.submit(more(), time.monotonic() - began)
        wake.wait(_POLL_SECONDS)
        if received:
            schedule.end()
    return received[0] if received else None


def _lines(entry: Entry, kinds: tuple[str, ...]) -> Iterator[str]:
    match entry:
        case Holds(at_seconds=at, name=name, nums=nums):
            yield f"{clock(at)}: {name} holds {_devices(nums, kinds) or 'nothing'}"
        case Ended(at_seconds=at, name=name, code=code):
            yield f"{clock(at)}: {name} " + (f"failed with {code}" if code else "has trained")


def _all(holdings: Holdings, kinds: tuple[str, ...]) -> str:
    each = (f"{name}: {_devices(nums, kinds) or 'nothing'}" for name, nums in holdings.items())
    return ", ".join(each) or "nothing"


def _names() -> str:
    return ", ".join(LIVE_POLICIES)


def _say(text: str) -> None:
    print(f"hxla: {text}", file=sys.stderr, flush=True)
