"""How tensors are cut into chunks, one for each copy of the model, as large as its share says.

A tensor that may be cut anywhere is flattened and cut into granules of equal size, as many as all
shares together; each copy has consecutive ones. So copies of equal shares have arrays of equal
shapes, and one program. A tensor that must stay whole belongs to one copy.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core._types import DATA_AXIS
from .._plan._ownership import Shares


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How tensors that travel together lie one after another, chunk after chunk.

    Attributes:
        shares: What each copy owns.
        tensors: Numbers of the tensors.
        sizes: Of each of them.
    """

    shares: Shares
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]

    @functools.cached_property
    def _cut(self) -> list[int]:
        """Places of the tensors that are cut."""
        return [k for k, i in enumerate(self.tensors) if self.shares.owners[i] is None]

    @functools.cached_property
    def _whole(self) -> list[list[int]]:
        """For each copy the places of those that it owns whole."""
        owners = [self.shares.owners[i] for i in self.tensors]
        return [
            [k for k, owner in enumerate(owners) if owner == c]
            for c in range(len(self.shares.granules))
        ]

    @functools.cached_property
    def _widths(self) -> list[int]:
        return [self.shares.granule(self.sizes[k]) for k in self._cut]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each chunk."""
        width = sum(self._widths)
        return tuple(
            g * width + sum(self.sizes[k] for k in whole)
            for g, whole in zip(self.shares.granules, self._whole, strict=True)
        )

    @property
    def longest(self) -> int:
        """Elements of the largest chunk."""
        return max(self.lengths)

    def flat(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """All chunks one after another.

        Args:
            arrays: The tensors.
        """
        columns = []
        for k, width in zip(self._cut, self._widths, strict=True):
            x = jnp.pad(arrays[k].reshape(-1), (0, width * self.shares.num - self.sizes[k]))
            columns.append(x.reshape(self.shares.num, width))
        rows = jnp.concatenate(columns, axis=1) if columns else None
        if rows is not None and not any(self._whole):
            return rows.reshape(-1)
        parts = []
        for c, own in enumerate(self._whole):
            if rows is not None:
                first = self.shares.firsts[c]
                parts.append(rows[first : first + self.shares.granules[c]].reshape(-1))
            parts += [arrays[k].reshape(-1) for k in own]
        return jnp.concatenate(parts)

    def unflat(self, flat: jax.Array, shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
        """The tensors of all chunks.

        Args:
            flat: From `flat`.
            shapes: Of the tensors.
        """
        width = sum(self._widths)
        starts = np.cumsum([0, *self.lengths])
        found: dict[int, jax.Array] = {}
        rows = []
        for c, own in enumerate(self._whole):
            granules = self.shares.granules[c]
            chunk = flat[starts[c] : starts[c + 1]]
            rows.append(chunk[: granules * width].reshape(granules, width))
            start = granules * width
            for k in own:
                found[k] = chunk[start : start + self.sizes[k]]
                start += self.sizes[k]
        every = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
        if not any(self._whole):
            every = flat.reshape(self.shares.num, width)
        start = 0
        for k, own_width in zip(self._cut, self._widths, strict=True):
            found[k] = every[:, start : start + own_width].reshape(-1)[: self.sizes[k]]
            start += own_width
        return [found[k].reshape(shape) for k, shape in enumerate(shapes)]

    def pieces(self, chunk: jax.Array, copy: int) -> list[jax.Array]:
        """A copy's own pieces of the tensors, flat; those that others own are empty.

        Args:
            chunk: Its own, perhaps with more behind it.
            copy: Its number.
        """
        granules, width = self.shares.granules[copy], sum(self._widths)
        rows = chunk[: granules * width].reshape(granules, width)
        found = {k: chunk[:0] for k in range(len(self.tensors))}
        start = 0
        for k, own_width in zip(self._cut, self._widths, strict=True):
            found[k] = rows[:, start : start + own_width].reshape(-1)
            start += own_width
        start = granules * width
        for k in self._whole[copy]:
            found[k] = chunk[start : start + self.sizes[k]]
            start += self.sizes[k]
        return [found[k] for k in range(len(self.tensors))]

    def chunk(self, pieces: Sequence[jax.Array], copy: int) -> jax.Array:
        """The other way: a copy's chunk, filled up with zeros to the longest.

        Args:
            pieces: As `pieces` gives them.
            copy: Its number.
        """
        granules = self.shares.granules[copy]
        parts = []
        if self._cut:
            columns = [pieces[k].reshape(granules, -1) for k in self._cut] if granules else []
            if columns:
                parts.append(jnp.concatenate(columns, axis=1).reshape(-1))
        parts += [pieces[k].reshape(-1) for k in self._whole[copy]]
        own = jnp.concatenate(parts) if parts else jnp.zeros(0, pieces[0].dtype)
        return jnp.pad(own, (0, self.longest - self.lengths[copy]))


def ring_layers(lengths: Sequence[int], most: int = 8) -> list[tuple[int, int]]:
    """Ranges of a chunk's elements that the same copies have, so that each travels by itself.

    Args:
        lengths: Elements of each chunk.
        most: Ranges; where lengths differ more often, the shorter ones are sent with some more.
    """
    ends = sorted({n for n in lengths if n})
    while len(ends) > most:
        gaps = [b - a for a, b in itertools.pairwise(ends)]
        del ends[int(np.argmin(gaps))]
    return list(itertools.pairwise([0, *ends]))


def reduce_scatter(
    flat: jax.Array, lengths: Sequence[int], axis: str, sent: Any, ring: bool
) -> jax.Array:
    """Chunk c of a sum on copy c, inside a `shard_map`; the sum is as long as the longest chunk.

    A partial permute for each hop and range of `ring_layers`: what travels is what is needed, for
    any shares.

    Args:
        flat: All chunks one after another, as this copy has them.
        lengths: Of the chunks.
        axis: Name of the mesh axis.
        sent: Dtype in which sums travel.
        ring: Whether chunks of equal length travel over a ring of permutes, too: Gloo has no
            reduce-scatter of its own.
    """
    is_even = len(set(lengths)) == 1
    if is_even and not ring:
        scattered = jax.lax.psum_scatter(
            flat.reshape(len(lengths), -1).astype(sent), axis, scatter_dimension=0, tiled=True
        )
        return scattered.reshape(-1).astype(flat.dtype)
    num, longest = len(lengths), max(lengths)
    starts = jnp.asarray([0, *itertools.accumulate(lengths)][:-1], jnp.int32)
    room = jnp.pad(flat, (0, longest))
    me = jax.lax.axis_index(axis)

    def own(c: Any) -> jax.Array:
        return jax.lax.dynamic_slice(room, (starts[c],), (longest,))

    if is_even:
        to_next = [(d, (d + 1) % num) for d in range(num)]

        def add(hop: Any, total: jax.Array) -> jax.Array:
            received = jax.lax.ppermute(total.astype(sent), axis, to_next)
            return own((me - hop) % num) + received.astype(total.dtype)

        # One body, compiled once however many devices there are.
        return jax.lax.fori_loop(2, num + 1, add, own((me - 1) % num))
    total = own((me - 1) % num)
    for hop in range(2, num + 1):  # copy d hands on chunk d - hop + 1
        total = own((me - hop) % num) + _passed(total, lengths, axis, 1 - hop, sent)
    return total


def all_gather(chunk: jax.Array, lengths: Sequence[int], axis: str) -> jax.Array:
    """All chunks one after another on every copy, inside a `shard_map`.

    Args:
        chunk: This copy's, as long as the longest.
        lengths: Of the chunks.
        axis: Name of the mesh axis.
    """
    num, longest = len(lengths), max(lengths)
    if len(set(lengths)) == 1:
        return jax.lax.all_gather(chunk, axis, tiled=True)
    me = jax.lax.axis_index(axis)
    every = jnp.zeros((num, longest), chunk.dtype).at[me].set(chunk)
    passed = chunk
    for hop in range(1, num):  # copy d hands on chunk d - hop + 1
        passed = _passed(passed, lengths, axis, 1 - hop, chunk.dtype)
        every = every.at[(me - hop) % num].set(passed)
    return jnp.concatenate([every[c, :n] for c, n in enumerate(lengths)])


def _passed(x: jax.Array, lengths: Sequence[int], axis: str, shift: int, sent: Any) -> jax.Array:
    """What the copy before hands on: it has chunk `d + shift`."""
    num, parts = len(lengths), []
    for start, end in ring_layers(lengths):
        pairs = [(d, (d + 1) % num) for d in range(num) if lengths[(d + shift) % num] > start]
        part = x[start:end].astype(sent)
        parts.append(jax.lax.ppermute(part, axis, pairs).astype(x.dtype))
    return jnp.concatenate(parts)


def sum_of_rows(
    parts: Sequence[jax.Array], num_rows: int, sent: Callable[[jax.Array], Any]
) -> list[jax.Array]:
    """Sums over replicas of arrays of which few rows are not zero, inside a `shard_map`.

    Args:
        parts: Of one tensor.
        num_rows: Most rows that a replica has.
        sent: Dtype in which an array travels.
    """
    used = [jnp.any(x != 0, axis=tuple(range(1, x.ndim))) for x in parts]
    [own_R] = jnp.nonzero(functools.reduce(jnp.logical_or, used), size=num_rows, fill_value=-1)
    all_R = jax.lax.all_gather(own_R, DATA_AXIS, tiled=True)
    all_R = jnp.where(all_R < 0, parts[0].shape[0], all_R)  # beyond the end: dropped
    out = []
    for x in parts:
        own = x[own_R].astype(sent(x))  # the last row where there are too few
        rows = jax.lax.all_gather(own, DATA_AXIS, tiled=True).astype(x.dtype)
        out.append(jnp.zeros_like(x).at[all_R].add(rows, mode="drop"))
    return out
