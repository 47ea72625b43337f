"""Whether a loss is a mean over independent examples, or mixes them.

A microbatch contributes its terms of a mean over the global batch. That is exact for a sum of
per-example losses. A contrastive loss, a maximum over the batch or a mean over the tokens of a
microbatch depends on the microbatch size.

Each value of the program has one of five tags: the same for all examples, a row per example, a sum
over rows, mixed, or unknown. In a mixed value one example's row depends on another example; unknown
are values after a sort or a loop.

Each variable that is no parameter merges over the microbatches of a step. A merged value is
right if one call with the whole batch would make the same. That is certain for three kinds:
variables that the loss does not change, variables that depend on neither batch, key nor batch size,
and averages. Any other variable needs a rule from the user, or is refused.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..core.errors import ConfigError
from ..jax.jaxpr import ClosedJaxpr, needed_for, passed_through, routes, scan_counts
from ..model.variables import RULES
from .factors import Factor
from .graph import Graph, Op
from .precision import SCALE_SCOPE

#: Linear primitives, f(a + b) = f(a) + f(b), if the other operands depend on no example.
_LINEAR = frozenset(
    {
        *("add", "add_any", "sub", "neg", "mul", "convert_element_type", "reduce_precision"),
        *("reduce_sum", "dot_general", "reshape", "broadcast_in_dim", "squeeze", "transpose"),
        *("expand_dims", "copy", "copy_p", "optimization_barrier", "psum", "psum_invariant"),
        *("select_n", "concatenate", "slice", "stack", "unstack", "split", "pad", "real"),
    }
)
#: Primitives that mix rows along the batch dimension.
_ALONG = frozenset(
    {
        *("sort", "cumsum", "cumprod", "cummax", "cumlogsumexp", "top_k"),
        *("argmax", "argmin", "reduce_prod"),
    }
)
#: Primitives whose dependences between elements are not analysed.
_OPAQUE = ("gather", "scatter", "dynamic_", "while", "cond", "sort", "top_k", "custom_", "reduce_w")
_NORMALIZATION = ("flax/nnx/nn/normalization.py", "flax/linen/normalization.py")


@dataclasses.dataclass(frozen=True)
class _Tag:
    """How a value depends on the examples; by default not at all."""

    row: int | None = None  # the batch dimension
    total: bool = False
    mixed: str = ""  # the operation that mixes examples
    unknown: bool = False


_SAME, _UNKNOWN, _TOTAL = _Tag(), _Tag(unknown=True), _Tag(total=True)


def mixing(graph: Graph) -> tuple[str, bool]:
    """Follow examples through a loss.

    Args:
        graph: The loss traced for a microbatch; of a single example it shows no mixing.

    Returns:
        The first operation by which the loss reads several examples at once, in words, or nothing;
        and whether layers of Flax take statistics over the microbatch.
    """
    walk = _Walk(dict.fromkeys(graph.batch_values, _Tag(row=0)))
    walk.run(graph.ops)
    return walk.tag(graph.result_values[0]).mixed, walk.normalizes


class _Walk:
    """Tags the values of operations in order.

    Args:
        tags: Initial tags by value number; other values are the same for all examples.
    """

    def __init__(self, tags: dict[int, _Tag]):
        self._tags = tags
        self.normalizes = False

    def tag(self, v: int | Any) -> _Tag:
        return self._tags.get(v, _SAME) if isinstance(v, int) else _SAME

    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if not op.body:
                tags = zip(op.eqn.outvars, self._leaf(op), strict=False)
                # An empty array reads no example.
                made = [_SAME if 0 in getattr(x.aval, "shape", ()) else tag for x, tag in tags]
                self._set(op.outputs, made)
            elif op.kind == "scan":
                self._scan(op)
            else:
                self._set(op.outputs, self._body(op, list(map(self.tag, op.inputs))))

    def _set(self, values: Sequence[int], tags: Sequence[_Tag]) -> None:
        self._tags.update(zip(values, tags, strict=False))

    def _body(self, op: Op, tags: Sequence[_Tag]) -> list[_Tag]:
        self._set(op.body_inputs, tags)
        self.run(op.body)
        return list(map(self.tag, op.body_outputs))

    def _scan(self, op: Op) -> None:
        num_consts, num_carry = scan_counts(op.eqn)
        operand_tags = list(map(self.tag, op.inputs))
        consts, carry = operand_tags[:num_consts], operand_tags[num_consts : num_consts + num_carry]
        slices = [_sliced(tag) for tag in operand_tags[num_consts + num_carry :]]
        while True:  # the tags form a finite lattice and only rise
            outputs = self._body(op, [*consts, *carry, *slices])
            after = [_join_tags(a, b) for a, b in zip(carry, outputs, strict=False)]
            if after == carry:
                break
            carry = after
        stacked = [
            dataclasses.replace(tag, row=None if tag.row is None else tag.row + 1)
            for tag in outputs[num_carry:]
        ]
        self._set(op.outputs, [*carry, *stacked])

    def _leaf(self, op: Op) -> list[_Tag]:
        tags = list(map(self.tag, op.inputs))
        if all(tag == _SAME for tag in tags):
            return [_SAME] * len(op.outputs)
        if mixed := [tag for tag in tags if tag.mixed]:
            return mixed[:1] * len(op.outputs)
        if any(tag.unknown for tag in tags):
            return [_UNKNOWN] * len(op.outputs)
        row_tags = self._rows(op, tags)
        if not any(tag.total for tag in tags):
            return row_tags
        if op.name.startswith(_OPAQUE):
            return [_UNKNOWN] * len(op.outputs)
        if not _keeps_sums(op, tags):
            return [self._mixed(op)] * len(op.outputs)
        return [t if t.mixed or t.unknown else dataclasses.replace(t, total=True) for t in row_tags]

    def _rows(self, op: Op, tags: Sequence[_Tag]) -> list[_Tag]:
        """The results' tags, from the batch dimensions of the operands alone."""
        rows = {k: tag.row for k, tag in enumerate(tags) if tag.row is not None}
        if not rows:
            return [_SAME] * len(op.outputs)
        factors = {k: _factor_of(op, k, dim) for k, dim in rows.items()}
        if None in factors.values():
            return [self._mixed(op) if op.name in _ALONG else _UNKNOWN] * len(op.outputs)
        [factor, *others] = {id(f): f for f in factors.values()}.values()
        assert factor is not None
        if others:
            return [_UNKNOWN if op.name.startswith(_OPAQUE) else self._mixed(op)] * len(op.outputs)
        result_tags = []
        for dim in factor.results:
            if dim is not None:
                result_tags.append(_Tag(row=dim))
            elif op.name in _LINEAR:
                result_tags.append(_SAME if self._is_normalization(op) else _TOTAL)
            else:
                result_tags.append(_UNKNOWN if op.name.startswith(_OPAQUE) else self._mixed(op))
        return result_tags

    def _mixed(self, op: Op) -> _Tag:
        if self._is_normalization(op) or SCALE_SCOPE in op.stack:
            return _SAME
        where = ", ".join(filter(None, (op.stack, op.source)))
        return _Tag(mixed=f"{op.name} ({where})" if where else op.name)

    def _is_normalization(self, op: Op) -> bool:
        """Whether a normalisation layer of Flax, such as BatchNorm, takes batch statistics."""
        traceback = op.eqn.source_info.traceback
        frames = () if traceback is None else traceback.frames
        if not any(frame.file_name.endswith(_NORMALIZATION) for frame in frames):
            return False
        self.normalizes = True
        return True


