"""How a variable that is no parameter merges over the microbatches of a step, as the user says."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from ..core.errors import ConfigError
from ..core.types import PyTree
from .trainable import chooses, entries_of, nearest

#: What an argument `merge` may be: from a pattern of paths or an NNX filter to a rule.
Merge = Mapping[Any, str] | None

#: The rules by name, with what each makes of a variable.
RULES = {
    "mean": "what it was and the mean of the changes",
    "sum": "what it was and the sum of the changes",
    "max": "the largest value, element by element",
    "min": "the smallest value, element by element",
    "last": "the last microbatch's value",
    "refuse": "an error where microbatches can make unlike values of it",
}


def merges_of(aux: PyTree, merge: Merge) -> tuple[str | None, ...]:
    """For each array of the other variables the rule that the user gives it, or None.

    Args:
        aux: Arrays or shapes, in the user's own tree.
        merge: By pattern of paths or NNX filter; the first that fits decides.

    Raises:
        ConfigError: If a rule or what it is for is unknown: all faults at once.
    """
    if merge is None:
        return (None,) * len(jax.tree.leaves(aux))
    if not isinstance(merge, Mapping):
        raise ConfigError(
            f"merge={merge!r}: pass a mapping from paths to rules, such as {{'count': 'sum'}}"
        )
    entries = list(entries_of(aux))
    problems, rules = [], dict[str, str]()
    for one, rule in merge.items():
        if rule not in RULES:
            problems.append(f"  {one!r}: {rule!r} is no rule: use {', '.join(RULES)}")
            continue
        fits = chooses(one, "merge")
        found = [name for path, name, value in entries if fits(path, name, value)]
        if not found:
            near = nearest(one, [name for _, name, _ in entries])
            problems.append(f"  {one!r} is no variable that the model keeps{near}")
        for name in found:
            rules.setdefault(name, rule)
    if problems:
        raise ConfigError("merge:\n" + "\n".join(problems))
    each: list[str | None] = []
    for _, name, value in entries:
        each += [rules.get(name)] * len(jax.tree.leaves(value))
    return tuple(each)


def statistics_of(aux: PyTree) -> tuple[bool, ...]:
    """For each array of the other variables whether Flax calls it a statistic of batches."""
    each: list[bool] = []
    for path, _, value in entries_of(aux):
        is_statistic = isinstance(value, nnx.BatchStat) or path[0] == "batch_stats"
        each += [is_statistic] * len(jax.tree.leaves(value))
    return tuple(each)
