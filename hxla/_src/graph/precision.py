"""The dtype of an equation under a precision policy, and which values stay in float32.

The lists follow PyTorch's autocast where it has an operation; `docs/concepts/precision.md` compares
both. An operation of no list computes in its traced dtypes.

Matrix products in float8 scale each operand by a separate power of two. Activations and parameters
are float8_e4m3fn, cotangents float8_e5m2, and products accumulate in float32. A scale puts an
operand's largest element as high as its dtype allows. It depends on that operand in that microbatch
alone: on no earlier step, and not on which device ran it. Dividing by a power of two is exact.

References:
    Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433): the two dtypes and
    their uses.
"""

import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..jax.fused_attention import PRIMITIVES as ATTENTION
from ..jax.jaxpr import Literal, inner_jaxpr, kind_of
from ..jax.rounded import times_power_of_two
from .graph import Op, leaves

#: `low`: in the policy's dtype. `float32`: in float32. `follows`: low if an operand is low and no
#: operand is a float32 statistic. `joins`: the same, for operands of unlike shapes. `view`: moves
#: elements. `gathers`: a view whose gradient is a sum. `compares`: in the widest dtype of its
#: operands; the result is no float.
OpClass = typing.Literal["low", "float32", "follows", "joins", "view", "gathers", "compares"]

# fmt: off
_CLASSES: dict[OpClass, frozenset[str]] = {
    "low": frozenset({
        "conv_general_dilated", "dot_general", "ragged_dot_general", *ATTENTION,
    }),
    "float32": frozenset({
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
        "cbrt", "cos", "cosh", "cumlogsumexp", "cumprod", "cumsum", "digamma", "erf_inv", "erfc",
        "exp", "exp2", "expm1", "igamma", "igammac", "lgamma", "log", "log1p",
        "nextafter", "polygamma", "pow", "psum", "psum2", "psum_invariant", "reduce_max",
        "reduce_min", "reduce_precision", "reduce_prod", "reduce_sum", "reduce_window_sum",
        "regularized_incomplete_beta", "rsqrt", "scatter-add", "scatter_add", "sin", "sinh",
        "sqrt", "tan", "zeta",
    }),
    "follows": frozenset({
        "abs", "add", "add_any", "ceil", "clamp", "div", "erf", "floor", "integer_pow", "logistic",
        "max", "min", "mul", "neg", "rem", "round", "select_n", "sign", "square", "sub", "tanh",
    }),
    "joins": frozenset({"concatenate", "dynamic_update_slice", "pad", "scatter", "stack"}),
    "view": frozenset({
        "convert_element_type", "copy", "copy_p", "cummax", "cummin", "device_put",
        "dynamic_slice", "expand_dims", "layout_constraint", "name", "optimization_barrier",
        "pbroadcast", "pvary", "reshape", "rev", "sharding_constraint", "slice", "sort", "split",
        "squeeze", "stop_gradient", "top_k", "transpose", "unstack",
    }),
    "gathers": frozenset({
        "all_gather", "broadcast_in_dim", "broadcast_to", "gather", "reduce_window_max",
        "reduce_window_min", "tile",
    }),
    "compares": frozenset({
        "argmax", "argmin", "eq", "ge", "gt", "is_finite", "le", "lt", "ne",
    }),
}
# fmt: on
_BY_NAME: dict[str, OpClass] = {name: c for c, names in _CLASSES.items() for name in names}


def class_of(eqn: Any) -> OpClass | None:
    """The class of an equation; None: it computes in its traced dtypes."""
    name = eqn.primitive.name
    if name == "integer_pow" and eqn.params["y"] < 0:  # a reciprocal
        return "float32"
    return _BY_NAME.get(name)


def members(op_class: OpClass) -> frozenset[str]:
    """The primitives of a class."""
    return _CLASSES[op_class]


def wanted_in_float32(jaxpr: Any, results: Sequence[bool]) -> frozenset[Any]:
    """Variables that are read only by operations in float32.

    Examples are the difference in a squared error, the shifted logits of a softmax, the square in a
    variance, and views of these.

    Args:
        results: For each result of the jaxpr whether it must be float32.
    """
    wanted: set[Any] = set()
    refused: set[Any] = set()

    def read(v: Any, in_float32: bool) -> None:
        if not isinstance(v, Literal):
            (wanted if in_float32 else refused).add(v)

    for v, in_float32 in zip(jaxpr.outvars, results, strict=True):
        read(v, in_float32)
    for eqn in reversed(jaxpr.eqns):
        outs = [v in wanted and v not in refused for v in eqn.outvars]
        inner = inner_jaxpr(eqn) if kind_of(eqn) in ("inlined", "custom", "remat") else None
        if inner is not None:
            inner_wanted = wanted_in_float32(inner.jaxpr, outs)
            for v, inner_v in zip(eqn.invars, inner.jaxpr.invars, strict=False):
                read(v, inner_v in inner_wanted)
            continue
        op_class = class_of(eqn) if kind_of(eqn) == "leaf" else "low"
        if op_class == "compares":
            continue
        in_float32 = op_class in (None, "float32") or (op_class != "low" and all(outs))
        for v in eqn.invars:
            read(v, in_float32 and eqn.primitive.name not in ("cond", "while"))
    return frozenset(wanted - refused)


FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
#: The scope of operations that read a whole array for its scale: statistics of a microbatch.
SCALE_SCOPE = "hxla.float8_scale"


def is_float8_product(op: Op) -> bool:
    """Whether an operation is a product in float8, whose scales belong to whole operands."""
    return op.kind == "custom" and any(SCALE_SCOPE in inner.stack for inner in leaves(op.body))


def quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round an array to float8 under a scale that is a power of two.

    Args:
        dtype: `float8_e4m3fn` or `float8_e5m2`.

    Returns:
        The array in `dtype`, and int32[], the exponent of its scale: `x` is about the array times
        `2**-exponent`. Finite elements stay finite in `dtype`; an infinite or NaN element of `x`
        leaves some element of the result not finite.
    """
    x = x.astype(jnp.float32)
    with jax.named_scope(SCALE_SCOPE):
        largest = jnp.max(jnp.abs(x), initial=0.0)
    most, room = np.frexp(np.float32(jnp.finfo(dtype).max))
    mantissa, magnitude = jnp.frexp(largest)  # largest = mantissa * 2**magnitude
    exponent = room - magnitude - (mantissa > most)
    exponent = jnp.where(largest > 0, exponent, 0)
    return times_power_of_two(x, exponent).astype(dtype), exponent


def float8_product(eqn: Any, operands: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Multiply two arrays in float8, in the backward too.

    Args:
        eqn: A traced `dot_general`.
        operands: Two arrays, float32 or lower.
        dtype: The result's dtype. A gradient has its operand's dtype, rounded once.
    """
    dimensions = eqn.params["dimension_numbers"]
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in operands]
    pulls = [_pull(dimensions, shapes, place) for place in range(2)]

    @jax.custom_vjp
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return forward(x, y)[0]

    def forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        residuals = (lhs, lhs_exp), (rhs, rhs_exp) = quantized(x, FORWARD), quantized(y, FORWARD)
        return _unscaled(_dot(dimensions, lhs, rhs), lhs_exp, rhs_exp).astype(dtype), residuals

    def backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        back, back_exp = quantized(cotangent, BACKWARD)
        others = zip(operands, pulls, reversed(residuals), strict=True)
        return tuple(
            _unscaled(_in_float8(pull, back, other), back_exp, other_exp).astype(operand.dtype)
            for operand, pull, (other, other_exp) in others
        )

    product.defvjp(forward, backward)
    return product(*operands)


def _dot(dimensions: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    # The highest precision: else a GPU may accumulate in fewer bits than float32.
    precision = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, dimensions, precision, jnp.float32)


def _unscaled(x: jax.Array, *exponents: jax.Array) -> jax.Array:
    for exponent in exponents:  # one after the other: their sum may exceed the exponents of float32
        x = times_power_of_two(x, -exponent)
    return x


def _pull(dimensions: Any, shapes: Sequence[Any], place: int) -> Any:
    """The program from a cotangent and the other operand to an operand's gradient."""

    def pulled(cotangent: jax.Array, other: jax.Array) -> jax.Array:
        def product(operand: jax.Array) -> jax.Array:
            return _dot(dimensions, *((operand, other) if place == 0 else (other, operand)))

        return jax.linear_transpose(product, shapes[place])(cotangent)[0]  # type: ignore[no-any-return]

    out = jax.eval_shape(lambda x, y: _dot(dimensions, x, y), *shapes)
    return jax.make_jaxpr(pulled)(out, shapes[1 - place]).jaxpr


def _in_float8(program: Any, cotangent: jax.Array, other: jax.Array) -> jax.Array:
    """Run the program on float8 operands; its products accumulate in float32."""
    env = dict(zip(program.invars, (cotangent, other), strict=True))
    for eqn in program.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name == "dot_general":
            params["preferred_element_type"] = np.dtype(np.float32)
        env[eqn.outvars[0]] = eqn.primitive.bind(*(env[v] for v in eqn.invars), **params)
    return env[program.outvars[0]]
