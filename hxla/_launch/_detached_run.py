"""A run on a Ray cluster whose authority is a detached actor: no command's death ends it."""

import dataclasses
import os
import signal
import threading
import time
import traceback
from typing import Any, cast

import ray

from .._core._errors import HxlaError, LaunchError
from ._elastic_run import ElasticRun
from ._elastic_wishes import ElasticWishes
from ._event_log import EventLog
from ._kept_output import KeptOutput, OutputPart
from ._ray_cluster import RayHosts
from ._ray_host import leave_main_module

_READ_SECONDS = 5.0  # for others who follow it as well
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
    """What one who follows a run is told.

    Attributes:
        output: What was printed since.
        code: The run's exit code; None: it goes on.
    """

    output: OutputPart
    code: int | None


class DetachedRun:
    """An elastic run, from its start until its end was read. Ray runs it as an actor.

    The run has a thread of its own, so that this actor answers meanwhile; it owns the actors on
    the nodes, which end when it does.

    Args:
        wishes: What is asked of the run.
        folder: Its working directory.
        unread_seconds: How long it is there after its end if nobody reads what it printed.
    """

    def __init__(self, wishes: ElasticWishes, folder: str, unread_seconds: float = 600.0):
        leave_main_module()
        self._output = KeptOutput()
        self._run: ElasticRun | None = None
        self._signals: list[int] = []  # that came before the run was there
        self._lock = threading.Lock()
        self._code: int | None = None
        self._goes_at = float("inf")
        self._is_read, self._unread_seconds = False, unread_seconds
        self._own: Any = ray.get_runtime_context().current_actor
        threading.Thread(target=self._live, args=(wishes, folder), daemon=True).start()

    def follow(self, since: int) -> Followed:
        """What is new since a piece of its output.

        One who asks for what comes after the last piece of a run that has ended has read all.
        """
        code = self._code
        output = self._output.read(since)
        if code is not None and not output.pieces and not self._is_read:
            self._is_read, self._goes_at = True, time.monotonic() + _READ_SECONDS
        return Followed(output=output, code=code)

    def standing(self) -> tuple[int | None, bool]:
        """The run's exit code, None while it goes on; and whether someone has read that."""
        return self._code, self._is_read

    def stop(self) -> int | None:
        """Ask the run to end as SIGTERM does; returns its exit code if it had ended."""
        with self._lock:
            if self._run is None:
                self._signals.append(signal.SIGTERM)
            else:
                self._run.receive(signal.SIGTERM)
        return self._code

    def _live(self, wishes: ElasticWishes, folder: str) -> None:
        try:
            code = self._work(wishes, folder)
        except HxlaError as error:
            code = self._fail(2, str(error))
        except Exception:  # nobody else would see it
            code = self._fail(1, f"the run failed:\n{traceback.format_exc()}")
        self._goes_at, self._code = time.monotonic() + self._unread_seconds, code
        while time.monotonic() < self._goes_at:
            time.sleep(_POLL_SECONDS)
        ray.kill(self._own)

    def _work(self, wishes: ElasticWishes, folder: str) -> int:
        try:
            os.chdir(folder)
        except OSError as error:
            raise LaunchError(
                f"{folder} is not on the head node of the Ray cluster ({error.strerror}): the "
                "working directory and the script must be at the same path on every node"
            ) from None
        events, streams = EventLog(wishes.events), self._output.streams
        hosts = RayHosts(None, wishes.command, streams, wishes.nodes)
        run = ElasticRun(hosts, streams, wishes.rules(), wishes.grace_seconds, events)
        with self._lock:
            self._run = run
            for number in self._signals:
                run.receive(number)
        return run.wait()

    def _fail(self, code: int, words: str) -> int:
        self._output.streams.err.write(f"hxla: {words}\n".encode())
        return code


DetachedActor: Any = cast(Any, ray.remote)(DetachedRun)
