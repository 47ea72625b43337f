"""A traced loss as a chain of segments, cut where little crosses.

What the planner places and the profiler measures is a chain. A program is a list of equations with
any pattern of use between them; between two equations the arrays that were made before and are
read after *cross*. A cut is good where few bytes cross: after a residual block, not inside one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ..core.errors import PlanError
from ..jax.jaxpr import scan_counts
from ..model.annotations import scopes_of
from .graph import Graph, params_of
from .interpreter import Env, run_ops
from .operations import Input, Op, leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive equations.

    Attributes:
        name: First and last module or source line in it.
        ops: Its operations, those that only cast or reshape parameters repeated where needed.
        params: Indices of the parameters that it reads.
        given: Values that the whole program is given (batch, other variables, random key).
        inputs: Values that earlier segments made, differentiable ones and others.
        outputs: Values that later segments, or the loss, read.
        flops: Forward operations of one microbatch.
    """

    name: str
    ops: tuple[Op, ...]
    params: tuple[int, ...]
    given: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float
    output_bytes: int

    def stashed(self, graph: Graph) -> tuple[int, ...]:
        """Every array in it that a gradient flows through, parameters and their casts left out."""
        return tuple(
            v
            for op in leaves(self.ops)
            for v in op.outputs
            if graph.values[v].differentiable and graph.values[v].param is None
        )


def segments(graph: Graph, num: int) -> tuple[Segment, ...]:
    """Cut a graph into a chain of segments of about equal work.

    Near each multiple of the `num`-th part of all operations, the cut is where the fewest bytes
    cross. A program with few such places, such as a scan over time, gives fewer segments.

    Args:
        graph: From `hxla.trace`; with its scans over layers opened, see `_parts.graph_of`, it is
            cut between their iterations too.
        num: Most segments, at least 1.

    Returns:
        At least one segment; their equations in order are the graph's.

    Raises:
        PlanError: If `num` is below 1.
    """
    return segments_at(graph, cut_points(graph, num))


def cut_points(graph: Graph, num: int) -> tuple[int, ...]:
    """Where `segments` cuts: numbers of operations, those that only recast parameters left out.

    Raises:
        PlanError: If `num` is below 1.
    """
    if num < 1:
        raise PlanError(f"a chain has at least one segment, not {num}")
    return tuple(_cuts(graph, num))


def chain_ops(graph: Graph) -> list[Op]:
    """The operations that are counted in cuts."""
    return _parameter_views(graph)[1]


def task_points(graph: Graph) -> tuple[int, ...]:
    """Where one TaskGraph ends and the next begins, as `segments_at` takes it."""
    ops = _parameter_views(graph)[1]
    return tuple(i for i in range(1, len(ops)) if ops[i].task != ops[i - 1].task)


def in_task_order(graph: Graph) -> Graph:
    """The graph with the operations of each TaskGraph together, in the order of the TaskGraphs.

    What no annotation covers (the loss, its weights, metrics) follows the last TaskGraph that it
    reads.

    Raises:
        PlanError: If a TaskGraph reads what a later one makes.
    """
    views, _ = _parameter_views(graph)
    made_in: dict[int, int] = {}
    ordered: list[list[Op]] = [[] for _ in graph.task_graphs]
    for op in graph.ops:
        before = max((made_in[v] for v in _reads(op) if v in made_in), default=None)
        here = op.task
        if before is not None and not scopes_of(op.stack):
            here = before
        elif before is not None and before > here:
            early, late = graph.task_graphs[here], graph.task_graphs[before]
            raise PlanError(
                f"TaskGraph {early.index} ({early.label}, {early.source}) reads what TaskGraph "
                f"{late.index} ({late.label}, {late.source}) makes: stages of a pipeline follow "
                "one another, so annotate the later equations as a stage of their own"
            )
        made_in.update({v: here for v in op.outputs if v not in views})
        ordered[here].append(dataclasses.replace(op, task=here))
    return dataclasses.replace(graph, ops=tuple(itertools.chain.from_iterable(ordered)))


