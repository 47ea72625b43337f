"""Which part of a state each process has, so that together they write every byte once."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._core._types import PyTree
from .._model._functional import plain_leaves

#: Of a piece of an array: first and end of it, along each axis.
Place = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePart:
    """What one process writes of a state; processes that hold the same are one part.

    Attributes:
        number: Of it, from zero.
        count: Of all parts.
        writer: The lowest of the processes that have this part.
        pieces: By the name of a leaf, where its pieces are in the whole.
    """

    number: int
    count: int
    writer: int
    pieces: Mapping[str, tuple[Place, ...]]

    def num_bytes(self, tree: PyTree) -> int:
        """Of its pieces, the leaves being those of a tree."""
        leaves = plain_leaves(tree)
        return sum(
            _size(place) * np.dtype(leaves[name].dtype).itemsize
            for name, places in self.pieces.items()
            for place in places
        )


def place_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    """Where a shard is in an array of a shape."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def slices_of(place: Place) -> tuple[slice, ...]:
    """What cuts a piece out of the whole."""
    return tuple(slice(*ends) for ends in place)


def state_part(tree: PyTree, rank: int, num_ranks: int) -> StatePart:
    """The part of a process; what several parts hold goes to the one that has least until then.

    Every process finds the same from the shardings alone, and asks nobody.

    Args:
        tree: Of the state: global arrays, or their shapes and shardings; what
            else there is every process has whole.
        rank: The process.
        num_ranks: Of all processes.
    """
    leaves = plain_leaves(tree)
    holds = {name: _places(leaf, num_ranks) for name, leaf in leaves.items()}
    by_rank = [tuple(own[rank] for own in holds.values()) for rank in range(num_ranks)]
    parts = list(dict.fromkeys(by_rank))
    pieces: list[dict[str, list[Place]]] = [{} for _ in parts]
    load = [0] * len(parts)
    for k, (name, leaf) in enumerate(leaves.items()):
        for place in sorted({place for held in parts for place in held[k]}):
            holders = [i for i, held in enumerate(parts) if place in held[k]]
            least = min(holders, key=load.__getitem__)
            load[least] += _size(place) * np.dtype(leaf.dtype).itemsize
            pieces[least].setdefault(name, []).append(place)
    own = parts.index(by_rank[rank])
    found = {name: tuple(places) for name, places in pieces[own].items()}
    writer = by_rank.index(by_rank[rank])
    return StatePart(number=own, count=len(parts), writer=writer, pieces=found)


def _size(place: Place) -> int:
    return math.prod(end - first for first, end in place)


def _places(leaf: Any, num_ranks: int) -> list[frozenset[Place]]:
    """The pieces of an array that each process has."""
    shape = tuple(np.shape(leaf))
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return [frozenset([tuple((0, n) for n in shape)])] * num_ranks
    found: list[set[Place]] = [set() for _ in range(num_ranks)]
    for device, index in sharding.devices_indices_map(shape).items():
        found[device.process_index].add(place_of(index, shape))
    return [frozenset(own) for own in found]
