"""What a batch of the user's data must be."""

from typing import Any

import jax
import jax.numpy as jnp

from .._core._errors import DataError
from .._core._types import PyTree


def leaf_name(path: Any) -> str:
    """An array of a batch, in words."""
    return jax.tree_util.keystr(path) or "the array"


def check_dtypes(tree: PyTree, where: str) -> None:
    """Refuse what no device can hold.

    Raises:
        DataError: With the array's name.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise DataError(
                f"{where}: {leaf_name(path)} holds random keys; leave them out, and let the loss "
                "take its key as third argument, loss(model, batch, key)"
            )
        if leaf.dtype.kind in "OSU":
            raise DataError(
                f"{where}: {leaf_name(path)} has dtype {leaf.dtype}, which no device can hold; "
                "encode it as numbers"
            )


def leading_dimension(tree: PyTree, where: str) -> int:
    """The one leading dimension of all arrays.

    Raises:
        DataError: If they have none, or several.
    """
    sizes = {
        leaf_name(path): (leaf.shape[0] if leaf.ndim else None)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    if len(set(sizes.values())) != 1 or None in sizes.values():
        listed = ", ".join(f"{k}: {v}" for k, v in sizes.items())
        raise DataError(f"{where}: leaves need one leading dimension, found {listed}")
    return int(next(iter(sizes.values())) or 0)
