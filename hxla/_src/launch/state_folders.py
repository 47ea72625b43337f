"""The folders of members' states and copies, and of second copies on other hosts."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from .host import Carrying, Host, KeptFolder
from .kept_state import KeptState, copy_folder
from .membership import Copied, LeftState


class StateFolders:
    """The folders of states that are still needed, on their hosts."""

    def __init__(self, carry: Callable[[KeptFolder, KeptFolder], Carrying]) -> None:
        self._carry = carry
        self._folders: dict[KeptState, KeptFolder] = {}
        # The first copy, the second copy, its folder and its transfer.
        self._under_way: list[tuple[Copied, Copied, KeptFolder, Carrying]] = []

    @property
    def paths(self) -> Collection[str]:
        """The folders on all hosts, including those of transfers."""
        expected = {there.folder for _, _, there, _ in self._under_way}
        return {folder.folder for folder in self._folders.values()} | expected

    def wrote(
        self, event: Copied | LeftState, rank: int, hosts: Mapping[str, Host]
    ) -> Copied | LeftState:
        """Record a state that a process wrote; with several hosts another one gets a copy.

        Args:
            hosts: The hosts of its generation by device, in the order of ranks.

        Returns:
            The event with its host, and the number of hosts that should have the state.
        """
        host = hosts[event.device]
        first = {other.name: device for device, other in reversed(list(hosts.items()))}
        names = list(dict.fromkeys(other.name for other in hosts.values()))
        event = dataclasses.replace(event, host=host.name, spread=min(2, len(names)))
        here = _folder(event, rank, host)
        self._put(event.kept, here)
        if isinstance(event, Copied) and len(names) > 1:
            name = names[(names.index(host.name) + 1) % len(names)]
            copy = dataclasses.replace(event, device=first[name], host=name)
            there = _folder(copy, rank, hosts[first[name]])
            self._under_way.append((event, copy, there, self._carry(here, there)))
        return event

    def arrived(self, at_seconds: float) -> Iterable[Copied]:
        """Events of second copies whose transfer has ended, with the time `at_seconds`.

        After a failed transfer the first copy is yielded again with a spread of one, so that later
        copies do not wait.
        """
        for one in list(self._under_way):
            first, copy, there, carrying = one
            has_arrived = carrying.arrived()
            if has_arrived is None:
                continue
            self._under_way.remove(one)
            if has_arrived:
                self._put(copy.kept, there)
                yield dataclasses.replace(copy, at_seconds=at_seconds)
            elif first.kept in self._folders and not there.host.is_lost:
                yield dataclasses.replace(first, at_seconds=at_seconds, spread=1)

    def of(self, states: Iterable[KeptState]) -> list[KeptFolder]:
        """The folders of states."""
        return [self._folders[kept] for kept in states]

    def keep(self, needed: Collection[KeptState]) -> None:
        """Remove all states but `needed`."""
        for kept in [kept for kept in self._folders if kept not in needed]:
            old = self._folders.pop(kept)
            if not old.host.is_lost:
                old.host.forget(old.folder)

    def _put(self, kept: KeptState, new: KeptFolder) -> None:
        before = self._folders.get(kept)
        if before is not None and before != new:
            before.host.forget(before.folder)  # the state was copied before it was left
        self._folders[kept] = new


def _folder(event: Copied | LeftState, rank: int, host: Host) -> KeptFolder:
    left = host.state_folder(event.generation, rank)
    folder = copy_folder(left, event.step) if isinstance(event, Copied) else left
    return KeptFolder(host=host, folder=folder)
