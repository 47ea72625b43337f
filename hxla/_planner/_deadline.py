"""Time that a search may take, watched from within its long steps."""

import time

_BETWEEN = 0.02  # seconds between two looks at the processor's time, which takes a system call


class OutOfTime(Exception):  # noqa: N818
    """The time is up; what is known by then holds."""


class Deadline:
    """A budget of this thread's processor seconds: work beside it takes nothing away.

    It counts from the start but ends nothing before it is `armed`.
    """

    def __init__(self, seconds: float):
        self._at = time.thread_time() + seconds
        self._looked = time.monotonic()
        self.armed = False

    def check(self) -> None:
        """To be called often.

        Raises:
            OutOfTime: If the time is up.
        """
        now = time.monotonic()
        if self.armed and now > self._looked + _BETWEEN:
            self._looked = now
            if time.thread_time() > self._at:
                raise OutOfTime

    def limit(self, seconds: float) -> None:
        """End no later than so many seconds from now."""
        self._at = min(self._at, time.thread_time() + seconds)
