"""When a session writes checkpoints."""

import time
from collections.abc import Callable, Mapping

import jax

from ..lower.store import Store
from ..plan.plan import Plan
from .periods import Every
from .requests import SAVE
from .restore import RestoreSource


class Saver:
    """Writes checkpoints when they are due, and none twice.

    Attributes:
        after_save: Functions that are called whenever a checkpoint was begun.

    Args:
        every: The period of checkpoints; None: nothing makes one due.
        is_alone: Whether training waits for a checkpoint, because memory is scarce.
    """

    def __init__(
        self,
        source: RestoreSource,
        store: Store,
        every: Every | None,
        *,
        is_alone: bool,
    ):
        self._source, self._store, self._every, self._is_alone = source, store, every, is_alone
        self._saved, self._saved_at = source.saved_step, time.monotonic()
        self._is_asked = self._is_changed = False
        self.after_save: list[Callable[[], object]] = []

    def request(self) -> float:
        """The request of this process to all: rank 0's clock alone counts."""
        seconds = None if self._every is None else self._every.seconds
        if seconds is None or jax.process_index():
            return 0.0
        return SAVE * (time.monotonic() - self._saved_at >= seconds)

    def heed(self, request: float) -> None:
        """Take the largest request of a process in a step."""
        self._is_asked = request == SAVE

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after some steps, the same on every process."""
        return self._is_asked or (self._every is not None and self._every.is_due(step))

    def is_saved(self, step: int) -> bool:
        """Whether the state after some steps is saved."""
        return self._saved == step

    def change(self) -> None:
        """Note that the state is another one, after as many steps."""
        self._saved, self._is_changed = None, True

    def may_save(self, step: int) -> bool:
        """Whether there is a folder, and the state is another than at the session's beginning."""
        is_new = self._is_changed or step > self._source.first_step
        return is_new and self._source.checkpoints is not None

    def save(self, step: int, plans: Mapping[int, Plan]) -> None:
        """Begin a checkpoint.

        Args:
            plans: The plans that ran, by their first step.

        Raises:
            CheckpointError: If this or an earlier checkpoint failed.
        """
        checkpoints = self._source.checkpoints
        assert checkpoints is not None
        facts = self._source.facts_at(step, plans)
        checkpoints.save(step, self._store.saved(), facts)
        self._saved, self._saved_at = step, time.monotonic()
        if self._is_alone:
            checkpoints.wait()
