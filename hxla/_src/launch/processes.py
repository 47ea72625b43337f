"""The processes of a job: started together, watched, ended together; and which failed first."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.errors import HxlaError
from ..core.types import EXIT_PREEMPTED, EXIT_WATCHDOG
from .cleanup import start_janitor
from .output import Forwarder, Logs, Output
from .process_group import end_group
from .status_page import BOARD_VARIABLE, ENDED, LOGS_VARIABLE, Post, new_board
from .throttle import Cgroup, Throttle, make_throttle, own_cores, pack

#: Phases in which a process waits for all others.
WAITING_PHASES = frozenset({"reduce", "evaluation's sum", "checkpoint", "finishing"})
_PHASES = ("data", "microbatches", "reduce", "update")  # of a step, in their order

# How long others may take to show that they failed first: a signal's news and an error's travel by
# different ways.
_SETTLE_SECONDS = 0.25
_VICTIM_SETTLE_SECONDS = 1.0
_WAITING_SECONDS = 2.0  # for a process that has left, until it is missed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """What is known of a rank.

    Attributes:
        rank: Which one.
        post: What it said last.
        code: Its exit code, negative for a signal; None while it lives.
    """

    rank: int
    post: Post
    code: int | None = None
    ended_at: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it makes no further calls."""
        return self.post.has_ended or self.code == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who ended a job, and how.

    Attributes:
        reason: How it failed and where, in words.
        code: The exit code of the job.
        can_leave: Whether the others may be able to end by themselves.
    """

    rank: int
    reason: str
    code: int
    can_leave: bool = True


def judge(standings: Sequence[Standing], now: float) -> Verdict | None:
    """The rank that failed first; None while none has, or while another may still turn out to be.

    Args:
        now: By `time.monotonic`.
    """
    found = [e for s in standings if (e := _evidence(s, standings, now)) is not None]
    if not found:
        return None
    weight = min(evidence.weight for evidence in found)
    first = min(evidence.at for evidence in found)
    settle = {_VICTIM: _VICTIM_SETTLE_SECONDS, _JUDGED: 0.0}.get(weight, _SETTLE_SECONDS)
    if now - first < settle:
        return None
    heaviest = [evidence for evidence in found if evidence.weight == weight]
    return min(heaviest, key=lambda evidence: (evidence.at, evidence.verdict.rank)).verdict


# What a kind of end says, from sure to doubtful.
_KILLED, _OWN, _LEFT, _JUDGED, _ABORTED, _VICTIM = range(6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Evidence:
    weight: int
    at: float
    verdict: Verdict


def _evidence(s: Standing, standings: Sequence[Standing], now: float) -> _Evidence | None:
    post, code = s.post, s.code

    def of(weight: int, at: float, reason: str, exit_code: int) -> _Evidence:
        verdict = Verdict(rank=s.rank, reason=f"{reason} {post.where}", code=exit_code)
        return _Evidence(weight=weight, at=at, verdict=verdict)

    if post.state == "judged" and post.blamed is not None:
        blamed = next(other.post for other in standings if other.rank == post.blamed)
        verdict = Verdict(
            rank=post.blamed,
            reason=f"{post.note}; it is {blamed.where}",
            code=EXIT_WATCHDOG,
            can_leave=False,
        )
        return _Evidence(weight=_JUDGED, at=post.moved_at, verdict=verdict)
    if post.state == "failed":
        return of(_OWN, post.moved_at, f"failed ({post.note})", post.exit_code or 1)
    if post.state == "victim":
        return of(_VICTIM, post.moved_at, f"lost the others ({post.note})", 1)
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        weight = _ABORTED if -code == signal.SIGABRT else _KILLED
        return of(weight, s.ended_at, f"was killed by {name}", 128 - code)
    if code not in (None, 0, EXIT_PREEMPTED) and post.state != "preempted":
        assert code is not None
        return of(_OWN, s.ended_at, f"exited with code {code}", code)
    is_gone = s.is_over or post.state == "left" or post.left_session
    if is_gone and _is_missed(s, standings, now):
        at = s.ended_at if code == 0 else post.moved_at
        if post.state == "finished":
            verdict = Verdict(rank=s.rank, reason=ENDED, code=EXIT_WATCHDOG)
            return _Evidence(weight=_LEFT, at=at, verdict=verdict)
        how = post.note or "exited with code 0"
        return of(_LEFT, at, f"left the job by itself ({how})", EXIT_WATCHDOG)
    return None


def _is_missed(gone: Standing, standings: Iterable[Standing], now: float) -> bool:
    """Whether another rank has come to where it needs the one that has left, or died of that."""
    has_failed = gone.code == 0 and gone.post.state != "finished"
    if has_failed and any(
        other.post.state == "victim" or other.code == -signal.SIGABRT for other in standings
    ):
        return True
    return any(
        other.post.state in ("running", "victim")
        and other.code is None
        and _needs(other.post, gone, now)
        for other in standings
    )


def _needs(waiting: Post, other: Standing, now: float) -> bool:
    """Whether a process at one place needs another that left at another place."""
    gone = other.post
    waits = waiting.phase in WAITING_PHASES
    waits = waits and now - max(waiting.moved_at, gone.moved_at) > _WAITING_SECONDS
    if waiting.session > gone.session:  # both have left a session: only one may open the next
        return other.is_over
    if waiting.session < gone.session:
        return waits and gone.left_session == waiting.session
    if gone.state == "finished" or (gone.state == "running" and not other.is_over):
        return False  # it is an earlier session that it left
    if waiting.phase in WAITING_PHASES:  # it may also be about to come to where the other left
        return waits and _place(waiting) >= _place(gone)
    if gone.phase == "script":
        return _place(waiting) > _place(gone)
    return waiting.step > gone.step


def _place(post: Post) -> tuple[int, int]:
    if post.phase == "script":  # before any session
        return post.step, -1
    return post.step, _PHASES.index(post.phase) if post.phase in _PHASES else len(_PHASES)


_POLL_SECONDS = 0.05
_HOPELESS_SECONDS = 0.5  # from SIGTERM to SIGKILL where no process can end by itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A process to start.

    Attributes:
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
        command: Arguments of the Python interpreter.
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
