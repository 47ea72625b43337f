"""From the sums of all places to totals, inside the programs with collectives between copies.

Chunks of integers are added, and then combined to floats; a chunk may wait as integers for more.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core._types import DATA_AXIS
from ._chunks import Chunks, moved, reduce_scatter, ring_sum
from ._contribution import Contribution
from ._global_arrays import GlobalArrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduced:
    """What all processes know after a sum.

    Attributes:
        numbers_DN: float32, what each replica told.
        rows_MS: float32, the sums of every microbatch.
        maxima_T: float32, the largest magnitude of each tensor in any microbatch.
        totals: For each local replica the bits of the sums of its tensors: the vectors of
            `buckets`, or each tensor where replicas have several devices.
        ints: For each local replica the integer leaves of other variables.
    """

    numbers_DN: np.ndarray
    rows_MS: np.ndarray
    maxima_T: np.ndarray
    totals: tuple[Any, ...]
    ints: tuple[Any, ...]


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


class Totals:
    """Adds up arrays of all places, each of which is several parts.

    Args:
        arrays: Knows all places.
        contribution: How tensors joined the sums.
    """

    def __init__(self, arrays: GlobalArrays, contribution: Contribution):
        self._arrays, self._contribution = arrays, contribution
        self._dtype = jnp.dtype(contribution.form.dtype)

    def travels_as(self, x: jax.Array) -> Any:
        """Integers are never rounded."""
        return x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else self._dtype

    def all_reduce(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The whole of a flat sum, combined, on every place."""
        if len(self._arrays.places) == 1:
            return self._contribution.combine(*parts)
        return self.gathered(self.even_chunk(parts), parts[0].size)

    def even_chunk(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """This place's chunk of a flat sum of which all have as much."""
        num = len(self._arrays.places)
        chunk = self.even_length(parts[0].size)
        padded = [jnp.pad(x, (0, chunk * num - x.size)) for x in parts]
        return self._scattered(padded, [chunk] * num)

    def even_length(self, size: int) -> int:
        """Elements of such a chunk."""
        return math.ceil(size / len(self._arrays.places))

    def gathered(self, parts: Sequence[jax.Array], size: int) -> jax.Array:
        """The whole of a sum, combined, from the chunks of `even_chunk`."""
        total = self._contribution.combine(*parts)
        if len(self._arrays.places) == 1:
            return total
        if self._dtype != jnp.float32:
            every = moved(_all_gather, total, self._dtype)
            return every[:size]
        # Its bits are wanted, and cost a copy of the whole.
        return jax.lax.bitcast_convert_type(_all_gather(as_bits(total))[:size], jnp.float32)

    def own_chunk(self, chunks: Chunks, parts: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """This place's chunk of the sum of tensors.

        Args:
            chunks: How they are shared out.
            parts: For each part those of the tensors.
        """
        lengths = self._arrays.lengths(chunks.lengths)
        is_each = len(lengths) == len(chunks.lengths) > 1
        if not (self._arrays.is_ring and is_each and chunks.is_even):
            return self._scattered([chunks.flat(own) for own in parts], lengths)
        return [
            ring_sum(
                functools.partial(chunks.of_copy, own),
                len(lengths),
                DATA_AXIS,
                self.travels_as(own[0]),
            )
            for own in parts
        ]

    def _scattered(self, parts: Sequence[jax.Array], lengths: Sequence[int]) -> list[jax.Array]:
        if len(lengths) == 1:
            return list(parts)
        ring = self._arrays.is_ring
        return [reduce_scatter(x, lengths, DATA_AXIS, self.travels_as(x), ring) for x in parts]

    def shared_out(
        self,
        chunks: Chunks,
        others: Sequence[int],
        parts: Sequence[Mapping[int, jax.Array]],
        before: Sequence[Sequence[jax.Array]],
    ) -> list[tuple[jax.Array, ...]]:
        """This place's chunks of the sums of parameters, and of the others', if there are any.

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

    def whole(self, found: Sequence[Sequence[jax.Array]], num_others: int) -> list[jax.Array]:
        """The totals of what `shared_out` gave.

        Args:
            found: Chunks.
            num_others: Elements of the tensors that are no parameters, which all places get.
        """
        own = found[: len(found) - bool(num_others)]
        totals = [self._contribution.combine(*parts) for parts in own]
        return totals + ([self.gathered(found[-1], num_others)] if num_others else [])


def _all_gather(chunk: jax.Array) -> jax.Array:
    return jax.lax.all_gather(chunk, DATA_AXIS, tiled=True)


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
