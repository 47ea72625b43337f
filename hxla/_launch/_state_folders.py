"""Where the states are that members left or copied."""

from collections.abc import Collection, Iterable

from .._elastic._kept_state import KeptState
from ._host import Host, KeptFolder
from ._mailbox import copy_folder


class StateFolders:
    """The folders of states, on their hosts, until nobody counts on them."""

    def __init__(self) -> None:
        self._folders: dict[KeptState, KeptFolder] = {}

    def add(self, kept: KeptState, host: Host, rank: int, *, is_copy: bool) -> None:
        """A process wrote one."""
        left = host.state_folder(kept.generation, rank)
        new = KeptFolder(host=host, folder=copy_folder(left, kept.step) if is_copy else left)
        before = self._folders.get(kept)
        if before not in (None, new):
            before.host.forget(before.folder)  # its last state, of which there was a copy
        self._folders[kept] = new

    def of(self, states: Iterable[KeptState]) -> list[KeptFolder]:
        """Where they are."""
        return [self._folders[kept] for kept in states]

    def keep(self, needed: Collection[KeptState]) -> None:
        """Let go of all others."""
        for kept in [kept for kept in self._folders if kept not in needed]:
            old = self._folders.pop(kept)
            if not old.host.is_lost:
                old.host.forget(old.folder)
