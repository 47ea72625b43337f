"""Experts without a capacity, as one operation that a mesh axis can cut by experts.

Rows of tokens are sorted by expert and multiplied group by group (`ragged_dot_general`). The rows
of one expert exist on its device only, and no dimension of an array says which rows these are. So
the products of a layer become one operation with what is row by row between them, and with the
linear operations after them up to the smallest sum: a scatter of rows into tokens, say. Cut by
experts, each device makes a partial sum from its experts' rows, and parameters stay where they are.

All of it is recognised by the dataflow of the traced equations.

References:
    Gale et al., "MegaBlocks", MLSys 2023 (experts without a capacity, as grouped products).
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ..jax.jaxpr import with_source_of
from .factors import PATTERNS
from .graph import Graph, Op, Value, leaves

PRODUCT = "ragged_dot_general"

# Functions with finite derivatives at zero, which rows of other devices' experts are.
_ELEMENTWISE = frozenset(
    {
        *("abs", "add", "add_any", "and", "clamp", "convert_element_type", "copy", "cos", "div"),
        *("eq", "erf", "erfc", "exp", "exp2", "expm1", "ge", "gt", "integer_pow", "is_finite"),
        *("le", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or"),
        "reduce_precision",
        *("select_n", "sign", "sin", "square", "stop_gradient", "sub", "tanh", "xor"),
    }
)
_ROW_WISE = _ELEMENTWISE | {
    *("broadcast_in_dim", "concatenate", "dot_general", "reduce_max", "reduce_sum", "reshape"),
    *("slice", "split", "squeeze", "transpose"),
}
#: Operations that are linear in one operand, whichever it is.
_BILINEAR = ("mul", "dot_general")
#: Operations that are linear in their first operand.
_LINEAR = frozenset(
    {
        *("broadcast_in_dim", "convert_element_type", "copy", "cumsum", "div", "dynamic_slice"),
        *("gather", "neg", "reduce_sum", "reshape", "rev", "slice", "split", "squeeze"),
        "transpose",
    }
)
#: Operations that are linear in all of their operands together, but for these.
ADDITIVE: Mapping[str, tuple[int, ...]] = {
    "add": (),
    "add_any": (),
    "concatenate": (),
    "pad": (),
    "scatter": (1,),
    "scatter-add": (1,),
    "select_n": (0,),
    "sub": (),
}
_PREPARES = ("broadcast_in_dim", "gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a layer of experts.

    Attributes:
        kind: `product`; `rows` (row by row: its results have the rows of this device's experts);
            `sum` (its results are partial sums); or `whole` (equal on all devices).
        dims: For each operand the dimension of its rows; None: it is read whole, or as a sum.
    """

    op: Op
    kind: str
    dims: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Experts:
    """The steps of a layer of experts.

    Attributes:
        stack: The name stack around all steps.
        inputs: The values that the steps read from outside.
        outputs: The values that others read.
        sizes: The value with the rows of each expert.
        row_dims: For each value with rows the dimension that runs over rows.
    """

    steps: tuple[Step, ...]
    stack: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: int
    num_rows: int
    num_experts: int
    row_dims: Mapping[int, int]

    def __repr__(self) -> str:
        """Text that is equal for equal programs."""
        number = {v: i for i, v in enumerate(self.inputs)}
        lines = []
        for step in self.steps:
            op = step.op
            names = [
                str(number.setdefault(v, len(number)) if isinstance(v, int) else v)
                for v in (*op.inputs, *op.outputs)
            ]
            rules = op.source if op.kind == "custom" else ""
            lines.append(f"{op.name} {names} {sorted(op.eqn.params.items())} {step.kind} {rules}")
        return "\n".join([*lines, str([number[v] for v in self.outputs])])


#: Stands for a layer of experts in a graph's operations; it is never bound in a program.
experts_p = core.Primitive("experts")
experts_p.multiple_results = True
experts_p.def_abstract_eval(lambda *_, **params: list(params["shapes"]))


def experts_of(op: Op) -> Experts | None:
    """The layer of experts that an operation is, or None."""
    return op.eqn.params["experts"] if op.eqn.primitive is experts_p else None


def with_experts(graph: Graph) -> Graph:
    """The same graph with each layer of experts as one operation."""
    if all(op.name != PRODUCT for op in leaves(graph.ops)):
        return graph
    return dataclasses.replace(graph, ops=_joined(graph.ops, graph.values, graph.result_values))


