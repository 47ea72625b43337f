"""SIGTERM as a wish to leave after the present step, on all processes at once."""

import signal
import threading
from typing import Any

from .._core._types import EXIT_PREEMPTED


class Preempted(SystemExit):
    """SIGTERM arrived: the step at hand was finished and, with a checkpoint folder, saved.

    It is a `SystemExit`: a script that does not catch it ends with exit code 75, and run again it
    resumes.

    Attributes:
        step: The updates done.
    """

    def __init__(self, step: int):
        super().__init__(EXIT_PREEMPTED)
        self.step = step

    def __str__(self) -> str:
        return f"SIGTERM arrived; training ended after {self.step} steps"


class Termination:
    """Whether SIGTERM arrived, from the constructor until `close`."""

    def __init__(self) -> None:
        self.arrived = False
        self._before: Any = None
        # Only the main thread may handle signals; elsewhere the caller keeps its own handling.
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.arrived = True

    def close(self) -> None:
        """Give the signal back to whoever handled it before."""
        if self._is_main:
            signal.signal(signal.SIGTERM, self._before)
