"""Lets jobs run in turns of a step each, so that the machine's drift meets all of them.

A job is any number of processes, in any framework: `Turns` starts nothing, it says which job may
go on and waits until each of its processes has. A process that waits blocks on a pipe and takes no
processor time. This file needs no package, so that any interpreter can import it.
"""

import os
import pathlib
import select
from collections.abc import Callable


def take_turn(folder: str, rank: int) -> None:
    """What a process calls when it is ready, and after each step: until it may take the next.

    Args:
        folder: Of the process's job.
        rank: Of the process in its job.
    """
    with open(pathlib.Path(folder, "done"), "wb", buffering=0) as done:
        done.write(b"x")
    with open(pathlib.Path(folder, str(rank)), "rb", buffering=0) as mine:
        mine.read(1)


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
