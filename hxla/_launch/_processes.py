"""The processes of a job: started together, watched, and ended together."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from .._core._errors import HxlaError
from .._core._types import EXIT_PREEMPTED
from ._board import BOARD_VARIABLE, LOGS_VARIABLE, Post, new_board
from ._janitor import start_janitor
from ._output import Forwarder, Logs, Output
from ._process_group import end_group
from ._throttle import Cgroup, Throttle, make_throttle, own_cores, pack
from ._verdict import Standing, Verdict, judge

_POLL_SECONDS = 0.05
_HOPELESS_SECONDS = 0.5  # from SIGTERM to SIGKILL where no process can end by itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A process to start.

    Attributes:
        env: Its environment variables.
        core_share: The share of a core that it is held to, or None.
    """

    env: Mapping[str, str]
    core_share: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Child:
    process: subprocess.Popen[bytes]
    forwarders: tuple[Forwarder, ...]  # of standard output and error
    throttle: Throttle | None


class Processes:
    """The processes of a job, from their start until `wait` returns.

    Args:
        starts: One for each rank.
        command: Arguments of the Python interpreter.
        grace_seconds: From SIGTERM to SIGKILL.
        reread_shares: The shares of the cores anew, on SIGUSR1; None: they never change.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        command: Sequence[str],
        *,
        grace_seconds: float,
        reread_shares: Callable[[], Sequence[float | None]] | None,
    ):
        self._command, self._grace = command, grace_seconds
        self._reread_shares = reread_shares
        self._signals: list[int] = []
        self._wake = threading.Event()
        self._asked: int | None = None  # the signal by which the user ends the job
        self._asked_at = 0.0
        self._num_asked = self._num_interrupts = 0
        self._is_unread = False
        self._lost_output = ""
        self._ended: dict[int, tuple[int, float]] = {}  # exit codes, and when they were seen
        self._verdict: Verdict | None = None
        self._kill_at = float("inf")
        self._logs = Logs()
        self._board, path = new_board(len(starts))
        own = {BOARD_VARIABLE: path, LOGS_VARIABLE: str(self._logs.folder)}
        lock = threading.Lock()
        self._out = Output(sys.stdout.buffer, lock, self._stop_unread)
        self._err = Output(sys.stderr.buffer, lock, lambda _: None)
        shares = [start.core_share for start in starts if start.core_share is not None]
        packed = iter(pack(shares, own_cores())) if shares else iter(())
        self._janitor = start_janitor()
        self._children: list[_Child] = []
        self._before = self._handle_signals()
        try:
            for rank, start in enumerate(starts):
                core = next(packed) if start.core_share is not None else None
                self._start(rank, start, core, own)
        except BaseException:
            self._kill_all()
            self._tidy()
            raise

    def _start(self, rank: int, start: Start, core: int | None, own: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, *self._command],
            env={**start.env, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._janitor.write(f"{process.pid}\n".encode())
        throttle = None
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        if start.core_share is not None:
            throttle, how = make_throttle(process.pid, rank, start.core_share)
            if isinstance(throttle, Cgroup):
                self._janitor.write(f"{throttle.folder}\n".encode())
            self._say(f"rank {rank} has {start.core_share:g} of core {core}, by {how}")
        assert process.stdout is not None
        assert process.stderr is not None
        forwarders = (
            Forwarder(rank, process.stdout, self._out, None),
            Forwarder(rank, process.stderr, self._err, self._logs),
        )
        self._children.append(_Child(process=process, forwarders=forwarders, throttle=throttle))

    def _say(self, text: str) -> None:
        self._err.write(f"hxla: {text}\n".encode())

    # -- signals -----------------------------------------------------------------------------

    def _handle_signals(self) -> dict[int, object]:
        if threading.current_thread() is not threading.main_thread():
            return {}

        def handle(number: int, frame: object) -> None:
            self._signals.append(number)
            self._wake.set()

        passed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        return {number: signal.signal(number, handle) for number in passed}

    def _serve_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGUSR1:
                self._change_shares()
                continue
            self._num_asked += 1
            if self._asked is None:
                self._asked, self._asked_at = number, time.monotonic()
            if number == signal.SIGINT:
                self._num_interrupts += 1
                for child in self._children:  # all of them say that they were interrupted
                    child.forwarders[1].quieten()
            self._send(signal.SIGKILL if self._num_interrupts > 1 else number)

    def _stop_unread(self, error: Exception) -> None:
        """Standard output was closed, by `head` perhaps: the job ends as by SIGTERM.

        One that is full, or gone for another reason, is worth a line and no job.
        """
        if not isinstance(error, BrokenPipeError):
            self._lost_output = str(error)
            return
        self._is_unread = True
        self._signals.append(signal.SIGTERM)
        self._wake.set()

    def _tell_of_lost_output(self) -> None:
        if self._lost_output:
            self._say(f"the output is lost from here on: {self._lost_output}")
            self._lost_output = ""

    def _change_shares(self) -> None:
        if self._reread_shares is None:
            return
        try:
            shares = self._reread_shares()
            for child, share in zip(self._children, shares, strict=True):
                if child.throttle is not None and share is not None:
                    child.throttle.set_share(share)
        except (HxlaError, OSError) as error:
            self._say(f"shares stay as they are: {error}")
            return
        self._say(f"core shares are now {list(shares)}")

    def _send(self, number: int) -> None:
        for rank in range(len(self._children)):
            self._send_to(rank, number)

    def _send_to(self, rank: int, number: int) -> None:
        child = self._children[rank]
        if child.process.poll() is None and number == signal.SIGKILL:
            end_group(child.process.pid)
        elif child.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)
                os.killpg(child.process.pid, signal.SIGCONT)

    # -- the end -----------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait for all; end all when one fails, or when the user asks.

        Returns:
            The exit code of the job.
        """
        try:
            while len(self._ended) < len(self._children):
                self._wake.wait(_POLL_SECONDS)
                self._wake.clear()
                self._serve_signals()
                self._tell_of_lost_output()
                self._reap()
                now = time.monotonic()
                if self._verdict is None:
                    self._judge(now)
                self._escalate(now)
                for child in self._children:
                    child.forwarders[1].release(now)
        finally:
            self._kill_all()
            if self._verdict is None:
                self._judge(float("inf"))  # before anything that was held is shown
            for child in self._children:
                for forwarder in child.forwarders:
                    forwarder.join(2.0, shows_held=self._asked is None)
            self._tidy()
        self._tell_of_lost_output()
        return self._conclude()

    def _reap(self) -> None:
        for rank, child in enumerate(self._children):
            code = child.process.poll()
            if code is not None and rank not in self._ended:
                self._ended[rank] = code, time.monotonic()

    def _judge(self, now: float) -> None:
        """Find the rank that failed first, if any has, and end the others."""
        posts = self._board.posts()
        if self._asked is None and any(
            code == EXIT_PREEMPTED or posts.get(rank, Post()).state == "preempted"
            for rank, (code, _) in self._ended.items()
        ):
            # SIGTERM to one rank: all of them are about to leave together.
            self._asked, self._asked_at = signal.SIGTERM, now
        if self._num_interrupts:
            return
        standings = []
        for rank in range(len(self._children)):
            code, ended_at = self._ended.get(rank, (None, 0.0))
            post = posts.get(rank, Post())
            # Once asked to end, a process may die of the signal; an error is still one.
            if self._asked is None or post.state == "failed":
                standings.append(Standing(rank=rank, post=post, code=code, ended_at=ended_at))
        self._verdict = judge(standings, now)
        if self._verdict is None:
            return
        self._say(f"rank {self._verdict.rank} {self._verdict.reason}; ending the job")
        for rank, child in enumerate(self._children):
            # One that stood still has nothing to say of it either.
            if rank != self._verdict.rank or not self._verdict.can_leave:
                child.forwarders[1].quieten()
        self._send(signal.SIGTERM)
        self._kill_at = now + (self._grace if self._verdict.can_leave else _HOPELESS_SECONDS)

    def _escalate(self, now: float) -> None:
        """SIGKILL for those who do not end."""
        if self._verdict is not None:
            if now > self._kill_at:
                self._send(signal.SIGKILL)
            return
        if self._asked is None:
            return
        posts = self._board.posts()
        for rank, child in enumerate(self._children):
            if child.process.poll() is None and now > self._end_of_patience(posts.get(rank)):
                where = posts.get(rank, Post()).where
                self._say(f"rank {rank} did not end within {self._grace:g} s, {where}: killed")
                self._send_to(rank, signal.SIGKILL)
                child.process.wait()

    def _end_of_patience(self, post: Post | None) -> float:
        """Until when a process may take to end: longer where it finishes a step and saves it."""
        since, extra = self._asked_at, 0.0
        works = post is not None and post.state == "running" and self._num_asked < 2
        if post is not None and works and self._asked in (signal.SIGTERM, signal.SIGINT):
            since = max(since, post.moved_at)
            if post.phase == "checkpoint":
                return float("inf")  # the watchdog sees whether it stands still
            extra = 2 * post.step_seconds
        return since + self._grace + extra

    def _conclude(self) -> int:
        """Say how the job ended and where the rest is; returns the exit code."""
        codes = {code for code, _ in self._ended.values()}
        code = 0
        if self._verdict is not None:
            code = self._verdict.code
        elif self._asked is not None and any(codes):
            code = self._conclude_asked(codes)
        if self._logs.said:
            self._say(f"what the processes said besides is in {self._logs.folder}")
        return code

    def _conclude_asked(self, codes: set[int]) -> int:
        assert self._asked is not None
        step = max((post.step for post in self._board.posts().values()), default=-1)
        where = f"after {step + 1} steps" if step >= 0 else "before the first step"
        name = "Ctrl-C" if self._asked == signal.SIGINT else "SIGTERM"
        why = "nobody reads the output any more" if self._is_unread else name
        if EXIT_PREEMPTED in codes:
            self._say(f"{why}: all ranks left {where}; run again to resume from a checkpoint")
        elif self._asked == signal.SIGINT:
            self._say(f"interrupted {where}")
        else:
            why = why if self._is_unread else signal.Signals(self._asked).name
            self._say(f"{why}: ended {where}")
        if self._is_unread:
            return 128 + signal.SIGPIPE
        return EXIT_PREEMPTED if EXIT_PREEMPTED in codes else 128 + self._asked

    def _kill_all(self) -> None:
        for child in self._children:
            end_group(child.process.pid)  # grandchildren too
            child.process.wait()

    def _tidy(self) -> None:
        for child in self._children:
            if child.throttle is not None:
                child.throttle.close()
        with contextlib.suppress(OSError):
            self._janitor.write(b"done\n")
            self._janitor.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
