"""`hxla schedule run` and `replay`: runs jobs, and repeats the decisions of a recorded run."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from ..core.errors import ScheduleError
from ..core.format import clock
from ..core.types import EXIT_PREEMPTED
from ..launch.cleanup import start_janitor
from ..launch.ending import Wakeup
from .allocation_picture import write_picture
from .elastic_jobs import Holdings, Nums
from .job_files import LiveJob, read_live_jobs
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
from .schedule_commands import GANGS, POLICIES

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
            yield f"{clock(at)}: {name} holds {_devices(nums, kinds)}"
        case Ended(at_seconds=at, name=name, code=code):
            yield f"{clock(at)}: {name} " + (f"failed with {code}" if code else "has trained")


def _all(holdings: Holdings, kinds: tuple[str, ...]) -> str:
    each = (f"{name}: {_devices(nums, kinds)}" for name, nums in holdings.items())
    return ", ".join(each) or "nothing"


def _devices(nums: Nums, kinds: tuple[str, ...]) -> str:
    return " + ".join(f"{n} {k}" for n, k in zip(nums, kinds, strict=True) if n) or "nothing"


def _names() -> str:
    return ", ".join(LIVE_POLICIES)


def _say(text: str) -> None:
    print(f"hxla: {text}", file=sys.stderr, flush=True)
