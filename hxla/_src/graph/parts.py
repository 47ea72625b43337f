"""A chain of segments as parts of a pipeline, with the values that cross between them.

A value that a later part reads crosses every boundary on its way, so a part exchanges data with its
neighbours only. The gradient of a value that several parts read adds up on its way back.

Scans over layers are cut between their iterations. A model written with `nn.scan`, `nnx.scan` or
`jax.lax.scan` over stacked parameters has all its layers in one equation. Here that equation
becomes several: each runs a range of the iterations and reads the rows of that range. A row range
of a stacked parameter is an entry of `Graph.param_values`, so a stage stores only the rows that it
reads.

A scan over time slices data and reads whole parameters: it stays one equation.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..jax.jaxpr import inlined, scan_counts, source_of, variables
from .graph import Graph, Input, Op, Value, leaves
from .interpreter import AS_THEY_ARE, ArrayPlacement, Env, read, run_ops
from .segments import Segment, chain_ops, in_task_order, segments_at

# Primitives that map a row range of a parameter to the same row range of the result.
_ROW_BY_ROW = ("convert_element_type", "copy", "transpose")


def is_over_layers(graph: Graph, op: Op) -> bool:
    """Whether an equation is a scan over layers: it has a carry, and slices parameters."""
    if op.kind != "scan" or op.iterations is not None:
        return False
    num_consts, num_carry = scan_counts(op.eqn)
    sliced = op.inputs[num_consts + num_carry :]
    stacked = any(isinstance(v, int) and graph.values[v].param is not None for v in sliced)
    return num_carry > 0 and op.eqn.params["length"] > 1 and stacked


def num_iterations(graph: Graph, op: Op) -> int:
    """The number of equations in `opened` for this one."""
    return int(op.eqn.params["length"]) if is_over_layers(graph, op) else 1


def stacked_dims(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each parameter the dimensions that scans slice: its layers.

    Nested scans, as over blocks of layers, slice two.
    """
    stacked: dict[int, set[int]] = {}
    # For each parameter, slice or cast of one: its dimensions, numbered as in the parameter.
    dims = {v: tuple(range(len(graph.values[v].shape))) for v in graph.param_values}
    _add_stacked(graph, graph.ops, dims, stacked)
    return tuple(tuple(sorted(stacked.get(p, ()))) for p in range(len(graph.param_values)))


def _add_stacked(
    graph: Graph, ops: Sequence[Op], dims: dict[int, tuple[int, ...]], stacked: dict[int, set[int]]
) -> None:
    for op in ops:
        if op.name in _ROW_BY_ROW and (old := dims.get(_number(op.inputs[0]))) is not None:
            order = op.eqn.params["permutation"] if op.name == "transpose" else range(len(old))
            dims[op.outputs[0]] = tuple(old[d] for d in order)
        elif op.body:
            first_slice = sum(scan_counts(op.eqn)) if op.kind == "scan" else len(op.inputs)
            for i, (outer, inner) in enumerate(zip(op.inputs, op.body_inputs, strict=True)):
                old = dims.get(_number(outer))
                param = None if old is None else graph.values[inner].param
                if old is None or param is None:
                    continue
                if i >= first_slice:
                    stacked.setdefault(param, set()).add(old[0])
                    old = old[1:]
                dims[inner] = old
            _add_stacked(graph, op.body, dims, stacked)


def _number(v: Input) -> int:
    """The number of a value, or -1 for a literal."""
    return v if isinstance(v, int) else -1


def opened(graph: Graph, cuts: Mapping[tuple[int, ...], Sequence[int]] | None = None) -> Graph:
    """The graph with its scans over layers cut into ranges of iterations.

    Args:
        cuts: By the results of a scan, the iterations at which its second and later ranges begin;
            None: every scan over layers is cut between all iterations.
    """
    if cuts is None:
        cuts = {
            op.outputs: range(1, num_iterations(graph, op))
            for op in graph.ops
            if is_over_layers(graph, op)
        }
    return _ScanCutter(graph).graph(cuts) if cuts else graph


