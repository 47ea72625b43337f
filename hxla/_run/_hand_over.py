"""The state of a member in its host's memory, for the generation after it.

Each process writes its part: one file of bytes and one that names them. The folder appears whole or
not at all, so a process that is killed while it writes leaves nothing that could be taken for a
state.
"""

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

from .._core._errors import CheckpointError
from .._core._format import num_bytes
from .._core._types import PyTree
from .._model._functional import plain_leaves
from ._state_parts import Place, StatePart, place_of, slices_of, state_part

_ALIGNMENT = 64  # bytes
_TABLE, _BYTES = "state.json", "state.bin"
_PART = ".part"  # of the name of a folder that is being written


def leave_state(
    tree: PyTree,
    facts: Mapping[str, Any],
    folder: str | os.PathLike[str],
    part: StatePart | None = None,
) -> str:
    """Write a state, or this process's part of it, into a folder in memory.

    Args:
        tree: Of it, as a checkpoint takes it.
        facts: Small facts besides, for JSON.
        folder: New.
        part: What to write; None: what is this process's.

    Returns:
        The SHA-256 of names, dtypes, shapes, places and bits: the same of equal parts.

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
    """A piece that is here of an array, in host memory."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(np.asarray(leaf)[slices_of(place)], order="C")
    shards = leaf.addressable_shards
    own = next(s for s in shards if place_of(s.index, leaf.shape) == place)
    return np.asarray(own.data, order="C")


def facts_of_state(folders: Sequence[str]) -> dict[str, Any]:
    """The small facts beside a state in memory; each of its parts has the same."""
    return dict(_table(folders[0])["facts"])


def load_state(folders: Sequence[str], like: PyTree) -> PyTree:
    """Read a state in memory into its places.

    Args:
        folders: That `leave_state` wrote: of all parts.
        like: Structure, shapes and shardings of what is wanted; numpy arrays where those are.

    Returns:
        The arrays in the structure and the places of `like`.

    Raises:
        CheckpointError: If it is of another model.
    """
    found: dict[str, _Pieces] = {}
    for folder in folders:
        data = np.memmap(pathlib.Path(folder) / _BYTES, np.uint8, "r")
        for row in _table(folder)["pieces"]:
            new = _Pieces(tuple(row["shape"]), np.dtype(row["dtype"]))
            found.setdefault(row["name"], new).add(data, row)
    wanted = plain_leaves(like)
    differing = sorted(set(wanted) ^ set(found)) or [
        name
        for name, leaf in wanted.items()
        if (found[name].shape, found[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    if differing:
        raise CheckpointError(
            f"the state in {folders[0]} is of another model or optimizer: "
            f"{', '.join(differing[:20])}"
        )
    missing = [name for name, pieces in found.items() if not pieces.are_all]
    if missing:
        raise CheckpointError(
            f"the state in {', '.join(folders)} is not whole: parts of "
            f"{', '.join(missing[:20])} are missing"
        )

    def read(name: str, leaf: Any) -> Any:
        pieces = found[name]
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return pieces.read((slice(None),) * len(pieces.shape))
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, pieces.read)

    leaves = [read(name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class _Pieces:
    """An array in pieces, in files.

    Args:
        shape: Of the whole.
        dtype: Of it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype = shape, dtype
        self._pieces: dict[Place, np.ndarray] = {}

    def add(self, data: np.ndarray, row: Mapping[str, Any]) -> None:
        """Take note of one, of which the table of a file says where it is."""
        place = tuple((first, end) for first, end in row["place"])
        shape = tuple(end - first for first, end in place)
        size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        own = data[row["position"] : row["position"] + size]
        self._pieces[place] = own.view(self.dtype).reshape(shape)

    @property
    def are_all(self) -> bool:
        """Whether they make the whole; no two of them overlap."""
        return sum(piece.size for piece in self._pieces.values()) == math.prod(self.shape)

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """A copy of what is asked for: on a CPU an array may be where it was read from."""
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
