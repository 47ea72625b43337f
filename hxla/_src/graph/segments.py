"""A traced loss as a chain of segments, cut where little crosses.

The planner places a chain and the profiler measures one. An array *crosses* a cut between two
equations if it is made before the cut and read after it. A cut is good where few bytes cross: after
a residual block, not inside one.

Segments between equal layers can share a program.

Parameters that a segment reads in 16 bits only may be gathered in 16 bits. A cast rounds element by
element, so it gives the same bits before an all-gather and after.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.errors import PlanError
from ..jax.jaxpr import scan_counts
from ..model.annotations import scopes_of
from .graph import Graph, Input, Op, leaves, params_of
from .interpreter import Env, run_ops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive equations.

    Attributes:
        name: The first and last module whose parameters it reads; without any, the module before
            it, or source lines.
        ops: Its operations; casts and reshapes of parameters are repeated where needed.
        params: Places of the parameters that it reads in `Graph.param_values`.
        given: Arguments of the program that it reads (batch, other variables, random key).
        inputs: Results of earlier segments that it reads, differentiable or not.
        outputs: Values that later segments or the loss read.
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
        """Every differentiable result, parameters and their casts left out."""
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
        graph: A result of `hxla.trace`; after `parts.graph_of` scans over layers are cut between
            iterations too.
        num: The most segments, at least 1.

    Returns:
        At least one segment; their equations in order are the graph's.

    Raises:
        PlanError: If `num` is below 1.
    """
    return segments_at(graph, cut_points(graph, num))


def cut_points(graph: Graph, num: int) -> tuple[int, ...]:
    """The cuts of `segments`, as indices of `chain_ops`.

    Raises:
        PlanError: If `num` is below 1.
    """
    if num < 1:
        raise PlanError(f"a chain has at least one segment, not {num}")
    return tuple(_cuts(graph, num))


def chain_ops(graph: Graph) -> list[Op]:
    """The operations that cuts count: all but casts and reshapes of parameters."""
    return _parameter_views(graph)[1]


def task_points(graph: Graph) -> tuple[int, ...]:
    """Cuts between TaskGraphs, as `segments_at` takes them."""
    ops = _parameter_views(graph)[1]
    return tuple(i for i in range(1, len(ops)) if ops[i].task != ops[i - 1].task)