def _factor_of(op: Op, operand: int, dim: int) -> Factor | None:
    return next((f for f in op.factors if f.operands[operand] == dim), None)


def _keeps_sums(op: Op, tags: Sequence[_Tag]) -> bool:
    """Whether a result is a sum over examples if an operand is."""
    sums = [tag for tag in tags if tag.total]
    if op.name == "div":
        return not (tags[1].total or (tags[1].row is not None and tags[0].row is None))
    if op.name in ("mul", "dot_general"):
        by_row = any(tag.row is not None and not tag.total for tag in tags)
        return len(sums) == 1 and (sums[0].row is not None or not by_row)
    if op.name == "select_n":
        return not tags[0].total
    return op.name in _LINEAR


def _sliced(tag: _Tag) -> _Tag:
    """The tag of a slice along the first dimension."""
    if tag.row is None:
        return tag
    return _UNKNOWN if tag.row == 0 else dataclasses.replace(tag, row=tag.row - 1)


def _join_tags(a: _Tag, b: _Tag) -> _Tag:
    """The tag of a value that has either tag."""
    if a.mixed or b.mixed:
        return a if a.mixed else b
    if a.unknown or b.unknown or (None not in (a.row, b.row) and a.row != b.row):
        return _UNKNOWN
    return _Tag(row=b.row if a.row is None else a.row, total=a.total or b.total)


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
