"""A traced loss: its equations in one tree, and the TaskGraphs they belong to.

Values are numbered; `jit` is inlined, `checkpoint` and `scan` keep their bodies as operations
inside an operation, so that the program can be run again as it was.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._model._annotations import Kind, written
from ._factors import UNITS, Factor

Input = int | Any  # the number of a value, or a literal (jax.extend.core.Literal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """An array of the program.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        param: Index of the parameter it is or is only a view of (a cast, a reshape), or None.
        batch_dim: The dimension that runs over examples, or None.
        differentiable: Whether a gradient flows back through it.
    """

    shape: tuple[int, ...]
    dtype: Any
    param: int | None
    batch_dim: int | None
    differentiable: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return int(np.prod(self.shape, dtype=np.int64)) * _itemsize(self.dtype)

    def __str__(self) -> str:
        name = str(self.dtype).replace("key<fry>", "key")
        return f"{name}[{','.join(map(str, self.shape))}]"


def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return np.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """An equation.

    Attributes:
        eqn: The jaxpr's own equation, to run it again.
        kind: `leaf`; `custom` (a rule of its own for gradients: runs as a whole, its body is for
            analysis only); `remat`; or `scan`.
        inputs: Numbers of values, or literals.
        outputs: Numbers of values.
        body: Operations of a `custom`, `remat` or `scan`.
        body_inputs: Values that stand for the operands inside the body.
        body_outputs: Values or literals that the body returns.
        body_consts: Arrays that the body closes over, by value.
        task: Index of its TaskGraph.
        stack: Name stack: modules and scopes.
        times: How often a step runs it.
        flops: Of one run of a leaf.
        factors: Ways to cut a leaf.
    """

    eqn: Any
    kind: str
    inputs: tuple[Input, ...]
    outputs: tuple[int, ...]
    body: tuple["Op", ...] = ()
    body_inputs: tuple[int, ...] = ()
    body_outputs: tuple[Input, ...] = ()
    body_consts: tuple[tuple[int, Any], ...] = ()
    task: int
    stack: str
    times: int
    flops: int = 0
    factors: tuple[Factor, ...] = ()

    @property
    def name(self) -> str:
        """Of the primitive."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """File and line of the user's code, or an empty string."""
        frame = self.eqn.source_info.traceback
        return _source(frame)


def _source(traceback: Any) -> str:
    if traceback is None:
        return ""
    for frame in traceback.frames:
        name = frame.file_name
        if "/site-packages/" not in name and "/hxla/_" not in name and "<" not in name:
            return f"{name}:{frame.line_num}"
    return ""


def leaves(ops: tuple[Op, ...]) -> Iterator[Op]:
    """All equations without a body, in order, those inside bodies included."""
    for op in ops:
        if op.body:
            yield from leaves(op.body)
        else:
            yield op


def origins(ops: tuple[Op, ...]) -> Callable[[int], int]:
    """From a value to the one it stands for, outside or inside bodies; else itself."""
    same = _stand_ins(ops)

    def origin(v: int) -> int:
        while v in same:
            v = same[v]
        return v

    return origin


