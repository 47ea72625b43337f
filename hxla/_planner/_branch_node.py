"""Parts of the plans of one number of stages, as branching takes them."""

import dataclasses

import numpy as np

from ._bound import Bound
from ._chain_tables import Array
from ._priced import Priced
from ._relaxed import Bands

FREE, MIXED = -1, -2  # stages of which nothing is laid down, and those of several kinds
Box = tuple[tuple[int, int], ...]
Spans = tuple[tuple[int, int], ...]
Modes = tuple[int, ...]  # per position from the end: a kind that all copies have there, or these


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A relaxed pipeline."""

    cuts: tuple[int, ...]
    kinds: tuple[int, ...]  # by position from the end
    used: tuple[int, ...]
    fill: float
    period: float
    most: int
    modes: Modes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchPart:
    """Plans whose largest stage is of like size.

    Attributes:
        bound: Of them.
        tail: That they have at least.
        priced: Their pipelines by period.
        grid: The same for every period, where some stages' kinds are laid down.
        columns: Of all nodes.
    """

    bound: Bound
    tail: float
    priced: list[Priced]
    grid: list[Priced]
    columns: list[Column]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchNode:
    """Plans whose boundaries and kinds lie within limits.

    Attributes:
        part: That they belong to.
        box: Per position from the end, the layers that its stage may begin with: from, up to.
        modes: What is laid down of their kinds.
        prices: To begin with.
        spans: Of each of the part's programmes, the intervals of periods that can matter: from, up
            to; None: all.
    """

    part: BranchPart
    box: Box
    modes: Modes
    prices: list[float]
    spans: Spans | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is laid down of its kinds."""
        return all(mode == FREE for mode in self.modes)

    def programmes(self) -> list[Priced]:
        """Of its pipelines, by period."""
        every = self.part.priced if self.is_free else self.part.grid
        if self.spans is None:
            return every
        return [own.within(*span) for own, span in zip(every, self.spans, strict=True)]


def span_of(kept: Array) -> tuple[int, int]:
    """From the first that is kept up to after the last."""
    at = np.flatnonzero(kept)
    return (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)


def cut_of(node: BranchNode) -> tuple[list[int], list[int]]:
    """First layers, and what is laid down, stage by stage, of a node of one cut."""
    return [low for low, _ in reversed(node.box)], list(reversed(node.modes))


def narrowed(box: Bands, place: int, part: tuple[int, int]) -> list[tuple[int, int]]:
    """A box with one boundary confined further; the others are kept in order."""
    new = list(box)
    new[place] = part
    for i in range(place + 1, len(new)):  # towards the first stage
        new[i] = (new[i][0], min(new[i][1], new[i - 1][1] - 1))
    for i in reversed(range(place)):
        new[i] = (max(new[i][0], new[i + 1][0] + 1), new[i][1])
    return new