def in_task_order(graph: Graph) -> Graph:
    """The graph with the operations of each TaskGraph together, in the order of the TaskGraphs.

    Operations without an annotation (the loss, its weights, metrics) join the last TaskGraph that
    they read.

    Raises:
        PlanError: If a TaskGraph reads a result of a later one.
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
                "one another, so annotate the later equations as another stage"
            )
        made_in.update({v: here for v in op.outputs if v not in views})
        ordered[here].append(dataclasses.replace(op, task=here))
    return dataclasses.replace(graph, ops=tuple(itertools.chain.from_iterable(ordered)))


def segments_at(graph: Graph, points: Sequence[int]) -> tuple[Segment, ...]:
    """The chain with these cuts, see `cut_points`."""
    views, ops = _parameter_views(graph)
    cuts = [0, *points, len(ops)]
    made_in: dict[int, int] = {}
    chunks = [ops[a:b] for a, b in itertools.pairwise(cuts)]
    for i, chunk in enumerate(chunks):
        made_in.update({v: i for op in chunk for v in op.outputs})
    last_use = _last_use(graph, ops)
    ends = list(itertools.accumulate(map(len, chunks)))
    names = _names(graph, chunks)
    return tuple(
        _segment(graph, i, names[i], chunk, views, made_in, last_use, ends[i])
        for i, chunk in enumerate(chunks)
    )


def run_segment(graph: Graph, segment: Segment) -> Callable[[Sequence[Any], Env, Env], list[Any]]:
    """`(params, inputs, given) -> outputs` of one segment.

    `params` are the arrays of `segment.params`; `inputs` and `given` are arrays by value number.
    """

    def run(params: Sequence[Any], inputs: Env, given: Env) -> list[Any]:
        env: Env = dict(graph.consts) | dict(inputs) | dict(given)
        numbers = (graph.param_values[p] for p in segment.params)
        env.update(zip(numbers, params, strict=True))
        run_ops(segment.ops, env)
        return [env[v] for v in segment.outputs]

    return run


def _parameter_views(graph: Graph) -> tuple[dict[int, Op], list[Op]]:
    """Operations that only cast or reshape parameters, by result; and all others."""
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
    """The last operation that reads each value; results are read after the last."""
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
    cuts: list[int] = []
    for target in (share * k for k in range(1, num)):
        candidates = [
            p
            for p in range(1, len(ops))
            if abs(work[p] - target) <= share / 2 and 0 < work[p] < work[-1]
        ]
        if candidates:
            best = min(candidates, key=lambda p: (crossing[p], abs(work[p] - target), p))
            if not cuts or best > cuts[-1]:
                cuts.append(best)
    return cuts


def _segment(
    graph: Graph,
    index: int,
    name: str,
    chunk: Sequence[Op],
    views: dict[int, Op],
    made_in: dict[int, int],
    last_use: dict[int, int],
    end: int,
) -> Segment:
    values = graph.values
    segment_views: dict[int, Op] = {}

    def add_views(v: int) -> None:
        if v in views and id(views[v]) not in segment_views:
            for inner in _reads(views[v]):
                add_views(inner)
            segment_views[id(views[v])] = views[v]

    # A result may be an unchanged parameter, so the last segment reads the results too.
    is_last = index == max(made_in.values(), default=0)
    results = [v for v in graph.result_values if isinstance(v, int)] if is_last else []
    read = dict.fromkeys([*(v for op in chunk for v in _reads(op)), *results])
    for v in read:
        add_views(v)
    ops = (*segment_views.values(), *chunk)
    segment_values = {v for op in ops for v in op.outputs}
    all_read = [*(v for op in ops for v in _reads(op)), *results]
    outside = dict.fromkeys(v for v in all_read if v not in segment_values)
    of_param = {v: p for p, v in enumerate(graph.param_values)}
    consts = {v for v, _ in graph.consts}
    params = tuple(of_param[v] for v in outside if v in of_param)
    outputs = tuple(v for op in chunk for v in op.outputs if last_use.get(v, -1) >= end)
    return Segment(
        name=name,
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


def _names(graph: Graph, chunks: Iterable[Sequence[Op]]) -> list[str]:
    """The names of segments, by the modules whose parameters they read."""
    names: list[str] = []
    last = ""
    for i, chunk in enumerate(chunks):
        labels = [module for op in chunk for module in _modules(graph, op)]
        if not labels and last and f"after {last}" not in names:
            names.append(f"after {last}")
            continue
        sources = [op.source.rsplit("/", 1)[-1] for op in chunk if op.source]
        first, *_, end = 2 * (labels or sources or [str(i)])
        last = labels[-1] if labels else last
        names.append(first if first == end else f"{first} .. {end}")
    return names


def _modules(graph: Graph, op: Op) -> Iterator[str]:
    """The modules whose parameters an operation reads; of a range of a scan one with its range."""
    inputs = op.inputs if op.iterations is None else op.inputs[sum(scan_counts(op.eqn)) :]
    values = [graph.values[v] for v in inputs if isinstance(v, int)]
    paths = [graph.param_names[v.param].split("/")[:-1] for v in values if v.param is not None]
    if op.iterations is None:
        yield from ("/".join(path) for path in paths if path)
        return
    start, stop = op.iterations
    levels = map(set, zip(*paths, strict=False))
    shared = [level.pop() for level in itertools.takewhile(lambda names: len(names) == 1, levels)]
    iterations = str(start) if stop == start + 1 else f"{start}:{stop}"
    yield f"{'/'.join(shared) or op.source.rsplit('/', 1)[-1]}[{iterations}]"


def trained_params(graph: Graph, segment: Segment, trained: Collection[int] | None) -> list[int]:
    """Indices of a segment's parameters that have a gradient.

    Args:
        trained: Indices of the trained parameters of the model; None: all.
    """
    param_of = params_of(graph)
    return [
        i
        for i, p in enumerate(segment.params)
        if graph.values[graph.param_values[p]].differentiable
        and (trained is None or param_of[p] in trained)
    ]


def segment_kind(graph: Graph, segment: Segment, trained: Collection[int] | None) -> Any:
    """A value that is equal for segments with equal programs on equal shapes.

    Args:
        trained: Indices of the trained parameters of the model; None: all.
    """
    number: dict[int, int] = {}
    signatures = functools.partial(_signatures, graph, number)
    return (
        tuple(_op_signature(op, signatures) for op in segment.ops),
        signatures(segment.inputs),
        signatures(segment.outputs),
        tuple(trained_params(graph, segment, trained)),
    )


def op_kind(graph: Graph, op: Op) -> Any:
    """A value that is equal for operations with equal programs on equal shapes."""
    return _op_signature(op, functools.partial(_signatures, graph, {}))


def _signatures(graph: Graph, number: dict[int, int], inputs: Iterable[Input]) -> tuple[Any, ...]:
    """Shape and dtype of values, each with the number of its first use; literals as text."""
    out: list[Any] = []
    for v in inputs:
        if not isinstance(v, int):
            out.append(str(v))
            continue
        value = graph.values[v]
        index = number.setdefault(v, len(number))
        out.append((index, value.shape, str(value.dtype), value.differentiable))
    return tuple(out)


def _op_signature(op: Op, signatures: Callable[[Iterable[Input]], tuple[Any, ...]]) -> Any:
    # Custom gradient rules are not in the body, so the source line stands for them.
    others = op.source if op.kind == "custom" else ""
    if not op.body:
        others = str(sorted(op.eqn.params.items()))
    return (
        *(op.name, others, op.iterations and op.iterations[1] - op.iterations[0]),
        signatures(op.inputs),
        signatures(op.body_inputs),
        tuple(_op_signature(inner, signatures) for inner in op.body),
        signatures(op.body_outputs),
        signatures(op.outputs),
    )


_MOST_PERIODS = 4096  # lengths of a layer that are tried
_LEAST_SHARE = 0.5  # of all work, in the repeated layers


def layer_points(graph: Graph, num: int | None = None) -> tuple[int, ...]:
    """Cuts between equal layers, as `segments_at` takes them.

    The repeated run of operations with the most work is cut between its repetitions, where the
    fewest bytes cross; the operations before and after it are segments too. If the repetitions have
    less than half of the work, the loss is cut by work.

    Args:
        graph: A trace; after `parts.graph_of` iterations of scans over layers are layers.
        num: The approximate number of segments, each several layers or an equal part of a layer;
            None: a segment for each layer.
    """
    ops = chain_ops(graph)
    repetition = _repetition(ops)
    if repetition is None or (num is not None and num < 3):
        return cut_points(graph, num or 8)
    first, period, repeats = repetition
    pieces = 1
    if num is not None:
        layers = max(1, round(repeats / max(num - 2, 1)))
        pieces = max(1, round((num - 2) / repeats))
        period, repeats = period * layers, repeats // layers
    crossing = crossing_bytes(graph, ops)
    end = first + period * repeats
    spare = len(ops) - end
    # A shift loses no layer if the operations behind the last look like the start of another.
    shifts = [s for s in range(period) if s == 0 or s < spare + period]
    cost = {s: _most_crossing_bytes(crossing, first + s, period, repeats - (s > 0)) for s in shifts}
    shift = min(shifts, key=lambda s: (cost[s], s))
    num_whole = repeats - (shift > 0)
    start = first + shift
    inner = _layer_cuts(crossing[start : start + period + 1], ops[start : start + period], pieces)
    points = [start + i * period + k for i in range(num_whole) for k in (0, *inner)]
    points.append(start + num_whole * period)
    return tuple(p for p in points if 0 < p < len(ops))


def _layer_cuts(crossing: np.ndarray, ops: Sequence[Op], num: int) -> tuple[int, ...]:
    """Cuts of a layer into pieces of about equal work, where the fewest bytes cross."""
    done = np.cumsum([sum(leaf.flops * leaf.times for leaf in leaves((op,))) for op in ops])
    cuts = set()
    for k in range(1, num):
        distance = np.abs(done / done[-1] - k / num)
        places = [i + 1 for i in range(len(ops) - 1) if distance[i] <= 0.5 / num]
        cuts |= {min(places, key=lambda i: (crossing[i], distance[i - 1]))} if places else set()
    return tuple(sorted(cuts))


def module_points(graph: Graph, patterns: Sequence[str]) -> tuple[int, ...]:
    """Cuts between modules, as `segments_at` takes them: a wrap policy of FSDP.

    A module is a common prefix of parameter paths. The cut is between the last operation that
    reads parameters of one module and the first for the next, where the fewest bytes cross.

    Args:
        patterns: Regular expressions, each for the whole path of a module, such as
            `blocks/[0-9]+`.

    Raises:
        PlanError: If a pattern matches no module; the message names some modules.
    """
    modules = {_module(name, patterns): None for name in graph.param_names}
    for pattern in patterns:
        if not any(m is not None and re.fullmatch(pattern, m) for m in modules):
            some = sorted({name.rsplit("/", 1)[0] for name in graph.param_names})[:6]
            raise PlanError(
                f"memory.segments: {pattern!r} matches the path of no module; there are "
                f"{', '.join(some)} and those around them"
            )
    ops = chain_ops(graph)
    crossing = crossing_bytes(graph, ops)
    reads: list[tuple[int, str]] = []
    for i, op in enumerate(ops):
        params = [graph.values[v].param for v in op.inputs if isinstance(v, int)]
        matched = {_module(graph.param_names[p], patterns) for p in params if p is not None}
        reads += [(i, module) for module in sorted(m for m in matched if m is not None)]
    points = []
    for (i, one), (j, other) in itertools.pairwise(reads):
        if one != other and i < j:
            points.append(min(range(i + 1, j + 1), key=lambda p: (crossing[p], p)))
    return tuple(points)


def _module(name: str, patterns: Sequence[str]) -> str | None:
    """The shortest prefix of a parameter's path that a pattern matches."""
    parts = name.split("/")
    starts = ("/".join(parts[:n]) for n in range(1, len(parts)))
    return next((s for s in starts if any(re.fullmatch(p, s) for p in patterns)), None)


