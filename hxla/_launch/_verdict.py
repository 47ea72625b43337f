"""Which process of a job failed first, and which ones only because of it."""

import dataclasses
import signal
from collections.abc import Iterable, Sequence

from .._core._types import EXIT_PREEMPTED, EXIT_WATCHDOG
from ._board import ENDED, Post

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
        ended_at: When that was seen.
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
        rank: The culprit.
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
        standings: Of all ranks.
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
