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

from ..core.types import DATA_AXIS
from ..plan.ownership import Shares


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How tensors that travel together lie one after another, chunk after chunk."""

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

    def held(self, copy: int) -> int:
        """Elements that a copy keeps of its chunk: one of none, which XLA keeps badly."""
        return max(self.lengths[copy], 1)

    def flat(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """All chunks one after another."""
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

    @property
    def is_even(self) -> bool:
        """Whether every copy has as much of every tensor as any other."""
        return not any(self._whole) and len(set(self.shares.granules)) == 1

    def of_copy(self, arrays: Sequence[jax.Array], copy: Any) -> jax.Array:
        """A chunk of `flat`, made without the others; they must be even."""
        granules, columns = self.shares.granules[0], []
        for k, width in zip(self._cut, self._widths, strict=True):
            missing = width * self.shares.num - self.sizes[k]
            flat = arrays[k].reshape(-1)
            flat = jnp.pad(flat, (0, missing)) if missing else flat
            size = granules * width
            own = jax.lax.dynamic_slice(flat, (copy * size,), (size,))
            columns.append(own.reshape(granules, width))
        return jnp.concatenate(columns, axis=1).reshape(-1)

    def pieces(self, chunk: jax.Array, copy: int) -> list[jax.Array]:
        """A copy's own pieces of the tensors, flat; those that others own are empty.

        Args:
            chunk: Its own, perhaps with more behind it.
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
    if is_even:
        return ring_sum(
            lambda c: jax.lax.dynamic_slice(flat, (c * longest,), (longest,)), num, axis, sent
        )
    layers, me = ring_layers(lengths), jax.lax.axis_index(axis)
    starts = [*itertools.accumulate(lengths, initial=0)]
    # How far ranges go beyond the last chunk: not at all, where each length has its own.
    beyond = max(
        (starts[c] + b - starts[-1] for a, b in layers for c in having(lengths, a)), default=0
    )
    room = jnp.pad(flat, (0, beyond)) if beyond > 0 else flat
    firsts = jnp.asarray(starts[:-1], jnp.int32)

    def own(c: Any) -> list[jax.Array]:
        """By ranges; of those that the chunk has not, anything."""
        return [jax.lax.dynamic_slice(room, (firsts[c] + a,), (b - a,)) for a, b in layers]

    total = own((me - 1) % num)
    for hop in range(2, num + 1):  # copy d hands on chunk d - hop + 1
        received = _passed(total, lengths, axis, 1 - hop, sent)
        total = [x + y for x, y in zip(own((me - hop) % num), received, strict=True)]
    return jnp.concatenate(total)


def moved(collective: Callable[[jax.Array], jax.Array], x: jax.Array, sent: Any) -> jax.Array:
    """What a collective that adds nothing makes of an array that travels in another dtype.

    Floats of 16 bits travel as integers: XLA's back end for CPUs would send them in 32.

    Args:
        collective: On arrays of any dtype.
    """
    low = x.astype(sent)
    if not (jnp.issubdtype(low.dtype, jnp.floating) and low.dtype.itemsize == 2):
        return collective(low).astype(x.dtype)
    bits = collective(jax.lax.bitcast_convert_type(low, jnp.uint16))
    return jax.lax.bitcast_convert_type(bits, low.dtype).astype(x.dtype)


def ring_sum(own: Callable[[Any], jax.Array], num: int, axis: str, sent: Any) -> jax.Array:
    """Chunk c of a sum on copy c, for chunks of equal length over a ring of permutes.

    Args:
        own: From the number of a chunk to it, as this copy has it.
        axis: Name of the mesh axis.
        sent: Dtype in which sums travel.
    """
    me = jax.lax.axis_index(axis)
    to_next = [(d, (d + 1) % num) for d in range(num)]

    def add(hop: Any, total: jax.Array) -> jax.Array:
        received = moved(lambda x: jax.lax.ppermute(x, axis, to_next), total, sent)
        return own((me - hop) % num) + received

    # One body, compiled once however many devices there are.
    return jax.lax.fori_loop(2, num + 1, add, own((me - 1) % num))


def all_gather(chunk: jax.Array, lengths: Sequence[int], axis: str) -> jax.Array:
    """All chunks one after another on every copy, inside a `shard_map`.

    Args:
        chunk: This copy's, as long as the longest.
        axis: Name of the mesh axis.
    """
    num = len(lengths)
    if len(set(lengths)) == 1:
        return jax.lax.all_gather(chunk, axis, tiled=True)
    layers, me = ring_layers(lengths), jax.lax.axis_index(axis)
    starts = [*itertools.accumulate(lengths, initial=0)]
    most = max(b - a for a, b in layers)
    flat = jnp.zeros(starts[-1] + most, chunk.dtype)
    firsts, sizes = jnp.asarray(starts[:-1], jnp.int32), jnp.asarray(lengths, jnp.int32)

    def put(flat: jax.Array, parts: Sequence[jax.Array], c: Any) -> jax.Array:
        """With a chunk; what it has not goes behind all chunks."""
        for (a, b), part in zip(layers, parts, strict=True):
            at = jnp.where(sizes[c] > a, firsts[c] + a, starts[-1])
            if any(a < n < b for n in lengths):  # the rest of the range is the next chunk's
                before = jax.lax.dynamic_slice(flat, (at,), (b - a,))
                part = jnp.where(jnp.arange(a, b) < sizes[c], part, before)
            flat = jax.lax.dynamic_update_slice(flat, part, (at,))
        return flat

    passed = [chunk[a:b] for a, b in layers]
    flat = put(flat, passed, me)
    for hop in range(1, num):  # copy d hands on chunk d - hop + 1
        passed = _passed(passed, lengths, axis, 1 - hop, chunk.dtype)
        flat = put(flat, passed, (me - hop) % num)
    return flat[: starts[-1]]


def having(lengths: Sequence[int], start: int) -> list[int]:
    """Numbers of the chunks that have elements from one on."""
    return [c for c, n in enumerate(lengths) if n > start]


def _passed(
    parts: Sequence[jax.Array], lengths: Sequence[int], axis: str, shift: int, sent: Any
) -> list[jax.Array]:
    """What the copy before hands on, by ranges: copy d has those of chunk `d + shift`."""
    num, found = len(lengths), []
    for part, (start, _) in zip(parts, ring_layers(lengths), strict=True):
        givers = [(c - shift) % num for c in having(lengths, start)]
        pairs = [(d, (d + 1) % num) for d in givers]
        move = functools.partial(jax.lax.ppermute, axis_name=axis, perm=pairs)
        found.append(moved(move, part, sent))
    return found


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
        # Of too few rows the last one again.
        rows = moved(lambda own: jax.lax.all_gather(own, DATA_AXIS, tiled=True), x[own_R], sent(x))
        out.append(jnp.zeros_like(x).at[all_R].add(rows, mode="drop"))
    return out
