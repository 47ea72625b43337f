"""Where the states are that members left or copied, and the second copies on other hosts."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from .host import Carrying, Host, KeptFolder
from .kept_state import KeptState, copy_folder
from .membership import Copied, LeftState


class StateFolders:
    """The folders of states, on their hosts, until nobody counts on them."""

    def __init__(self, carry: Callable[[KeptFolder, KeptFolder], Carrying]) -> None:
        self._carry = carry
        self._folders: dict[KeptState, KeptFolder] = {}
        # What was written, what is to be, where, and how far that is.
        self._under_way: list[tuple[Copied, Copied, KeptFolder, Carrying]] = []

    @property
    def paths(self) -> Collection[str]:
        """Those on all hosts, also where one is about to appear."""
        coming = {there.folder for _, _, there, _ in self._under_way}
        return {own.folder for own in self._folders.values()} | coming

    def wrote(
        self, event: Copied | LeftState, rank: int, hosts: Mapping[str, Host]
    ) -> Copied | LeftState:
        """A process wrote one; where a generation is on several hosts another gets a copy.

        Args:
            hosts: By device, those of its generation, in the order of ranks.

        Returns:
            The event, with where it is and where it should be.
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
        """The copies that have arrived on another host, at a time.

        Where one could not be written there the first has to do, or copies would wait for it: that
        is yielded again, with a spread of one.
        """
        for one in list(self._under_way):
            first, copy, there, carrying = one
            found = carrying.arrived()
            if found is None:
                continue
            self._under_way.remove(one)
            if found:
                self._put(copy.kept, there)
                yield dataclasses.replace(copy, at_seconds=at_seconds)
            elif first.kept in self._folders and not there.host.is_lost:
                yield dataclasses.replace(first, at_seconds=at_seconds, spread=1)

    def of(self, states: Iterable[KeptState]) -> list[KeptFolder]:
        """Where they are."""
        return [self._folders[kept] for kept in states]

    def keep(self, needed: Collection[KeptState]) -> None:
        """Let go of all others."""
        for kept in [kept for kept in self._folders if kept not in needed]:
            old = self._folders.pop(kept)
            if not old.host.is_lost:
                old.host.forget(old.folder)

    def _put(self, kept: KeptState, new: KeptFolder) -> None:
        before = self._folders.get(kept)
        if before is not None and before != new:
            before.host.forget(before.folder)  # it is there twice: copied, and then left
        self._folders[kept] = new


def _folder(event: Copied | LeftState, rank: int, host: Host) -> KeptFolder:
    left = host.state_folder(event.generation, rank)
    folder = copy_folder(left, event.step) if isinstance(event, Copied) else left
    return KeptFolder(host=host, folder=folder)
