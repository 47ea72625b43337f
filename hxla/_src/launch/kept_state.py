"""What members left or copied into the memory of hosts: states, whole or in parts."""

import dataclasses
import glob
from collections.abc import Collection, Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptState:
    """A state, or a part of one, in the memory of a host.

    Attributes:
        device: With whose host it goes: the member that wrote it, or a neighbour with a copy.
        digest: The SHA-256 of the part: equal parts of equal steps have equal ones.
        spread: On how many hosts each part should be before older states are let go.
    """

    device: str
    step: int
    digest: str
    generation: int = 0
    part: int = 0
    num_parts: int = 1
    host: str = ""
    spread: int = dataclasses.field(default=1, compare=False)  # of the same thing, what is hoped

    @property
    def state(self) -> tuple[int, int]:
        """Which state it is (a part) of: generations cut one in parts each in its own way."""
        return self.step, self.generation


_Parts = dict[int, list[KeptState]]  # of one state, by their numbers


def newest(
    kept: Iterable[KeptState], leaving: Collection[str] = frozenset()
) -> tuple[KeptState, ...]:
    """One of each part of the newest state that is all there; empty if none is.

    Args:
        leaving: Devices that are taken only where no other has a part.
    """
    for _, parts in sorted(_by_state(kept).items(), reverse=True):
        if _are_all(parts):
            return tuple(
                min(parts[part], key=lambda one: one.device in leaving) for part in sorted(parts)
            )
    return ()


def differing(kept: Iterable[KeptState]) -> frozenset[tuple[int, int]]:
    """The states of which two devices have unlike bits of a part: they are not trusted."""
    return frozenset(
        state
        for state, parts in _by_state(kept).items()
        if any(len({one.digest for one in ones}) > 1 for ones in parts.values())
    )


def added(kept: tuple[KeptState, ...], new: KeptState) -> tuple[KeptState, ...]:
    """With one more, in the place of what its device had of that part."""
    which = new.device, new.state, new.part
    return (*(one for one in kept if (one.device, one.state, one.part) != which), new)


def pruned(kept: tuple[KeptState, ...]) -> tuple[KeptState, ...]:
    """Without what is older than a state of which enough hosts have each part."""
    safe = max((s for s, parts in _by_state(kept).items() if _is_safe(parts)), default=(0, 0))
    return tuple(one for one in kept if one.state >= safe)


def whole(kept: tuple[KeptState, ...]) -> tuple[KeptState, ...]:
    """Without those of which a part is nowhere, and nobody writes it any more."""
    states = {state for state, parts in _by_state(kept).items() if _are_all(parts)}
    return tuple(one for one in kept if one.state in states)


def _is_safe(parts: _Parts) -> bool:
    return _are_all(parts) and all(
        len({one.host for one in ones}) >= max(one.spread for one in ones)
        and len({one.digest for one in ones}) == 1
        for ones in parts.values()
    )


def _are_all(parts: _Parts) -> bool:
    return all(len(parts) == one.num_parts for ones in parts.values() for one in ones)


def _by_state(kept: Iterable[KeptState]) -> dict[tuple[int, int], _Parts]:
    found: dict[tuple[int, int], _Parts] = {}
    for one in kept:
        found.setdefault(one.state, {}).setdefault(one.part, []).append(one)
    return found


def left_folder(memory: str, generation: int, rank: int) -> str:
    """Where a process leaves its state."""
    return f"{memory}/{generation}-{rank}"


def copy_folder(left: str, step: int) -> str:
    """Where a process copies its state after a step, of where it leaves its last one."""
    return f"{left}-{step}"


def folders_of(memory: str, generation: int) -> list[str]:
    """All that processes of a generation wrote, whole or not."""
    return glob.glob(f"{glob.escape(memory)}/{generation}-*")
