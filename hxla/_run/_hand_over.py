"""The state of a member in its host's memory, for the generation after it.

One file of bytes and one that names them. The folder appears whole or not at all, so a process that
is killed while it writes leaves nothing that could be taken for a state.
"""

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .._core._errors import CheckpointError
from .._core._format import num_bytes
from .._core._types import PyTree
from ._checkpoints import plain_leaves

_ALIGNMENT = 64  # bytes
_TABLE, _BYTES = "state.json", "state.bin"


def leave_state(
    tree: PyTree,
    facts: Mapping[str, Any],
    folder: str | os.PathLike[str],
    gather: Callable[[Any], np.ndarray] | None = None,
) -> str:
    """Write a state into a folder in memory.

    Args:
        tree: Of it, as a checkpoint takes it.
        facts: Small facts besides, for JSON.
        folder: New.
        gather: What makes an array whole with all processes; None: this one is alone with what it
            has.

    Returns:
        The SHA-256 of names, dtypes, shapes and bits: the same on every member.

    Raises:
        CheckpointError: If this process has only a part of an array, or memory is full.
    """
    path = pathlib.Path(folder)
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    total = hashlib.sha256()
    rows, place = [], 0
    try:
        part.mkdir()
        with (part / _BYTES).open("wb", buffering=0) as file:
            for name, leaf in plain_leaves(tree).items():
                array = np.asarray(whole_here(name, leaf, gather), order="C")
                data = array.reshape(-1).view(np.uint8).data
                total.update(f"{name} {array.dtype} {array.shape}".encode())
                total.update(data)
                file.seek(place)
                while len(data):
                    data = data[file.write(data) :]
                rows.append(
                    {
                        "name": name,
                        "dtype": str(array.dtype),
                        "shape": array.shape,
                        "place": place,
                    }
                )
                place += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
            file.truncate(max(place, 1))
        table = {"facts": dict(facts), "leaves": rows, "sha256": total.hexdigest()}
        (part / _TABLE).write_text(json.dumps(table))
        part.rename(path)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"{path.parent} has no room for the {num_bytes(place)} and more of the state: "
            f"{error.strerror}; enlarge it (mount -o remount,size=... /dev/shm), or write "
            "checkpoints more often"
        ) from error
    return total.hexdigest()


def whole_here(
    name: str, leaf: Any, gather: Callable[[Any], np.ndarray] | None = None
) -> np.ndarray:
    """An array whole in host memory, from the parts that are here.

    Raises:
        CheckpointError: If they are not enough and there is nobody to ask.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    parts = {str(s.index): s for s in leaf.addressable_shards}
    if sum(s.data.size for s in parts.values()) >= leaf.size:
        out = np.empty(leaf.shape, leaf.dtype)
        for shard in parts.values():
            out[shard.index] = np.asarray(shard.data)
        return out
    if gather is None:
        raise CheckpointError(f"{name} lies in parts on several members, and one is gone")
    return np.asarray(gather(leaf))


def facts_of_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The small facts beside a state in memory."""
    return dict(_table(folder)["facts"])


def load_state(folder: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Read a state in memory into its places.

    Args:
        folder: That `leave_state` wrote.
        like: Structure, shapes and shardings of what is wanted; numpy arrays where those are.

    Returns:
        The arrays in the structure and the places of `like`.

    Raises:
        CheckpointError: If it is of another model.
    """
    rows = {row["name"]: row for row in _table(folder)["leaves"]}
    data = np.memmap(pathlib.Path(folder) / _BYTES, np.uint8, "r")
    wanted = plain_leaves(like)
    differing = sorted(set(wanted) ^ set(rows)) or [
        name
        for name, leaf in wanted.items()
        if (tuple(rows[name]["shape"]), np.dtype(rows[name]["dtype"])) != (leaf.shape, leaf.dtype)
    ]
    if differing:
        raise CheckpointError(
            f"the state in {folder} is of another model or optimizer: {', '.join(differing[:20])}"
        )

    def read(name: str, leaf: Any) -> Any:
        row, dtype = rows[name], np.dtype(rows[name]["dtype"])
        size = int(np.prod(row["shape"], dtype=np.int64)) * dtype.itemsize
        array = data[row["place"] : row["place"] + size].view(dtype).reshape(row["shape"])
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return np.array(array)
        # A copy: on a CPU an array may be where it was read from.
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.array(array[index])
        )

    leaves = [read(name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _table(folder: str | os.PathLike[str]) -> dict[str, Any]:
    return dict(json.loads((pathlib.Path(folder) / _TABLE).read_text()))
