"""Ends a job in which a process is dead, frozen or stuck, and says which.

Each process publishes a beat through the coordination service and reads the others'. The service
lives in process 0, so a second thread watches whether it still answers at all.
"""

import json
import os
import sys
import threading
import time

from .._core._types import EXIT_WATCHDOG
from .._jax import _coordination

_PREFIX = "hxla/beat/"
_INTERVAL_SECONDS = 0.5  # between beats


class Watchdog:
    """Watches all processes of a job from each of them.

    Args:
        rank: This process.
        num_processes: All of them.
        heartbeat_timeout_seconds: A process that has not answered for so long is dead or frozen.
        progress_timeout_seconds: A job that lives but has not moved for so long is stuck.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_processes: int,
        heartbeat_timeout_seconds: float,
        progress_timeout_seconds: float,
    ):
        self._rank, self._num = rank, num_processes
        self._heartbeat, self._progress = heartbeat_timeout_seconds, progress_timeout_seconds
        self._now: tuple[int, str] = (-1, "starting")
        self._count = 0
        self._end = threading.Event()
        self._answered = time.monotonic()
        self._seen: dict[int, tuple[int, str, int]] = {}  # step, phase, count
        self._moved: dict[int, float] = {}
        self._beat_at: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=work, daemon=True, name="hxla-watchdog")
            for work in (self._exchange, self._watch)
        ]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._publish("finished")

    def beat(self, step: int, phase: str) -> None:
        """Say where this process is; costs nothing."""
        self._now = (step, phase)

    def _publish(self, phase: str | None = None) -> None:
        step, own = self._now
        self._count += 1
        value = json.dumps([step, phase or own, self._count])
        try:
            _coordination.put(f"{_PREFIX}{self._rank}", value)
        except Exception:  # the service is gone with process 0: the other thread says so
            return

    def _exchange(self) -> None:
        while not self._end.wait(_INTERVAL_SECONDS):
            self._publish()
            try:
                entries = _coordination.entries(_PREFIX)
            except Exception:
                continue
            now = self._answered = time.monotonic()
            for key, value in entries.items():
                rank = int(key.rsplit("/", 1)[-1])
                step, phase, count = json.loads(value)
                old = self._seen.get(rank)
                if old is None or old[:2] != (step, phase):
                    self._moved[rank] = now
                if old is None or old[2] != count:
                    self._beat_at[rank] = now
                self._seen[rank] = (step, phase, count)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(_INTERVAL_SECONDS):
            now = time.monotonic()
            if now - last > self._heartbeat / 2:
                # This process itself was stopped: judge the others only by what comes from now on.
                self._answered = now
                self._beat_at = dict.fromkeys(self._beat_at, now)
            last = now
            message = self._judge(now)
            if message and not self._end.is_set():
                self._end.set()
                _end(f"hxla watchdog: {message}; ending the job (exit code 76)")

    def _judge(self, now: float) -> str | None:
        if self._rank and now - self._answered > self._heartbeat:
            return self._blame(0, now - self._answered, "has not answered")
        for rank, beat in self._beat_at.items():
            finished = self._seen[rank][1] == "finished"
            if rank != self._rank and not finished and now - beat > self._heartbeat:
                return self._blame(rank, now - beat, "has not answered")
        unfinished = {r: s for r, s in self._seen.items() if s[1] != "finished"}
        if unfinished and all(now - self._moved[r] > self._progress for r in unfinished):
            rank = min(unfinished, key=lambda r: (unfinished[r][0], unfinished[r][1] == "reduce"))
            return self._blame(rank, now - self._moved[rank], "has not moved")
        return None

    def _blame(self, rank: int, seconds: float, what: str) -> str:
        step, phase, _ = self._seen.get(rank, (-1, "starting", 0))
        where = f"at step {step} in phase {phase!r}" if step >= 0 else f"in phase {phase!r}"
        return f"rank {rank} {what} for {seconds:.1f} s; last seen {where}"


def _end(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_WATCHDOG)
