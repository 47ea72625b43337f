"""Seconds and residuals of each segment of a model's chain on one device."""

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.timing import steady_seconds
from ..core.types import PyTree
from ..graph.graph import Graph, bytes_of, params_of
from ..graph.interpreter import Env
from ..graph.residuals import ResidualEstimator
from ..graph.segments import Segment, run_segment, segment_kind, trained_params
from ..jax.cpu_dots import uncrossed
from ..jax.jaxpr import ClosedJaxpr
from ..jax.ordered_adds import ordered
from ..model.functional import is_abstract, leaf_names
from ..model.plain_arrays import root_key
from ..plan.sharding import Sharded
from .products import moved_bytes, products_of
from .profile import LayerSize, LayerTime


def kept_bytes(
    graph: Graph, chain: Sequence[Segment], trained: Collection[int] | None = None
) -> tuple[int, ...]:
    """For each segment the fewest bytes of residuals that its backward needs.

    A stage of a pipeline keeps a minimum cut between its forward and backward, in which
    element-wise work may be recomputed. The cuts of consecutive segments together are a cut of
    their stage, so their sum is an upper bound: an array in two cuts counts twice. Parameters,
    batch and constants do not count.

    Args:
        trained: Indices of the parameters that have a gradient; None: all.
    """
    estimator = ResidualEstimator(graph)
    known: dict[Any, int] = {}
    out = []
    for segment in chain:
        key = segment_kind(graph, segment, trained)
        if key not in known:
            known[key] = _residual_bytes(estimator, graph, segment, trained)
        out.append(known[key])
    return tuple(out)


def _residual_bytes(
    estimator: ResidualEstimator, graph: Graph, segment: Segment, trained: Collection[int] | None
) -> int:
    values = graph.values
    params = [graph.param_values[p] for p in segment.params]
    with_gradient = [params[i] for i in trained_params(graph, segment, trained)]
    with_gradient += [v for v in segment.inputs if values[v].differentiable]
    cotangents = [v for v in segment.outputs if values[v].differentiable]
    arguments = (*params, *segment.inputs, *segment.given)
    program = estimator.program(segment.ops, arguments, segment.outputs, cotangents, with_gradient)
    return sum(bytes_of(v.aval.shape, v.aval.dtype) for v in program.kept(segment.inputs))


