"""SIGTERM and Ctrl-C as a wish to leave after the present step, on all processes at once."""

import os
import signal
import threading
from typing import Any

from .._core._types import EXIT_PREEMPTED

_SAID = b"\nhxla: Ctrl-C: training ends after this step; once more ends it at once\n"


class Preempted(SystemExit):
    """SIGTERM or Ctrl-C: the step at hand was finished and, with a checkpoint folder, saved.

    It is a `SystemExit`: a script that does not catch it ends with exit code 75, and run again it
    resumes. Without a checkpoint folder the code is that of the signal, 143 or 130.

    Attributes:
        step: The updates done.
    """

    def __init__(self, step: int, signal_name: str = "SIGTERM", *, is_kept: bool = True):
        number = signal.SIGINT if signal_name == "Ctrl-C" else signal.SIGTERM
        super().__init__(EXIT_PREEMPTED if is_kept else 128 + number)
        self.step, self._signal, self._is_kept = step, signal_name, is_kept

    def __str__(self) -> str:
        lost = "" if self._is_kept else ", which are lost: there is no checkpoint_dir"
        return f"{self._signal} arrived; training ended after {self.step} steps{lost}"


class Termination:
    """Whether SIGTERM or SIGINT arrived, from the constructor until `close`.

    Attributes:
        arrived: The name of the signal that arrived first; empty: none has.
        hurries: Whether a second Ctrl-C ends all at once.
    """

    def __init__(self) -> None:
        self.arrived, self.hurries = "", False
        self._num_interrupts = 0
        self._before: dict[int, Any] = {}
        # Only the main thread may handle signals; elsewhere the caller keeps its own handling.
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)

    def heed_interrupts(self) -> None:
        """Take the first Ctrl-C as a SIGTERM from now on, unless the script handles it itself."""
        if self._before and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)

    def _terminate(self, number: int, frame: Any) -> None:
        self.arrived = self.arrived or "SIGTERM"

    def _interrupt(self, number: int, frame: Any) -> None:
        self._num_interrupts += 1
        self.arrived = self.arrived or "Ctrl-C"
        if self._num_interrupts > 1:
            self.hurries = True
            raise KeyboardInterrupt
        os.write(2, _SAID)  # a handler may not print: it may have interrupted a print

    def left(self, step: int, *, is_kept: bool) -> Preempted:
        """The exit of this process after a step, with the code for a state kept or lost."""
        return Preempted(step, self.arrived or "SIGTERM", is_kept=is_kept)

    def close(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