def _stand_ins(ops: tuple[Op, ...]) -> dict[int, int]:
    """Values that are others under a new number: operands of bodies, results of bodies."""
    out: dict[int, int] = {}
    for op in ops:
        for inner, outer in zip(op.body_inputs, op.inputs, strict=False):
            if isinstance(outer, int):
                out[inner] = outer
        for outer_value, inner_value in zip(op.outputs, op.body_outputs, strict=False):
            if isinstance(inner_value, int):
                out[outer_value] = inner_value
        out |= _stand_ins(op.body)
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """Consecutive operations of one strategy: what Whale places and splits.

    Attributes:
        index: Its place in the order of execution.
        strategy: `replicate` or `split`.
        device_count: What the annotation asked for; None: all devices.
        scope: The annotation's name in equations and HLO, `(default)` where there is none.
        source: File and line of the first operation.
        num_equations: Equations.
        params: Paths of the parameters it reads.
        shared_params: Those that other TaskGraphs read too.
        inputs: Values that come from other TaskGraphs or the batch, as `float32[8,128]`.
        outputs: Values that others read, or the loss.
        flops: Floating-point operations of a forward pass over the traced batch.
        param_bytes: Bytes of its parameters.
        input_bytes: Bytes of `inputs`.
        output_bytes: Bytes of `outputs`.
        activation_bytes: Bytes of every result that its equations make from the batch.
    """

    index: int
    strategy: Kind
    device_count: int | None
    scope: str
    source: str
    num_equations: int
    params: tuple[str, ...]
    shared_params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: int
    param_bytes: int
    input_bytes: int
    output_bytes: int
    activation_bytes: int

    @property
    def label(self) -> str:
        """As a person would write it: `split(4)`."""
        return written(self.strategy, self.device_count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """What `hxla.trace` returns.

    Attributes:
        task_graphs: In the order of execution.
        param_names: Path of every parameter.
        param_shapes: Shape of every parameter.
        param_logical: Logical names of every parameter's dimensions, where Flax's metadata has any.
        ops: The program.
        values: Every array of the program.
        param_values: Numbers of the values that are parameters.
        aux_values: Numbers of those that are other variables.
        batch_values: Numbers of those that are the batch.
        key_value: Number of the random key.
        result_values: Results, values or literals.
        consts: Arrays that the loss closes over, by value.
        nested: For each TaskGraph the copies around it (`replicate(n)` around a `split`), or 1.
    """

    task_graphs: tuple[TaskGraph, ...]
    param_names: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    param_logical: Sequence[Sequence[str | None] | None] | None = None
    ops: tuple[Op, ...] = dataclasses.field(repr=False)
    values: tuple[Value, ...] = dataclasses.field(repr=False)
    param_values: tuple[int, ...] = dataclasses.field(repr=False)
    aux_values: tuple[int, ...] = dataclasses.field(repr=False)
    batch_values: tuple[int, ...] = dataclasses.field(repr=False)
    key_value: int = dataclasses.field(repr=False)
    result_values: tuple[Input, ...] = dataclasses.field(repr=False)
    consts: tuple[tuple[int, Any], ...] = dataclasses.field(repr=False)
    nested: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass."""
        return sum(t.flops for t in self.task_graphs)

    def __str__(self) -> str:
        return table(self)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the TaskGraphs: their work, their bytes, what flows between them.

        Args:
            path: A `.png`, `.svg` or `.pdf` file; its folder is made.
        """
        from ._task_graph_picture import draw

        draw(self, path)


def rows_read(graph: Graph) -> dict[int, int]:
    """Parameters that are only looked up by rows, with the rows that a microbatch reads at most.

    An embedding that is also multiplied with (a tied output layer) is none of them: its gradient
    has no row that is zero.
    """
    found: dict[int, int] = {}
    others: set[int] = set()
    values = graph.values
    for op in leaves(graph.ops):
        for k, v in enumerate(op.inputs):
            param = values[v].param if isinstance(v, int) else None
            if param is None:
                continue
            if op.name == "gather" and k == 0 and _takes_rows(op, values[v].shape):
                indices = op.inputs[1]
                shape = values[indices].shape if isinstance(indices, int) else indices.val.shape
                found[param] = found.get(param, 0) + op.times * int(np.prod(shape[:-1]))
            elif not (op.name == "convert_element_type" and values[op.outputs[0]].param == param):
                others.add(param)
    return {p: rows for p, rows in found.items() if p not in others}


def _takes_rows(op: Op, shape: tuple[int, ...]) -> bool:
    numbers = op.eqn.params["dimension_numbers"]
    whole_row = tuple(op.eqn.params["slice_sizes"]) == (1, *shape[1:])
    return whole_row and tuple(numbers.start_index_map) == (0,)


def table(graph: Graph) -> str:
    """The TaskGraphs as a table of text, one line each."""
    head = ("", "TaskGraph", "equations", "params", "shared", "param bytes", "FLOPs", "activations")
    rows = [
        (
            str(t.index),
            t.label,
            str(t.num_equations),
            str(len(t.params)),
            str(len(t.shared_params)),
            short(t.param_bytes),
            short(t.flops),
            short(t.activation_bytes),
        )
        for t in graph.task_graphs
    ]
    widths = [max(len(r[c]) for r in (head, *rows)) for c in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        first = f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}"
        return "  ".join([first, *(f"{x:>{w}}" for x, w in zip(row[2:], widths[2:], strict=True))])

    return "\n".join(line(r) for r in (head, *rows))


def short(value: float) -> str:
    """A number with its thousands as a letter: 24.1M."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.0f}"


def is_unit(op: Op, values: tuple[Value, ...]) -> bool:
    """Whether the equation applies parameters that a `split` must cut."""
    return op.name in UNITS and any(
        isinstance(v, int) and values[v].param is not None for v in op.inputs
    )