def _most_crossing_bytes(crossing: np.ndarray, first: int, period: int, repeats: int) -> int:
    """The most bytes that cross at one of the cuts."""
    places = [first + i * period for i in range(repeats + 1)]
    return int(max(crossing[p] for p in places if p < len(crossing)))


def _repetition(ops: Sequence[Op]) -> tuple[int, int, int] | None:
    """The first operation, length and number of the repetitions with the most work."""
    numbers: dict[str, int] = {}
    kinds = np.array([numbers.setdefault(_kind(op), len(numbers)) for op in ops])
    work = np.array([0.0, *(sum(leaf.flops * leaf.times for leaf in leaves((op,))) for op in ops)])
    work = np.cumsum(work)
    best: tuple[float, int, int, int] | None = None
    for period in range(1, min(len(ops) // 2, _MOST_PERIODS) + 1):
        equal = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            repeats = (stop - start) // period + 1
            if repeats < 2:
                continue
            repeated = float(work[start + period * repeats] - work[start])
            if repeated > 0 and (best is None or repeated > best[0] * 1.001):
                best = repeated, int(start), period, int(repeats)
    return None if best is None or best[0] < _LEAST_SHARE * work[-1] else best[1:]


def _kind(op: Op) -> str:
    """A text that is equal for equal operations on arrays of equal shapes."""
    eqn = op.eqn
    avals = [getattr(v, "aval", None) for v in (*eqn.invars, *eqn.outvars)]
    return f"{op.name}{avals}{op.iterations is None}"


#: Primitives that move elements and keep all bits.
_VIEWS = frozenset(
    {"broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "reshape", "rev", "slice"}
    | {"split", "squeeze", "transpose", "unstack"}
)
_LOW = frozenset({"bfloat16", "float16"})


def low_params(graph: Graph, segment: Segment) -> dict[int, str]:
    """The float32 parameters that a segment reads only through casts to one 16-bit dtype.

    Returns:
        The dtype of each such parameter, by parameter index.
    """
    param_of = params_of(graph)
    read = {
        graph.param_values[entry]: param_of[entry]
        for entry in segment.params
        if graph.values[graph.param_values[entry]].dtype == jnp.float32
    }
    dtypes: dict[int, set[str]] = {p: set() for p in read.values()}
    leaving = {v for v in (*segment.outputs, *graph.result_values) if isinstance(v, int)}
    _collect_dtypes(segment.ops, read, leaving, dtypes)
    only = {p: next(iter(names)) for p, names in dtypes.items() if len(names) == 1}
    return {p: dtype for p, dtype in only.items() if dtype in _LOW}


def _collect_dtypes(
    ops: Sequence[Op], read: dict[int, int], leaving: Iterable[int], dtypes: dict[int, set[str]]
) -> None:
    """Add the dtypes in which operations read parameters to `dtypes`.

    Args:
        read: Values with the unrounded elements of a parameter, and the parameter's index.
        leaving: Values that are read outside `ops`, in an unknown dtype.
        dtypes: Dtype names by parameter index; changed in place.
    """
    read = dict(read)
    for op in ops:
        places = [k for k, v in enumerate(op.inputs) if isinstance(v, int) and v in read]
        body_read: dict[int, int] = {}
        for k in places:
            param = read[op.inputs[k]]
            if op.name == "convert_element_type":
                new = jnp.dtype(op.eqn.params["new_dtype"]).name
                if new == "float32":
                    read[op.outputs[0]] = param
                else:
                    dtypes[param].add(new)
            elif op.name in _VIEWS and k == 0:
                read |= dict.fromkeys(op.outputs, param)
            elif op.kind == "remat" or (op.kind == "scan" and not _is_carried(op, k)):
                body_read[op.body_inputs[k]] = param
            else:
                dtypes[param].add("float32")
        if body_read:
            body_leaving = [v for v in op.body_outputs if isinstance(v, int)]
            _collect_dtypes(op.body, body_read, body_leaving, dtypes)
    for v in leaving:
        if v in read:
            dtypes[read[v]].add("float32")


def _is_carried(op: Op, k: int) -> bool:
    """Whether an operand of a scan is carried."""
    num_consts, num_carry = scan_counts(op.eqn)
    return num_consts <= k < num_consts + num_carry
