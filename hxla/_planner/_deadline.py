"""Time that a search may take, watched from within its long steps."""

import time


class OutOfTime(Exception):  # noqa: N818
    """The time is up; what is known by then holds."""


class Deadline:
    """A time budget. It counts from the start but ends nothing before it is `armed`."""

    def __init__(self, seconds: float):
        self._at = time.thread_time() + seconds
        self.armed = False

    def check(self) -> None:
        """To be called often.

        Raises:
            OutOfTime: If the time is up.
        """
        if self.armed and time.thread_time() > self._at:
            raise OutOfTime
