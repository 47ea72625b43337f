"""The user's rules for merging variables that are no parameters over microbatches."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from ..core.errors import ConfigError
from ..core.types import PyTree
from .trainable import as_predicate, entries_of, nearest

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
