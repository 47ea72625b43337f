"""What ranks say of themselves, on the launcher's board or through the coordination service."""

from typing import Protocol

from ..core.errors import LaunchError
from ..jax.coordination import entries, put
from .status_page import ENDED, own_board, post_of

_PREFIX = "hxla/beat/"


class RankNotes(Protocol):
    """Holds one text of each rank."""

    def put(self, rank: int, text: str) -> None:
        """Write a rank's."""

    def entries(self) -> dict[int, str]:
        """Those that were written."""


class ServiceNotes:
    """The texts of ranks in the coordination service, for processes on several machines."""

    def put(self, rank: int, text: str) -> None:
        """Write a rank's."""
        put(f"{_PREFIX}{rank}", text)

    def entries(self) -> dict[int, str]:
        """Those that were written."""
        found = entries(_PREFIX)
        return {int(key.rsplit("/", 1)[-1]): text for key, text in found.items()}


def check_is_there(rank: int) -> None:
    """Refuse to wait for a rank whose script is over.

    Raises:
        LaunchError: If it is.
    """
    texts = own_board() or ServiceNotes()
    told = texts.entries().get(rank)
    if told is not None and post_of(told).has_ended:
        raise LaunchError(f"rank {rank} {ENDED}")
