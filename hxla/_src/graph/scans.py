"""Scans over layers, cut between their iterations where they can be.

A model written with `nn.scan`, `nnx.scan` or `jax.lax.scan` over stacked parameters has all its
layers in one equation. Here that equation becomes several, one after another: each runs a range of
the iterations and reads its own rows of what is stacked. A range of a stacked parameter is an entry
of `Graph.param_values` of its own, so whoever holds it holds those rows and no others.

A scan over time reads data step by step, and the parameters as a whole: it stays one equation.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..jax.jaxpr import inlined, scan_counts, variables
from .graph import Graph
from .operations import Input, Op, Value, source_of
from .segments import chain_ops

# What makes of some rows of a parameter the same rows of its result.
_ROW_BY_ROW = ("convert_element_type", "copy", "transpose")


def is_over_layers(graph: Graph, op: Op) -> bool:
    """Whether an equation is a scan over layers: it carries something, and slices parameters."""
    if op.kind != "scan" or op.iterations is not None:
        return False
    num_consts, num_carry = scan_counts(op.eqn)
    sliced = op.inputs[num_consts + num_carry :]
    stacked = any(isinstance(v, int) and graph.values[v].param is not None for v in sliced)
    return num_carry > 0 and op.eqn.params["length"] > 1 and stacked


def num_iterations(graph: Graph, op: Op) -> int:
    """The equations that `opened` makes of one."""
    return int(op.eqn.params["length"]) if is_over_layers(graph, op) else 1


def stacked_dims(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each parameter the dimensions along which scans take slices of it: its layers.

    A scan inside a scan, as over blocks of layers, takes two of them.
    """
    found: dict[int, set[int]] = {}
    # Of what is a parameter, or a slice or a cast of it, the parameter's dimensions that it has.
    dims = {v: tuple(range(len(graph.values[v].shape))) for v in graph.param_values}
    _add_stacked(graph, graph.ops, dims, found)
    return tuple(tuple(sorted(found.get(p, ()))) for p in range(len(graph.param_values)))


def _add_stacked(
    graph: Graph, ops: Sequence[Op], dims: dict[int, tuple[int, ...]], found: dict[int, set[int]]
) -> None:
    for op in ops:
        if op.name in _ROW_BY_ROW and (own := dims.get(_number(op.inputs[0]))) is not None:
            order = op.eqn.params["permutation"] if op.name == "transpose" else range(len(own))
            dims[op.outputs[0]] = tuple(own[d] for d in order)
        elif op.body:
            first_slice = sum(scan_counts(op.eqn)) if op.kind == "scan" else len(op.inputs)
            for i, (outer, inner) in enumerate(zip(op.inputs, op.body_inputs, strict=True)):
                own = dims.get(_number(outer))
                param = None if own is None else graph.values[inner].param
                if own is None or param is None:
                    continue
                if i >= first_slice:
                    found.setdefault(param, set()).add(own[0])
                    own = own[1:]
                dims[inner] = own
            _add_stacked(graph, op.body, dims, found)


def _number(v: Input) -> int:
    """The number of a value; of a literal one that no value has."""
    return v if isinstance(v, int) else -1


def opened(graph: Graph, cuts: Mapping[tuple[int, ...], Sequence[int]] | None = None) -> Graph:
    """The graph with its scans over layers cut into ranges of iterations.

    Args:
        cuts: For a scan, named by its results, the iterations at which a range begins, without the
            first; None: every scan over layers is cut before each of its iterations.
    """
    if cuts is None:
        cuts = {
            op.outputs: range(1, num_iterations(graph, op))
            for op in graph.ops
            if is_over_layers(graph, op)
        }
    return _Opening(graph).graph(cuts) if cuts else graph