def segments_at(graph: Graph, points: Sequence[int]) -> tuple[Segment, ...]:
    """The chain with the given cuts: see `cut_points`."""
    views, ops = _parameter_views(graph)
    cuts = [0, *points, len(ops)]
    made_in: dict[int, int] = {}
    chunks = [ops[a:b] for a, b in itertools.pairwise(cuts)]
    for i, chunk in enumerate(chunks):
        made_in.update({v: i for op in chunk for v in op.outputs})
    last_use = _last_use(graph, ops)
    ends = list(itertools.accumulate(map(len, chunks)))
    return tuple(
        _segment(graph, i, chunk, views, made_in, last_use, ends[i])
        for i, chunk in enumerate(chunks)
    )


def run_segment(graph: Graph, segment: Segment) -> Callable[[Sequence[Any], Env, Env], list[Any]]:
    """`(params, inputs, given) -> outputs` of one segment.

    `params` are the arrays of `segment.params`, `inputs` and `given` go by number.
    """

    def run(params: Sequence[Any], inputs: Env, given: Env) -> list[Any]:
        env: Env = dict(graph.consts) | dict(inputs) | dict(given)
        numbers = (graph.param_values[p] for p in segment.params)
        env.update(zip(numbers, params, strict=True))
        run_ops(segment.ops, env)
        return [env[v] for v in segment.outputs]

    return run


def _parameter_views(graph: Graph) -> tuple[dict[int, Op], list[Op]]:
    """Operations that only recast parameters, by what they make; and all others."""
    views: dict[int, Op] = {}
    rest = []
    for op in graph.ops:
        if op.outputs and all(graph.values[v].param is not None for v in op.outputs):
            views.update(dict.fromkeys(op.outputs, op))
        else:
            rest.append(op)
    return views, rest


def _reads(op: Op) -> list[int]:
    return [v for v in op.inputs if isinstance(v, int)]


def _last_use(graph: Graph, ops: Sequence[Op]) -> dict[int, int]:
    """The last operation that reads a value; the results are read after all."""
    last = {v: i for i, op in enumerate(ops) for v in _reads(op)}
    return last | {v: len(ops) for v in graph.result_values if isinstance(v, int)}


def crossing_bytes(graph: Graph, ops: Sequence[Op]) -> np.ndarray:
    """Bytes that cross before each operation, int64[num ops + 1]."""
    change = np.zeros(len(ops) + 2, np.int64)
    last = _last_use(graph, ops)
    for i, op in enumerate(ops):
        for v in op.outputs:
            if last.get(v, i) > i:
                change[i + 1] += graph.values[v].num_bytes
                change[last[v] + 1] -= graph.values[v].num_bytes
    return np.cumsum(change)[: len(ops) + 1]


def _flops(op: Op) -> float:
    return float(sum(leaf.flops for leaf in leaves((op,))))


def _cuts(graph: Graph, num: int) -> list[int]:
    ops = chain_ops(graph)
    crossing = crossing_bytes(graph, ops)
    work = np.concatenate([[0.0], np.cumsum([_flops(op) for op in ops])])
    share = work[-1] / num
    found: list[int] = []
    for target in (share * k for k in range(1, num)):
        near = [
            p
            for p in range(1, len(ops))
            if abs(work[p] - target) <= share / 2 and 0 < work[p] < work[-1]
        ]
        if near:
            best = min(near, key=lambda p: (crossing[p], abs(work[p] - target), p))
            if not found or best > found[-1]:
                found.append(best)
    return found


