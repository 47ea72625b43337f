"""Reduce-scatter and all-gather of exact sums, inside the programs of `sum`.

Chunks of integers are added, then combined to floats; between waves a chunk stays integers.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.types import DATA_AXIS, SHARD_GROUP_AXIS
from .chunks import Chunks, moved, reduce_scatter, ring_sum
from .contribution import Contribution
from .global_arrays import GlobalArrays


class GroupBytes(NamedTuple):
    """Bytes of a group of sums on one device.

    Attributes:
        sums: Bytes of the local sums.
        adding: Bytes beside them while they are reduced over all places.
        totals: Bytes of the totals.
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
