"""The end of a run, by the first failed rank or by the user, and its exit code."""

import contextlib
import dataclasses
import math
import queue
import signal
from collections.abc import Iterable, Sequence

from ..core.types import EXIT_PREEMPTED, EXIT_WATCHDOG
from .channel import ENDED, Standing, Status

#: Phases in which a process waits for all others.
WAITING_PHASES = frozenset({"reduce", "evaluation's sum", "checkpoint", "finishing"})
_PHASES = ("data", "microbatches", "reduce", "update")  # of a step, in their order

# Time for other ranks to show that they failed first, as signals and errors arrive differently.
_SETTLE_SECONDS = 0.25
_VICTIM_SETTLE_SECONDS = 1.0
_WAITING_SECONDS = 2.0  # until a process that has left counts as missed
HOPELESS_SECONDS = 0.5  # from SIGTERM to SIGKILL if no process can end by itself


# Kinds of end, from sure to doubtful evidence.
_KILLED, _OWN, _LEFT, _JUDGED, _ABORTED, _VICTIM = range(6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rank that ended a job, and the reason.

    Attributes:
        reason: How and where the rank failed, in words.
        code: The exit code of the job.
        weight: Doubt about the verdict; the least doubtful verdict counts.
        at: Time of the failure, by `time.monotonic`.
        can_leave: Whether other ranks may be able to end by themselves.
    """

    rank: int
    reason: str
    code: int
    weight: int = _OWN
    at: float = 0.0
    can_leave: bool = True


def judge(standings: Sequence[Standing], now: float) -> Verdict | None:
    """The rank that failed first; None without a failure, or until it is certain.

    Args:
        now: By `time.monotonic`.
    """
    verdicts = [v for s in standings if (v := _verdict(s, standings, now)) is not None]
    if not verdicts:
        return None
    weight = min(verdict.weight for verdict in verdicts)
    first = min(verdict.at for verdict in verdicts)
    settle = {_VICTIM: _VICTIM_SETTLE_SECONDS, _JUDGED: 0.0}.get(weight, _SETTLE_SECONDS)
    if now - first < settle:
        return None
    surest = [verdict for verdict in verdicts if verdict.weight == weight]
    return min(surest, key=lambda verdict: (verdict.at, verdict.rank))


def _verdict(s: Standing, standings: Sequence[Standing], now: float) -> Verdict | None:
    """The verdict on one rank, without regard to others' failures."""
    status, code = s.status, s.code

    def of(weight: int, at: float, reason: str, exit_code: int) -> Verdict:
        reason = f"{reason} {status.where}"
        return Verdict(rank=s.rank, reason=reason, code=exit_code, weight=weight, at=at)

    if status.state == "judged" and status.blamed is not None:
        blamed = next(other.status for other in standings if other.rank == status.blamed)
        return Verdict(
            rank=status.blamed,
            reason=f"{status.note}; it is {blamed.where}",
            code=EXIT_WATCHDOG,
            weight=_JUDGED,
            at=status.moved_at,
            can_leave=False,
        )
    if status.state == "failed":
        kind = status.note.partition(": ")[0]  # the rank has printed its message
        return of(_OWN, status.moved_at, f"failed ({kind})", status.exit_code or 1)
    if status.state == "victim":
        return of(_VICTIM, status.moved_at, f"lost the others ({status.note})", 1)
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        weight = _ABORTED if -code == signal.SIGABRT else _KILLED
        return of(weight, s.ended_at, f"was killed by {name}", 128 - code)
    if code not in (None, 0, EXIT_PREEMPTED) and status.state != "preempted":
        assert code is not None
        return of(_OWN, s.ended_at, f"exited with code {code}", code)
    is_gone = s.is_over or status.state == "left" or status.left_session
    if is_gone and _is_missed(s, standings, now):
        at = s.ended_at if code == 0 else status.moved_at
        how = f"left the job by itself ({status.note or 'exited with code 0'}) {status.where}"
        reason = ENDED if status.state == "finished" else how
        return Verdict(rank=s.rank, reason=reason, code=EXIT_WATCHDOG, weight=_LEFT, at=at)
    return None


def _is_missed(gone: Standing, standings: Iterable[Standing], now: float) -> bool:
    """Whether another rank needs the one that has left, or failed without it."""
    has_failed = gone.code == 0 and gone.status.state != "finished"
    if has_failed and any(
        other.status.state == "victim" or other.code == -signal.SIGABRT for other in standings
    ):
        return True
    return any(
        other.status.state in ("running", "victim")
        and other.code is None
        and _needs(other.status, gone, now)
        for other in standings
    )


def _needs(waiting: Status, other: Standing, now: float) -> bool:
    """Whether a waiting process needs another that has left."""
    gone = other.status
    waits = waiting.phase in WAITING_PHASES
    waits = waits and now - max(waiting.moved_at, gone.moved_at) > _WAITING_SECONDS
    if waiting.session > gone.session:  # a later session needs every rank
        return other.is_over
    if waiting.session < gone.session:
        return waits and gone.left_session == waiting.session
    if gone.state == "finished" or (gone.state == "running" and not other.is_over):
        return False  # it left an earlier session
    if waiting.phase in WAITING_PHASES:  # it may not yet have reached the place of the other
        return waits and _place(waiting) >= _place(gone)
    if gone.phase == "script":
        return _place(waiting) > _place(gone)
    return waiting.step > gone.step


def _place(status: Status) -> tuple[int, int]:
    if status.phase == "script":  # before any session
        return status.step, -1
    return status.step, _PHASES.index(status.phase) if status.phase in _PHASES else len(_PHASES)


def costs_generation_only(status: Status, code: int) -> bool:
    """Whether a member ended for a reason that the next generation does not share."""
    of_others = status.state in ("victim", "judged", "preempted", "left")
    is_own_error = status.state == "failed" or (code > 0 and not of_others)
    return code in (EXIT_PREEMPTED, EXIT_WATCHDOG) or (code != 0 and not is_own_error)


class Wakeup:
    """Wakes a loop that waits, from another thread or from a signal handler.

    `threading.Event` takes a lock that the interrupted code may have already, and then waits for
    ever. `queue.SimpleQueue.put` may interrupt itself.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake the loop now, or when it waits next."""
        self._calls.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for `set`, at most so long."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=seconds)
            while True:
                self._calls.get_nowait()


class RunEnding:
    """The reason why a run ends: a signal of the user, or a failed rank.

    Args:
        grace_seconds: From SIGTERM to SIGKILL.

    Attributes:
        asked: The user's signal; None without one.
        is_unread: Whether the output has no reader any more.
        verdict: The rank that failed first; None without one.
        codes: Exit codes of ranks, which show whether all have saved their state.
    """

    def __init__(self, grace_seconds: float):
        self.grace_seconds = grace_seconds
        self.asked: int | None = None
        self.num_interrupts = 0
        self.is_unread = False
        self.verdict: Verdict | None = None
        self.codes = set[int]()
        self._asked_at = 0.0
        self._num_asked = 0
        self._kill_at = math.inf

    @property
    def is_near(self) -> bool:
        """Whether the run is ending."""
        return self.asked is not None or self.verdict is not None

    def ask(self, number: int, now: float) -> None:
        """End the run by a signal."""
        if self.asked is None:
            self.asked, self._asked_at = number, now
        self._num_asked += 1
        self.num_interrupts += number == signal.SIGINT

    def follow(self, now: float) -> None:
        """End the run by a SIGTERM to one of the ranks, which all leave together."""
        self.asked, self._asked_at = signal.SIGTERM, now

    def fail(self, verdict: Verdict, grace_seconds: float, now: float) -> None:
        """End the run by a failed rank."""
        self.verdict, self._kill_at = verdict, now + grace_seconds

    def patience_until(self, status: Status) -> float:
        """The deadline for a rank to end, which is later if it finishes and saves a step."""
        if self.verdict is not None:
            return self._kill_at
        if self.asked is None:
            return math.inf
        since, extra = self._asked_at, 0.0
        works = status.state == "running" and self._num_asked < 2
        if works and self.asked in (signal.SIGTERM, signal.SIGINT):
            since = max(since, status.moved_at)
            if status.phase == "checkpoint":
                return math.inf  # the watchdog detects a stuck checkpoint
            extra = 2 * status.step_seconds
        return since + self.grace_seconds + extra

    def outcome(self, num_steps: int, saved_step: int) -> tuple[int, str] | None:
        """The exit code and message of a run that its user ended; None if it had ended before.

        The code is 75 if all steps are in a checkpoint.

        Args:
            saved_step: The step of the newest known checkpoint.
        """
        if self.asked is None or (self.codes and not any(self.codes)):
            return None
        is_saved = EXIT_PREEMPTED in self.codes
        if not self.codes:  # no rank trained
            is_saved = 0 < num_steps <= saved_step
        how = f"ended after {num_steps} steps" if num_steps else "ended before the first step"
        if self.is_unread:
            code, why = 128 + signal.SIGPIPE, "nobody reads the output any more"
        else:
            code = EXIT_PREEMPTED if is_saved else 128 + self.asked
            why = "Ctrl-C" if self.asked == signal.SIGINT else signal.Signals(self.asked).name
        if is_saved:
            return code, f"{why}: {how}; run again to resume from a checkpoint"
        if self.asked == signal.SIGINT:
            return code, how.replace("ended", "interrupted")
        return code, f"{why}: {how}"
