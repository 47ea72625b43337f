"""Arrays of any dtype as those that programs, sums, stores and checkpoints take.

Random keys are their bits, numbers of less than a byte take one, and a complex parameter is two
real parts, in a last dimension of its own: optimizers and exact sums are for real numbers.
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
    """The complex array of which `real_parts` made another."""
    return jax.lax.complex(parts[..., 0], parts[..., 1])


def root_key(seed: int) -> jax.Array:
    """The key from which those of a run derive.

    It is of the generator that `jax_default_prng_impl` names, one of the settings in
    `Plan.numerics`.
    """
    return jax.random.key(seed, impl=jax.config.values["jax_default_prng_impl"])


def key_impl(leaf: Any) -> Any:
    """The random algorithm of a key, which may be a shape only; a trace sees nothing of it."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def in_bytes(arrays: Sequence[Any]) -> list[Any]:
    """Arrays, or shapes, in whole bytes: jax 0.10 takes no others from one program to the next."""
    return [x if (dtype := _whole_bytes(x.dtype)) is None else _cast(x, dtype) for x in arrays]


def from_bytes(arrays: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The arrays of which `in_bytes` made others.

    Args:
        like: The shapes of what it made them of.
    """
    pairs = zip(arrays, like, strict=True)
    return [x if _whole_bytes(y.dtype) is None else x.astype(y.dtype) for x, y in pairs]


def _cast(x: Any, dtype: Any) -> Any:
    return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def with_arrays(tree: PyTree) -> PyTree:
    """A tree with arrays for numbers of Python's."""
    is_number = lambda x: isinstance(x, int | float | complex)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x) if is_number(x) else x, tree)


def is_plain(tree: PyTree, *, in_parts: bool = False) -> bool:
    """Whether `as_plain` leaves a tree as it is."""
    leaves = jax.tree.leaves(tree)
    return not any(
        is_key(x) or _whole_bytes(x.dtype) or (in_parts and is_complex(x)) for x in leaves
    )


def as_plain(tree: PyTree, *, in_parts: bool = False) -> PyTree:
    """A tree of arrays, or of their shapes, with others in the place of those that need one.

    Args:
        in_parts: Whether complex numbers are two real ones.
    """

    def plain(x: Any) -> Any:
        if is_key(x):
            return jax.random.key_data(x)
        if not is_complex(x):
            return in_bytes([x])[0]
        return real_parts(x)

    def of_leaf(x: Any) -> Any:
        if is_plain(x, in_parts=in_parts):
            return x
        return jax.eval_shape(plain, x) if isinstance(x, jax.ShapeDtypeStruct) else plain(x)

    return jax.tree.map(of_leaf, with_arrays(tree))


def from_plain(tree: PyTree, like: PyTree) -> PyTree:
    """The arrays of which `as_plain` made others.

    Args:
        like: What it made it of, or the shapes of that.
    """

    def typed(x: Any, like: Any) -> Any:
        if is_key(like):
            return jax.random.wrap_key_data(x, impl=key_impl(like))
        if is_complex(like) and not is_complex(x):
            return from_real_parts(x)
        return from_bytes([x], [like])[0]

    return jax.tree.map(typed, tree, like)


def _whole_bytes(dtype: Any) -> Any:
    """The dtype that stands for one of less than a byte; None: it needs none."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return jnp.float8_e4m3fn
    return None