class _ScanCutter:
    """Builds the graph whose scans are cut, adding values."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._values = list(graph.values)
        self._alike: dict[int, int] = {}
        self._range_values: list[int] = []
        self._rows_of: dict[tuple[int, int, int, int], int | None] = {}
        self._ops: list[Op] = []
        read = (v for vs in (*(op.inputs for op in graph.ops), graph.result_values) for v in vs)
        self._read = {v for v in read if isinstance(v, int)}
        self._maker = {v: op for op in graph.ops for v in op.outputs}

    def graph(self, cuts: Mapping[tuple[int, ...], Sequence[int]]) -> Graph:
        """See `opened`."""
        for op in self._graph.ops:
            if op.outputs in cuts:
                self._add_ranges(op, cuts[op.outputs])
            else:
                self._ops.append(op)
        return dataclasses.replace(
            self._graph,
            ops=tuple(self._ops),
            values=tuple(self._values),
            param_values=(*self._graph.param_values, *self._range_values),
            alike=self._alike,
        )

    def _new_value(self, like: int, shape: tuple[int, ...]) -> int:
        self._values.append(dataclasses.replace(self._values[like], shape=shape))
        number = len(self._values) - 1
        self._alike[number] = self._alike.get(like, like)
        return number

    def _new_counter(self) -> int:
        self._values.append(
            Value(
                shape=(), dtype=np.dtype(np.int32), param=None, batch_dim=None, differentiable=False
            )
        )
        return len(self._values) - 1

    def _add_ranges(self, op: Op, cuts: Sequence[int]) -> None:
        """Add the ranges of a scan, one after another.

        Besides the carry, a range hands the stacked results so far to the next. It also hands the
        number of finished iterations, if a range needs it to find its rows.
        """
        length, is_reversed = op.eqn.params["length"], op.eqn.params["reverse"]
        num_consts, num_carry = scan_counts(op.eqn)
        consts, sliced = op.inputs[:num_consts], op.inputs[num_consts + num_carry :]
        carry: Sequence[Input] = op.inputs[num_consts : num_consts + num_carry]
        kept = [i for i, v in enumerate(op.outputs) if i < num_carry or v in self._read]
        full_outputs = [op.outputs[i] for i in kept]
        rest: Sequence[Input] = ()
        for start, stop in itertools.pairwise((0, *cuts, length)):
            rows = (length - stop, length - start) if is_reversed else (start, stop)
            slices = [self._rows(v, 0, *rows) for v in sliced]
            counts = len(kept) > num_carry or any(
                a == b for a, b in zip(slices, sliced, strict=True)
            )
            outputs: Sequence[int] = full_outputs
            if stop < length:
                outputs = [self._new_value(v, self._values[v].shape) for v in full_outputs]
                outputs += [self._new_counter()] if counts else []
            self._ops.append(
                dataclasses.replace(
                    op,
                    inputs=(*consts, *carry, *slices, *rest),
                    outputs=tuple(outputs),
                    body=_with_runs(op.body, stop - start, length),
                    body_outputs=tuple(op.body_outputs[i] for i in kept),
                    iterations=(start, stop),
                )
            )
            carry, rest = outputs[:num_carry], outputs[num_carry:]

    def _rows(self, v: Input, dim: int, start: int, stop: int) -> Input:
        """The value of a row range, if it is computable without the other rows; else the whole."""
        if not isinstance(v, int) or self._graph.values[v].param is None:
            return v
        rows = self._some_rows(v, dim, start, stop)
        return v if rows is None else rows

    def _some_rows(self, v: int, dim: int, start: int, stop: int) -> int | None:
        key = v, dim, start, stop
        if key not in self._rows_of:
            self._rows_of[key] = self._make_rows(*key)
        return self._rows_of[key]

    def _make_rows(self, v: int, dim: int, start: int, stop: int) -> int | None:
        shape = self._values[v].shape
        shape = (*shape[:dim], stop - start, *shape[dim + 1 :])
        if v in self._graph.param_values:
            number = self._new_value(v, shape)
            row_range = dataclasses.replace(self._values[number], rows=(dim, start, stop))
            self._values[number] = row_range
            self._range_values.append(number)
            return number
        op = self._maker.get(v)
        if op is None or op.name not in _ROW_BY_ROW or not isinstance(op.inputs[0], int):
            return None
        before = op.eqn.params["permutation"][dim] if op.name == "transpose" else dim
        source = self._some_rows(op.inputs[0], before, start, stop)
        if source is None:
            return None
        number = self._new_value(v, shape)
        self._ops.append(dataclasses.replace(op, inputs=(source,), outputs=(number,)))
        return number


def _with_runs(body: tuple[Op, ...], num: int, old_num: int) -> tuple[Op, ...]:
    """A body with the counts of `num` runs instead of `old_num`."""
    return tuple(
        dataclasses.replace(
            op,
            times=op.times * num // old_num,
            flops=op.flops * num // old_num,
            body=_with_runs(op.body, num, old_num),
        )
        for op in body
    )


def ranged(graph: Graph, points: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """A graph whose scans are cut only at the cuts of a chain.

    Args:
        points: Cuts of `opened(graph)`, see `segments.cut_points`.

    Returns:
        The graph, and the same cuts counted in its equations.
    """
    cuts: dict[tuple[int, ...], Sequence[int]] = {}
    new_points: list[int] = []
    fine = coarse = 0
    for op in chain_ops(graph):
        end = fine + num_iterations(graph, op)
        inner = [p - fine for p in points if fine < p < end]
        if inner:
            cuts[op.outputs] = inner
        new_points += [coarse + bisect.bisect(inner, p - fine) for p in points if fine <= p < end]
        fine, coarse = end, coarse + len(inner) + 1
    return opened(graph, cuts), tuple(new_points)


def reads_apart(graph: Graph) -> Graph:
    """The graph where each operation that reads a parameter has an entry of its own for it.

    So the gradient of a parameter has one term for each of them, wherever the graph is cut.
    """
    values, entries, alike = list(graph.values), list(graph.param_values), dict(graph.alike)
    params = {v for v in entries if values[v].differentiable}
    unread, ops = set(params), []
    for op in graph.ops:
        own: dict[int, int] = {}
        for v in dict.fromkeys(v for v in map(_number, op.inputs) if v in params):
            if v in unread:
                unread.remove(v)
            else:
                own[v] = len(values)
                alike[own[v]] = alike.get(v, v)
                values.append(values[v])
                entries.append(own[v])
        inputs = tuple(own.get(_number(v), v) for v in op.inputs)
        ops.append(dataclasses.replace(op, inputs=inputs) if own else op)
    return dataclasses.replace(
        graph,
        ops=tuple(ops),
        values=tuple(values),
        param_values=tuple(entries),
        alike=alike,
    )


_OUTSIDE = "stages can be cut between its layers where it stands outside"
_REMEDIES = {
    "a checkpoint": (
        "put the checkpoint around the layer instead, nn.scan(nn.remat(Layer)), and stages can be "
        "cut between layers"
    ),
    "a scan over layers": "stages are cut between the iterations of the outer one only",
    "a scan": (
        "stack the parameters of the outer one too, and stages can be cut between its iterations"
    ),
}


def uncut_scans(graph: Graph) -> tuple[str, ...]:
    """A remark on each scan over layers that is nested in another equation, with a remedy."""
    return tuple(dict.fromkeys(_remarks(graph, graph.ops, "")))


def _remarks(graph: Graph, ops: Sequence[Op], around: str) -> Iterator[str]:
    for op in ops:
        over_layers = op.iterations is not None or is_over_layers(graph, op)
        if over_layers and around:
            yield _remark(op.eqn, around)
        if op.kind == "scan":
            yield from _remarks(graph, op.body, around or "a scan" + " over layers" * over_layers)
        elif op.body:
            inside = "a checkpoint" if op.kind == "remat" else "a function with its own gradient"
            yield from _remarks(graph, op.body, around or inside)
        elif op.name == "cond":
            yield from _branch_remarks(graph, op, around or "a cond")


def _branch_remarks(graph: Graph, op: Op, around: str) -> Iterator[str]:
    """Remarks on the scans in a cond, whose first operand is the index of the branch."""
    params = [isinstance(v, int) and graph.values[v].param is not None for v in op.inputs[1:]]
    for branch in op.eqn.params["branches"]:
        jaxpr = inlined(branch).jaxpr
        stacked = list(itertools.compress(jaxpr.invars, params))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan" and scan_counts(eqn)[1]:
                sliced = variables(eqn.invars[sum(scan_counts(eqn)) :])
                if not sliced.keys().isdisjoint(stacked):
                    yield _remark(eqn, around)


def _remark(eqn: Any, around: str) -> str:
    place = source_of(eqn).rsplit("/", 1)[-1]
    remedy = _REMEDIES.get(around, _OUTSIDE)
    return f"a scan over layers ({place}) stays whole inside {around}: {remedy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainPart:
    """Consecutive segments.

    Attributes:
        inputs: Values that cross into the part, in order, also those that only pass through.
        outputs: Values that cross to the next part; the last part has none.
        is_last: Whether the part computes the program's results.
    """

    segment: Segment
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_last: bool


def values_by_shape(graph: Graph, part: ChainPart) -> dict[tuple[int, ...], list[int]]:
    """The results of a part's equations, also inside bodies, by shape."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for v in (v for op in leaves(part.segment.ops) for v in op.outputs):
        by_shape.setdefault(graph.values[v].shape, []).append(v)
    return by_shape