def _joined(ops: Sequence[Op], values: Sequence[Value], ends: Sequence[Any]) -> tuple[Op, ...]:
    ops = [
        op
        if op.kind == "custom" or not op.body
        else dataclasses.replace(op, body=_joined(op.body, values, op.body_outputs))
        for op in ops
    ]
    while True:
        layer = next(
            (
                layer
                for i, op in enumerate(ops)
                if _is_product(op) and (layer := _Layer(ops, values, ends, i)).is_possible
            ),
            None,
        )
        if layer is None:
            return tuple(ops)
        ops = layer.joined()


def _is_product(op: Op) -> bool:
    """Whether it multiplies the rows of each group, in one run after another, by its matrix."""
    if op.name != PRODUCT or not isinstance(op.inputs[2], int) or op.eqn.params["group_offset"]:
        return False
    numbers, sizes = op.eqn.params["ragged_dot_dimension_numbers"], op.eqn.invars[2].aval
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    [rows] = numbers.lhs_ragged_dimensions
    return rows not in (*contracted, *batch) and sizes.ndim == 1 and isinstance(op.inputs[1], int)


def _product_dims(op: Op) -> tuple[int, int, int]:
    """The dimension of rows of the first operand and of the result, and that of experts."""
    numbers = op.eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    [rows], [group] = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    free = [d for d in range(op.eqn.invars[0].aval.ndim) if d not in (*contracted, *batch)]
    return rows, len(batch) + free.index(rows), group


