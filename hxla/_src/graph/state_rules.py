"""How each variable that is no parameter merges over the microbatches of a step.

What a loss makes of a variable is right for the global batch if it is what one call with all of
the batch would make. That is sure of three kinds: what the loss does not change; what depends on
neither batch, key nor batch size; and averages. Anything else is what the user says, or refused.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..core.errors import ConfigError
from ..jax.jaxpr import ClosedJaxpr
from ..jax.result_sources import needed_for, passed_through, routes
from ..model.merge import RULES
from .graph import Graph

_FIRST_RESULT = 2  # of the other variables: the loss and the sums of a microbatch come first
_WEIGHS = frozenset({"mul", "div"})
_KEEPS = frozenset(
    {
        *("add", "add_any", "sub", "neg", "mul", "div", "select_n", "convert_element_type"),
        *("broadcast_in_dim", "copy", "copy_p", "expand_dims", "optimization_barrier"),
        *("reduce_precision", "reshape", "squeeze", "transpose"),
    }
)


def by_dtype(graph: Graph) -> tuple[str, ...]:
    """The rules where one call sees all of the batch, or where nothing is known of the batch."""
    kept = passed_through(graph.program)[_FIRST_RESULT:]
    rules = []
    for i, v in enumerate(graph.aux_values):
        is_same = i < len(kept) and kept[i] == len(graph.param_values) + i
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
        asked: For each the rule that the user gives it, or None.
        statistics: For each whether Flax calls it a statistic of batches.
        whole: Traces the loss for the global batch.

    Raises:
        ConfigError: With every variable whose merge is not known, or whose rule is not for its
            dtype.
    """
    rules, averaged = list(graph.merges), []
    wrong, unknown = [], []
    made = _Made(graph, whole)
    for i, (name, own) in enumerate(zip(names, asked, strict=True)):
        dtype = graph.values[graph.aux_values[i]].dtype
        said = None if own is None else _unfit(own, dtype)
        if said is not None:
            wrong.append(f"  {name}: {dtype}, {own!r}: {said}")
        if rules[i] == "same" or said is not None:
            continue
        if own is not None and own != "refuse":
            rules[i] = own
            continue
        is_average = jnp.issubdtype(dtype, jnp.inexact) and own is None and made.is_average(i)
        if num_microbatches == 1 or (is_average and statistics[i]):
            continue
        reason = made.depends_on(i)
        if reason is None:
            rules[i] = "first"
        elif is_average:
            averaged.append(name)
        else:
            unknown.append(f"  {name}: {dtype}, depends on {reason}")
    if wrong:
        raise ConfigError(
            "merge gives rules that are not for these variables:\n" + "\n".join(wrong)
        )
    if unknown:
        raise ConfigError(
            f"a step has {num_microbatches} microbatches, and each makes a value of its own of "
            "these variables; how they merge is not known:\n" + "\n".join(unknown) + "\nsay it, "
            f"merge={{{unknown[0].split(':')[0].strip()!r}: 'sum'}}, where a rule is one of "
            + "; ".join(f"{rule!r} ({what})" for rule, what in RULES.items() if rule != "refuse")
            + "; or pass microbatch_size=batch_size, so that one call sees the whole batch"
        )
    return dataclasses.replace(graph, merges=tuple(rules), averaged=tuple(averaged))


class _Made:
    """What a loss makes of its other variables."""

    def __init__(self, graph: Graph, whole: Callable[[], Graph]):
        self._graph, self._trace_whole = graph, whole

    @functools.cached_property
    def _whole(self) -> ClosedJaxpr | None:
        """The loss for the global batch; None: it cannot be called with that."""
        try:
            return self._trace_whole().program
        except Exception:
            return None

    def is_average(self, i: int) -> bool:
        """Whether the mean of a variable's changes may be what the global batch changes.

        It cannot be where elements are placed or compared, or where the variable as it was is
        only added to: a sum, a maximum, a queue.
        """
        old = len(self._graph.param_values) + i
        on_the_way = routes(self._graph.program, _FIRST_RESULT + i).get(old)
        return on_the_way is None or (on_the_way <= _KEEPS and bool(on_the_way & _WEIGHS))

    def depends_on(self, i: int) -> str | None:
        """What else than state the new value depends on; None: microbatches make it alike."""
        graph, result = self._graph, _FIRST_RESULT + i
        needed = needed_for(graph.program, result)
        start = len(graph.param_values) + len(graph.aux_values)
        if start in needed.arguments:
            return "the random key"
        if any(place > start for place in needed.arguments):
            return "the batch"
        if self._whole is None:
            return "what is not known, for the loss cannot be traced for the whole batch"
        if needed.text != needed_for(self._whole, result).text:
            return "the number of examples"
        return None


def _unfit(rule: str, dtype: Any) -> str | None:
    """Why a rule is not for variables of a dtype; None: it is."""
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
