"""Where hxla says what it does: the logger `hxla`, and one live line on a terminal.

Records go to standard error, where a terminal also has a live line below them. The launcher of
several processes paints the live line of rank 0 on its terminal. In a program that has configured
logging at level INFO they go to the handlers of its root logger instead. (A root at level WARNING
means nothing: absl makes one.)

The progress of a run is a line for its steps, and one for a long silence.
"""

import collections
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..core.format import clock, number, si
from ..launch.output import LIVE_VARIABLE, SAID, terminal_columns
from .history import StepRecord, scalars

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


#: A live line is repainted at least every two seconds, even on a busy machine.
PERIOD_SECONDS = 1.5
#: A plain line about what a process waits for comes at most so often.
CHANGE_SECONDS = 30.0


class Waiting:
    """Says what the process waits for, from a thread.

    On a terminal it is a live line with the seconds so far. Elsewhere it is a record of the logger
    when something else is waited for. A wait shorter than one period says nothing.

    Args:
        is_main: Whether this process says anything.
    """

    def __init__(
        self,
        prefix: str,
        *,
        is_main: bool,
        period_seconds: float | None = None,
    ):
        self._prefix, self._what = prefix, "starting"
        self._period = PERIOD_SECONDS if period_seconds is None else period_seconds
        self._change = CHANGE_SECONDS
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
        """Say nothing more."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        said, said_at = "", -self._change
        while not self._is_over.wait(self._period):
            now = time.monotonic() - self._began
            text = f"{self._prefix}: {self._what}"
            if TERMINAL.can_paint:
                TERMINAL.paint(f"{text}, {now:.0f} s")
            elif text != said and now - said_at >= self._change:
                said, said_at = text, now
                LOGGER.info("%s, %.0f s", text, now)
        TERMINAL.clear()


_SHOWN_DEVICES = 6
_SHOWN_METRICS = 4
_WINDOW_STEPS = 10
_LINE_SECONDS = 10.0  # between plain lines


def line(record: StepRecord, num_steps: int | None, names: tuple[str, ...], seconds: float) -> str:
    """The line of a step.

    Args:
        num_steps: Of the run; None if not known.
    """
    amount, unit = record.num_examples, "examples"
    if record.num_tokens:
        amount, unit = record.num_tokens, "tokens"
    parts = [f"step {record.step}" + (f"/{num_steps}" if num_steps is not None else "")]
    if record.epoch is not None:
        parts.append(f"epoch {record.epoch:.2f}")
    parts.append(f"loss {number(record.loss)}")
    metrics = list(scalars(record.metrics).items())
    parts += [f"{name} {number(value)}" for name, value in metrics[:_SHOWN_METRICS]]
    if record.learning_rate is not None:
        parts.append(f"lr {record.learning_rate:.3g}")
    parts.append(f"{si(amount / seconds)} {unit}/s")
    if num_steps is not None:
        parts.append(f"left {clock(seconds * (num_steps - record.step))}")
    total = sum(record.counts)
    idle = [i / record.seconds if record.seconds else 0.0 for i in record.idle_seconds]
    if 1 < len(names) <= _SHOWN_DEVICES:
        for name, count, share in zip(names, record.counts, idle, strict=True):
            parts.append(f"{name} {count}/{total} idle {share:.0%}")
    elif len(names) > 1:
        worst = max(range(len(idle)), key=idle.__getitem__)
        parts.append(
            f"{len(names)} replicas {min(record.counts)} to {max(record.counts)} of {total}, "
            f"worst idle {names[worst]} {idle[worst]:.0%}"
        )
    return "  ".join(parts)


class Progress:
    """Shows the steps of a run: a live line on a terminal, and records of the logger.

    Args:
        num_steps: Of the run; None if not known.
        replica_names: In the order of counts.
        log_every: The number of steps between records; None for one every few seconds where there
            is no live line.
    """

    def __init__(
        self, num_steps: int | None, replica_names: tuple[str, ...], *, log_every: int | None
    ):
        self._num_steps, self._names, self._log_every = num_steps, replica_names, log_every
        self._recent: collections.deque[float] = collections.deque(maxlen=_WINDOW_STEPS)
        self._said_at = -math.inf

    def update(self, record: StepRecord) -> None:
        """Show a step."""
        self._recent.append(record.seconds)
        seconds = max(sorted(self._recent)[len(self._recent) // 2], 1e-9)
        text = line(record, self._num_steps, self._names, seconds)
        TERMINAL.paint(text)
        if self._is_due(record.step):
            self._said_at = time.monotonic()
            LOGGER.info("%s", text)

    def _is_due(self, step: int) -> bool:
        if step == self._num_steps:
            return True
        if self._log_every is not None:
            return step % self._log_every == 0
        is_late = time.monotonic() - self._said_at >= _LINE_SECONDS
        return is_late and not TERMINAL.can_paint

    def close(self) -> None:
        """Release the terminal."""
        TERMINAL.clear()
