"""Where hxla says what it does: the logger `hxla`, and one live line on a terminal.

Records go to standard error, where a terminal also has a live line below them. The launcher of
several processes paints the live line of rank 0 on its terminal. In a program that has configured
logging at level INFO they go to the handlers of its root logger instead. (A root at level WARNING
means nothing: absl makes one.)
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..launch.output import LIVE_VARIABLE, SAID, terminal_columns

LOGGER = logging.getLogger("hxla")
_PAUSE_SECONDS = 0.5  # between live lines for a launcher


class Terminal(logging.Handler):
    """Writes records to standard error, and on a terminal a live line below them."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._painted = 0.0

    @property
    def can_paint(self) -> bool:
        """Whether somebody sees a live line."""
        return bool(_columns()) and LOGGER.isEnabledFor(logging.INFO) and not _root_listens()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or hand it to the root logger's handlers."""
        try:
            if not _root_listens():
                self._write(self.format(record))
            elif not LOGGER.propagate:
                logging.root.callHandlers(record)
        except Exception:
            self.handleError(record)

    def _write(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if _is_launched():
            text = "\n".join(SAID.decode() + line for line in text.split("\n"))
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def paint(self, text: str) -> None:
        """Replace the live line."""
        if not self.can_paint:
            return
        with self._locked():
            if _is_launched():
                now = time.monotonic()
                if now - self._painted >= _PAUSE_SECONDS:
                    self._painted = now
                    width = _columns() - 1
                    shown = text if len(text) <= width else text[: max(width - 3, 0)] + "..."
                    sys.stderr.write(f"{SAID.decode()}{shown}\r")
                    sys.stderr.flush()
                return
            if self._live is None:
                # What a script prints belongs above the line, but into a file where it is one.
                self._live = Live(
                    console=Console(stderr=True),
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),
                )
                self._live.start()
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))

    def clear(self) -> None:
        """Remove the live line and release the terminal."""
        with self._locked():
            if self._live is not None:
                self._live.stop()
                self._live = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


TERMINAL = Terminal()
LOGGER.addHandler(TERMINAL)
LOGGER.propagate = False
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)


@contextlib.contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """Say warnings only."""
    before = LOGGER.level
    if quiet:
        LOGGER.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        LOGGER.setLevel(before)


def print_result(text: str) -> None:
    """Print what a command is for on standard output, without the rank that a launcher adds."""
    print((SAID.decode() if _is_launched() else "") + text, flush=True)


def _root_listens() -> bool:
    return bool(logging.root.handlers) and logging.root.isEnabledFor(logging.INFO)


def _is_launched() -> bool:
    return LIVE_VARIABLE in os.environ


def _columns() -> int:
    """The width of the terminal that shows standard error; 0 where there is none."""
    return int(os.environ[LIVE_VARIABLE]) if _is_launched() else terminal_columns()
