"""The state as the user sees it: read only, and replaced by checked arrays.

Its dictionaries refuse writes at once. Other containers (an `nnx.State`, a variable, a
list) cannot, so they are checked before the next step.

A check says whether the replicas of the state are still equal, bit for bit.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError, LaunchError
from ..core.files import listed
from ..core.types import PyTree
from ..job.agreement import facts_of_data, ranks_text
from ..job.context import JobContext
from ..lower.initial_state import State
from ..lower.store import Store
from ..model.functional import leaf_names
from ..model.loss_scale import own_variables
from ..model.plain_arrays import is_key
from ..weights.weights import note_other_variables

_MOST_NAMES = 5


class ReplicaChecksum:
    """Compares the checksums of the replicas of the state at regular steps.

    Args:
        ranks: The processes of each replica; a single replica is not compared.
    """

    def __init__(self, store: Store, ranks: tuple[tuple[int, ...], ...], every: int):
        self._store, self._ranks, self._every = store, ranks, every
        self._compared: int | None = None
        self._was_due = False

    def stepped(self, step: int, *, are_one: bool) -> None:
        """Compare if it is due, or was since the replicas had one state.

        Raises:
            LaunchError: As `compare`.
        """
        self._was_due |= self.is_due(step)
        if self._was_due and are_one:
            self._was_due = False
            self.compare(step)

    def is_due(self, step: int) -> bool:
        """Whether to compare at this step."""
        return step % self._every == 0

    def compare(self, step: int) -> None:
        """Compare unless this step was compared already; every process must call this.

        Raises:
            LaunchError: On every process, with the differing replicas and arrays.
        """
        if len(self._ranks) == 1 or step == self._compared:
            return
        before, self._compared = self._compared, step
        rows = self._store.checksums()
        usual, _ = Counter(map(bytes, rows)).most_common(1)[0]
        first = next(i for i, row in enumerate(rows) if bytes(row) == usual)
        odd = {i: rows[i] != rows[first] for i in range(len(rows)) if bytes(rows[i]) != usual}
        if not odd:
            return
        since = (
            f"after step {before} they were still equal"
            if before is not None
            else ("they were not compared before")
        )
        raise LaunchError(
            f"after {step} steps the replicas of the state are no longer equal ({since}):\n  "
            + "\n  ".join(self._lines(first, odd))
            + "\nthe processes got different inputs, their devices compute differently, or memory "
            "was damaged: resume from an earlier checkpoint"
        )

    def _lines(self, first: int, odd: Mapping[int, np.ndarray]) -> list[str]:
        names = self._store.layout.names()
        lines = []
        for i, differs in odd.items():
            arrays = [names[k] for k in np.flatnonzero(differs)]
            more = f" and {len(arrays) - _MOST_NAMES} more" if len(arrays) > _MOST_NAMES else ""
            lines.append(
                f"{ranks_text(self._ranks[i])} has another {', '.join(arrays[:_MOST_NAMES])}{more} "
                f"than {ranks_text(self._ranks[first])}"
            )
        return lines


_REMEDY = (
    "hand in what is to be trained on, session.replace(params=..., aux=..., opt_state=...); what "
    "jax.tree.map or session.gather makes of the state is yours to change"
)
PARTS = ("params", "aux", "opt_state")


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(f"session.state is to be read, and nothing reads it back: {_REMEDY}")


@jax.tree_util.register_pytree_with_keys_class
class ReadOnlyDict(dict[Any, Any]):
    """A dictionary that cannot be changed; `jax.tree.map` makes a plain one of it."""

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    update = setdefault = pop = popitem = clear = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[Any, ...]]:
        """Flatten like a plain dictionary."""
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(k), self[k]) for k in keys], keys

    @staticmethod
    def tree_unflatten(keys: tuple[Any, ...], children: Any) -> dict[Any, Any]:
        """Make a plain dictionary, which may be changed."""
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
    """The state that the user holds between two steps."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._leaves: list[Any] = []
        self._ids: set[int] = set()

    def hand_out(self, state: State) -> State:
        """Make the state read only; it stays the same object until `take_back`."""
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
        """The state that the user holds; None if none."""
        return self._state

    def has(self, leaf: Any) -> bool:
        """Whether an array belongs to the state that the user holds."""
        return id(leaf) in self._ids

    def check(self) -> None:
        """Refuse writes into the state.

        Raises:
            ConfigError: With the changed leaves.
        """
        if self._state is None:
            return
        now = _leaves(self._state)
        if len(now) == len(self._leaves):
            pairs = zip(_names(self._state), now, self._leaves, strict=True)
            written = [name for name, x, leaf in pairs if x is not leaf]
        else:
            written = ["its structure"]
        if written:
            more = f" and {len(written) - 5} more" if len(written) > 5 else ""
            raise ConfigError(
                f"session.state was written into ({', '.join(written[:5])}{more}), and nothing "
                f"reads it back: {_REMEDY}"
            )

    def take_back(self) -> None:
        """Check the state for writes and release it.

        Raises:
            ConfigError: If the state was written into.
        """
        try:
            self.check()
        finally:
            self._state, self._leaves, self._ids = None, [], set()


