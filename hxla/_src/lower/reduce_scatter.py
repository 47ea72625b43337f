"""From the sums of all places to totals, inside the programs with collectives between copies.

Chunks of integers are added, and then combined to floats; a chunk may wait as integers for more.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduced:
    """What all processes know after a sum.

    Attributes:
        numbers_DN: float32, what each replica told.
        rows_MS: float32, the sums of every microbatch.
        maxima_T: float32, the largest magnitude of each tensor in any microbatch.
        totals: For each local replica the bits of the sums of its tensors: the vectors of
            `buckets`, or each tensor where replicas have several devices.
        words: For each local replica those of other variables, see `_state_sums`.
    """

    numbers_DN: np.ndarray
    rows_MS: np.ndarray
    maxima_T: np.ndarray
    totals: tuple[Any, ...]
    words: tuple[Any, ...]


class GroupBytes(NamedTuple):
    """What a group of sums takes of one device.

    Attributes:
        sums: The bytes of its sums.
        adding: The bytes beside them while they are added up over all places.
        totals: The bytes of its totals.
        waiting: The bytes of its chunks between waves.
    """

    sums: int
    adding: int
    totals: int
    waiting: int


class ReduceScatter:
    """Adds up arrays of all places, each of which is several parts.

    Args:
        contribution: How tensors joined the sums.
    """

    def __init__(self, arrays: GlobalArrays, contribution: Contribution):
        self._arrays, self._contribution = arrays, contribution
        self._dtype = jnp.dtype(contribution.form.dtype)
        self._num_groups = len(arrays.places) // arrays.num_members

    def travels_as(self, x: jax.Array) -> Any:
        """Integers are never rounded."""
        return x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else self._dtype

    def all_reduce(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The whole of a flat sum, combined, on every place."""
        if len(self._arrays.places) == 1:
            return self._contribution.combine(*parts)
        return self.gathered(self.even_chunk(parts), parts[0].size)

    def even_chunk(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """This place's part of a flat sum of which all have as much."""
        num = self._arrays.num_members
        chunk = self.even_length(parts[0].size)
        padded = [jnp.pad(x, (0, chunk * num - x.size)) for x in parts]
        return self._scattered(padded, [chunk] * num)

    def even_length(self, size: int) -> int:
        """Elements of the chunk of each place of a group, of which it has what `part_of` says."""
        return math.ceil(size / self._arrays.num_members)

    def part_of(self, length: int) -> int:
        """Elements that each place has of a chunk, of which every group has one."""
        return math.ceil(length / self._num_groups)

    def gathered(self, parts: Sequence[jax.Array], size: int) -> jax.Array:
        """The whole of a sum, combined, from the parts of `even_chunk`."""
        total = self._contribution.combine(*parts)
        if len(self._arrays.places) == 1:
            return total
        total = self._of_groups(total, self.even_length(size))
        return self._gathered(total, DATA_AXIS, size)

    def _of_groups(self, total: jax.Array, length: int) -> jax.Array:
        """A chunk of so many elements from the parts that the groups have of it, combined."""
        if self._num_groups == 1:
            return total
        return self._gathered(total, SHARD_GROUP_AXIS, length)

    def _gathered(self, total: jax.Array, axis: str, size: int) -> jax.Array:
        gather = functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True)
        if self._dtype != jnp.float32:
            return moved(gather, total, self._dtype)[:size]
        # Its bits are wanted, and cost a copy of the whole.
        return jax.lax.bitcast_convert_type(gather(as_bits(total))[:size], jnp.float32)

    def own_chunk(self, chunks: Chunks, parts: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """This place's part of the sum of tensors: of the chunk of its group, if there are several.

        Args:
            chunks: How they are shared out.
            parts: For each part those of the tensors.
        """
        lengths = self._arrays.lengths(chunks.lengths)
        is_each = len(lengths) == len(chunks.lengths) > 1
        if not (self._arrays.is_ring and is_each and chunks.is_even):
            return self._scattered([chunks.flat(own) for own in parts], lengths)
        return self._over_groups(
            ring_sum(
                functools.partial(chunks.of_copy, own),
                len(lengths),
                DATA_AXIS,
                self.travels_as(own[0]),
            )
            for own in parts
        )

    def _scattered(self, parts: Sequence[jax.Array], lengths: Sequence[int]) -> list[jax.Array]:
        if len(lengths) == 1:
            return list(parts)
        ring = self._arrays.is_ring
        return self._over_groups(
            reduce_scatter(x, lengths, DATA_AXIS, self.travels_as(x), ring) for x in parts
        )

    def _over_groups(self, chunks: Iterable[jax.Array]) -> list[jax.Array]:
        """This place's part of chunks of sums, added up over all groups."""
        num, ring, found = self._num_groups, self._arrays.is_ring, []
        if num == 1:
            return list(chunks)
        for x in chunks:
            lengths = [self.part_of(x.size)] * num
            padded = jnp.pad(x, (0, sum(lengths) - x.size))
            sent = self.travels_as(x)
            found.append(reduce_scatter(padded, lengths, SHARD_GROUP_AXIS, sent, ring))
        return found

    def shared_out(
        self,
        chunks: Chunks,
        others: Sequence[int],
        parts: Sequence[Mapping[int, jax.Array]],
        before: Sequence[Sequence[jax.Array]],
    ) -> list[tuple[jax.Array, ...]]:
        """This place's part of the sums of parameters, and of the others', if there are any.

        Args:
            chunks: How parameters are shared out.
            others: Numbers of the tensors that are none.
            parts: Of the sums of each tensor.
            before: What this gave of other terms; none: there are none.
        """
        found: list[list[jax.Array]] = []
        if chunks.tensors:
            found.append(
                self.own_chunk(chunks, [[part[i] for i in chunks.tensors] for part in parts])
            )
        if others:
            found.append(self.even_chunk([concatenated([p[i] for i in others]) for p in parts]))
        if not before:
            return [tuple(own) for own in found]
        pairs = zip(found, before, strict=True)
        return [tuple(a + b for a, b in zip(*pair, strict=True)) for pair in pairs]

    def whole(
        self, found: Sequence[Sequence[jax.Array]], longest: int, num_others: int
    ) -> list[jax.Array]:
        """The totals of what `shared_out` gave.

        Args:
            longest: Elements of the largest chunk of parameters.
            num_others: Elements of the tensors that are no parameters, which all places get.
        """
        own = found[: len(found) - bool(num_others)]
        combine = self._contribution.combine
        totals = [self._of_groups(combine(*parts), longest) for parts in own]
        return totals + ([self.gathered(found[-1], num_others)] if num_others else [])


def concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
    """One flat array of several."""
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def as_bits(x: jax.Array) -> jax.Array:
    """Of floats."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def flatly(collective: Callable[[jax.Array], jax.Array], arrays: list[jax.Array]) -> Any:
    """One collective over small arrays, as if it were one for each."""
    return cut(collective(concatenated(arrays)), arrays)


def cut(flat: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays from all of them one after another."""
    ends = np.cumsum([x.size for x in like])
    parts = jnp.split(flat, ends[:-1], axis=-1)
    return [p.reshape(flat.shape[:-1] + x.shape) for p, x in zip(parts, like, strict=True)]


def zeros_like(like: Any) -> Any:
    """What makes arrays of zeros of such shapes and shardings."""
    where = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), out_shardings=where
    )
