"""Folders on their way between nodes of a Ray cluster."""

from typing import Any

import ray

from ._ray_host import RayHost


class RayCarrying:
    """A folder on its way from a node to another, through Ray's object store.

    Args:
        source: Of it.
        folder: There.
        target: Gets it.
        copy: The folder there.
    """

    def __init__(self, source: RayHost, folder: str, target: RayHost, copy: str):
        self._target, self._copy = target, copy
        self._state: Any = None
        self._written: Any = None
        with source.losing():
            self._state = source.reading(folder)

    def arrived(self) -> bool | None:
        """Whether it has arrived; None: it is under way."""
        waits_for = self._written or self._state
        if self._target.is_lost or waits_for is None:
            return False
        # Without a copy on this machine.
        if not ray.wait([waits_for], timeout=0, fetch_local=False)[0]:
            return None
        try:
            if self._written is None:
                self._written = self._target.receiving(self._copy, self._state)
                return None
            ray.get(self._written)
        except ray.exceptions.RayError:  # the folder was let go, or a host is gone
            return False
        return True
