"""What each segment of a model's chain takes on one device, measured."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._evaluate import Env
from ._graph import Graph
from ._lower._shard import Sharded
from ._profile._hardware import median_seconds
from ._profile._values import LayerSize, LayerTime
from ._segments import Segment, run_segment
from ._types import PyTree


def fingerprint(graph: Graph) -> str:
    """Names a model by its parameters and their shapes, the same at every microbatch size."""
    text = "\n".join(f"{n} {s}" for n, s in zip(graph.param_names, graph.param_shapes, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layer_sizes(
    graph: Graph, chain: Sequence[Segment], cut: Sharded | None = None
) -> tuple[LayerSize, ...]:
    """What the planner needs of each segment's size, on one device of a tensor-parallel group.

    Args:
        graph: Traced.
        chain: Its segments.
        cut: How the group's devices share the arrays; None: a group of one.
    """

    def own(values: Iterable[int]) -> int:
        return sum(
            graph.values[v].num_bytes // (1 if cut is None else cut.num_parts(v)) for v in values
        )

    num = 1 if cut is None else math.prod(axis.num_devices for axis in cut.axes.values())
    return tuple(
        LayerSize(
            parameter_bytes=own(graph.param_values[p] for p in s.params),
            output_bytes=s.output_bytes,
            stash_bytes=own(s.stashed(graph)),
            flops=s.flops / num,
        )
        for s in chain
    )


def measure(
    graph: Graph,
    chain: Sequence[Segment],
    *,
    params: PyTree,
    aux: PyTree,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    device: jax.Device,
    options: dict[str, Any],
    done: Callable[[int], None] = lambda _: None,
) -> tuple[LayerTime, ...]:
    """Run every segment forward, and forward and backward, on real data.

    A segment's backward is the time of both less that of the forward. The optimizer's update is
    measured for the whole model and shared out by bytes of parameters.

    Args:
        graph: Traced for a microbatch like `batch`.
        chain: Its segments.
        params: Arrays.
        aux: Other variables.
        batch: One microbatch.
        optimizer: The user's own.
        device: Where.
        options: XLA's, those of training.
        done: Called with the number of segments measured so far.

    Returns:
        One time per segment.
    """
    put = functools.partial(jax.device_put, device=device)
    leaves = put(jax.tree.leaves(params))
    given: Env = dict(zip(graph.aux_values, put(jax.tree.leaves(aux)), strict=True))
    given[graph.key_value] = put(jax.random.key(0))
    given |= dict(zip(graph.batch_values, put(jax.tree.leaves(batch)), strict=True))
    update = _update_seconds(optimizer, put(params), options)
    total_bytes = max(1, sum(s.param_bytes for s in chain))
    crossing: Env = {}
    times = []
    for i, segment in enumerate(chain):
        own = [leaves[p] for p in segment.params]
        inputs = {v: crossing[v] for v in segment.inputs}
        rest = {v: given[v] for v in segment.given}
        run = run_segment(graph, segment)
        forward = jax.jit(run, compiler_options=options)
        outputs = forward(own, inputs, rest)
        forward_seconds = median_seconds(functools.partial(forward, own, inputs, rest))
        both = jax.jit(_with_backward(run), compiler_options=options)
        both_seconds = median_seconds(functools.partial(both, own, inputs, rest))
        crossing |= dict(zip(segment.outputs, outputs, strict=True))
        times.append(
            LayerTime(
                forward=forward_seconds,
                backward=max(0.0, both_seconds - forward_seconds),
                update=update * segment.param_bytes / total_bytes,
            )
        )
        done(i + 1)
    return tuple(times)


def _with_backward(run: Callable[..., list[Any]]) -> Callable[..., Any]:
    def both(params: Sequence[Any], inputs: Env, given: Env) -> Any:
        smooth = {v: x for v, x in inputs.items() if _is_float(x)}
        others = {v: x for v, x in inputs.items() if v not in smooth}

        def outputs(params: Sequence[Any], smooth: Env) -> list[Any]:
            made = run(params, {**smooth, **others}, given)
            return [x for x in made if _is_float(x)]

        made, back = jax.vjp(outputs, list(params), smooth)
        return made, back([jnp.ones_like(x) for x in made])

    return both


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _update_seconds(
    optimizer: optax.GradientTransformation, params: PyTree, options: dict[str, Any]
) -> float:
    state = jax.jit(optimizer.init)(params)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-3), params)

    def step(grads: PyTree, state: PyTree, params: PyTree) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, compiler_options=options)
    return median_seconds(lambda: compiled(grads, state, params))