class _Layer:
    """The steps around one product.

    Args:
        ends: Values that must be there after the operations.
    """

    def __init__(self, ops: Sequence[Op], values: Sequence[Value], ends: Sequence[Any], seed: int):
        self._ops, self._values = ops, values
        self._readers: dict[int, set[int]] = {v: {len(ops)} for v in ends if isinstance(v, int)}
        for i, op in enumerate(ops):
            for v in _ints(op.inputs):
                self._readers.setdefault(v, set()).add(i)
        self._maker = {v: i for i, op in enumerate(ops) for v in op.outputs}
        first = ops[seed]
        self._task, self._sizes, self._first = first.task, first.inputs[2], first
        self._num_rows = first.eqn.invars[0].aval.shape[_product_dims(first)[0]]
        self._steps: dict[int, Step] = {}
        self._row_dims: dict[int, int] = {}
        self._sums: set[int] = set()
        self._grow(seed)
        self._trim()
        self._prepare()

    @property
    def is_possible(self) -> bool:
        """Whether its results are sums, and no matrix of experts is also read in another way."""
        weights, results = self._weights(), self._results(self._steps)
        others = {
            v
            for step in self._steps.values()
            for k, v in enumerate(step.op.inputs)
            if isinstance(v, int) and not (step.kind == "product" and k == 1)
        }
        are_numbers = all(jnp.issubdtype(self._values[v].dtype, jnp.number) for v in results)
        return bool(results) and are_numbers and others.isdisjoint(weights)

    def _weights(self) -> dict[int, int]:
        products = (step.op for step in self._steps.values() if step.kind == "product")
        return {op.inputs[1]: _product_dims(op)[2] for op in products}

    # -- steps -----------------------------------------------------------------------------------

    def _grow(self, seed: int) -> None:
        """Add all that is row by row or linear in the products' results."""
        outside: set[int] = set()  # values made outside of the layer from its results
        for i, op in enumerate(self._ops[seed:], seed):
            reads = set(_ints(op.inputs))
            step = None if not reads.isdisjoint(outside) else self._step(op)
            if step is not None:
                self._steps[i] = step
            elif reads & (outside | self._row_dims.keys() | self._sums):
                outside.update(op.outputs)

    def _step(self, op: Op) -> Step | None:
        if op.task != self._task or (op.body and op.kind != "custom"):
            return None
        if _is_product(op) and op.inputs[2] == self._sizes:
            return self._product(op)
        reads = set(_ints(op.inputs))
        if reads.isdisjoint(self._row_dims.keys() | self._sums):
            return None
        return self._row_step(op) or self._sum_step(op)

    def _product(self, op: Op) -> Step | None:
        rows, result, _ = _product_dims(op)
        first, second = op.inputs[:2]
        made = self._row_dims.keys() | self._sums
        if not isinstance(first, int) or first in self._sums or second in made:
            return None
        shape = self._values[first].shape
        if shape[rows] != self._num_rows or self._row_dims.get(first, rows) != rows:
            return None
        self._row_dims[op.outputs[0]] = result
        return Step(op=op, kind="product", dims=(rows, None, None))

    def _row_step(self, op: Op) -> Step | None:
        made = self._row_dims
        rows = {k: made[v] for k, v in enumerate(op.inputs) if isinstance(v, int) and v in made}
        if not rows or not self._sums.isdisjoint(_ints(op.inputs)):
            return None
        if op.name == "div" and 1 in rows:
            return None
        if op.name == "integer_pow" and op.eqn.params["y"] < 0:
            return None
        if op.name == "dot_general" and self._reads_params(op):
            return None
        found = _dims_of_custom if op.kind == "custom" else _dims_of_leaf
        dims, results = found(op, rows)
        if dims is None or results is None:
            return None
        self._row_dims.update(zip(op.outputs, results, strict=True))
        return Step(op=op, kind="rows", dims=dims)

    def _sum_step(self, op: Op) -> Step | None:
        made = self._row_dims.keys() | self._sums
        sums = [k for k, v in enumerate(op.inputs) if isinstance(v, int) and v in made]
        if not _is_linear(op, sums) or self._reads_params(op):
            return None
        self._sums.update(op.outputs)
        return Step(op=op, kind="sum", dims=(None,) * len(op.inputs))

    def _reads_params(self, op: Op) -> bool:
        return any(self._values[v].param is not None for v in _ints(op.inputs))

    def _trim(self) -> None:
        """Leave out last steps that make the layer's results no smaller."""
        last = True
        while last:
            last = False
            for i in sorted(self._steps, reverse=True):
                step = self._steps[i]
                readers = set().union(*(self._readers.get(v, set()) for v in step.op.outputs))
                if step.kind == "product" or readers & self._steps.keys():
                    continue
                others = {k: s for k, s in self._steps.items() if k != i}
                if self._result_bytes(others) <= self._result_bytes(self._steps):
                    self._steps, last = others, True

    def _result_bytes(self, steps: Mapping[int, Step]) -> int:
        return sum(self._values[v].num_bytes for v in self._results(steps))

    def _results(self, steps: Mapping[int, Step]) -> list[int]:
        made = [v for step in steps.values() for v in step.op.outputs]
        return [v for v in made if self._readers.get(v, set()) - steps.keys()]

    def _prepare(self) -> None:
        """Add what makes operands larger before they are read, such as a gather of rows."""
        found = True
        while found:
            found = False
            for v, dim in self._operands().items():
                i = self._maker.get(v)
                if i is None or i in self._steps or not self._readers[v] <= self._steps.keys():
                    continue
                step = self._prepared(self._ops[i], dim)
                if step is not None:
                    self._steps[i], found = step, True
                    if dim is not None:
                        self._row_dims[v] = dim

    def _operands(self) -> dict[int, int | None]:
        """Values that are read from outside in one way, each with the dimension of its rows."""
        read: dict[int, set[int | None]] = {}
        made = {v for step in self._steps.values() for v in step.op.outputs}
        for step in self._steps.values():
            for v, dim in zip(step.op.inputs, step.dims, strict=True):
                if isinstance(v, int) and v not in made:
                    read.setdefault(v, set()).add(dim)
        kept = {self._sizes, *self._weights()}
        alike = {v: next(iter(dims)) for v, dims in read.items() if len(dims) == 1}
        return {v: dim for v, dim in alike.items() if v not in kept}

    def _prepared(self, op: Op, dim: int | None) -> Step | None:
        if op.name not in _PREPARES or op.task != self._task:
            return None
        [made], values = op.outputs, self._values
        reads = [values[v] for v in _ints(op.inputs)]
        grows = sum(x.num_bytes for x in reads if x.differentiable) <= values[made].num_bytes
        if not grows or (op.name == "gather" and self._reads_params(op)):
            return None
        if dim is None:
            return Step(op=op, kind="whole", dims=(None,) * len(op.inputs))
        factors = [f for f in op.factors if f.results == (dim,) and not f.partial]
        return Step(op=op, kind="rows", dims=factors[0].operands) if factors else None

    # -- the operation ---------------------------------------------------------------------------

    def joined(self) -> list[Op]:
        """The operations with the layer as one of them."""
        experts, last = self._experts(), max(self._steps)
        later: list[Op] = []
        made = set(experts.outputs)
        before: list[Op] = []
        for i, op in enumerate(self._ops[:last]):
            if i in self._steps:
                continue
            if made.isdisjoint(_ints(op.inputs)):
                before.append(op)
            else:
                made.update(op.outputs)
                later.append(op)
        return [*before, self._op(experts), *later, *self._ops[last + 1 :]]

    def _experts(self) -> Experts:
        steps = {i: self._steps[i] for i in sorted(self._steps)}
        made = {v for step in steps.values() for v in step.op.outputs}
        read = [v for step in steps.values() for v in _ints(step.op.inputs) if v not in made]
        stacks = [step.op.stack.split("/") for step in steps.values()]
        columns = zip(*stacks)  # noqa: B905
        alike = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
        return Experts(
            steps=tuple(steps.values()),
            stack="/".join(column[0] for column in alike),
            inputs=tuple(dict.fromkeys(read)),
            outputs=tuple(self._results(steps)),
            sizes=self._sizes,
            num_rows=self._num_rows,
            num_experts=self._values[self._sizes].shape[0],
            row_dims={v: dim for v, dim in self._row_dims.items() if v in made},
        )

    def _op(self, experts: Experts) -> Op:
        weights, first, values = self._weights(), self._first, self._values
        reads, results = (
            [jax.ShapeDtypeStruct(values[v].shape, values[v].dtype) for v in numbers]
            for numbers in (experts.inputs, experts.outputs)
        )
        avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in results)
        [eqn] = jax.make_jaxpr(lambda *xs: experts_p.bind(*xs, shapes=avals, experts=experts))(
            *reads
        ).jaxpr.eqns
        return Op(
            eqn=with_source_of(first.eqn, eqn),
            kind="leaf",
            inputs=experts.inputs,
            outputs=experts.outputs,
            task=first.task,
            stack=experts.stack,
            times=first.times,
            flops=sum(step.op.flops for step in experts.steps),
            factors=tuple(
                PATTERNS.factors(
                    "experts",
                    [x.shape for x in reads],
                    [x.shape for x in results],
                    {"expert_dims": [weights.get(v) for v in experts.inputs]},
                )
            ),
            caller=first.caller,
        )


