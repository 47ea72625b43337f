"""A graph's operations run again, equation by equation, as they were traced."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.types import PyTree
from ..jax.jaxpr import checkpoint_like, run_equation, scan_counts
from .experts import experts_of
from .graph import Graph, Input, Op

Env = dict[int, Any]


def _as_they_are(_: Any, arrays: list[Any]) -> list[Any]:
    return arrays


def _run_equation(op: Op, operands: list[Any]) -> list[Any]:
    return run_equation(op.eqn, operands)


def run_experts(op: Op, operands: Sequence[Any]) -> list[Any]:
    """The results of a layer of experts, all of which are here."""
    experts = experts_of(op)
    assert experts is not None
    env: Env = dict(zip(experts.inputs, operands, strict=True))
    run_ops([step.op for step in experts.steps], env, prefix=experts.stack)
    return [env[v] for v in experts.outputs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPlacement:
    """Places arrays on devices while operations run.

    Attributes:
        operands: Places the operands of an operation.
        results: Places the results of an operation.
        carry: Places the carry of a scan, or other values, given by their numbers.
        experts: Runs a layer of experts.
        equation: Runs an equation.
    """

    operands: Callable[[Op, list[Any]], list[Any]] = _as_they_are
    results: Callable[[Op, list[Any]], list[Any]] = _as_they_are
    carry: Callable[[Sequence[int], list[Any]], list[Any]] = _as_they_are
    experts: Callable[[Op, list[Any]], list[Any]] = run_experts
    equation: Callable[[Op, list[Any]], list[Any]] = _run_equation


def scope_of(op: Op, prefix: str) -> contextlib.AbstractContextManager[Any]:
    """The scopes around an operation.

    Args:
        prefix: Name stack of the caller, a prefix of the operation's stack.
    """
    # The equation has its name stack, but not that of the inlined jit around it.
    stack = op.stack.removeprefix(prefix).removesuffix(str(op.eqn.source_info.name_stack))
    stack = stack.strip("/")
    return jax.named_scope(stack) if stack else contextlib.nullcontext()


#: Places nothing: jax decides.
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
    """Run operations, adding their results to `env`.

    Args:
        env: Arrays by value number; it must have all that the operations read.
        prefix: Name stack of the caller, a prefix of each operation's stack.
    """
    for op in ops:
        operands = place.operands(op, [read(env, v) for v in op.inputs])
        with scope_of(op, prefix):
            results = place.results(op, evaluate(op, operands, place))
        env.update(zip(op.outputs, results, strict=True))


def evaluate(op: Op, operands: list[Any], place: ArrayPlacement) -> list[Any]:
    """The results of one operation; see `run_ops`."""
    if experts_of(op) is not None:
        return place.experts(op, operands)
    if not op.body or op.kind == "custom":
        return place.equation(op, operands)

    def body(*inputs: Any) -> list[Any]:
        inner_env: Env = dict(op.body_consts)
        inner_env.update(zip(op.body_inputs, inputs, strict=True))
        run_ops(op.body, inner_env, place, op.stack)
        return [read(inner_env, v) for v in op.body_outputs]

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
    """The first row of a range of a scan, and its rows of the stacked operands.

    The row is an array that each range hands to the next, so that equal ranges share a program.
    """
    assert op.iterations is not None
    start, stop = op.iterations
    length, num = op.eqn.params["length"], stop - start
    row = rest[-1] if start and rest else start
    if op.eqn.params["reverse"]:
        row = length - num - row
    # A sliced parameter has these rows only.
    return row, [
        x if x.shape[0] == num else jax.lax.dynamic_slice_in_dim(x, row, num) for x in slices
    ]


def _stacked(op: Op, row: Any, ys: list[Any], rest: list[Any]) -> list[Any]:
    """The stacked results of a scan up to this range, and the first row of the next range."""
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
