"""Programs whose bits depend neither on how XLA partitions them nor on what it fuses.

A partitioned program adds the same floats in another order, and its fusions end elsewhere, so other
products are contracted to fused multiply-adds. Here every product is rounded before it is added
(`rounded`), and every sum is a tree of element-wise additions. What remains is element-wise, moves
elements, or compares them; its bits are those of IEEE 754 for any shape. Matrix products have an
order of their own for each shape: they must be inside of a `shard_map` that is marked as an
`ISLAND`, in which each device computes them whole.

The rewriting is of programs after differentiation, so it reaches all gradients alike.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import PlanError
from .jaxpr import (
    ClosedJaxpr,
    Literal,
    in_place_of,
    inner_jaxpr,
    inner_programs,
    kind_of,
    run_as,
    run_equation,
    scan_counts,
    source_of,
)
from .rounded import divided, is_division, rounded

Join = Callable[[jax.Array, jax.Array], jax.Array]

#: The scope of a `shard_map` in which each device computes what it does for any partition.
ISLAND = "hxla.island"
#: Also those whose order is free: XLA may fuse a reduction with an exponential of another library.
_REDUCTIONS = {"reduce_max": jax.lax.max, "reduce_min": jax.lax.min, "reduce_sum": jax.lax.add}
# fmt: off
#: Exact, or rounded once by themselves.
_EXACT = frozenset({
    "abs", "add", "add_any", "argmax", "argmin", "bitcast_convert_type", "broadcast_in_dim", "ceil",
    "clamp", "concatenate", "convert_element_type", "copy", "copy_p", "cummax", "cummin",
    "dynamic_slice", "dynamic_update_slice", "expand_dims", "floor", "gather", "iota", "max", "min",
    "name", "neg", "optimization_barrier", "pad", "reduce_precision", "rem", "reshape", "reshard",
    "rev", "round", "scatter", "scatter-add", "select_n", "sharding_constraint", "sign", "slice",
    "sort", "split", "sqrt", "squeeze", "stack", "stop_gradient", "sub", "top_k", "transpose",
    "unstack",
})
#: What may end with a product, which a compiler could fuse with a sum.
_PRODUCTS = frozenset({
    "cbrt", "cos", "erf", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic", "mul",
    "pow", "rsqrt", "sin", "square", "tan", "tanh",
})
# fmt: on
#: What XLA writes as many operations, whose products must not meet those around them.
_COMPOSED = frozenset({"erf_inv", "erfc"})
_KNOWN = frozenset({*_EXACT, *_PRODUCTS, *_COMPOSED, *_REDUCTIONS, "div"})


def partition_invariant(
    function: Callable[..., Any],
    zero: jax.Array,
    granules: int,
    gather: Callable[[jax.Array, int], jax.Array],
) -> Callable[..., Any]:
    """The same function of trees of arrays, to be partitioned in any way.

    Args:
        zero: See `rounded`.
        granules: A dimension that may be cut is cut into divisors of this number.
        gather: Replicates an array along a dimension; others stay as they are.

    Raises:
        PlanError: When it is called, for operations whose order of additions is unknown.
    """
    runner = _Runner(zero, granules, gather)
    return run_as(function, runner.run)


class _Runner:
    def __init__(self, zero: jax.Array, granules: int, gather: Callable[[jax.Array, int], Any]):
        self._zero = zero
        self._granules = granules
        self._gather = gather
        self._caller = ""  # the line of a function whose operations have none

    def run(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
        env |= dict(zip(jaxpr.constvars, closed.consts, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, inner, kind = eqn.primitive.name, inner_jaxpr(eqn), kind_of(eqn)
        if name == "random_bits" and "fry" not in str(eqn.invars[0].aval.dtype):
            raise PlanError(
                f"numerics.cut: the random numbers at {self._line(eqn)} depend on how a program is "
                "cut: set jax_default_prng_impl to 'threefry2x32', or numerics.cut to 'planned'"
            )
        if not _has_floats(eqn) or ISLAND in str(eqn.source_info.name_stack):
            return run_equation(eqn, operands)
        if inner is None or kind in ("leaf", None):
            return self._leaf(eqn, operands)
        if kind == "scan":
            return self._scan(eqn, inner, operands)
        if kind == "remat" and eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            operands = [_apart(x) for x in operands]
        caller, self._caller = self._caller, self._line(eqn)
        with in_place_of(eqn):
            results = self.run(inner, operands)
        self._caller = caller
        return results

    def _line(self, eqn: Any) -> str:
        return source_of(eqn) or self._caller or "an unknown line"

    def _leaf(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        narrow = [v.aval.dtype for v in eqn.outvars if _is_float(v) and v.aval.dtype.itemsize < 4]
        if narrow or name not in _KNOWN:
            what = f"{narrow[0]} is rounded" if narrow else f"{name} may add"
            raise PlanError(
                f"numerics.cut: {what} at {self._line(eqn)} in a way that depends on how the "
                "program is cut: leave it out of the loss, or set numerics.cut to 'planned'"
            )
        with in_place_of(eqn):
            if name in _REDUCTIONS:
                return [self._reduced(_REDUCTIONS[name], operands[0], params["axes"])]
            if is_division(eqn):
                return [self._quotient(*operands)]
            if name == "scatter-add":
                operands = self._with_whole_rows(params["dimension_numbers"], operands)
        if name in _COMPOSED:
            return [_apart(x) for x in run_equation(eqn, [_apart(x) for x in operands])]
        results = run_equation(eqn, operands)
        if name not in _PRODUCTS:
            return results
        with in_place_of(eqn):
            return [rounded(x, self._zero) for x in results]

    def _with_whole_rows(self, numbers: Any, operands: Sequence[Any]) -> list[Any]:
        """The operands of a scatter, so that each device has all rows that it adds."""
        operand, indices, updates = operands
        rows = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
        for i, d in enumerate(rows):
            if i not in numbers.scatter_indices_batching_dims:
                indices, updates = self._gather(indices, i), self._gather(updates, d)
        return [operand, indices, updates]

    def _quotient(self, x: Any, y: Any) -> jax.Array:
        x, y = jnp.asarray(x), jnp.asarray(y)
        return divided(jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, y.shape)), y, self._zero)

    def _scan(self, eqn: Any, inner: ClosedJaxpr, operands: list[Any]) -> list[Any]:
        params = eqn.params
        num_consts, num_carry = scan_counts(eqn)
        consts, rest = operands[:num_consts], operands[num_consts:]

        def step(carry: Any, xs: Any) -> Any:
            results = self.run(inner, [*consts, *carry, *xs])
            return results[:num_carry], results[num_carry:]

        carry, ys = jax.lax.scan(
            step,
            rest[:num_carry],
            rest[num_carry:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    def _reduced(self, join: Join, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """A reduction of axes, each granule of an axis first."""
        for axis in sorted(axes):
            size = x.shape[axis]
            if size % self._granules == 0 and size > self._granules:
                shape = (*x.shape[:axis], self._granules, -1, *x.shape[axis + 1 :])
                x = _tree(join, x.reshape(shape), axis + 1).squeeze(axis + 1)
            x = _tree(join, self._gather(x, axis), axis)
        return x.squeeze(axes)


def _tree(join: Join, x: jax.Array, axis: int) -> jax.Array:
    """A reduction of an axis, which stays with size 1, as element-wise operations on halves."""
    rests = []
    while (size := x.shape[axis]) > 1:
        half = size // 2
        if size % 2:
            rests.append(jax.lax.slice_in_dim(x, size - 1, size, axis=axis))
        x = join(
            jax.lax.slice_in_dim(x, 0, half, axis=axis),
            jax.lax.slice_in_dim(x, half, 2 * half, axis=axis),
        )
    return functools.reduce(join, rests, x)


def _apart(x: Any) -> Any:
    """The same array, which XLA fuses with nothing, and computes again where jax asks for it."""
    is_array = not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return jax.lax.optimization_barrier(x) if is_array else x


def _has_floats(eqn: Any) -> bool:
    """Whether an equation, or a program in it, makes floats."""
    if any(_is_float(v) for v in eqn.outvars):
        return True
    return any(itertools.chain.from_iterable(map(_has_floats, p.eqns) for p in inner_programs(eqn)))


def _is_float(v: Any) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.inexact))
