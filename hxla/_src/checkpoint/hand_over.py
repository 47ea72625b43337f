"""The state of a member in its host's memory, for the next generation.

Each process writes its part: a file of bytes and a table of the pieces in it. The folder appears
complete by one rename, so a process that is killed during the write leaves no incomplete state.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import CheckpointError
from ..core.format import num_bytes
from ..core.types import PyTree
from ..model.functional import plain_leaves

#: A piece of an array: first index and end in each dimension.
Place = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePart:
    """The pieces of a state that one process writes; processes with equal shards share a part.

    Attributes:
        writer: The lowest rank that has this part.
        pieces: By the name of a leaf, the places of its pieces in the whole array.
    """

    number: int
    count: int
    writer: int
    pieces: Mapping[str, tuple[Place, ...]]

    def num_bytes(self, tree: PyTree) -> int:
        """Bytes of the pieces, with the dtypes of a tree's leaves."""
        leaves = plain_leaves(tree)
        return sum(
            _size(place) * np.dtype(leaves[name].dtype).itemsize
            for name, places in self.pieces.items()
            for place in places
        )


def place_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    """The place of a shard in an array of this shape."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def slices_of(place: Place) -> tuple[slice, ...]:
    """The slices of a piece."""
    return tuple(slice(*ends) for ends in place)


def state_part(tree: PyTree, rank: int, num_ranks: int) -> StatePart:
    """The part of a process; a piece in several parts goes to the least loaded of them.

    It depends on shardings alone, so every process computes the same without communication.

    Args:
        tree: Global arrays, or their shapes and shardings; other leaves are whole in every process.
    """
    leaves = plain_leaves(tree)
    places_of = {name: _places(leaf, num_ranks) for name, leaf in leaves.items()}
    by_rank = [tuple(places[rank] for places in places_of.values()) for rank in range(num_ranks)]
    parts = list(dict.fromkeys(by_rank))
    pieces: list[dict[str, list[Place]]] = [{} for _ in parts]
    load = [0] * len(parts)
    for k, (name, leaf) in enumerate(leaves.items()):
        for place in sorted({place for part in parts for place in part[k]}):
            candidates = [i for i, part in enumerate(parts) if place in part[k]]
            least = min(candidates, key=load.__getitem__)
            load[least] += _size(place) * np.dtype(leaf.dtype).itemsize
            pieces[least].setdefault(name, []).append(place)
    number = parts.index(by_rank[rank])
    return StatePart(
        number=number,
        count=len(parts),
        writer=by_rank.index(by_rank[rank]),
        pieces={name: tuple(places) for name, places in pieces[number].items()},
    )


def _size(place: Place) -> int:
    return math.prod(end - first for first, end in place)


def _places(leaf: Any, num_ranks: int) -> list[frozenset[Place]]:
    """For each process the places of its shards of an array."""
    shape = tuple(np.shape(leaf))
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return [frozenset([tuple((0, n) for n in shape)])] * num_ranks
    by_rank: list[set[Place]] = [set() for _ in range(num_ranks)]
    for device, index in sharding.devices_indices_map(shape).items():
        by_rank[device.process_index].add(place_of(index, shape))
    return list(map(frozenset, by_rank))


_ALIGNMENT = 64  # bytes
_TABLE, _BYTES = "state.json", "state.bin"
_PART = ".part"  # suffix of a folder that is being written


def leave_state(
    tree: PyTree,
    facts: Mapping[str, Any],
    folder: str | os.PathLike[str],
    part: StatePart | None = None,
) -> str:
    """Write a state, or this process's part of it, into a folder in memory.

    Args:
        tree: The state, as for a checkpoint.
        part: The part to write; None: this process's.

    Returns:
        The SHA-256 of names, dtypes, shapes, places and bits, which is the same for equal parts.

    Raises:
        CheckpointError: If memory is full.
    """
    if part is None:
        part = state_part(tree, jax.process_index(), jax.process_count())
    path = pathlib.Path(folder)
    new = path.with_name(path.name + _PART)
    shutil.rmtree(new, ignore_errors=True)
    total = hashlib.sha256()
    rows, position = [], 0
    try:
        new.mkdir()
        with (new / _BYTES).open("wb", buffering=0) as file:
            for name, leaf in plain_leaves(tree).items():
                for place in part.pieces.get(name, ()):
                    array = _piece(leaf, place)
                    data = array.reshape(-1).view(np.uint8).data
                    total.update(f"{name} {array.dtype} {leaf.shape} {place}".encode())
                    total.update(data)
                    file.seek(position)
                    while len(data):
                        data = data[file.write(data) :]
                    rows.append(
                        {
                            "name": name,
                            "dtype": str(array.dtype),
                            "shape": leaf.shape,
                            "place": place,
                            "position": position,
                        }
                    )
                    position += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
            file.truncate(max(position, 1))
        table = {"facts": dict(facts), "pieces": rows, "sha256": total.hexdigest()}
        (new / _TABLE).write_text(json.dumps(table))
        new.rename(path)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(
            f"{path.parent} has no room for the {num_bytes(position)} and more of the state: "
            f"{error.strerror}; enlarge it (mount -o remount,size=... /dev/shm), or write "
            "checkpoints more often"
        ) from error
    return total.hexdigest()


def _piece(leaf: Any, place: Place) -> np.ndarray:
    """A local piece of an array, in host memory."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(np.asarray(leaf)[slices_of(place)], order="C")
    shards = leaf.addressable_shards
    shard = next(s for s in shards if place_of(s.index, leaf.shape) == place)
    return np.asarray(shard.data, order="C")