class _Opening:
    """One graph on its way to another, with more values."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._values = list(graph.values)
        self._alike: dict[int, int] = {}
        self._range_values: list[int] = []
        self._rows_of: dict[tuple[int, int, int, int], int | None] = {}
        self._ops: list[Op] = []
        read = (v for own in (*(op.inputs for op in graph.ops), graph.result_values) for v in own)
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

    def _new(self, like: int, shape: tuple[int, ...]) -> int:
        self._values.append(dataclasses.replace(self._values[like], shape=shape))
        number = len(self._values) - 1
        self._alike[number] = self._alike.get(like, like)
        return number

    def _counter(self) -> int:
        self._values.append(
            Value(
                shape=(), dtype=np.dtype(np.int32), param=None, batch_dim=None, differentiable=False
            )
        )
        return len(self._values) - 1

    def _add_ranges(self, op: Op, cuts: Sequence[int]) -> None:
        """The parts of a scan, one after another.

        Beside what the scan carries, a part hands to the next what all parts so far have put out,
        and the number of iterations that are done, if any of them asks for it.
        """
        length, is_reversed = op.eqn.params["length"], op.eqn.params["reverse"]
        num_consts, num_carry = scan_counts(op.eqn)
        consts, sliced = op.inputs[:num_consts], op.inputs[num_consts + num_carry :]
        carry: Sequence[Input] = op.inputs[num_consts : num_consts + num_carry]
        kept = [i for i, v in enumerate(op.outputs) if i < num_carry or v in self._read]
        whole = [op.outputs[i] for i in kept]
        rest: Sequence[Input] = ()
        for start, stop in itertools.pairwise((0, *cuts, length)):
            rows = (length - stop, length - start) if is_reversed else (start, stop)
            own = [self._rows(v, 0, *rows) for v in sliced]
            counts = len(kept) > num_carry or any(a == b for a, b in zip(own, sliced, strict=True))
            made: Sequence[int] = whole
            if stop < length:
                made = [self._new(v, self._values[v].shape) for v in whole]
                made += [self._counter()] if counts else []
            self._ops.append(
                dataclasses.replace(
                    op,
                    inputs=(*consts, *carry, *own, *rest),
                    outputs=tuple(made),
                    body=_shorter(op.body, stop - start, length),
                    body_outputs=tuple(op.body_outputs[i] for i in kept),
                    iterations=(start, stop),
                )
            )
            carry, rest = made[:num_carry], made[num_carry:]

    def _rows(self, v: Input, dim: int, start: int, stop: int) -> Input:
        """Those rows as a value of their own, if they can be had without the others; else all."""
        if not isinstance(v, int) or self._graph.values[v].param is None:
            return v
        found = self._some_rows(v, dim, start, stop)
        return v if found is None else found

    def _some_rows(self, v: int, dim: int, start: int, stop: int) -> int | None:
        key = v, dim, start, stop
        if key not in self._rows_of:
            self._rows_of[key] = self._make_rows(*key)
        return self._rows_of[key]

    def _make_rows(self, v: int, dim: int, start: int, stop: int) -> int | None:
        shape = self._values[v].shape
        shape = (*shape[:dim], stop - start, *shape[dim + 1 :])
        if v in self._graph.param_values:
            number = self._new(v, shape)
            own = dataclasses.replace(self._values[number], rows=(dim, start, stop))
            self._values[number] = own
            self._range_values.append(number)
            return number
        op = self._maker.get(v)
        if op is None or op.name not in _ROW_BY_ROW or not isinstance(op.inputs[0], int):
            return None
        before = op.eqn.params["permutation"][dim] if op.name == "transpose" else dim
        given = self._some_rows(op.inputs[0], before, start, stop)
        if given is None:
            return None
        number = self._new(v, shape)
        self._ops.append(dataclasses.replace(op, inputs=(given,), outputs=(number,)))
        return number


def _shorter(body: tuple[Op, ...], num: int, of: int) -> tuple[Op, ...]:
    """A body that runs `num` times where it ran `of` times."""
    return tuple(
        dataclasses.replace(
            op,
            times=op.times * num // of,
            flops=op.flops * num // of,
            body=_shorter(op.body, num, of),
        )
        for op in body
    )


def ranged(graph: Graph, points: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """A graph whose scans are cut where a chain's parts end, and nowhere else.

    Args:
        points: Places between the equations of `opened(graph)`, see `_segments.cut_points`.

    Returns:
        The graph, and the same places between its own equations.
    """
    cuts: dict[tuple[int, ...], Sequence[int]] = {}
    moved: list[int] = []
    fine = coarse = 0
    for op in chain_ops(graph):
        end = fine + num_iterations(graph, op)
        inside = [p - fine for p in points if fine < p < end]
        if inside:
            cuts[op.outputs] = inside
        moved += [coarse + bisect.bisect(inside, p - fine) for p in points if fine <= p < end]
        fine, coarse = end, coarse + len(inside) + 1
    return opened(graph, cuts), tuple(moved)


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
    """What to say of each scan over layers that is inside another equation.

    Args:
        graph: Traced, its scans cut or not.
    """
    return tuple(dict.fromkeys(_uncut(graph, graph.ops, "")))


def _uncut(graph: Graph, ops: Sequence[Op], around: str) -> Iterator[str]:
    for op in ops:
        over_layers = op.iterations is not None or is_over_layers(graph, op)
        if over_layers and around:
            yield _said(op.eqn, around)
        if op.kind == "scan":
            yield from _uncut(graph, op.body, around or "a scan" + " over layers" * over_layers)
        elif op.body:
            inside = "a checkpoint" if op.kind == "remat" else "a function with its own gradient"
            yield from _uncut(graph, op.body, around or inside)
        elif op.name == "cond":
            yield from _in_branches(graph, op, around or "a cond")


def _in_branches(graph: Graph, op: Op, around: str) -> Iterator[str]:
    """Of the scans in a cond, whose first operand is the branch's number."""
    params = [isinstance(v, int) and graph.values[v].param is not None for v in op.inputs[1:]]
    for branch in op.eqn.params["branches"]:
        jaxpr = inlined(branch).jaxpr
        stacked = list(itertools.compress(jaxpr.invars, params))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan" and scan_counts(eqn)[1]:
                sliced = variables(eqn.invars[sum(scan_counts(eqn)) :])
                if not sliced.keys().isdisjoint(stacked):
                    yield _said(eqn, around)


def _said(eqn: Any, around: str) -> str:
    place = source_of(eqn).rsplit("/", 1)[-1]
    remedy = _REMEDIES.get(around, _OUTSIDE)
    return f"a scan over layers ({place}) stays whole inside {around}: {remedy}"
