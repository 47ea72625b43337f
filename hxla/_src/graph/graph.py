"""A traced loss: its program, its operations and their TaskGraphs."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..jax.jaxpr import ClosedJaxpr
from ..model.loss import MetricColumns
from .operations import Op, Value, leaves
from .task_graphs import TaskGraph, table


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
        from .task_graphs import draw_task_graphs

        draw_task_graphs(self.task_graphs, path)


def shapes_of(graph: Graph, values: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of some values of a graph."""
    selected = (graph.values[v] for v in values)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in selected]


def params_of(graph: Graph) -> tuple[int, ...]:
    """The parameter index of each of `Graph.param_values`, whole or a row range."""
    params = tuple(graph.values[v].param for v in graph.param_values)
    return tuple(p for p in params if p is not None)


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
