"""When a session writes checkpoints."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from ..core.types import PyTree
from .member import SAVE
from .periods import Every

if TYPE_CHECKING:
    from ..checkpoint.checkpoints import Checkpoints


class Saver:
    """Writes checkpoints when they are due, and none twice.

    Attributes:
        after_save: Functions that are called whenever a checkpoint was begun.

    Args:
        every: The period of checkpoints; None: nothing makes one due.
        saved_step: The step of the checkpoint from which the session begins, if any.
        is_alone: Whether training waits for a checkpoint, because memory is scarce.
    """

    def __init__(
        self,
        checkpoints: "Checkpoints | None",
        every: Every | None,
        saved_step: int | None,
        *,
        is_alone: bool,
    ):
        self._checkpoints, self._every, self._is_alone = checkpoints, every, is_alone
        self._saved, self._saved_at = saved_step, time.monotonic()
        self._is_asked = False
        self.after_save: list[Callable[[], object]] = []

    @property
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
        """Note that the state is another one."""
        self._saved = None

    def save(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Begin a checkpoint.

        Raises:
            CheckpointError: If this or an earlier checkpoint failed.
        """
        assert self._checkpoints is not None
        self._checkpoints.save(step, state, facts)
        self._saved, self._saved_at = step, time.monotonic()
        if self._is_alone:
            self._checkpoints.wait()
