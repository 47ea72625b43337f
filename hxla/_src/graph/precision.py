"""The dtype of an equation under a precision policy, and which values stay in float32.

The lists follow PyTorch's autocast where it has an operation; `docs/concepts/precision.md`
compares both.
An operation of no list computes in its traced dtypes.
"""

import typing
from collections.abc import Sequence
from typing import Any

from ..jax.fused_attention import PRIMITIVES as ATTENTION
from ..jax.jaxpr import Literal, inner_jaxpr, kind_of

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