def facts_of_state(folders: Sequence[str]) -> dict[str, Any]:
    """The small facts of a state in memory, which are the same in each part."""
    return dict(_table(folders[0])["facts"])


def load_state(folders: Sequence[str], like: PyTree) -> PyTree:
    """Read a state in memory into new shardings.

    Args:
        folders: Of all parts, as `leave_state` wrote them.
        like: Structure, shapes and shardings of the result; numpy arrays for numpy arrays.

    Returns:
        Arrays with the structure and shardings of `like`.

    Raises:
        CheckpointError: If the state is of another model, or parts are missing.
    """
    stored: dict[str, _Pieces] = {}
    for folder in folders:
        data = np.memmap(pathlib.Path(folder) / _BYTES, np.uint8, "r")
        for row in _table(folder)["pieces"]:
            new = _Pieces(tuple(row["shape"]), np.dtype(row["dtype"]))
            stored.setdefault(row["name"], new).add(data, row)
    wanted = plain_leaves(like)
    differing = sorted(set(wanted) ^ set(stored)) or [
        name
        for name, leaf in wanted.items()
        if (stored[name].shape, stored[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    if differing:
        raise CheckpointError(
            f"the state in {folders[0]} is of another model or optimizer: "
            f"{', '.join(differing[:20])}"
        )
    missing = [name for name, pieces in stored.items() if not pieces.are_complete]
    if missing:
        raise CheckpointError(
            f"the state in {', '.join(folders)} is incomplete: parts of "
            f"{', '.join(missing[:20])} are missing"
        )

    def read(name: str, leaf: Any) -> Any:
        pieces = stored[name]
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return pieces.read((slice(None),) * len(pieces.shape))
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, pieces.read)

    leaves = [read(name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class _Pieces:
    """The pieces of an array in files."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype = shape, dtype
        self._pieces: dict[Place, np.ndarray] = {}

    def add(self, data: np.ndarray, row: Mapping[str, Any]) -> None:
        """Add a piece by its row in a file's table."""
        place = tuple((first, end) for first, end in row["place"])
        shape = tuple(end - first for first, end in place)
        size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        stored = data[row["position"] : row["position"] + size]
        self._pieces[place] = stored.view(self.dtype).reshape(shape)

    @property
    def are_complete(self) -> bool:
        """Whether the pieces form the whole array; no two of them overlap."""
        return sum(piece.size for piece in self._pieces.values()) == math.prod(self.shape)

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """A copy of a block, since on a CPU an array may alias its source."""
        wanted = place_of(index or (), self.shape)
        out = np.empty([end - first for first, end in wanted], self.dtype)
        for place, piece in self._pieces.items():
            common = [
                (max(a, first), min(b, end))
                for (a, b), (first, end) in zip(wanted, place, strict=True)
            ]
            if all(first < end for first, end in common):
                there = slices_of(
                    tuple((a - w, b - w) for (a, b), (w, _) in zip(common, wanted, strict=True))
                )
                here = slices_of(
                    tuple((a - p, b - p) for (a, b), (p, _) in zip(common, place, strict=True))
                )
                out[there] = piece[here]
        return out


def _table(folder: str) -> dict[str, Any]:
    return dict(json.loads((pathlib.Path(folder) / _TABLE).read_text()))
