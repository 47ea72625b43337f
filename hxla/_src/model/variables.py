"""Variables of a model: which parameters are trained, and how the others merge.

Variables that are no parameters merge over microbatches, by the user's rules.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from ..core import files
from ..core.errors import ConfigError
from ..core.types import PyTree

#: The argument `trainable`, see `frozen_names`.
Trainable = str | Sequence[Any] | Callable[..., Any] | None

_ACCEPTED = (
    "a pattern of paths ('head/'), an NNX filter (nnx.LoRAParam, nnx.Not(...), "
    "nnx.PathContains(...), a function of path and value), or a list of these"
)


def frozen_names(params: PyTree, trainable: Trainable) -> frozenset[str]:
    """The paths of the parameters that are not trained.

    Args:
        params: Arrays or shapes.
        trainable: A pattern that occurs in the path of a parameter, from the start of a path
            component, as in rule sets; an NNX filter, which gets the path as a tuple; or several,
            of which one must match. None: all are trained.

    Raises:
        ConfigError: If a pattern or filter matches no parameter, or is of another type.
    """
    if trainable is None:
        return frozenset()
    entries = list(entries_of(params))
    chosen: set[str] = set()
    problems = []
    for selector in trainable if isinstance(trainable, list | tuple) else [trainable]:
        is_match = as_predicate(selector, "trainable")
        matches = {name for path, name, value in entries if is_match(path, name, value)}
        chosen |= matches
        if not matches:
            nearest_path = nearest(selector, [name for _, name, _ in entries])
            shown = (
                repr(selector)
                if isinstance(selector, str)
                else getattr(selector, "__name__", selector)
            )
            problems.append(f"  {shown}{nearest_path}")
    if problems:
        raise ConfigError(
            "trainable names no parameter of the model by\n"
            + "\n".join(problems)
            + f"\ntrainable is {_ACCEPTED}; parameters of Linen have paths and no types"
        )
    return frozenset(name for _, name, _ in entries) - chosen


def trained_leaves(params: PyTree, frozen: frozenset[str]) -> tuple[bool, ...]:
    """Whether each array of the parameters is trained."""
    is_trained: list[bool] = []
    for _, name, value in entries_of(params):
        is_trained += [name not in frozen] * len(jax.tree.leaves(value))
    return tuple(is_trained)


def trained_tree(params: PyTree, frozen: frozenset[str]) -> PyTree:
    """The user's tree without frozen parameters, its arrays in the same order."""
    if not frozen:
        return params
    if isinstance(params, nnx.State):
        return nnx.filter_state(params, lambda path, _: "/".join(map(str, path)) not in frozen)
    flat = flatten_dict(params)
    kept = unflatten_dict({k: x for k, x in flat.items() if "/".join(map(str, k)) not in frozen})
    return freeze(kept) if isinstance(params, FrozenDict) else kept


def entries_of(params: PyTree) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Path, name and value of each parameter; a value may be a box around arrays."""
    is_box = lambda x: isinstance(x, nnx.Variable | meta.AxisMetadata)  # noqa: E731
    for path, value in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box):
        keys = tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path)
        yield keys, "/".join(map(str, keys)), value


def nearest(selector: Any, names: Sequence[str]) -> str:
    """The path nearest to a pattern, for a message."""
    return f" (the nearest path is {files.nearest(str(selector), names)!r})" if names else ""


def as_predicate(selector: Any, argument: str) -> Callable[[tuple[Any, ...], str, Any], bool]:
    """A pattern of paths or an NNX filter as a predicate of path, name and value.

    Raises:
        ConfigError: If `selector` is neither.
    """
    if isinstance(selector, str):
        try:
            pattern = re.compile(rf"(?:^|/)(?:{selector})")
        except re.error as error:
            raise ConfigError(f"{argument}={selector!r} is no pattern: {error}") from None
        return lambda _path, name, _value: pattern.search(name) is not None
    try:
        test = nnx.filterlib.to_predicate(selector)
    except (TypeError, ValueError):
        raise ConfigError(f"{argument}={selector!r}: pass {_ACCEPTED}") from None

    def run(path: tuple[Any, ...], _name: str, value: Any) -> bool:
        return bool(test(path, value))

    return run


#: The argument `merge`: a rule for each pattern of paths or NNX filter.
Merge = Mapping[Any, str] | None

#: The rules by name, with the merged value in words.
RULES = {
    "mean": "what it was and the mean of the changes",
    "sum": "what it was and the sum of the changes",
    "max": "the largest value, element by element",
    "min": "the smallest value, element by element",
    "last": "the last microbatch's value",
    "refuse": "an error where microbatches can make unlike values of it",
}


def merges_of(aux: PyTree, merge: Merge) -> tuple[str | None, ...]:
    """The user's rule for each array of the other variables, or None.

    Args:
        aux: Arrays or shapes, in the user's tree.
        merge: Rules by pattern of paths or NNX filter; the first match decides.

    Raises:
        ConfigError: If rules are unknown or match no variable: all faults at once.
    """
    if merge is None:
        return (None,) * len(jax.tree.leaves(aux))
    if not isinstance(merge, Mapping):
        raise ConfigError(
            f"merge={merge!r}: pass a mapping from paths to rules, such as {{'count': 'sum'}}"
        )
    entries = list(entries_of(aux))
    problems, rules = [], dict[str, str]()
    for selector, rule in merge.items():
        if rule not in RULES:
            problems.append(f"  {selector!r}: {rule!r} is no rule: use {', '.join(RULES)}")
            continue
        is_match = as_predicate(selector, "merge")
        matches = [name for path, name, value in entries if is_match(path, name, value)]
        if not matches:
            nearest_path = nearest(selector, [name for _, name, _ in entries])
            problems.append(f"  {selector!r} is no variable that the model keeps{nearest_path}")
        for name in matches:
            rules.setdefault(name, rule)
    if problems:
        raise ConfigError("merge:\n" + "\n".join(problems))
    array_rules: list[str | None] = []
    for _, name, value in entries:
        array_rules += [rules.get(name)] * len(jax.tree.leaves(value))
    return tuple(array_rules)


def statistics_of(aux: PyTree) -> tuple[bool, ...]:
    """Whether each array of the other variables is a batch statistic of Flax."""
    are_statistics: list[bool] = []
    for path, _, value in entries_of(aux):
        is_statistic = isinstance(value, nnx.BatchStat) or path[0] == "batch_stats"
        are_statistics += [is_statistic] * len(jax.tree.leaves(value))
    return tuple(are_statistics)