def _segment(
    graph: Graph,
    index: int,
    chunk: Sequence[Op],
    views: dict[int, Op],
    made_in: dict[int, int],
    last_use: dict[int, int],
    end: int,
) -> Segment:
    values = graph.values
    own_views: dict[int, Op] = {}

    def needed(v: int) -> None:
        if v in views and id(views[v]) not in own_views:
            for inner in _reads(views[v]):
                needed(inner)
            own_views[id(views[v])] = views[v]

    # A result may be a parameter as it is, so the end reads the results too.
    is_last = index == max(made_in.values(), default=0)
    results = [v for v in graph.result_values if isinstance(v, int)] if is_last else []
    read = dict.fromkeys([*(v for op in chunk for v in _reads(op)), *results])
    for v in read:
        needed(v)
    ops = (*own_views.values(), *chunk)
    made = {v for op in ops for v in op.outputs}
    read_inside = [*(v for op in ops for v in _reads(op)), *results]
    outside = dict.fromkeys(v for v in read_inside if v not in made)
    of_param = {v: p for p, v in enumerate(graph.param_values)}
    consts = {v for v, _ in graph.consts}
    params = tuple(of_param[v] for v in outside if v in of_param)
    outputs = tuple(v for op in chunk for v in op.outputs if last_use.get(v, -1) >= end)
    stacks = [_label(graph, op, op.stack) for op in chunk if op.stack or op.iterations]
    sources = [_label(graph, op, op.source.rsplit("/", 1)[-1]) for op in chunk if op.source]
    labels = stacks if len(set(stacks)) > 1 else sources or [str(index)]
    first, last = labels[0], labels[-1]
    return Segment(
        name=first if first == last else f"{first} .. {last}",
        ops=ops,
        params=params,
        given=tuple(
            v for v in outside if v not in of_param and v not in consts and v not in made_in
        ),
        inputs=tuple(v for v in outside if made_in.get(v, index) < index),
        outputs=outputs,
        flops=sum(map(_flops, chunk)),
        output_bytes=sum(values[v].num_bytes for v in outputs),
    )


def _label(graph: Graph, op: Op, place: str) -> str:
    """Of a part of a scan the path that its stacked parameters share, and its iterations."""
    if op.iterations is None:
        return place
    start, stop = op.iterations
    values = [graph.values[v] for v in op.inputs[sum(scan_counts(op.eqn)) :] if isinstance(v, int)]
    paths = [graph.param_names[v.param].split("/")[:-1] for v in values if v.param is not None]
    levels = map(set, zip(*paths, strict=False))
    shared = [level.pop() for level in itertools.takewhile(lambda own: len(own) == 1, levels)]
    of = str(start) if stop == start + 1 else f"{start}:{stop}"
    return f"{'/'.join(shared) or place}[{of}]"


def trained_params(graph: Graph, segment: Segment, trained: Collection[int] | None) -> list[int]:
    """Places among a segment's parameters of those that have a gradient.

    Args:
        trained: Places of the model's parameters that are trained; None: all.
    """
    of = params_of(graph)
    return [
        i
        for i, p in enumerate(segment.params)
        if graph.values[graph.param_values[p]].differentiable
        and (trained is None or of[p] in trained)
    ]


def segment_kind(graph: Graph, segment: Segment, trained: Collection[int] | None) -> Any:
    """Equal for segments which compute the same from arrays of the same shapes.

    Args:
        trained: Places of the model's parameters that are trained; None: all.
    """
    number: dict[int, int] = {}
    places = functools.partial(_places, graph, number)
    return (
        tuple(_of(op, places) for op in segment.ops),
        places(segment.inputs),
        places(segment.outputs),
        tuple(trained_params(graph, segment, trained)),
    )


def op_kind(graph: Graph, op: Op) -> Any:
    """Likewise of one operation."""
    return _of(op, functools.partial(_places, graph, {}))


def _places(graph: Graph, number: dict[int, int], inputs: Iterable[Input]) -> tuple[Any, ...]:
    """What values are, each with a number by which it is known again; literals are themselves."""
    out: list[Any] = []
    for v in inputs:
        if not isinstance(v, int):
            out.append(str(v))
            continue
        value = graph.values[v]
        own = number.setdefault(v, len(number))
        out.append((own, value.shape, str(value.dtype), value.differentiable))
    return tuple(out)


def _of(op: Op, places: Callable[[Iterable[Input]], tuple[Any, ...]]) -> Any:
    # Rules of a user's own for gradients are not in the body: their place in the code is.
    others = op.source if op.kind == "custom" else ""
    if not op.body:
        others = str(sorted(op.eqn.params.items()))
    return (
        *(op.name, others, op.iterations and op.iterations[1] - op.iterations[0]),
        places(op.inputs),
        places(op.body_inputs),
        tuple(_of(own, places) for own in op.body),
        places(op.body_outputs),
        places(op.outputs),
    )
