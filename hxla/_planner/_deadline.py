"""Time that a search may take, watched from within its long steps."""

import time

_BETWEEN = 0.02  # seconds between two looks at the processor's time, which takes a system call


class OutOfTime(Exception):  # noqa: N818
    """The time is up; what is known by then holds."""


class Deadline:
    """A budget of this thread's processor seconds: work beside it takes nothing away.

    It counts from the start but ends nothing before it is armed.

    Args:
        seconds: The budget.
        most: Up to which it grows when it is armed.

    Attributes:
        armed: Whether it is.
    """

    def __init__(self, seconds: float, most: float = 0.0):
        self._begun, self._most = time.thread_time(), most
        self._at = self._begun + seconds
        self._looked = time.monotonic()
        self.armed = False

    def arm(self, worth: float) -> None:
        """End the time when it is up.

        Args:
            worth: Seconds that do not matter.
        """
        self._at = max(self._at, self._begun + min(worth, self._most))
        self.armed = True

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