def model_name(params: PyTree) -> str:
    """A fingerprint of a model's parameter names and shapes."""
    named = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    text = "\n".join(f"{name} {x.shape}" for name, x in named)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layer_sizes(
    graph: Graph,
    chain: Sequence[Segment],
    cut: Sharded,
    *,
    kept: Sequence[int] | None = None,
    trained: Collection[int] | None = None,
) -> tuple[LayerSize, ...]:
    """The size of each segment on one device of a tensor-parallel group.

    The residuals are taken to be sharded like all values that the segment makes together.

    Args:
        cut: The sharding over the group.
        kept: For each segment the bytes of its residuals; None: by `kept_bytes`.
        trained: Indices of the parameters that have a gradient; None: all.
    """

    def device_bytes(values: Iterable[int]) -> int:
        return sum(graph.values[v].num_bytes // cut.num_parts(v) for v in values)

    num = math.prod(axis.num_devices for axis in cut.axes.values())
    kept = kept_bytes(graph, chain, trained) if kept is None else kept
    made = [s.stashed(graph) for s in chain]
    whole = [sum(graph.values[v].num_bytes for v in values) for values in made]
    shares = [device_bytes(values) for values in made]
    return tuple(
        LayerSize(
            parameter_bytes=device_bytes(graph.param_values[p] for p in s.params),
            output_bytes=s.output_bytes,
            stash_bytes=kept[i] * (shares[i] / whole[i] if whole[i] else 1.0),
            flops=s.flops / num,
            arithmetic=graph.arithmetic,
            products=products_of(graph, s.ops, cut),
            # Without products and reductions, all values that it makes move through memory.
            moved_bytes=moved_bytes(graph, s.ops, cut) or shares[i],
        )
        for i, s in enumerate(chain)
    )


def measure(
    graph: Graph,
    chain: Sequence[Segment],
    *,
    params: PyTree,
    aux: PyTree,
    batch: PyTree,
    device: jax.Device,
    options: dict[str, Any],
    in_order: bool = False,
    done: Callable[[int], None] = lambda _: None,
) -> tuple[LayerTime, ...]:
    """Time every segment's forward, and its forward with backward, on real data.

    A segment's backward takes the difference. Parameters are on the device one segment at a time;
    where only shapes are known, they are random. Segments that are one program, as the iterations
    of a scan over layers are, are compiled and timed once.

    Args:
        graph: Traced for a microbatch like `batch`.
        params: Arrays or shapes.
        in_order: Whether scatters have a fixed order of additions.
        done: Called with the number of segments measured so far.

    Returns:
        One time per segment, without the optimizer's update.
    """
    put = functools.partial(jax.device_put, device=device)
    leaves = jax.tree.leaves(params)
    others = [_stand_in(x) for x in jax.tree.leaves(aux)]
    outer: Env = dict(zip(graph.aux_values, put(others), strict=True))
    outer[graph.key_value] = put(root_key(0))
    outer |= dict(zip(graph.batch_values, put(jax.tree.leaves(batch)), strict=True))
    crossing: Env = {}
    times = []
    known: dict[Any, tuple[Any, LayerTime]] = {}
    for i, segment in enumerate(chain):
        read = put([_read_rows(graph, leaves, p) for p in segment.params])
        inputs = [crossing[v] for v in segment.inputs]
        rest = [outer[v] for v in segment.given]
        run = _by_place(graph, segment)
        key = len(read), len(inputs), _text(jax.make_jaxpr(run)(read, inputs, rest))
        if key not in known:
            with_backward = _with_backward(run)
            if in_order:
                run, with_backward = ordered(run), ordered(with_backward)
            forward = jax.jit(run, compiler_options=options)
            jax.block_until_ready(forward(read, inputs, rest))
            forward_seconds = steady_seconds(functools.partial(forward, read, inputs, rest))
            if device.platform == "cpu":
                with_backward = uncrossed(with_backward)
            both = jax.jit(with_backward, compiler_options=options)
            both_seconds = steady_seconds(functools.partial(both, read, inputs, rest))
            backward_seconds = max(0.0, both_seconds - forward_seconds)
            time = LayerTime(forward=forward_seconds, backward=backward_seconds)
            known[key] = forward, time
        forward, time = known[key]
        crossing |= dict(zip(segment.outputs, forward(read, inputs, rest), strict=True))
        times.append(time)
        done(i + 1)
    return tuple(times)


def _by_place(graph: Graph, segment: Segment) -> Callable[..., list[Any]]:
    """A segment as a function of lists of arrays."""
    run = run_segment(graph, segment)

    def by_place(params: Sequence[Any], inputs: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        crossing = dict(zip(segment.inputs, inputs, strict=True))
        return run(params, crossing, dict(zip(segment.given, rest, strict=True)))

    return by_place


def _text(closed: ClosedJaxpr) -> str:
    """Text that is equal for segments with the same program and constants."""
    consts = [f"{np.shape(c)}{np.asarray(c).tobytes().hex()}" for c in closed.consts]
    return "\n".join((str(closed.jaxpr), *consts))


def _read_rows(graph: Graph, params: Sequence[Any], entry: int) -> Any:
    """A parameter, or the rows that a segment reads from it."""
    x, value = params[params_of(graph)[entry]], graph.values[graph.param_values[entry]]
    if value.rows is None:
        return _stand_in(x)
    if is_abstract(x):
        return _stand_in(jax.ShapeDtypeStruct(value.shape, x.dtype))
    dim, start, stop = value.rows
    return jax.lax.slice_in_dim(x, start, stop, axis=dim)


def _stand_in(x: Any) -> Any:
    if not is_abstract(x):
        return x
    # Neither zeros nor large, so that later values stay in the usual range.
    return np.random.default_rng(0).normal(0, 0.02, x.shape).astype(x.dtype)


def _with_backward(run: Callable[..., list[Any]]) -> Callable[..., Any]:
    def both(params: Sequence[Any], inputs: Sequence[Any], rest: Sequence[Any]) -> Any:
        smooth = {i: x for i, x in enumerate(inputs) if _is_float(x)}

        def outputs(params: Sequence[Any], smooth: dict[int, Any]) -> list[Any]:
            made = run(params, [smooth.get(i, x) for i, x in enumerate(inputs)], rest)
            return [x for x in made if _is_float(x)]

        made, back = jax.vjp(outputs, list(params), smooth)
        return made, back([jnp.ones_like(x) for x in made])

    return both


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
