"""A traced loss: its program, its operations and their TaskGraphs.

Values are numbered. `jit` is inlined; `checkpoint` and `scan` keep their bodies as nested
operations, so that the program can be run again as traced.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError
from ..core.files import local_path
from ..core.format import si
from ..jax.fused_attention import PRIMITIVES as ATTENTION
from ..jax.fused_attention import attention_shape
from ..jax.jaxpr import ClosedJaxpr, source_of
from ..model.annotations import Scope, written
from ..model.loss import MetricColumns
from .factors import UNITS, Factor


def equation_flops(eqn: Any) -> int:
    """Floating-point operations of one equation, as XLA's cost analysis counts them.

    A multiply-add counts two; transcendental functions, which XLA counts separately, count zero.
    """
    name = eqn.primitive.name
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
    out = tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
    size = math.prod(out)
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(shapes[0][d] for d in contract)
    if name == "ragged_dot_general":
        (contract, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return 2 * size * math.prod(shapes[0][d] for d in contract)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = shapes[1]
        window = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
        return 2 * size * window * kernel[numbers.rhs_spec[1]]
    if name in ATTENTION:
        return attention_shape(shapes, eqn.params).flops
    if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
        return math.prod(shapes[0]) - size
    if name in _ARITHMETIC and eqn.outvars[0].aval.dtype != np.bool_:
        return size
    return 0


_ARITHMETIC = frozenset(
    {
        *("add", "sub", "mul", "div", "max", "min", "neg", "abs", "add_any", "clamp"),
        *("integer_pow", "square", "select_n", "sign", "floor"),
    }
)


Input = int | Any  # the number of a value, or a literal (jax.extend.core.Literal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """An array of a traced loss.

    Attributes:
        shape: The shape of the whole array.
        dtype: The dtype.
        param: The index of its parameter, if it is one or a view of one (a cast, a reshape), or
            None.
        batch_dim: The dimension that runs over examples, or None.
        differentiable: Whether a gradient flows back through it.
        rows: For a row range of a stacked parameter the dimension, the first row and the row after
            the last; None: it is whole.
    """

    shape: tuple[int, ...]
    dtype: Any
    param: int | None
    batch_dim: int | None
    differentiable: bool
    rows: tuple[int, int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole array."""
        return bytes_of(self.shape, self.dtype)

    def __str__(self) -> str:
        name = str(self.dtype).replace("key<fry>", "key")
        return f"{name}[{','.join(map(str, self.shape))}]"


def bytes_of(shape: tuple[int, ...], dtype: Any) -> int:
    """The bytes of an array, random keys included."""
    return math.prod(shape) * _itemsize(dtype)


@functools.cache
def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return np.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """An equation of a traced loss.

    Attributes:
        eqn: The equation of the jaxpr.
        kind: The way it is run again: `leaf`; `custom` (it has custom gradient rules and runs as a
            whole; its body is for analysis only); `remat`; or `scan`.
        inputs: The operands, indices of `Graph.values` or literals.
        outputs: The indices of the results.
        body: The operations inside a `custom`, `remat` or `scan`.
        body_inputs: The values of the operands inside the body.
        body_outputs: The values or literals that the body returns.
        body_consts: The arrays that the body closes over, each with its index.
        task: The index of its TaskGraph.
        stack: The name stack: modules and scopes.
        times: The number of runs in a step.
        flops: The floating-point operations of one run of a leaf.
        factors: The ways to cut a leaf.
        iterations: The first iteration that a range of a cut scan runs, and the one after the
            last; None: all.
        caller: The call in the user's code that it was inlined from, such as `jnp.var`; None: it
            was not inlined.
    """

    eqn: Any
    kind: str
    inputs: tuple[int | Any, ...]
    outputs: tuple[int, ...]
    body: tuple["Op", ...] = ()
    body_inputs: tuple[int, ...] = ()
    body_outputs: tuple[int | Any, ...] = ()
    body_consts: tuple[tuple[int, Any], ...] = ()
    task: int
    stack: str
    times: int
    flops: int = 0
    factors: tuple[Factor, ...] = ()
    iterations: tuple[int, int] | None = None
    caller: Any = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The file and line of the user's code, or an empty string."""
        location = source_of(self.eqn)
        return location if location or self.caller is None else source_of(self.caller)


def leaves(ops: tuple[Op, ...]) -> Iterator[Op]:
    """All equations without a body, in order, those inside bodies included."""
    for op in ops:
        if op.body:
            yield from leaves(op.body)
        else:
            yield op


