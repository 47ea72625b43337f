"""Random keys of jax's key types, as the arrays of bits that sums, stores and checkpoints take."""

from typing import Any

import jax
import jax.numpy as jnp

from .._core._types import PyTree


def is_key(x: Any) -> bool:
    """Whether a leaf, or the shape of one, is an array of random keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


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


def keys_as_data(tree: PyTree) -> PyTree:
    """A tree of arrays, or of their shapes, in which the data of keys stands for the keys."""

    def plain(x: Any) -> Any:
        if not is_key(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.eval_shape(jax.random.key_data, x)
        return jax.random.key_data(x)

    return jax.tree.map(plain, tree)


def keys_from_data(tree: PyTree, like: PyTree) -> PyTree:
    """The arrays of which `keys_as_data` made others.

    Args:
        tree: What it made.
        like: The same with keys, or the shapes of that.
    """

    def typed(x: Any, like: Any) -> Any:
        return jax.random.wrap_key_data(x, impl=key_impl(like)) if is_key(like) else x

    return jax.tree.map(typed, tree, like)
