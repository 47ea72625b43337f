"""Arrays of any dtypes as one array of 32-bit words, bit for bit, and back."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class BitcastPacking:
    """Layout of arrays one after another.

    Attributes:
        dtypes: Dtypes of the arrays; random keys are packed as their data.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @staticmethod
    def like(arrays: Sequence[Any]) -> "BitcastPacking":
        """The packing of arrays of these shapes and dtypes."""
        return BitcastPacking(tuple(tuple(x.shape) for x in arrays), tuple(x.dtype for x in arrays))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Words of each array."""
        return tuple(map(_num_words, self.shapes, self.dtypes))

    @functools.cached_property
    def size(self) -> int:
        """Words of all arrays."""
        return sum(self.sizes)

    def pack(self, arrays: Sequence[jax.Array], size: int | None = None) -> jax.Array:
        """The arrays as uint32[size], padded with zeros."""
        words = [_to_words(x) for x in arrays]
        rest = (self.size if size is None else size) - self.size
        if rest or not words:
            words.append(jnp.zeros(rest, jnp.uint32))
        return jnp.concatenate(words) if len(words) > 1 else words[0]

    def pack_on_host(self, rows: Sequence[Sequence[Any]], num: int) -> np.ndarray:
        """Host arrays as uint32[num, size], a row for each sequence; the other rows are padding."""
        out = np.empty((num, self.size), np.uint32)
        starts = itertools.accumulate(self.sizes, initial=0)
        each = zip(starts, self.sizes, self.shapes, self.dtypes, strict=False)
        for place, (start, size, shape, dtype) in enumerate(each):
            if not size:
                continue
            part = out[: len(rows), start : start + size].view(dtype)[:, : math.prod(shape)]
            np.stack([np.asarray(row[place]).reshape(-1) for row in rows], out=part)
        return out

    def unpack(self, words: jax.Array) -> list[jax.Array]:
        """The arrays, from the first words."""
        starts = itertools.accumulate(self.sizes, initial=0)
        return [
            _from_words(words[start : start + size], shape, dtype)
            for start, size, shape, dtype in zip(
                starts, self.sizes, self.shapes, self.dtypes, strict=False
            )
        ]


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _key_data(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))


def _carried(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype for the bitcast of an array: keys, booleans and others have none directly."""
    if _is_key(dtype):
        return _key_data(shape, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.ShapeDtypeStruct((*shape, 2), jnp.finfo(dtype).dtype)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jax.ShapeDtypeStruct(shape, jnp.int8)
    return jax.ShapeDtypeStruct(shape, jnp.uint8 if dtype == jnp.bool_ else dtype)


def _num_words(shape: tuple[int, ...], dtype: Any) -> int:
    carried = _carried(shape, dtype)
    return -(-math.prod(carried.shape) * carried.dtype.itemsize // 4)


def _to_words(x: jax.Array) -> jax.Array:
    carried = _carried(x.shape, x.dtype)
    if _is_key(x.dtype):
        x = jax.random.key_data(x)
    elif jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    flat = x.astype(carried.dtype).reshape(-1)
    narrow = 4 // flat.dtype.itemsize
    if narrow > 1:
        flat = jnp.pad(flat, (0, -flat.size % narrow)).reshape(-1, narrow)
    return jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


def _from_words(words: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    carried = _carried(shape, dtype)
    if carried.dtype.itemsize > 4:
        words = words.reshape(-1, carried.dtype.itemsize // 4)
    flat = jax.lax.bitcast_convert_type(words, carried.dtype).reshape(-1)
    x = flat[: math.prod(carried.shape)].reshape(carried.shape)
    if _is_key(dtype):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), dtype)))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(x[..., 0], x[..., 1])
    return x.astype(dtype)


def leaf_checksums(leaves: Sequence[jax.Array]) -> jax.Array:
    """uint32[leaves]: the sum of each array's bits, the same in any order of addition."""
    return jnp.stack([BitcastPacking.like([x]).pack([x]).sum(dtype=jnp.uint32) for x in leaves])


def array_bytes(x: Any) -> Any:
    """uint8[bytes]: an array's bytes in host memory."""
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)
