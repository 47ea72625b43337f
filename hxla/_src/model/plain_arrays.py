"""Arrays of any dtype as plain arrays, for programs, sums, stores and checkpoints.

Random keys become their bits, and elements of less than a byte take one. A complex parameter
becomes two real parts in an added last dimension, for optimizers and exact sums take real numbers.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.types import PyTree


def is_key(x: Any) -> bool:
    """Whether a leaf, or the shape of one, is an array of random keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def is_complex(x: Any) -> bool:
    """Whether a leaf, or the shape of one, is an array of complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def real_parts(x: jax.Array) -> jax.Array:
    """The real and the imaginary part of a complex array, in a last dimension of two."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


def from_real_parts(parts: jax.Array) -> jax.Array:
    """Inverse of `real_parts`."""
    return jax.lax.complex(parts[..., 0], parts[..., 1])


def root_key(seed: int) -> jax.Array:
    """The key from which all keys of a run derive.

    Its generator is `jax_default_prng_impl`, one of the settings in `Plan.numerics`.
    """
    return jax.random.key(seed, impl=jax.config.values["jax_default_prng_impl"])


def key_impl(leaf: Any) -> Any:
    """The generator of a key, which may be a shape only."""
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return impls[0]


def in_bytes(arrays: Sequence[Any]) -> list[Any]:
    """Arrays, or shapes, in whole bytes: jax 0.10 passes no others between programs."""
    return [x if (dtype := _whole_bytes(x.dtype)) is None else _cast(x, dtype) for x in arrays]


def from_bytes(arrays: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Inverse of `in_bytes`.

    Args:
        like: The shapes of the result.
    """
    pairs = zip(arrays, like, strict=True)
    return [x if _whole_bytes(y.dtype) is None else x.astype(y.dtype) for x, y in pairs]


def _cast(x: Any, dtype: Any) -> Any:
    return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def with_arrays(tree: PyTree) -> PyTree:
    """A tree with arrays in place of Python numbers."""
    is_number = lambda x: isinstance(x, int | float | complex)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x) if is_number(x) else x, tree)


def is_plain(tree: PyTree, *, in_parts: bool = False) -> bool:
    """Whether `as_plain` returns a tree unchanged."""
    leaves = jax.tree.leaves(tree)
    return not any(
        is_key(x) or _whole_bytes(x.dtype) or (in_parts and is_complex(x)) for x in leaves
    )


def as_plain(tree: PyTree, *, in_parts: bool = False) -> PyTree:
    """A tree of arrays or shapes with random keys, complex and sub-byte arrays replaced.

    Args:
        in_parts: Whether complex numbers become two real parts.
    """

    def plain(x: Any) -> Any:
        if is_key(x):
            return jax.random.key_data(x)
        if not is_complex(x):
            return in_bytes([x])[0]
        return real_parts(x)

    def plain_leaf(x: Any) -> Any:
        if is_plain(x, in_parts=in_parts):
            return x
        return jax.eval_shape(plain, x) if isinstance(x, jax.ShapeDtypeStruct) else plain(x)

    return jax.tree.map(plain_leaf, with_arrays(tree))


def from_plain(tree: PyTree, like: PyTree) -> PyTree:
    """Inverse of `as_plain`.

    Args:
        like: A tree with the dtypes of the result, arrays or shapes.
    """

    def typed(x: Any, like: Any) -> Any:
        if is_key(like):
            return jax.random.wrap_key_data(x, impl=key_impl(like))
        if is_complex(like) and not is_complex(x):
            return from_real_parts(x)
        return from_bytes([x], [like])[0]

    return jax.tree.map(typed, tree, like)


def _whole_bytes(dtype: Any) -> Any:
    """The dtype in whole bytes for one of less than a byte; None: it has whole bytes."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return jnp.float8_e4m3fn
    return None
