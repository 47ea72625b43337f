"""How each variable that is no parameter merges over the microbatches of a step.

A merged value is right if one call with the whole batch would make the same. That is certain for
three kinds: variables that the loss does not change, variables that depend on neither batch, key
nor batch size, and averages. Any other variable needs a rule from the user, or is refused.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..core.errors import ConfigError
from ..jax.jaxpr import ClosedJaxpr, needed_for, passed_through, routes
from ..model.variables import RULES
from .graph import Graph

_FIRST_RESULT = 2  # of the other variables: the loss and the sums come first
_WEIGHS = frozenset({"mul", "div"})
_KEEPS = frozenset(
    {
        *("add", "add_any", "sub", "neg", "mul", "div", "select_n", "convert_element_type"),
        *("broadcast_in_dim", "copy", "copy_p", "expand_dims", "optimization_barrier"),
        *("reduce_precision", "reshape", "squeeze", "transpose"),
    }
)


def by_dtype(graph: Graph) -> tuple[str, ...]:
    """The rules by dtype, for a step of one microbatch or before the batch is known."""
    passed = passed_through(graph.program)[_FIRST_RESULT:]
    rules = []
    for i, v in enumerate(graph.aux_values):
        is_same = i < len(passed) and passed[i] == len(graph.param_values) + i
        is_float = jnp.issubdtype(graph.values[v].dtype, jnp.inexact)
        rules.append("same" if is_same else "mean" if is_float else "first")
    return tuple(rules)


def with_rules(
    graph: Graph,
    names: Sequence[str],
    asked: Sequence[str | None],
    statistics: Sequence[bool],
    num_microbatches: int,
    whole: Callable[[], Graph],
) -> Graph:
    """The graph with the rule of each other variable.

    Args:
        asked: The user's rule for each variable, or None.
        statistics: Whether each variable is a batch statistic of Flax.
        whole: Traces the loss for the global batch.

    Raises:
        ConfigError: With every variable whose merge is unknown, or whose rule does not fit its
            dtype.
    """
    rules, averaged = list(graph.merges), []
    wrong, unknown = [], []
    new_values = _NewValues(graph, whole)
    for i, (name, user_rule) in enumerate(zip(names, asked, strict=True)):
        dtype = graph.values[graph.aux_values[i]].dtype
        misfit = None if user_rule is None else _misfit(user_rule, dtype)
        if misfit is not None:
            wrong.append(f"  {name}: {dtype}, {user_rule!r}: {misfit}")
        if rules[i] == "same" or misfit is not None:
            continue
        if user_rule is not None and user_rule != "refuse":
            rules[i] = user_rule
            continue
        is_average = (
            jnp.issubdtype(dtype, jnp.inexact) and user_rule is None and new_values.is_average(i)
        )
        if num_microbatches == 1 or (is_average and statistics[i]):
            continue
        reason = new_values.depends_on(i)
        if reason is None:
            rules[i] = "first"
        elif is_average:
            averaged.append(name)
        else:
            unknown.append(f"  {name}: {dtype}, depends on {reason}")
    if wrong:
        raise ConfigError("merge gives rules that do not fit these variables:\n" + "\n".join(wrong))
    if unknown:
        raise ConfigError(
            f"a step has {num_microbatches} microbatches, and each makes another value of "
            "these variables; how they merge is not known:\n" + "\n".join(unknown) + "\nsay it, "
            f"merge={{{unknown[0].split(':')[0].strip()!r}: 'sum'}}, where a rule is one of "
            + "; ".join(f"{rule!r} ({what})" for rule, what in RULES.items() if rule != "refuse")
            + "; or pass microbatch_size=batch_size, so that one call sees the whole batch"
        )
    return dataclasses.replace(graph, merges=tuple(rules), averaged=tuple(averaged))


class _NewValues:
    """Facts of the new values of other variables, from the traced loss."""

    def __init__(self, graph: Graph, whole: Callable[[], Graph]):
        self._graph, self._trace_whole = graph, whole

    @functools.cached_property
    def _whole(self) -> ClosedJaxpr | None:
        """The loss traced for the global batch; None: that fails."""
        try:
            return self._trace_whole().program
        except Exception:
            return None

    def is_average(self, i: int) -> bool:
        """Whether the mean of a variable's changes may be its change for the global batch.

        It cannot be where elements are placed or compared, or where the old value is only added to:
        a sum, a maximum, a queue.
        """
        old = len(self._graph.param_values) + i
        primitives = routes(self._graph.program, _FIRST_RESULT + i).get(old)
        return primitives is None or (primitives <= _KEEPS and bool(primitives & _WEIGHS))

    def depends_on(self, i: int) -> str | None:
        """What the new value depends on besides state; None: it is equal in all microbatches."""
        graph, result = self._graph, _FIRST_RESULT + i
        needed = needed_for(graph.program, result)
        start = len(graph.param_values) + len(graph.aux_values)
        if start in needed.arguments:
            return "the random key"
        if any(place > start for place in needed.arguments):
            return "the batch"
        if self._whole is None:
            return "an unknown cause, for the loss cannot be traced for the whole batch"
        if needed.text != needed_for(self._whole, result).text:
            return "the number of examples"
        return None


def _misfit(rule: str, dtype: Any) -> str | None:
    """Why a rule does not fit a dtype; None: it fits."""
    is_float, is_complex = (
        jnp.issubdtype(dtype, kind) for kind in (jnp.inexact, jnp.complexfloating)
    )
    if rule == "mean" and not is_float:
        return "a mean is no whole number"
    if rule == "sum" and dtype == jnp.bool_:
        return "booleans have no sum: 'max' is any of them, 'min' all"
    if rule in ("max", "min") and is_complex:
        return "complex numbers have no order"
    if rule in ("max", "min") and jnp.dtype(dtype).itemsize > 4:
        return "the largest and the smallest are of 32 bits at most"
    return None
