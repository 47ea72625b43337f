"""Chunks of tensors, one for each replica, in proportion to its share.

A tensor that may be cut anywhere is flattened and cut into granules of equal size, as many as all
shares together. Each replica has consecutive granules. So replicas of equal shares have arrays of
equal shapes, and one program. A tensor that must stay whole belongs to one replica.

The programs of `sum` contain reduce-scatter and all-gather of exact sums. Chunks of integers are
added, then combined to floats; between waves a chunk stays integers.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.types import DATA_AXIS, SHARD_GROUP_AXIS
from ..plan.ownership import Shares
from .contribution import Contribution
from .global_arrays import GlobalArrays


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The layout of tensors in one flat array, chunk after chunk."""

    shares: Shares
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]

    @functools.cached_property
    def _cut(self) -> list[int]:
        """Places of the cut tensors."""
        return [k for k, i in enumerate(self.tensors) if self.shares.owners[i] is None]

    @functools.cached_property
    def _whole(self) -> list[list[int]]:
        """For each replica the places of the whole tensors that it owns."""
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

    def buffer_size(self, replica: int) -> int:
        """Length of a replica's chunk; at least 1, because XLA mishandles empty donated buffers."""
        return max(self.lengths[replica], 1)

    def flat(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """All chunks, concatenated."""
        columns = []
        for k, width in zip(self._cut, self._widths, strict=True):
            x = jnp.pad(arrays[k].reshape(-1), (0, width * self.shares.num - self.sizes[k]))
            columns.append(x.reshape(self.shares.num, width))
        rows = jnp.concatenate(columns, axis=1) if columns else None
        if rows is not None and not any(self._whole):
            return rows.reshape(-1)
        parts = []
        for c, places in enumerate(self._whole):
            if rows is not None:
                first = self.shares.firsts[c]
                parts.append(rows[first : first + self.shares.granules[c]].reshape(-1))
            parts += [arrays[k].reshape(-1) for k in places]
        return jnp.concatenate(parts)

    def unflat(self, flat: jax.Array, shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
        """The inverse of `flat`."""
        width = sum(self._widths)
        starts = np.cumsum([0, *self.lengths])
        tensors: dict[int, jax.Array] = {}
        rows = []
        for c, places in enumerate(self._whole):
            granules = self.shares.granules[c]
            chunk = flat[starts[c] : starts[c + 1]]
            rows.append(chunk[: granules * width].reshape(granules, width))
            start = granules * width
            for k in places:
                tensors[k] = chunk[start : start + self.sizes[k]]
                start += self.sizes[k]
        all_rows = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
        if not any(self._whole):
            all_rows = flat.reshape(self.shares.num, width)
        start = 0
        for k, column_width in zip(self._cut, self._widths, strict=True):
            tensors[k] = all_rows[:, start : start + column_width].reshape(-1)[: self.sizes[k]]
            start += column_width
        return [tensors[k].reshape(shape) for k, shape in enumerate(shapes)]

    @property
    def is_even(self) -> bool:
        """Whether all replicas have equal shares of every tensor."""
        return not any(self._whole) and len(set(self.shares.granules)) == 1

    def even_chunk_of(self, arrays: Sequence[jax.Array], replica: Any) -> jax.Array:
        """A chunk of `flat`, computed without the others; chunks must be even."""
        granules, columns = self.shares.granules[0], []
        for k, width in zip(self._cut, self._widths, strict=True):
            missing = width * self.shares.num - self.sizes[k]
            flat = arrays[k].reshape(-1)
            flat = jnp.pad(flat, (0, missing)) if missing else flat
            size = granules * width
            piece = jax.lax.dynamic_slice(flat, (replica * size,), (size,))
            columns.append(piece.reshape(granules, width))
        return jnp.concatenate(columns, axis=1).reshape(-1)

    def pieces(self, chunk: jax.Array, replica: int) -> list[jax.Array]:
        """A replica's pieces of the tensors, flat, from its chunk; others' tensors are empty.

        Args:
            chunk: The chunk, perhaps padded at the end.
        """
        granules, width = self.shares.granules[replica], sum(self._widths)
        rows = chunk[: granules * width].reshape(granules, width)
        pieces = {k: chunk[:0] for k in range(len(self.tensors))}
        start = 0
        for k, column_width in zip(self._cut, self._widths, strict=True):
            pieces[k] = rows[:, start : start + column_width].reshape(-1)
            start += column_width
        start = granules * width
        for k in self._whole[replica]:
            pieces[k] = chunk[start : start + self.sizes[k]]
            start += self.sizes[k]
        return [pieces[k] for k in range(len(self.tensors))]

    def chunk(self, pieces: Sequence[jax.Array], replica: int) -> jax.Array:
        """The inverse of `pieces`: a replica's chunk, padded with zeros to the longest."""
        granules = self.shares.granules[replica]
        parts = []
        if self._cut:
            columns = [pieces[k].reshape(granules, -1) for k in self._cut] if granules else []
            if columns:
                parts.append(jnp.concatenate(columns, axis=1).reshape(-1))
        parts += [pieces[k].reshape(-1) for k in self._whole[replica]]
        flat = jnp.concatenate(parts) if parts else jnp.zeros(0, pieces[0].dtype)
        return jnp.pad(flat, (0, self.longest - self.lengths[replica]))


def ring_layers(lengths: Sequence[int], most: int = 8) -> list[tuple[int, int]]:
    """Ranges of a chunk's elements that the same replicas have, so that each is sent by itself.

    Args:
        most: The most ranges; with more lengths, shorter chunks are sent with some padding.
    """
    ends = sorted({n for n in lengths if n})
    while len(ends) > most:
        gaps = [b - a for a, b in itertools.pairwise(ends)]
        del ends[int(np.argmin(gaps))]
    return list(itertools.pairwise([0, *ends]))


def reduce_scatter(
    flat: jax.Array, lengths: Sequence[int], axis: str, sent: Any, ring: bool
) -> jax.Array:
    """Chunk c of a sum on replica c, inside a `shard_map`, padded to the longest chunk.

    A partial permute for each hop and range of `ring_layers` sends no more than is needed, for any
    shares.

    Args:
        flat: All chunks of this replica, concatenated.
        sent: Dtype in which sums are sent.
        ring: Whether chunks of equal length use a ring of permutes, too: Gloo has no native
            reduce-scatter.
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
    # Elements of ranges beyond the last chunk: 0 if each length has a range.
    beyond = max(
        (starts[c] + b - starts[-1] for a, b in layers for c in having(lengths, a)), default=0
    )
    room = jnp.pad(flat, (0, beyond)) if beyond > 0 else flat
    firsts = jnp.asarray(starts[:-1], jnp.int32)

    def local_ranges(c: Any) -> list[jax.Array]:
        """Chunk c by ranges; arbitrary values in ranges beyond its length."""
        return [jax.lax.dynamic_slice(room, (firsts[c] + a,), (b - a,)) for a, b in layers]

    total = local_ranges((me - 1) % num)
    for hop in range(2, num + 1):  # replica d passes on chunk d - hop + 1
        received = _passed(total, lengths, axis, 1 - hop, sent)
        total = [x + y for x, y in zip(local_ranges((me - hop) % num), received, strict=True)]
    return jnp.concatenate(total)


def moved(collective: Callable[[jax.Array], jax.Array], x: jax.Array, sent: Any) -> jax.Array:
    """Apply a collective without additions to an array that is sent in another dtype.

    16-bit floats are sent as integers: XLA's CPU backend would send them in 32 bits.
    """
    low = x.astype(sent)
    if not (jnp.issubdtype(low.dtype, jnp.floating) and low.dtype.itemsize == 2):
        return collective(low).astype(x.dtype)
    bits = collective(jax.lax.bitcast_convert_type(low, jnp.uint16))
    return jax.lax.bitcast_convert_type(bits, low.dtype).astype(x.dtype)


def ring_sum(local_chunk: Callable[[Any], jax.Array], num: int, axis: str, sent: Any) -> jax.Array:
    """Chunk c of a sum on replica c, for chunks of equal length over a ring of permutes.

    Args:
        local_chunk: From the number of a chunk to this replica's term of it.
        sent: Dtype in which sums are sent.
    """
    me = jax.lax.axis_index(axis)
    to_next = [(d, (d + 1) % num) for d in range(num)]

    # No loop: XLA runs the collectives of a program in one order on all devices, but a program of
    # the compilation cache has lost the order between those in a loop and those outside of it.
    # Devices that begin with different ones wait for each other for ever.
    total = local_chunk((me - 1) % num)
    for hop in range(2, num + 1):
        received = moved(lambda x: jax.lax.ppermute(x, axis, to_next), total, sent)
        total = local_chunk((me - hop) % num) + received
    return total


def all_gather(chunk: jax.Array, lengths: Sequence[int], axis: str) -> jax.Array:
    """All chunks, concatenated, on every replica, inside a `shard_map`.

    Args:
        chunk: This replica's chunk, padded to the longest.
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
        """Write a chunk into `flat`; ranges beyond its length go behind all chunks."""
        for (a, b), part in zip(layers, parts, strict=True):
            at = jnp.where(sizes[c] > a, firsts[c] + a, starts[-1])
            if any(a < n < b for n in lengths):  # the rest of the range is the next chunk's
                before = jax.lax.dynamic_slice(flat, (at,), (b - a,))
                part = jnp.where(jnp.arange(a, b) < sizes[c], part, before)
            flat = jax.lax.dynamic_update_slice(flat, part, (at,))
        return flat

    passed = [chunk[a:b] for a, b in layers]
    flat = put(flat, passed, me)
    for hop in range(1, num):  # replica d passes on chunk d - hop + 1
        passed = _passed(passed, lengths, axis, 1 - hop, chunk.dtype)
        flat = put(flat, passed, (me - hop) % num)
    return flat[: starts[-1]]


def having(lengths: Sequence[int], start: int) -> list[int]:
    """Numbers of the chunks that are longer than `start`."""
    return [c for c, n in enumerate(lengths) if n > start]


def _passed(
    parts: Sequence[jax.Array], lengths: Sequence[int], axis: str, shift: int, sent: Any
) -> list[jax.Array]:
    """Ranges received from the previous replica; replica d sends those of chunk `d + shift`."""
    num, received = len(lengths), []
    for part, (start, _) in zip(parts, ring_layers(lengths), strict=True):
        senders = [(c - shift) % num for c in having(lengths, start)]
        pairs = [(d, (d + 1) % num) for d in senders]
        move = functools.partial(jax.lax.ppermute, axis_name=axis, perm=pairs)
        received.append(moved(move, part, sent))
    return received


def sum_of_rows(
    parts: Sequence[jax.Array], num_rows: int, sent: Callable[[jax.Array], Any]
) -> list[jax.Array]:
    """Sums over replicas of arrays with few nonzero rows, inside a `shard_map`.

    Args:
        parts: The limbs of one tensor.
        num_rows: Most nonzero rows of a replica.
        sent: Dtype in which an array is sent.
    """
    used = [jnp.any(x != 0, axis=tuple(range(1, x.ndim))) for x in parts]
    [local_R] = jnp.nonzero(functools.reduce(jnp.logical_or, used), size=num_rows, fill_value=-1)
    all_R = jax.lax.all_gather(local_R, DATA_AXIS, tiled=True)
    all_R = jnp.where(all_R < 0, parts[0].shape[0], all_R)  # past the end: dropped
    out = []
    for x in parts:
        # Unused places, with index -1, read the last row and are dropped.
        rows = moved(
            lambda local: jax.lax.all_gather(local, DATA_AXIS, tiled=True), x[local_R], sent(x)
        )
        out.append(jnp.zeros_like(x).at[all_R].add(rows, mode="drop"))
    return out


class GroupBytes(NamedTuple):
    """Bytes of a group of sums on one device.

    Attributes:
        sums: Bytes of the local sums.
        adding: Bytes beside them while they are reduced over all places.
        waiting: Bytes of the chunks between waves.
    """

    sums: int
    adding: int
    totals: int
    waiting: int


class ReduceScatter:
    """Collectives on the sums of all places; each sum is several arrays, its limbs."""

    def __init__(self, arrays: GlobalArrays, contribution: Contribution):
        self._arrays, self._contribution = arrays, contribution
        self._dtype = jnp.dtype(contribution.form.dtype)
        self._num_groups = len(arrays.places) // arrays.num_members

    def sent_dtype(self, x: jax.Array) -> Any:
        """Dtype in which an array is sent; integers are never rounded."""
        return x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else self._dtype

    def all_reduce(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The all-reduced total of a flat sum, as floats."""
        if len(self._arrays.places) == 1:
            return self._contribution.combine(*parts)
        return self.gather_even(self.even_chunk(parts), parts[0].size)

    def even_chunk(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """This place's chunk of a flat sum that is cut evenly."""
        num = self._arrays.num_members
        chunk = self.even_length(parts[0].size)
        padded = [jnp.pad(x, (0, chunk * num - x.size)) for x in parts]
        return self._scatter(padded, [chunk] * num)

    def even_length(self, size: int) -> int:
        """Elements of a chunk of an even cut, of which a place has `part_of`."""
        return math.ceil(size / self._arrays.num_members)

    def part_of(self, length: int) -> int:
        """Elements of a place's part of a chunk, which is cut over the shard groups."""
        return math.ceil(length / self._num_groups)

    def gather_even(self, parts: Sequence[jax.Array], size: int) -> jax.Array:
        """The whole total, as floats, from the chunks of `even_chunk`."""
        total = self._contribution.combine(*parts)
        if len(self._arrays.places) == 1:
            return total
        total = self._gather_groups(total, self.even_length(size))
        return self._gather_axis(total, DATA_AXIS, size)

    def _gather_groups(self, total: jax.Array, length: int) -> jax.Array:
        """A chunk of totals, gathered from its parts on the shard groups."""
        if self._num_groups == 1:
            return total
        return self._gather_axis(total, SHARD_GROUP_AXIS, length)

    def _gather_axis(self, total: jax.Array, axis: str, size: int) -> jax.Array:
        gather = functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True)
        if self._dtype != jnp.float32:
            return moved(gather, total, self._dtype)[:size]
        # Gather bits: callers want them, and a conversion afterwards would copy the whole array.
        return jax.lax.bitcast_convert_type(gather(as_bits(total))[:size], jnp.float32)

    def place_chunk(self, chunks: Chunks, parts: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """This place's chunk of the tensors' sums, or its part of its group's chunk.

        Args:
            parts: For each limb the tensors.
        """
        lengths = self._arrays.lengths(chunks.lengths)
        is_each = len(lengths) == len(chunks.lengths) > 1
        if not (self._arrays.is_ring and is_each and chunks.is_even):
            return self._scatter([chunks.flat(tensors) for tensors in parts], lengths)
        return self._reduce_groups(
            ring_sum(
                functools.partial(chunks.even_chunk_of, tensors),
                len(lengths),
                DATA_AXIS,
                self.sent_dtype(tensors[0]),
            )
            for tensors in parts
        )

    def _scatter(self, parts: Sequence[jax.Array], lengths: Sequence[int]) -> list[jax.Array]:
        if len(lengths) == 1:
            return list(parts)
        ring = self._arrays.is_ring
        return self._reduce_groups(
            reduce_scatter(x, lengths, DATA_AXIS, self.sent_dtype(x), ring) for x in parts
        )

    def _reduce_groups(self, chunks: Iterable[jax.Array]) -> list[jax.Array]:
        """This place's part of chunks, reduced over all shard groups."""
        num, ring, out = self._num_groups, self._arrays.is_ring, []
        if num == 1:
            return list(chunks)
        for x in chunks:
            lengths = [self.part_of(x.size)] * num
            padded = jnp.pad(x, (0, sum(lengths) - x.size))
            sent = self.sent_dtype(x)
            out.append(reduce_scatter(padded, lengths, SHARD_GROUP_AXIS, sent, ring))
        return out

    def reduce_chunks(
        self,
        chunks: Chunks,
        others: Sequence[int],
        parts: Sequence[Mapping[int, jax.Array]],
        before: Sequence[Sequence[jax.Array]],
    ) -> list[tuple[jax.Array, ...]]:
        """This place's chunk of the parameters' sums, and of the other tensors', if any.

        Args:
            others: Numbers of the tensors that are not parameters.
            parts: For each limb the tensors, by number.
            before: The chunks of earlier waves, which are added; empty: none.
        """
        reduced: list[list[jax.Array]] = []
        if chunks.tensors:
            reduced.append(
                self.place_chunk(chunks, [[part[i] for i in chunks.tensors] for part in parts])
            )
        if others:
            reduced.append(self.even_chunk([concatenated([p[i] for i in others]) for p in parts]))
        if not before:
            return [tuple(limbs) for limbs in reduced]
        pairs = zip(reduced, before, strict=True)
        return [tuple(a + b for a, b in zip(*pair, strict=True)) for pair in pairs]

    def gather_chunks(
        self, chunks: Sequence[Sequence[jax.Array]], longest: int, num_others: int
    ) -> list[jax.Array]:
        """The totals from the chunks of `reduce_chunks`.

        Args:
            longest: Elements of the largest chunk of parameters.
            num_others: Elements of the tensors that are not parameters, which all places get.
        """
        param_chunks = chunks[: len(chunks) - bool(num_others)]
        combine = self._contribution.combine
        totals = [self._gather_groups(combine(*parts), longest) for parts in param_chunks]
        return totals + ([self.gather_even(chunks[-1], num_others)] if num_others else [])


def concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
    """One flat array of several."""
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def as_bits(x: jax.Array) -> jax.Array:
    """The bits of floats as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def flatly(collective: Callable[[jax.Array], jax.Array], arrays: list[jax.Array]) -> Any:
    """One collective for several small arrays."""
    return cut(collective(concatenated(arrays)), arrays)


def cut(flat: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """The inverse of `concatenated`."""
    ends = np.cumsum([x.size for x in like])
    parts = jnp.split(flat, ends[:-1], axis=-1)
    return [p.reshape(flat.shape[:-1] + x.shape) for p, x in zip(parts, like, strict=True)]


def zeros_like(like: Any) -> Any:
    """A function that makes zeros of the same shapes and shardings."""
    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), out_shardings=shardings
    )
