"""A graph's operations run again, equation by equation, as they were traced."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.types import PyTree
from ..jax.jaxpr import checkpoint_like, run_equation, scan_counts
from .graph import Graph
from .operations import Input, Op

Env = dict[int, Any]


def _as_they_are(_: Any, arrays: list[Any]) -> list[Any]:
    return arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPlacement:
    """Where arrays are to lie while operations run.

    Attributes:
        operands: Of an operation, placed as it wants them.
        results: Of an operation, placed as it leaves them.
        carry: Arrays that a scan carries, with their numbers inside its body.
    """

    operands: Callable[[Op, list[Any]], list[Any]] = _as_they_are
    results: Callable[[Op, list[Any]], list[Any]] = _as_they_are
    carry: Callable[[Sequence[int], list[Any]], list[Any]] = _as_they_are


#: As jax leaves them.
AS_THEY_ARE = ArrayPlacement()


def run_graph(
    graph: Graph,
    params: PyTree,
    aux: PyTree,
    key: jax.Array,
    batch: PyTree,
    place: ArrayPlacement,
) -> list[Any]:
    """The results of a traced `run(params, aux, key, batch)`, flat."""
    env: Env = dict(graph.consts)
    for numbers, tree in (
        (graph.param_values, params),
        (graph.aux_values, aux),
        ((graph.key_value,), key),
        (graph.batch_values, batch),
    ):
        env.update(zip(numbers, jax.tree.leaves(tree), strict=True))
    run_ops(graph.ops, env, place)
    return [read(env, v) for v in graph.result_values]


def run_ops(
    ops: Sequence[Op], env: Env, place: ArrayPlacement = AS_THEY_ARE, prefix: str = ""
) -> None:
    """Run operations, adding what they make to `env`.

    Args:
        ops: In order.
        env: Numbers of values to arrays, those that the operations read.
        place: Where arrays are to lie.
        prefix: Name stack around the caller, part of every operation's own.
    """
    for op in ops:
        operands = place.operands(op, [read(env, v) for v in op.inputs])
        # The equation brings its own names; those of an inlined jit around it are missing.
        stack = op.stack.removeprefix(prefix).removesuffix(str(op.eqn.source_info.name_stack))
        stack = stack.strip("/")
        with jax.named_scope(stack) if stack else contextlib.nullcontext():
            results = place.results(op, evaluate(op, operands, place))
        env.update(zip(op.outputs, results, strict=True))


def evaluate(op: Op, operands: list[Any], place: ArrayPlacement) -> list[Any]:
    """The results of one operation; see `run_ops`."""
    if not op.body or op.kind == "custom":
        return run_equation(op.eqn, operands)

    def body(*inputs: Any) -> list[Any]:
        inside: Env = dict(op.body_consts)
        inside.update(zip(op.body_inputs, inputs, strict=True))
        run_ops(op.body, inside, place, op.stack)
        return [read(inside, v) for v in op.body_outputs]

    if op.kind == "remat":
        return checkpoint_like(op.eqn, body)(*operands)
    params = op.eqn.params
    num_consts, num_carry = scan_counts(op.eqn)
    first_slice = num_consts + num_carry
    slices, rest = operands[first_slice : len(op.body_inputs)], operands[len(op.body_inputs) :]
    length, unroll, row = params["length"], params["unroll"], None
    if op.iterations is not None:
        row, slices = _rows(op, slices, rest)
        length = op.iterations[1] - op.iterations[0]
        unroll = min(unroll, length)
    consts, carry = operands[:num_consts], operands[num_consts:first_slice]
    carried = op.body_inputs[num_consts:first_slice]

    def step(carry: Any, xs: Any) -> Any:
        out = body(*consts, *place.carry(carried, carry), *xs)
        return place.carry(carried, out[:num_carry]), out[num_carry:]

    carry, ys = jax.lax.scan(
        step,
        place.carry(carried, carry),
        slices,
        length=length,
        reverse=params["reverse"],
        unroll=unroll,
    )
    if row is not None:
        ys = _stacked(op, row, ys, rest)
    return [*carry, *ys]


def _rows(op: Op, slices: list[Any], rest: list[Any]) -> tuple[Any, list[Any]]:
    """The first row of a part of a scan, and of what is stacked the rows that it reads.

    The row is an array that goes from part to part, so that like parts are one program.
    """
    assert op.iterations is not None
    start, stop = op.iterations
    length, num = op.eqn.params["length"], stop - start
    row = rest[-1] if start and rest else start
    if op.eqn.params["reverse"]:
        row = length - num - row
    # Of a stacked parameter these rows are all there is.
    return row, [
        x if x.shape[0] == num else jax.lax.dynamic_slice_in_dim(x, row, num) for x in slices
    ]


def _stacked(op: Op, row: Any, ys: list[Any], rest: list[Any]) -> list[Any]:
    """What the parts of a scan up to this one put out, and the row at which the next begins."""
    assert op.iterations is not None
    start, stop = op.iterations
    length = op.eqn.params["length"]
    before = (
        rest[:-1] if start and rest else [jnp.zeros((length, *y.shape[1:]), y.dtype) for y in ys]
    )
    out = [
        jax.lax.dynamic_update_slice_in_dim(x, y, row, 0) for x, y in zip(before, ys, strict=True)
    ]
    if len(op.outputs) > len(op.body_outputs):
        done = rest[-1] if start else jnp.int32(0)
        out.append(done + (stop - start))
    return out


def read(env: Env, v: Input) -> Any:
    """An array, or the value of a literal."""
    return env[v] if isinstance(v, int) else v.val