def parts_of(graph: Graph, points: Sequence[int]) -> tuple[ChainPart, ...]:
    """Cut a graph into parts.

    Args:
        points: Cuts, see `segments.cut_points`.

    Returns:
        One part more than there are points.
    """
    chain = segments_at(graph, points)
    last = len(chain) - 1
    last_reader: dict[int, int] = {v: i for i, s in enumerate(chain) for v in s.inputs}
    made = {v: i for i, s in enumerate(chain) for op in s.ops for v in op.outputs}
    last_reader |= {v: last for v in graph.result_values if isinstance(v, int) and v in made}
    out = []
    inputs: tuple[int, ...] = ()
    for i, segment in enumerate(chain):
        candidates = dict.fromkeys((*inputs, *segment.outputs))
        outputs = tuple(v for v in candidates if last_reader.get(v, -1) > i)
        out.append(ChainPart(segment=segment, inputs=inputs, outputs=outputs, is_last=i == last))
        inputs = outputs
    return tuple(out)


def graph_of(graph: Graph, cut_by: str = "work") -> Graph:
    """The graph in the form that a chain is cut from.

    Args:
        cut_by: `work`: in traced order, each iteration of a scan over layers is an equation;
            `annotations`: see `in_task_order`.
    """
    return in_task_order(graph) if cut_by == "annotations" else opened(graph)


