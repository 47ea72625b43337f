"""Lets what is compared run in turns, so that the machine's drift meets all of it.

What runs is either functions of one process, or jobs. A job is any number of processes, in any
framework: `Turns` starts nothing, it says which job may go on and waits until each of its processes
has. A process that waits blocks on a pipe and takes no processor time. This file needs no package,
so that any interpreter can import it.
"""

import ctypes
import gc
import os
import pathlib
import select
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def seconds_in_turns(
    runs: Mapping[str, Callable[[], Any]],
    num_rounds: int,
    *,
    tolerance: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each function in each round; every second round goes backwards.

    Args:
        runs: What takes a turn in each round, by name. Each is run once before: it may compile.
        num_rounds: Turns of each.
        tolerance: Relative, of the losses that they return: in a round all must be alike.
        clock: What the seconds are of.

    Raises:
        SystemExit: If losses are not alike: then the work was not the same.
    """
    losses = {name: run() for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(num_rounds):
        if tolerance is not None:
            check_alike(losses, tolerance)
        for name in list(runs)[:: -1 if n % 2 else 1]:
            began = clock()
            losses[name] = runs[name]()
            seconds[name].append(clock() - began)
    return seconds


def check_alike(losses: Mapping[str, float], tolerance: float) -> None:
    """Refuse a comparison of unlike work.

    Raises:
        SystemExit: With all losses.
    """
    middle = statistics.median(losses.values())
    if any(abs(loss - middle) > tolerance * abs(middle) for loss in losses.values()):
        raise SystemExit(f"the losses are not alike: {losses}")


def over(others: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    """How many times as fast as another: its seconds over one's own, round by round.

    Returns:
        The median over the rounds as `ratio`, and the quartiles below and above it.
    """
    ratios = [other / mine for other, mine in zip(others, own, strict=True)]
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return {"ratio": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each, rounded."""
    return {name: float(f"{statistics.median(own):.4g}") for name, own in seconds.items()}


def take_turn(folder: str, rank: int, num: int | None = None) -> None:
    """What a process calls when it is ready, and after each step: until it may take the next.

    Args:
        folder: Of the process's job.
        rank: Of the process in its job.
        num: Of its processes, where the job may have left some out: the first answers for those.
    """
    ranks = [rank]
    if num is not None and rank == 0:
        ranks += [int(name) for name in os.listdir(folder) if name.isdigit() and int(name) >= num]
    for _ in ranks:
        with open(pathlib.Path(folder, "done"), "wb", buffering=0) as done:
            done.write(b"x")
    for each in ranks:
        with open(pathlib.Path(folder, str(each)), "rb", buffering=0) as mine:
            mine.read(1)


def forget_peak() -> None:
    """Let `peak_resident_bytes` begin anew, without what was freed: on Linux, elsewhere nothing."""
    peak = pathlib.Path("/proc/self/clear_refs")
    if os.access(peak, os.W_OK):
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        peak.write_text("5")


def peak_resident_bytes() -> int:
    """The most that this process has held in memory since `forget_peak`; 0 where nobody knows."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def turns_of_steps(
    make: Callable[[], tuple[Callable[[int], Any], Callable[[], Any]]],
    folder: str,
    *,
    num_turns: int,
    num_steps: int,
) -> dict[str, Any]:
    """What a process alone in its job does: a first step, then turns of some steps.

    Args:
        make: Makes a step, which takes its number and returns its loss, perhaps before it is done,
            and a function that waits until all is done.
        folder: Of the process's job.
        num_turns: Turns to take.
        num_steps: Steps of a turn.

    Returns:
        Seconds of a step in each turn, seconds until the first was done, last losses of turns.
    """
    begun = time.perf_counter()
    step, wait = make()
    losses = [float(step(0))]
    wait()
    ready, seconds = time.perf_counter() - begun, []
    for turn in range(num_turns):
        take_turn(folder, 0)
        begun = time.perf_counter()
        for n in range(num_steps):
            found = step(1 + turn * num_steps + n)
        wait()
        seconds.append((time.perf_counter() - begun) / num_steps)
        losses.append(float(found))
    return {"seconds_per_step": seconds, "seconds_to_first_step": ready, "losses": losses}


class Turns:
    """One job's side of the one who gives the turns.

    Args:
        folder: A new one for this job alone.
        num_processes: Of the job.
    """

    def __init__(self, folder: pathlib.Path, num_processes: int):
        folder.mkdir()
        self._paths = [folder / str(rank) for rank in range(num_processes)]
        for path in (*self._paths, folder / "done"):
            os.mkfifo(path)
        # Both ways, so that it neither waits for a writer nor ends with one.
        self._done = os.open(folder / "done", os.O_RDWR)

    def wait(self, check: Callable[[], None]) -> None:
        """Until every process waits for its turn.

        Args:
            check: Called once a second; raises if the job has failed.
        """
        missing = len(self._paths)
        while missing:
            if select.select([self._done], [], [], 1.0)[0]:
                missing -= len(os.read(self._done, missing))
            else:
                check()

    def give(self) -> None:
        """Let every process go on."""
        for path in self._paths:
            with path.open("wb", buffering=0) as mine:  # waits until the process reads
                mine.write(b"x")

    def close(self) -> None:
        """No more turns."""
        os.close(self._done)
