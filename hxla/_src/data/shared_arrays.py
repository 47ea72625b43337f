"""Arrays in anonymous shared memory, which processes send each other as a file descriptor.

Without a name, the memory is freed however its processes end, and it does not count against the
size of /dev/shm.
"""

import mmap
import os
from typing import Any

import jax
import numpy as np

from ..core.types import PyTree

_ALIGNMENT = 64  # bytes

#: Dtype, shape and offset of each array, in the tree of the batch.
Table = PyTree


def place_arrays(tree: PyTree) -> tuple[Table, int, PyTree]:
    """Copy arrays into new shared memory.

    Returns:
        The table of the arrays, the file descriptor of the memory, and the new arrays.
    """
    leaves, treedef = jax.tree.flatten(tree)
    rows, end = [], 0
    for leaf in leaves:
        rows.append((leaf.dtype, leaf.shape, end))
        end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    table = jax.tree.unflatten(treedef, [_Row(row) for row in rows])
    fd = os.memfd_create("hxla-data")
    os.ftruncate(fd, max(end, 1))
    arrays = _arrays(table, mmap.mmap(fd, max(end, 1)))
    for place, leaf in zip(jax.tree.leaves(arrays), leaves, strict=True):
        place[...] = leaf
    return table, fd, arrays


def arrays_at(table: Table, fd: int) -> PyTree:
    """Read-only arrays in the memory of a file descriptor, which may be closed afterwards."""
    return _arrays(table, mmap.mmap(fd, 0, prot=mmap.PROT_READ))


class _Row:
    """A leaf of a table."""

    def __init__(self, row: tuple[np.dtype[Any], tuple[int, ...], int]):
        self.row = row


def _arrays(table: Table, memory: mmap.mmap) -> PyTree:
    data = np.frombuffer(memory, np.uint8)

    def array(leaf: _Row) -> np.ndarray:
        dtype, shape, begin = leaf.row
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return data[begin : begin + size].view(dtype).reshape(shape)

    return jax.tree.map(array, table)
