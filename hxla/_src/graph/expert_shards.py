"""A layer of experts on one device that has some of them.

Tokens are whole, rows are sorted by expert. Rows are rolled so that those of this device's experts
come first, and the others are zero: products, and what is row by row, then run on them alone. What
is summed over rows gives a partial sum, whose total over devices is the result.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..jax.jaxpr import run_equation
from .experts import ADDITIVE, Experts, Step
from .interpreter import AS_THEY_ARE, evaluate, read, scope_of


def run_some_experts(experts: Experts, operands: Sequence[Any], num: int, start: Any) -> list[Any]:
    """The partial sums of some experts.

    Args:
        operands: Matrices of `num` experts; all others whole.
        start: The first of the experts, int32.
    """
    return _Shard(experts, operands, num, start).run()


class _Shard:
    def __init__(self, experts: Experts, operands: Sequence[Any], num: int, start: Any):
        self._experts = experts
        self._env: dict[int, Any] = dict(zip(experts.inputs, operands, strict=True))
        self._sums: dict[int, Any] = {}
        self._rolled: dict[tuple[int, int], Any] = {}
        self._is_first = start == 0
        sizes = self._env[experts.sizes]
        before = (jnp.cumsum(sizes) - sizes).astype(jnp.int32)
        self._sizes = jax.lax.dynamic_slice_in_dim(sizes, start, num)
        self._first_row = jax.lax.dynamic_index_in_dim(before, start, keepdims=False)
        self._num_rows = self._sizes.sum().astype(jnp.int32)

    def run(self) -> list[Any]:
        for step in self._experts.steps:
            with scope_of(step.op, self._experts.stack):
                results = self._step(step)
            env = self._sums if step.kind == "sum" else self._env
            env.update(zip(step.op.outputs, results, strict=True))
        return [self._sum(v) for v in self._experts.outputs]

    def _step(self, step: Step) -> list[Any]:
        op = step.op
        if step.kind == "sum":
            return evaluate(op, self._summands(step), AS_THEY_ARE)
        pairs = zip(op.inputs, step.dims, strict=True)
        operands = [read(self._env, v) if dim is None else self._rows(v, dim) for v, dim in pairs]
        if step.kind != "product":
            return evaluate(op, operands, AS_THEY_ARE)
        [dim], [rows] = (d for d in step.dims if d is not None), [op.outputs[0]]
        first = self._masked(operands[0], dim)
        results = run_equation(op.eqn, [first, operands[1], self._sizes])
        return [self._masked(results[0], self._experts.row_dims[rows])]

    def _summands(self, step: Step) -> list[Any]:
        """Operands of a linear operation; one device alone adds what is whole."""
        op, additive = step.op, ADDITIVE.get(step.op.name)
        operands = []
        for k, v in enumerate(op.inputs):
            if isinstance(v, int) and (v in self._sums or v in self._experts.row_dims):
                operands.append(self._sum(v))
                continue
            x = read(self._env, v)
            if additive is not None and k not in additive:
                x = jnp.where(self._is_first, x, jnp.zeros_like(x))
            operands.append(x)
        return operands

    def _rows(self, v: Any, dim: int) -> Any:
        """A value whose first rows are those of this device's experts."""
        if not isinstance(v, int):
            return v.val
        if v in self._experts.row_dims:
            return self._env[v]
        if (v, dim) not in self._rolled:
            self._rolled[v, dim] = self._roll(self._env[v], dim, self._first_row)
        return self._rolled[v, dim]

    def _sum(self, v: int) -> Any:
        """A partial sum of this device; rows of others are zero in it."""
        if v not in self._sums:
            dim = self._experts.row_dims[v]
            back = self._experts.num_rows - self._first_row
            self._sums[v] = self._roll(self._masked(self._env[v], dim), dim, back)
        return self._sums[v]

    def _roll(self, x: Any, dim: int, first: Any) -> Any:
        twice = jnp.concatenate([x, x], axis=dim)
        return jax.lax.dynamic_slice_in_dim(twice, first, self._experts.num_rows, dim)

    def _masked(self, x: Any, dim: int) -> Any:
        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
        return jnp.where(places < self._num_rows, x, jnp.zeros((), x.dtype))
