"""The live line of a run, and the line that explains a long silence."""

import collections
import os
import sys
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..core.format import clock, si
from .history import StepRecord

#: A line comes at least every two seconds, even on a busy machine.
PERIOD_SECONDS = 1.5


class Waiting:
    """Says periodically, from a thread, what the process waits for.

    On a terminal it is a line that is painted over and vanishes; under `hxla run`, the same line
    for the launcher to paint; into a file or pipe, a plain line. A wait shorter than one period
    prints nothing.

    Args:
        prefix: Of all lines.
        is_main: Whether this process prints.
    """

    def __init__(
        self,
        prefix: str,
        *,
        is_main: bool,
        stream: TextIO | None = None,
        period_seconds: float | None = None,
    ):
        self._prefix, self._what = prefix, ""
        self._stream = stream or sys.stdout
        self._period = PERIOD_SECONDS if period_seconds is None else period_seconds
        self._piped = stream is None and bool(os.environ.get("HXLA_LIVE"))
        self._live: Live | None = None
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hxla-waiting", daemon=True)
        if is_main:
            self._thread.start()

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def tell(self, what: str) -> None:
        """Set what the process waits for from now on."""
        self._what = what

    def close(self) -> None:
        """Print nothing more."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._period):
            self._show(f"{self._prefix}: {self._what}, {time.monotonic() - self._began:.0f} s")
        if self._live is not None:
            self._live.stop()

    def _show(self, text: str) -> None:
        if not self._stream.isatty():
            print(text, end="\r" if self._piped else "\n", file=self._stream, flush=True)
            return
        if self._live is None:
            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


_SHOWN_DEVICES = 6
_WINDOW_STEPS = 10


def line(record: StepRecord, num_steps: int | None, names: tuple[str, ...], seconds: float) -> str:
    """The live line.

    Args:
        num_steps: Of the run; None if not known.
    """
    amount, unit = record.num_examples, "examples"
    if record.num_tokens:
        amount, unit = record.num_tokens, "tokens"
    parts = [
        f"step {record.step + 1}" + (f"/{num_steps}" if num_steps is not None else ""),
        f"loss {record.loss:.4g}",
        f"{si(amount / seconds)} {unit}/s",
    ]
    if num_steps is not None:
        parts.append(f"left {clock(seconds * (num_steps - record.step - 1))}")
    total = sum(record.counts)
    idle = [i / record.seconds if record.seconds else 0.0 for i in record.idle_seconds]
    if len(names) <= _SHOWN_DEVICES:
        for name, count, share in zip(names, record.counts, idle, strict=True):
            parts.append(f"{name} {count}/{total} idle {share:.0%}")
    else:
        worst = max(range(len(idle)), key=idle.__getitem__)
        parts.append(
            f"{len(names)} devices {min(record.counts)} to {max(record.counts)} of {total}, "
            f"worst idle {names[worst]} {idle[worst]:.0%}"
        )
    return "  ".join(parts)


class Progress:
    """Shows the progress of a run.

    On a terminal, a line that is painted over; under `hxla run`, the same line for the launcher to
    paint; into a file or pipe, a plain line every few seconds.

    Args:
        num_steps: Of the run; None if not known.
        device_names: In the order of counts.
        start_step: The first step of this call.
    """

    def __init__(
        self,
        num_steps: int | None,
        device_names: tuple[str, ...],
        start_step: int = 0,
        stream: TextIO | None = None,
    ):
        self._num_steps, self._names = num_steps, device_names
        self._stream = stream or sys.stdout
        self._recent: collections.deque[float] = collections.deque(maxlen=_WINDOW_STEPS)
        self._written = 0.0
        self._start = start_step
        self._live: Live | None = None
        if self._stream.isatty():
            self._live = Live(console=Console(file=self._stream), refresh_per_second=4)
            self._live.start()
        self._piped = not self._live and stream is None and bool(os.environ.get("HXLA_LIVE"))

    def update(self, record: StepRecord) -> None:
        """Show a step."""
        self._recent.append(record.seconds)
        seconds = max(sorted(self._recent)[len(self._recent) // 2], 1e-9)
        text = line(record, self._num_steps, self._names, seconds)
        if self._live is not None:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))
            return
        now = time.monotonic()
        last = record.step + 1 == self._num_steps
        pause = 0.5 if self._piped else 5.0
        if now - self._written < pause and not last and record.step != self._start:
            return
        self._written = now
        print(text, end="\r" if self._piped and not last else "\n", file=self._stream, flush=True)

    def log(self, message: str) -> None:
        """Print an ordinary line above the live one."""
        if self._live is not None:
            self._live.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        """Release the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
