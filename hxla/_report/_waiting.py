"""What a long silence is spent on: a line every so often, until there are steps to show."""

import os
import sys
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

#: Lines come at least every two seconds, also where the machine is busy.
PERIOD_SECONDS = 1.5


class Waiting:
    """Says what is being waited for, every so often, from a thread of its own.

    On a terminal it is a line that is painted over and vanishes; under `hxla run`, the same line
    for the launcher to paint; into a file or pipe, a plain line. What is over before the first line
    is due prints nothing.

    Args:
        prefix: What all lines begin with.
        is_main: Whether this process tells anybody.
        stream: Default: standard output.
        period_seconds: Between two lines.
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
        """Say from now on that this is being waited for."""
        self._what = what

    def close(self) -> None:
        """Say nothing more."""
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