def origins(ops: tuple[Op, ...]) -> Callable[[int], int]:
    """Map a value to the value that it renames outside or inside bodies, or to itself."""
    renamed = _renamed_values(ops)

    def origin(v: int) -> int:
        while v in renamed:
            v = renamed[v]
        return v

    return origin


def _renamed_values(ops: tuple[Op, ...]) -> dict[int, int]:
    """Values that only rename another: operands inside bodies, results outside bodies."""
    out: dict[int, int] = {}
    for op in ops:
        for inner, outer in zip(op.body_inputs, op.inputs, strict=False):
            if isinstance(outer, int):
                out[inner] = outer
        for outer_value, inner_value in zip(op.outputs, op.body_outputs, strict=False):
            if isinstance(inner_value, int):
                out[outer_value] = inner_value
        out |= _renamed_values(op.body)
    return out


def is_unit(op: Op, values: tuple[Value, ...]) -> bool:
    """Whether the equation applies parameters that a `split` must cut."""
    return op.name in UNITS and any(
        isinstance(v, int) and values[v].param is not None for v in op.inputs
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """Consecutive operations of one strategy, the unit that Whale places and splits.

    Attributes:
        index: The place in the order of execution, from 0.
        strategy: The annotation's kind, `replicate` or `split`; `tokens` for
            `split(dim="sequence")`.
        device_count: The number of devices that the annotation asks for; None means all.
        scope: The annotation's name in equations and HLO, `(default)` where there is none.
        source: The file and line of the first operation.
        num_equations: The number of equations.
        params: The paths of the parameters it reads.
        shared_params: The paths of its parameters that other TaskGraphs read too.
        inputs: The values from other TaskGraphs or the batch, as `float32[8,128]`.
        outputs: The values that other TaskGraphs read, or the loss.
        flops: The floating-point operations of a forward pass over the traced batch.
        param_bytes: The bytes of its parameters.
        input_bytes: The bytes of `inputs`.
        output_bytes: The bytes of `outputs`.
        activation_bytes: The bytes of all differentiable results of its equations.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.1.2 (TaskGraphs).
    """

    index: int
    strategy: Literal["replicate", "split", "tokens"]
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
        """The annotation as a person would write it: `split(4)`."""
        return written(self.strategy, self.device_count)

    @property
    def asks_for_devices(self) -> bool:
        """Whether the annotation says how devices share the TaskGraph."""
        return self.strategy != "replicate" or self.device_count is not None


def make_task_graphs(
    scopes: Sequence[Scope],
    ops: tuple[Op, ...],
    values: tuple[Value, ...],
    params: Sequence[int],
    results: tuple[Input, ...],
    names: tuple[str, ...],
) -> tuple[TaskGraph, ...]:
    """Group operations by TaskGraph.

    Args:
        params: Value numbers of the parameters.
        results: Values that the program returns.
    """
    num = len(scopes)
    read: list[set[int]] = [set() for _ in range(num)]
    made: list[set[int]] = [set() for _ in range(num)]
    task_params: list[set[int]] = [set() for _ in range(num)]
    maker: dict[int, int] = {}
    all_ops = [list[Op]() for _ in range(num)]
    for op in leaves(ops):
        all_ops[op.task].append(op)
        for v in op.outputs:
            maker[v] = op.task
    origin = origins(ops)
    for op in leaves(ops):
        made[op.task].update(op.outputs)
        for v in op.inputs:
            if not isinstance(v, int):
                continue
            source = origin(v)
            param = values[source].param
            if param is not None and source in params:
                task_params[op.task].add(param)
            elif maker.get(source) != op.task:
                read[op.task].add(source)
    wanted = {origin(v) for v in results if isinstance(v, int)}
    for task in range(num):
        wanted |= read[task]
    shared = {
        p for p in range(len(params)) if sum(p in task_params[task] for task in range(num)) > 1
    }
    out = []
    for task, scope in enumerate(scopes):
        outputs = sorted(made[task] & wanted)
        inputs = sorted(read[task])
        group = all_ops[task]
        out.append(
            TaskGraph(
                index=task,
                strategy=scope.kind,
                device_count=scope.device_count,
                scope="(default)" if scope.entry < 0 else scope.name,
                source=next((op.source for op in group if op.source), ""),
                num_equations=len(group),
                params=tuple(names[p] for p in sorted(task_params[task])),
                shared_params=tuple(names[p] for p in sorted(task_params[task] & shared)),
                inputs=tuple(str(values[v]) for v in inputs),
                outputs=tuple(str(values[v]) for v in outputs),
                flops=sum(op.flops for op in group),
                param_bytes=sum(values[params[p]].num_bytes for p in task_params[task]),
                input_bytes=sum(values[v].num_bytes for v in inputs),
                output_bytes=sum(values[v].num_bytes for v in outputs),
                activation_bytes=sum(
                    values[v].num_bytes * op.times
                    for op in group
                    for v in op.outputs
                    if values[v].differentiable and values[v].param is None
                ),
            )
        )
    return tuple(out)


def table(task_graphs: Sequence[TaskGraph]) -> str:
    """The TaskGraphs as a table of text, one line each."""
    head = ("", "TaskGraph", "equations", "params", "shared", "param bytes", "FLOPs", "activations")
    rows = [
        (
            str(t.index),
            t.label,
            str(t.num_equations),
            str(len(t.params)),
            str(len(t.shared_params)),
            si(t.param_bytes),
            si(t.flops),
            si(t.activation_bytes),
        )
        for t in task_graphs
    ]
    widths = [max(len(r[c]) for r in (head, *rows)) for c in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        first = f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}"
        return "  ".join([first, *(f"{x:>{w}}" for x, w in zip(row[2:], widths[2:], strict=True))])

    return "\n".join(line(r) for r in (head, *rows))


_COLOURS = {"replicate": "#dbe9f6", "split": "#fbe3d0", "tokens": "#e0f0dc"}
_MAX_SHOWN = 24


def draw_task_graphs(task_graphs: Sequence[TaskGraph], path: str | os.PathLike[str]) -> None:
    """Write the TaskGraphs as a picture; see `Graph.draw`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    shown = task_graphs[:_MAX_SHOWN]
    height = 1.15 * len(shown) + 0.4
    figure = Figure(figsize=(8.5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    axes.set_ylim(-len(shown) - 0.1, 0.3)
    largest = max((t.flops for t in shown), default=1) or 1
    for i, task in enumerate(shown):
        top = -i
        box = FancyBboxPatch(
            (0.2, top - 0.72),
            6.6,
            0.64,
            boxstyle="round,pad=0.04",
            facecolor=_COLOURS[task.strategy],
            edgecolor="#555555",
            linewidth=0.8,
        )
        axes.add_patch(box)
        axes.text(0.35, top - 0.27, f"{task.index}  {task.label}", fontsize=10, weight="bold")
        axes.text(0.35, top - 0.58, _facts(task), fontsize=8, color="#333333")
        axes.barh(top - 0.4, 2.6 * task.flops / largest, left=7.1, height=0.22, color="#5b87b5")
        axes.text(7.1, top - 0.19, f"{si(task.flops)} FLOPs", fontsize=8, va="bottom")
        if i + 1 < len(shown):
            arrow = dict(arrowstyle="->", color="#555555")
            axes.annotate("", (3.5, top - 1.05), (3.5, top - 0.78), arrowprops=arrow)
            axes.text(3.65, top - 0.97, f"{si(task.output_bytes)}B", fontsize=8)
    rest = len(task_graphs) - len(shown)
    flops = si(sum(t.flops for t in task_graphs))
    title = f"{len(task_graphs)} TaskGraphs, {flops} FLOPs forward"
    axes.set_title(title + (f" (the first {_MAX_SHOWN})" if rest else ""), fontsize=10)
    file = local_path(path, "path", ConfigError)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _facts(task: TaskGraph) -> str:
    where = pathlib.Path(task.source).name if task.source else ""
    parts = [
        f"{task.num_equations} equations",
        f"{len(task.params)} parameters, {si(task.param_bytes)}B",
        f"activations {si(task.activation_bytes)}B",
        where,
    ]
    return "   ".join(p for p in parts if p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """A traced loss, as `hxla.trace` returns it.

    Attributes:
        task_graphs: The TaskGraphs in the order of execution.
        param_names: The path of every parameter.
        param_shapes: The shape of every parameter.
        param_logical: The logical names of every parameter's dimensions, where Flax's metadata has
            any.
        metrics: The columns of the user's metrics in the second result.
        num_losses: The number of losses that a microbatch sums; 1: the loss is a mean already.
        program: The program as jax traced it.
        ops: The program's operations.
        values: Every array of the program; other fields refer to them by their index here.
        param_values: The indices of the parameters; where scans are cut, also of row ranges of
            stacked parameters.
        aux_values: The indices of the other variables.
        batch_values: The indices of the batch's arrays.
        key_value: The index of the random key.
        result_values: The results, indices of values or literals.
        consts: The arrays that the loss closes over, each with its index.
        nested: For each TaskGraph the number of replicas around it (`replicate(n)` around a
            `split`), or 1.
        merges: For each other variable how its values from the microbatches merge: `same` (the loss
            does not change it), `first` (all values are equal), `mean`, `sum`, `max`, `min` or
            `last`.
        averaged: The paths of variables that are averaged without a rule from the user.
        bound_axes: The axis names that the loss's collectives use, such as a BatchNorm's
            `axis_name`; each has one member, the microbatch.
        alike: Where scans are cut, for each added value the original value that it slices, or
            repeats at another iteration. Both have the same sharding.
        mixes: The first operation by which the loss reads several examples at once, in words; empty
            where none is known.
        normalizes: Whether layers of Flax take statistics over a microbatch, as BatchNorm does.
        precision: The policy of the trace; None: the model's dtypes.
    """

    task_graphs: tuple[TaskGraph, ...]
    param_names: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    param_logical: Sequence[Sequence[str | None] | None] | None = None
    metrics: tuple[MetricColumns, ...] = ()
    num_losses: int = 1
    program: ClosedJaxpr = dataclasses.field(repr=False)
    ops: tuple[Op, ...] = dataclasses.field(repr=False)
    values: tuple[Value, ...] = dataclasses.field(repr=False)
    param_values: tuple[int, ...] = dataclasses.field(repr=False)
    aux_values: tuple[int, ...] = dataclasses.field(repr=False)
    batch_values: tuple[int, ...] = dataclasses.field(repr=False)
    key_value: int = dataclasses.field(repr=False)
    result_values: tuple[int | Any, ...] = dataclasses.field(repr=False)
    consts: tuple[tuple[int, Any], ...] = dataclasses.field(repr=False)
    nested: tuple[int, ...]
    merges: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    bound_axes: tuple[str, ...] = ()
    alike: Mapping[int, int] = dataclasses.field(default_factory=dict, repr=False)
    mixes: str = ""
    normalizes: bool = False
    precision: Any = dataclasses.field(default=None, repr=False)

    @property
    def flops(self) -> int:
        """The floating-point operations of a forward pass over the traced batch."""
        return sum(t.flops for t in self.task_graphs)

    @property
    def arithmetic(self) -> str:
        """The arithmetic of matrix products; `model` where the model decides it."""
        return "model" if self.precision is None else str(self.precision.arithmetic)

    def __str__(self) -> str:
        return table(self.task_graphs)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the TaskGraphs: their work, their bytes and the bytes between them.

        Args:
            path: A `.png`, `.svg` or `.pdf` file; its folder is made.
        """

        draw_task_graphs(self.task_graphs, path)


def is_slow_in_loops(graph: Graph, kinds: Iterable[str]) -> bool:
    """Whether devices of these kinds compute the loss much slower inside a loop.

    XLA computes convolutions there at a twentieth of their speed on CPUs.
    """
    has_convolutions = any(op.name == "conv_general_dilated" for op in leaves(graph.ops))
    return has_convolutions and "cpu" in kinds


def shapes_of(graph: Graph, values: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of some values of a graph."""
    selected = (graph.values[v] for v in values)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in selected]


def params_of(graph: Graph) -> tuple[int, ...]:
    """The parameter index of each of `Graph.param_values`, whole or a row range."""
    params = tuple(graph.values[v].param for v in graph.param_values)
    return tuple(p for p in params if p is not None)


def entries_of(graph: Graph, params: Collection[int]) -> tuple[int, ...]:
    """The places in `Graph.param_values` of some parameters, whole or row ranges."""
    return tuple(i for i, p in enumerate(params_of(graph)) if p in params)


def rows_read(graph: Graph) -> dict[int, int]:
    """Parameters that are only looked up by rows, each with the most rows a microbatch reads.

    A tied embedding, which is also a factor of a product, is left out: its gradient has no zero
    rows.
    """
    most_rows: dict[int, int] = {}
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
                most_rows[param] = most_rows.get(param, 0) + op.times * int(np.prod(shape[:-1]))
            elif not (op.name == "convert_element_type" and values[op.outputs[0]].param == param):
                others.add(param)
    return {p: rows for p, rows in most_rows.items() if p not in others}


def rows_touched(graph: Graph, num_microbatches: int) -> dict[int, int]:
    """The parameters of `rows_read`, each with the most rows that these microbatches touch."""
    return {
        p: min(rows * num_microbatches, graph.param_shapes[p][0])
        for p, rows in rows_read(graph).items()
    }


def _takes_rows(op: Op, shape: tuple[int, ...]) -> bool:
    numbers = op.eqn.params["dimension_numbers"]
    whole_row = tuple(op.eqn.params["slice_sizes"]) == (1, *shape[1:])
    return whole_row and tuple(numbers.start_index_map) == (0,)
