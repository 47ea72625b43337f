"""What a process asks of all others in a step: to save, to end the run, or to leave it."""

from collections.abc import Callable

#: Requests of a process to all, of which the largest counts: save; end the run; leave it after a
#: checkpoint; leave it with the state in memory. All but the first keep the state anyway.
SAVE, STOP, LEAVE, MOVE = 0.5, 1.0, 2.0, 3.0


class Requests:
    """The requests of this process, and the one that all processes obey.

    Attributes:
        agreed: The last request that ended the run, on every process; 0 if there was none.

    Args:
        sources: Functions that return a present request of this process, or 0.
    """

    def __init__(self, *sources: Callable[[], float]):
        self._sources, self._stop, self.agreed = sources, 0.0, 0.0

    def stop(self) -> None:
        """Ask to end the run; does nothing once it ends."""
        self._stop = STOP * (not self.agreed)

    @property
    def present(self) -> float:
        """The request that this process sends with a step's sums."""
        return max(self._stop, *(source() for source in self._sources))

    def agree(self, request: float) -> None:
        """Obey the largest request of all processes in a step."""
        if request > SAVE:
            self._stop, self.agreed = 0.0, request
