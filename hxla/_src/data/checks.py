"""Checks of the user's examples and batches, and their conversion to host arrays."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree
from ..model.plain_arrays import is_key

_SCALARS = (int, float, complex, np.generic, str, bytes, type(None))


def leaf_name(path: Any) -> str:
    """The name of an array of a batch, for messages."""
    return jax.tree_util.keystr(path) or "the array"


def as_arrays(tree: PyTree, where: str) -> PyTree:
    """An example or a batch as host arrays of dtypes that devices support.

    A list of numbers, however deep, is an array; other lists are containers. Mappings that jax does
    not know become dictionaries.

    Raises:
        DataError: With the name of the first leaf that is no such array.
    """

    def convert(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return convert_tree(dict(leaf), path)
        return _as_array(leaf, f"{where}: {leaf_name(path)}")

    def convert_tree(part: PyTree, prefix: Any) -> PyTree:
        at_path = lambda path, leaf: convert((*prefix, *path), leaf)  # noqa: E731
        return jax.tree_util.tree_map_with_path(at_path, part, is_leaf=_is_numbers)

    return convert_tree(tree, ())


def with_dictionaries(data: Any) -> Any:
    """The user's data with dictionaries for mappings that jax does not know."""
    if not isinstance(data, Mapping | tuple):
        return data

    def convert(leaf: Any) -> Any:
        return with_dictionaries(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return jax.tree.map(convert, data)


def _is_numbers(x: Any) -> bool:
    """Whether `x` is a list of numbers, or of such lists; lists of texts are refused later."""
    if type(x) is not list:
        return False
    kinds = set(map(type, x))
    if kinds == {list}:
        return all(map(_is_numbers, x))
    return all(issubclass(kind, _SCALARS) for kind in kinds)


def _as_array(x: Any, name: str) -> np.ndarray:
    check_dtype(x, name)
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(x, list):
            raise DataError(f"{name}: its lists have unlike lengths; pad them") from None
        raise DataError(f"{name} is no array that this process can read: {error}") from error
    check_dtype(array, name)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_dtype(x: Any, name: str) -> None:
    """Refuse dtypes that no device supports, masked arrays and random keys.

    Args:
        x: Anything; without a dtype it passes.

    Raises:
        DataError: With the remedy.
    """
    dtype = getattr(x, "dtype", None)
    if isinstance(x, np.ma.MaskedArray):
        raise DataError(
            f"{name} is a masked array, whose mask devices do not support: fill it, x.filled(0), "
            "and pass the mask as another array"
        )
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and is_key(x):
        raise DataError(
            f"{name} has random keys; leave them out, and let the loss take its key as third "
            "argument, loss(model, batch, key)"
        )
    if isinstance(dtype, np.dtype) and not _is_supported(dtype):
        raise DataError(
            f"{name} has dtype {dtype}, which no device supports; encode it as numbers of at most "
            "64 bits"
        )


@functools.cache
def _is_supported(dtype: np.dtype[Any]) -> bool:
    is_number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return is_number and dtype.kind != "m" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


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


def check_alike(tree: PyTree, where: str, first: PyTree, there: str, *, leading: int = 0) -> None:
    """Refuse arrays that differ from the first ones, for which programs are compiled.

    Args:
        where: The name of `tree`, for messages.
        first: Arrays or shapes.
        there: The name of `first`, for messages.
        leading: The number of leading dimensions that may differ.

    Raises:
        DataError: With every array that differs.
    """
    leaves, like = jax.tree.leaves(tree), jax.tree.leaves(first)
    pairs = [
        (x.shape[leading:], x.dtype) == (y.shape[leading:], y.dtype)
        for x, y in zip(leaves, like, strict=False)
    ]
    structures = [jax.tree.structure(t) for t in (tree, first)]
    if all(pairs) and len(set(structures)) == 1:
        return
    actual, expected = _by_name(tree), _by_name(first)
    faults = [f"{name} is missing" for name in expected if name not in actual]
    faults += [f"{name} is not in {there}" for name in actual if name not in expected]
    for name in (name for name in expected if name in actual):
        x, y = actual[name], expected[name]
        if x.shape[leading:] != y.shape[leading:]:
            faults.append(f"{name} has shape {x.shape}, in {there} {y.shape}; pad it to one shape")
        if _on_device(x) != _on_device(y):
            faults.append(f"{name} is {x.dtype}, in {there} {y.dtype}")
    if not faults and str(structures[0]) != str(structures[1]):
        faults.append(f"its structure is {structures[0]}, in {there} {structures[1]}")
    if faults:
        raise DataError(f"{where}: " + "; ".join(faults))


def _by_name(tree: PyTree) -> dict[str, Any]:
    return {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _on_device(x: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(x.dtype)
