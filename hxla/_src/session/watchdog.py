"""Ends a job in which a process is dead, frozen or stuck, and names this process.

Each process publishes its status and reads those of the others: on the launcher's channel, or
without a launcher through the coordination service. The service is in process 0, so a second thread
watches whether it still answers.
"""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import ClassVar

import jax

from ..core.config import WatchdogConfig
from ..core.types import EXIT_PREEMPTED, EXIT_WATCHDOG
from ..launch.channel import ENDED, RankStatuses, Status, own_channel, own_member
from ..launch.ending import WAITING_PHASES
from ..launch.join import ServiceStatuses
from ..launch.output import last_words
from .ending import Preempted

_INTERVAL_SECONDS = 0.5  # between beats
_CHANNEL_SECONDS = 0.25  # between beats on a channel, which cost nothing


class Watchdog:
    """Publishes the status of this process, and watches all processes of the job.

    Args:
        num_processes: Of the job; a single process publishes its status to a launcher only.
    """

    _last: ClassVar[Status] = Status()  # of this process's sessions

    def __init__(self, *, rank: int, num_processes: int, settings: WatchdogConfig):
        self._rank = rank
        self._heartbeat = settings.heartbeat_timeout_seconds
        # In an elastic run the authority judges silence, after the others have left their state.
        self._judges_silence = own_member() is None
        self._progress = settings.progress_timeout_seconds
        self._channel = own_channel()
        self._statuses: RankStatuses | None = self._channel
        if self._channel is None and num_processes > 1:
            self._statuses = ServiceStatuses()
        self._interval = _INTERVAL_SECONDS if self._channel is None else _CHANNEL_SECONDS
        self._change = threading.Lock()  # of the status, which two threads write
        before = Watchdog._last
        self._status = Status(
            state="running",
            note=before.note,
            moved_at=time.monotonic(),
            session=before.session + 1,
            left_session=before.left_session,
        )
        self._step_began = time.monotonic()
        self._end = threading.Event()
        self._answered = time.monotonic()
        self._seen: dict[int, Status] = {}
        self._moved: dict[int, float] = {}
        self._beat_at: dict[int, float] = {}
        targets: list[Callable[[], None]] = [] if self._statuses is None else [self._exchange]
        if num_processes > 1:
            targets.append(self._watch)
        self._threads = [
            threading.Thread(target=target, daemon=True, name="hxla-watchdog") for target in targets
        ]

    @classmethod
    def of_job(cls, settings: WatchdogConfig) -> "Watchdog":
        """The watchdog of this process in the job that it has joined."""
        rank, num = jax.process_index(), jax.process_count()
        return cls(rank=rank, num_processes=num, settings=settings)

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._status.state == "running":
            self._update(state="finished")
            self._publish()
        Watchdog._last = self._status

    def beat(self, step: int, phase: str) -> None:
        """Update the status of this process."""
        seconds = self._status.step_seconds
        if phase == "data":  # the first phase of a step
            now = time.monotonic()
            seconds = now - self._step_began if step else 0.0
            self._step_began = now
        self._update(step=step, phase=phase, step_seconds=seconds)
        if self._channel is not None:
            self._publish()

    @contextlib.contextmanager
    def phase(self, step: int, phase: str) -> Iterator[Callable[[str], None]]:
        """Set a phase and restore the previous one; an error inside keeps the phase.

        Yields:
            A function that sets another phase.
        """
        before = self._status
        self.beat(step, phase)
        yield functools.partial(self.beat, step)
        self.beat(before.step, before.phase)

    def left_by(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: types.TracebackType | None,
    ) -> None:
        """Publish that an error or `sys.exit` ends the session, before any wait for others.

        Its arguments are those of a context manager's `__exit__`.
        """
        if error is None:
            return
        code = error.code if isinstance(error, SystemExit) else None
        if code == EXIT_PREEMPTED or isinstance(error, Preempted):
            self._update(state="preempted")
        else:
            is_exit = isinstance(error, SystemExit)
            note = f"sys.exit({code!r})" if is_exit else last_words(error)
            self._update(state="left", note=note, left_session=self._status.session)
        self._publish()

    def _update(self, **changes: object) -> None:
        with self._change:
            self._status = dataclasses.replace(
                self._status,
                moved_at=time.monotonic(),
                **changes,  # type: ignore[arg-type]
            )

    def _publish(self) -> None:
        if self._statuses is None:
            return
        with self._change:
            self._status = dataclasses.replace(self._status, count=self._status.count + 1)
            try:
                self._statuses.tell(self._rank, self._status)
            except Exception:  # the service ended with process 0, which the other thread reports
                return

    def _exchange(self) -> None:
        while not self._end.wait(self._interval):
            self._publish()
            try:
                assert self._statuses is not None
                statuses = self._statuses.statuses()
            except Exception:
                continue
            now = self._answered = time.monotonic()
            for rank, status in statuses.items():
                old = self._seen.get(rank)
                if old is None or old.moved_at != status.moved_at:
                    self._moved[rank] = now
                if old is None or old.count != status.count:
                    self._beat_at[rank] = now
                self._seen[rank] = status

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(self._interval):
            now = time.monotonic()
            if now - last > self._heartbeat / 2:
                # This process was stopped, so old beats say nothing about the others.
                self._answered = now
                self._beat_at = dict.fromkeys(self._beat_at, now)
            last = now
            judged = self._judge(now)
            if judged is not None and not self._end.is_set():
                self._end.set()
                self._end_job(*judged)

    def _judge(self, now: float) -> tuple[int, str] | None:
        """The rank to blame and the reason; None while every rank is well."""
        if self._channel is None and self._rank and now - self._answered > self._heartbeat:
            return 0, f"has not answered for {now - self._answered:.1f} s"
        for rank, status in self._seen.items():
            if status.has_ended and status.session < self._status.session:
                return rank, ENDED
        running = {
            rank: status
            for rank, status in self._seen.items()
            if status.state == "running"
            or (status.state == "left" and status.session == self._status.session)
        }
        for rank, status in running.items():
            silent = now - self._beat_at[rank]
            if rank != self._rank and silent > self._heartbeat and self._judges_silence:
                if status.state == "left":
                    return rank, f"left ({status.note}) {silent:.1f} s ago"
                return rank, f"has not answered for {silent:.1f} s"
        if running and all(now - self._moved[r] > self._progress for r in running):
            rank = min(running, key=lambda r: (running[r].step, _waits(running[r])))
            return rank, f"has not moved for {now - self._moved[rank]:.1f} s"
        return None

    def _end_job(self, rank: int, why: str) -> None:
        """End the job; a launcher reports the verdict, as it knows more."""
        if self._channel is not None:
            self._update(state="judged", blamed=rank, note=why)
            self._publish()
        else:
            where = self._seen.get(rank, Status()).where
            print(
                f"hxla watchdog: rank {rank} {why}; it was {where}; ending the job (exit code 76)",
                file=sys.stderr,
                flush=True,
            )
        sys.stdout.flush()
        os._exit(EXIT_WATCHDOG)


def _waits(status: Status) -> bool:
    return status.phase in WAITING_PHASES
