"""Checks that the replicas of the state are still equal, bit for bit."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from ..core.errors import LaunchError
from ..job.agreement import ranks_text
from ..lower.store import Store

_MOST_NAMES = 5


class ReplicaChecksum:
    """Compares the checksums of the replicas of the state at regular steps.

    Args:
        ranks: The processes of each replica; a single replica is not compared.
        every: Steps between comparisons.
    """

    def __init__(self, store: Store, ranks: tuple[tuple[int, ...], ...], every: int):
        self._store, self._ranks, self._every = store, ranks, every
        self._compared: int | None = None

    def stepped(self, step: int) -> None:
        """Compare if it is due.

        Raises:
            LaunchError: As `compare`.
        """
        if self.is_due(step):
            self.compare(step)

    def is_due(self, step: int) -> bool:
        """Whether to compare at this step."""
        return step % self._every == 0

    def compare(self, step: int) -> None:
        """Compare unless this step was compared already; every process must call this.

        Raises:
            LaunchError: On every process, with the differing replicas and arrays.
        """
        if len(self._ranks) == 1 or step == self._compared:
            return
        before, self._compared = self._compared, step
        rows = self._store.checksums()
        usual, _ = Counter(map(bytes, rows)).most_common(1)[0]
        first = next(i for i, row in enumerate(rows) if bytes(row) == usual)
        odd = {i: rows[i] != rows[first] for i in range(len(rows)) if bytes(rows[i]) != usual}
        if not odd:
            return
        since = (
            f"after step {before} they were still equal"
            if before is not None
            else ("they were not compared before")
        )
        raise LaunchError(
            f"after {step} steps the replicas of the state are no longer equal ({since}):\n  "
            + "\n  ".join(self._lines(first, odd))
            + "\nthe processes got different inputs, their devices compute differently, or memory "
            "was damaged: resume from an earlier checkpoint"
        )

    def _lines(self, first: int, odd: Mapping[int, np.ndarray]) -> list[str]:
        names = self._store.layout.names()
        lines = []
        for i, differs in odd.items():
            arrays = [names[k] for k in np.flatnonzero(differs)]
            more = f" and {len(arrays) - _MOST_NAMES} more" if len(arrays) > _MOST_NAMES else ""
            lines.append(
                f"{ranks_text(self._ranks[i])} has another {', '.join(arrays[:_MOST_NAMES])}{more} "
                f"than {ranks_text(self._ranks[first])}"
            )
        return lines
