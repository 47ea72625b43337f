"""Which parameters are trained: an NNX filter, or patterns of paths, for NNX and Linen alike."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from ..core.errors import ConfigError
from ..core.types import PyTree

#: What an argument `trainable` may be: see `frozen_names`.
Trainable = str | Sequence[Any] | Callable[..., Any] | None

_ACCEPTED = (
    "a pattern of paths ('head/'), an NNX filter (nnx.LoRAParam, nnx.Not(...), "
    "nnx.PathContains(...), a function of path and value), or a list of these"
)


def frozen_names(params: PyTree, trainable: Trainable) -> frozenset[str]:
    """The paths of the parameters that are not trained.

    Args:
        params: Of the model, arrays or shapes.
        trainable: A pattern that must be found in the path of a parameter, from the start of a path
            component, as in rule sets; an NNX filter, which gets the path as a tuple; or several,
            of which one is enough. None: all are trained.

    Raises:
        ConfigError: If one of them names no parameter, or is none of these.
    """
    if trainable is None:
        return frozenset()
    entries = list(entries_of(params))
    chosen: set[str] = set()
    problems = []
    for one in trainable if isinstance(trainable, list | tuple) else [trainable]:
        is_chosen = chooses(one, "trainable")
        found = {name for path, name, value in entries if is_chosen(path, name, value)}
        chosen |= found
        if not found:
            near = nearest(one, [name for _, name, _ in entries])
            shown = repr(one) if isinstance(one, str) else getattr(one, "__name__", one)
            problems.append(f"  {shown}{near}")
    if problems:
        raise ConfigError(
            "trainable names no parameter of the model by\n"
            + "\n".join(problems)
            + f"\ntrainable is {_ACCEPTED}; parameters of Linen have paths and no types"
        )
    return frozenset(name for _, name, _ in entries) - chosen


def trained_leaves(params: PyTree, frozen: frozenset[str]) -> tuple[bool, ...]:
    """For each array of the parameters whether it is trained."""
    found: list[bool] = []
    for _, name, value in entries_of(params):
        found += [name not in frozen] * len(jax.tree.leaves(value))
    return tuple(found)


def trained_tree(params: PyTree, frozen: frozenset[str]) -> PyTree:
    """The user's tree without what is frozen, its arrays in the same order."""
    if not frozen:
        return params
    if isinstance(params, nnx.State):
        return nnx.filter_state(params, lambda path, _: "/".join(map(str, path)) not in frozen)
    flat = flatten_dict(params)
    kept = unflatten_dict({k: x for k, x in flat.items() if "/".join(map(str, k)) not in frozen})
    return freeze(kept) if isinstance(params, FrozenDict) else kept


def entries_of(params: PyTree) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Path, name and value of each parameter, which may be an array in a box."""
    is_box = lambda x: isinstance(x, nnx.Variable | meta.AxisMetadata)  # noqa: E731
    for path, value in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box):
        keys = tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path)
        yield keys, "/".join(map(str, keys)), value


def nearest(one: Any, names: Sequence[str]) -> str:
    """The path that comes nearest to a pattern, to be added to a message."""
    near = difflib.get_close_matches(str(one), names, n=1, cutoff=0.0)
    return f" (the nearest path is {near[0]!r})" if near else ""


def chooses(one: Any, argument: str) -> Callable[[tuple[Any, ...], str, Any], bool]:
    """Whether a pattern of paths or an NNX filter is of a variable: of path, name and value.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(one, str):
        try:
            pattern = re.compile(rf"(?:^|/)(?:{one})")
        except re.error as error:
            raise ConfigError(f"{argument}={one!r} is no pattern: {error}") from None
        return lambda _path, name, _value: pattern.search(name) is not None
    try:
        test = nnx.filterlib.to_predicate(one)
    except (TypeError, ValueError):
        raise ConfigError(f"{argument}={one!r}: pass {_ACCEPTED}") from None

    def run(path: tuple[Any, ...], _name: str, value: Any) -> bool:
        return bool(test(path, value))

    return run
