"""Other arrays that the user puts into the state: checked, and whole in host memory."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core._errors import ConfigError
from .._core._faults import listed
from .._core._types import PyTree
from .._model._functional import leaf_names
from .._model._loss_scale import own_variables
from .._model._plain_arrays import is_key

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)  # each takes those before it


def replaced(
    given: Mapping[str, PyTree],
    wanted: Mapping[str, PyTree],
    is_there: Callable[[Any], bool],
    whole: Callable[[Any], np.ndarray],
) -> dict[int, np.ndarray]:
    """Arrays that take the place of others.

    Args:
        given: Of parts of the state, by the names of its fields; None: that part stays.
        wanted: Shapes of the whole state.
        is_there: Whether a leaf is the state's own, which stays.
        whole: Makes an array whole in host memory; every process calls it for the same leaves.

    Returns:
        The arrays by their numbers in `Held.leaves`.

    Raises:
        ConfigError: With everything that differs from the state in its name, shape or dtype.
    """
    arrays: dict[int, np.ndarray] = {}
    faults: list[str] = []
    number = 0
    for part, tree in wanted.items():
        new, own = given.get(part), own_variables(tree)
        if new is not None:
            found = dict(zip(leaf_names(new), jax.tree.leaves(new), strict=True))
            names = leaf_names(own)
            faults += [f"{part}/{name}: missing" for name in names if name not in found]
            faults += [f"{part}/{name}: not in the state" for name in found if name not in names]
            for k, (name, like) in enumerate(zip(names, jax.tree.leaves(own), strict=True)):
                if name not in found or is_there(found[name]):
                    continue
                try:
                    arrays[number + k] = _as(found[name], like, whole)
                except (TypeError, ValueError, OverflowError) as error:
                    faults.append(f"{part}/{name}: {error}")
        number += len(jax.tree.leaves(tree))
    if faults:
        raise ConfigError(
            f"session.replace:{listed(faults)}\npass whole parts of session.state, in which arrays "
            "have the shapes and the dtypes of those that they replace"
        )
    return arrays


def _as(x: Any, like: Any, whole: Callable[[Any], np.ndarray]) -> np.ndarray:
    """A leaf as an array of a shape and a dtype; numbers of Python have no dtype of their own."""
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    has_dtype = hasattr(x, "dtype") and not isinstance(x, float)  # np.float64 is Python's number
    shape, dtype = np.shape(x), getattr(x, "dtype", np.asarray(x).dtype)
    if shape != like.shape:
        raise ValueError(f"has shape {shape}, in the state {like.shape}")
    same = jax.dtypes.canonicalize_dtype(dtype) == like.dtype
    if not same and (has_dtype or _rank(dtype) > _rank(like.dtype)):
        raise TypeError(f"is {dtype}, in the state {like.dtype}")
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return whole(x)
    return np.array(x, like.dtype)


def _rank(dtype: Any) -> int:
    return next((i for i, k in enumerate(_KINDS) if jnp.issubdtype(dtype, k)), len(_KINDS))
