"""The state as the user sees it: read only, and replaced by checked arrays.

Its dictionaries refuse at once. Other containers (an `nnx.State`, a variable, a list) cannot, so
they are looked at again before anything goes on.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError
from ..core.files import listed
from ..core.types import PyTree
from ..lower.state import State
from ..model.functional import leaf_names
from ..model.loss_scale import own_variables
from ..model.plain_arrays import is_key
from ..weights.save_weights import note_other_variables

_REMEDY = (
    "hand in what is to be trained on, session.replace(params=..., aux=..., opt_state=...); what "
    "jax.tree.map or session.gather makes of the state is yours to change"
)
PARTS = ("params", "aux", "opt_state")


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(f"session.state is to be read, and nothing reads it back: {_REMEDY}")


@jax.tree_util.register_pytree_with_keys_class
class ReadOnlyDict(dict[Any, Any]):
    """A dictionary that cannot be changed; what is mapped over it is a plain one."""

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    update = setdefault = pop = popitem = clear = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[Any, ...]]:
        """As those of a plain dictionary."""
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(k), self[k]) for k in keys], keys

    @staticmethod
    def tree_unflatten(keys: tuple[Any, ...], children: Any) -> dict[Any, Any]:
        """A plain one, which may be changed."""
        return dict(zip(keys, children, strict=True))


def _read_only(tree: PyTree) -> PyTree:
    """The same tree with dictionaries that cannot be changed."""
    if type(tree) is dict:
        return ReadOnlyDict({key: _read_only(child) for key, child in tree.items()})
    if jax.tree_util.all_leaves([tree]):
        return tree
    is_child = lambda x: x is not tree  # noqa: E731
    children, treedef = jax.tree.flatten(tree, is_leaf=is_child)
    return jax.tree.unflatten(treedef, [_read_only(child) for child in children])


class StateAccess:
    """What was handed out of the state between two steps."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._leaves: list[Any] = []
        self._ids: set[int] = set()

    def hand_out(self, state: State) -> State:
        """A state to be read only: the same one until `take_back`."""
        exponents = state.exponents.copy()
        exponents.flags.writeable = False
        parts = {name: _read_only(getattr(state, name)) for name in PARTS}
        self._state = dataclasses.replace(state, exponents=exponents, **parts)
        note_other_variables(self._state)
        self._leaves = _leaves(self._state)
        self._ids = set(map(id, self._leaves))
        return self._state

    @property
    def state(self) -> State | None:
        """What is handed out now."""
        return self._state

    def has(self, leaf: Any) -> bool:
        """Whether an array is one that is handed out now."""
        return id(leaf) in self._ids

    def check(self) -> None:
        """Refuse to go on where something was written into it.

        Raises:
            ConfigError: With what was.
        """
        if self._state is None:
            return
        now = _leaves(self._state)
        if len(now) == len(self._leaves):
            pairs = zip(_names(self._state), now, self._leaves, strict=True)
            written = [name for name, x, own in pairs if x is not own]
        else:
            written = ["its structure"]
        if written:
            more = f" and {len(written) - 5} more" if len(written) > 5 else ""
            raise ConfigError(
                f"session.state was written into ({', '.join(written[:5])}{more}), and nothing "
                f"reads it back: {_REMEDY}"
            )

    def take_back(self) -> None:
        """Let go of it, once it was looked at.

        Raises:
            ConfigError: If something was written into it.
        """
        try:
            self.check()
        finally:
            self._state, self._leaves, self._ids = None, [], set()


def _leaves(state: State) -> list[Any]:
    return jax.tree.leaves([getattr(state, name) for name in PARTS])


def _names(state: State) -> list[str]:
    return [f"{part}/{name}" for part in PARTS for name in leaf_names(getattr(state, part))]


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
        The arrays by their numbers in `ReplicaArrays.leaves`.

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