def graph_at(graph: Graph, cut_by: str, points: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """`graph_of`, but each part runs its iterations of a scan in one equation.

    Args:
        cut_by: See `graph_of`.

    Returns:
        The graph, and the cuts of this graph.
    """
    if cut_by == "annotations":
        return in_task_order(graph), tuple(points)
    return ranged(graph, points)


def run_part(
    graph: Graph, part: ChainPart, place: ArrayPlacement = AS_THEY_ARE
) -> Callable[[Sequence[Any], Sequence[Any], Env], list[Any]]:
    """`(params, inputs, given) -> outputs`, for the last part the program's results.

    `params` are the arrays of `part.segment.params`, `inputs` those of `part.inputs`; `given` has
    the batch, other variables and the random key by number. `place` is that of `run_ops`.
    """

    def run(params: Sequence[Any], inputs: Sequence[Any], given: Env) -> list[Any]:
        env: Env = dict(graph.consts)
        numbers = [graph.param_values[p] for p in part.segment.params]
        for values, arrays in ((given, given.values()), (part.inputs, inputs), (numbers, params)):
            env.update(zip(values, place.carry(tuple(values), list(arrays)), strict=True))
        run_ops(part.segment.ops, env, place)
        if part.is_last:
            return [read(env, v) for v in graph.result_values]
        return place.carry(part.outputs, [env[v] for v in part.outputs])

    return run
