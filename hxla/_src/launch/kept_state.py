"""States in the memory of hosts, whole or in parts, which members left or copied."""

import dataclasses
import glob
from collections.abc import Collection, Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptState:
    """A state, or a part of one, in the memory of a host.

    Attributes:
        device: A device of the host: the member that wrote it, or a neighbour with a copy.
        digest: The SHA-256 of the part.
        spread: The number of hosts that need each part before older states are removed.
    """

    device: str
    step: int
    digest: str
    generation: int = 0
    part: int = 0
    num_parts: int = 1
    host: str = ""
    spread: int = dataclasses.field(default=1, compare=False)  # no part of the identity

    @property
    def state(self) -> tuple[int, int]:
        """Identity of the whole state; each generation divides it into other parts."""
        return self.step, self.generation


_Parts = dict[int, list[KeptState]]  # parts of a state, by number


def newest(
    kept: Iterable[KeptState], leaving: Collection[str] = frozenset()
) -> tuple[KeptState, ...]:
    """One of each part of the newest complete state; empty without one.

    Args:
        leaving: Devices to avoid if another has the same part.
    """
    for _, parts in sorted(_by_state(kept).items(), reverse=True):
        if _is_complete(parts):
            return tuple(
                min(parts[part], key=lambda one: one.device in leaving) for part in sorted(parts)
            )
    return ()


def differing(kept: Iterable[KeptState]) -> frozenset[tuple[int, int]]:
    """The states of which two devices have different bits of a part."""
    return frozenset(
        state
        for state, parts in _by_state(kept).items()
        if any(len({one.digest for one in ones}) > 1 for ones in parts.values())
    )


def added(kept: tuple[KeptState, ...], new: KeptState) -> tuple[KeptState, ...]:
    """Add a state, in place of the same part of the same device."""
    which = new.device, new.state, new.part
    return (*(one for one in kept if (one.device, one.state, one.part) != which), new)


def pruned(kept: tuple[KeptState, ...]) -> tuple[KeptState, ...]:
    """Drop states older than the newest one of which enough hosts have each part."""
    safe = max((s for s, parts in _by_state(kept).items() if _is_safe(parts)), default=(0, 0))
    return tuple(one for one in kept if one.state >= safe)


def whole(kept: tuple[KeptState, ...]) -> tuple[KeptState, ...]:
    """Drop incomplete states."""
    states = {state for state, parts in _by_state(kept).items() if _is_complete(parts)}
    return tuple(one for one in kept if one.state in states)


def _is_safe(parts: _Parts) -> bool:
    return _is_complete(parts) and all(
        len({one.host for one in ones}) >= max(one.spread for one in ones)
        and len({one.digest for one in ones}) == 1
        for ones in parts.values()
    )


def _is_complete(parts: _Parts) -> bool:
    return all(len(parts) == one.num_parts for ones in parts.values() for one in ones)


def _by_state(kept: Iterable[KeptState]) -> dict[tuple[int, int], _Parts]:
    states: dict[tuple[int, int], _Parts] = {}
    for one in kept:
        states.setdefault(one.state, {}).setdefault(one.part, []).append(one)
    return states


def left_folder(memory: str, generation: int, rank: int) -> str:
    """The folder for a process's last state."""
    return f"{memory}/{generation}-{rank}"


def copy_folder(left: str, step: int) -> str:
    """The folder for a copy of the state after a step."""
    return f"{left}-{step}"


def folders_of(memory: str, generation: int) -> list[str]:
    """All folders that processes of a generation wrote, complete or not."""
    return glob.glob(f"{glob.escape(memory)}/{generation}-*")