def _leaves(state: State) -> list[Any]:
    return jax.tree.leaves([getattr(state, name) for name in PARTS])


def _names(state: State) -> list[str]:
    return [f"{part}/{name}" for part in PARTS for name in leaf_names(getattr(state, part))]


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)  # from narrow to wide


def replaced(
    parts: Mapping[str, PyTree],
    wanted: Mapping[str, PyTree],
    is_in_state: Callable[[Any], bool],
    whole: Callable[[Any], np.ndarray],
) -> dict[int, np.ndarray]:
    """The arrays that replace arrays of the state.

    Args:
        parts: Trees by the state's field names; None keeps a part.
        wanted: Shapes of the whole state.
        is_in_state: Whether a leaf comes from the state, and stays.
        whole: Gathers an array into host memory; every process calls it for the same leaves.

    Returns:
        Arrays by their index in `ReplicaArrays.leaves`.

    Raises:
        ConfigError: With every leaf that differs from the state in name, shape or dtype.
    """
    arrays: dict[int, np.ndarray] = {}
    faults: list[str] = []
    number = 0
    for part, tree in wanted.items():
        new_tree, variables = parts.get(part), own_variables(tree)
        if new_tree is not None:
            leaves = dict(zip(leaf_names(new_tree), jax.tree.leaves(new_tree), strict=True))
            names = leaf_names(variables)
            faults += [f"{part}/{name}: missing" for name in names if name not in leaves]
            faults += [f"{part}/{name}: not in the state" for name in leaves if name not in names]
            for k, (name, like) in enumerate(zip(names, jax.tree.leaves(variables), strict=True)):
                if name not in leaves or is_in_state(leaves[name]):
                    continue
                try:
                    arrays[number + k] = _converted(leaves[name], like, whole)
                except (TypeError, ValueError, OverflowError) as error:
                    faults.append(f"{part}/{name}: {error}")
        number += len(jax.tree.leaves(tree))
    if faults:
        raise ConfigError(
            f"session.replace:{listed(faults)}\npass whole parts of session.state, in which arrays "
            "have the shapes and the dtypes of those that they replace"
        )
    return arrays


def agreed_arrays(
    parts: Mapping[str, PyTree], store: Store, handed_out: StateAccess, job: JobContext
) -> dict[int, np.ndarray]:
    """The arrays of `replaced`, the same on every process.

    Raises:
        ConfigError: With every leaf that differs from the state in name, shape or dtype.
        LaunchError: If the arrays of processes differ.
    """
    arrays = replaced(parts, store.wanted(), handed_out.has, store.gather)
    names = store.layout.names()
    named = {names[k]: x for k, x in arrays.items()}
    job.agree("replaced arrays", lambda: facts_of_data(named, "session.replace: "))
    return arrays


def _converted(x: Any, like: Any, whole: Callable[[Any], np.ndarray]) -> np.ndarray:
    """A leaf as an array with the shape and dtype of another; Python numbers may widen."""
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