def _ints(numbers: Iterable[Any]) -> Iterator[int]:
    return (v for v in numbers if isinstance(v, int))


def _dims_of_leaf(
    op: Op, rows: Mapping[int, int]
) -> tuple[tuple[int | None, ...] | None, Sequence[int] | None]:
    """The dimension of rows of each operand and result, if the operation is row by row."""
    if op.name not in _ROW_WISE:
        return None, None
    for f in op.factors:
        results = [dim for dim in f.results if dim is not None]
        agrees = all(f.operands[k] == dim for k, dim in rows.items())
        if agrees and not f.partial and len(results) == len(op.outputs):
            return f.operands, results
    return None, None


def _dims_of_custom(
    op: Op, rows: Mapping[int, int]
) -> tuple[tuple[int | None, ...] | None, Sequence[int] | None]:
    """The same for an element-wise function with gradient rules, such as `relu`."""
    shape, *others = (v.aval.shape for v in op.eqn.outvars)
    shapes = [v.aval.shape for v in op.eqn.invars]
    is_elementwise = all(inner.name in _ELEMENTWISE - {"div"} for inner in leaves(op.body))
    alike = all(s in ((), shape) for s in shapes) and all(s == shape for s in others)
    [dim, *unlike] = set(rows.values())
    if not is_elementwise or not alike or unlike:
        return None, None
    return tuple(dim if s else None for s in shapes), [dim] * len(op.outputs)


def _is_linear(op: Op, sums: Collection[int]) -> bool:
    """Whether an operation is linear in these operands together."""
    if op.kind == "custom" or not sums:
        return False
    if op.name in _BILINEAR:
        return len(sums) == 1
    if op.name in ADDITIVE:
        return not set(sums) & set(ADDITIVE[op.name])
    if op.name not in _LINEAR or tuple(sums) != (0,):
        return False
    if op.name == "gather":
        return not op.eqn.params["fill_value"]
    if op.name == "convert_element_type":  # the sum would be rounded in parts
        old, new = op.eqn.invars[0].aval.dtype, op.eqn.outvars[0].aval.dtype
        return jnp.issubdtype(new, jnp.inexact) and new.itemsize >= old.itemsize
    return True
