"""The equations of a traced loss in one tree, with their floating-point operations.

Values are numbered. `jit` is inlined; `checkpoint` and `scan` keep their bodies as nested
operations, so that the program can be run again as traced.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..jax.fused_attention import PRIMITIVES as ATTENTION
from ..jax.fused_attention import attention_shape
from .factors import UNITS, Factor


def equation_flops(eqn: Any) -> int:
    """Floating-point operations of one equation, as XLA's cost analysis counts them.

    A multiply-add counts two; transcendental functions, which XLA counts separately, count zero.
    """
    name = eqn.primitive.name
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
    out = tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
    size = math.prod(out)
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(shapes[0][d] for d in contract)
    if name == "ragged_dot_general":
        (contract, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return 2 * size * math.prod(shapes[0][d] for d in contract)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = shapes[1]
        window = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
        return 2 * size * window * kernel[numbers.rhs_spec[1]]
    if name in ATTENTION:
        return attention_shape(shapes, eqn.params).flops
    if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
        return math.prod(shapes[0]) - size
    if name in _ARITHMETIC and eqn.outvars[0].aval.dtype != np.bool_:
        return size
    return 0


_ARITHMETIC = frozenset(
    {
        *("add", "sub", "mul", "div", "max", "min", "neg", "abs", "add_any", "clamp"),
        *("integer_pow", "square", "select_n", "sign", "floor"),
    }
)


Input = int | Any  # the number of a value, or a literal (jax.extend.core.Literal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """An array of a traced loss.

    Attributes:
        shape: The shape of the whole array.
        dtype: The dtype.
        param: The index of its parameter, if it is one or a view of one (a cast, a reshape), or
            None.
        batch_dim: The dimension that runs over examples, or None.
        differentiable: Whether a gradient flows back through it.
        rows: For a row range of a stacked parameter the dimension, the first row and the row after
            the last; None: it is whole.
    """

    shape: tuple[int, ...]
    dtype: Any
    param: int | None
    batch_dim: int | None
    differentiable: bool
    rows: tuple[int, int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole array."""
        return bytes_of(self.shape, self.dtype)

    def __str__(self) -> str:
        name = str(self.dtype).replace("key<fry>", "key")
        return f"{name}[{','.join(map(str, self.shape))}]"


def bytes_of(shape: tuple[int, ...], dtype: Any) -> int:
    """The bytes of an array, random keys included."""
    return math.prod(shape) * _itemsize(dtype)


@functools.cache
def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return np.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """An equation of a traced loss.

    Attributes:
        eqn: The equation of the jaxpr.
        kind: The way it is run again: `leaf`; `custom` (it has custom gradient rules and runs as a
            whole; its body is for analysis only); `remat`; or `scan`.
        inputs: The operands, indices of `Graph.values` or literals.
        outputs: The indices of the results.
        body: The operations inside a `custom`, `remat` or `scan`.
        body_inputs: The values of the operands inside the body.
        body_outputs: The values or literals that the body returns.
        body_consts: The arrays that the body closes over, each with its index.
        task: The index of its TaskGraph.
        stack: The name stack: modules and scopes.
        times: The number of runs in a step.
        flops: The floating-point operations of one run of a leaf.
        factors: The ways to cut a leaf.
        iterations: The first iteration that a range of a cut scan runs, and the one after the
            last; None: all.
        caller: The call in the user's code that it was inlined from, such as `jnp.var`; None: it
            was not inlined.
    """

    eqn: Any
    kind: str
    inputs: tuple[int | Any, ...]
    outputs: tuple[int, ...]
    body: tuple["Op", ...] = ()
    body_inputs: tuple[int, ...] = ()
    body_outputs: tuple[int | Any, ...] = ()
    body_consts: tuple[tuple[int, Any], ...] = ()
    task: int
    stack: str
    times: int
    flops: int = 0
    factors: tuple[Factor, ...] = ()
    iterations: tuple[int, int] | None = None
    caller: Any = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The file and line of the user's code, or an empty string."""
        location = source_of(self.eqn)
        return location if location or self.caller is None else source_of(self.caller)


def source_of(eqn: Any) -> str:
    """The file and line of the user's code of an equation, or an empty string."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    for frame in traceback.frames:
        name = frame.file_name
        if "/site-packages/" not in name and "/hxla/_" not in name and "<" not in name:
            return f"{name}:{frame.line_num}"
    return ""


def leaves(ops: tuple[Op, ...]) -> Iterator[Op]:
    """All equations without a body, in order, those inside bodies included."""
    for op in ops:
        if op.body:
            yield from leaves(op.body)
        else:
            yield op


def origins(ops: tuple[Op, ...]) -> Callable[[int], int]:
    """Map a value to the value that it renames outside or inside bodies, or to itself."""
    renamed = _renamed_values(ops)

    def origin(v: int) -> int:
        while v in renamed:
            v = renamed[v]
        return v

    return origin


def _renamed_values(ops: tuple[Op, ...]) -> dict[int, int]:
    """Values that only rename another: operands inside bodies, results outside bodies."""
    out: dict[int, int] = {}
    for op in ops:
        for inner, outer in zip(op.body_inputs, op.inputs, strict=False):
            if isinstance(outer, int):
                out[inner] = outer
        for outer_value, inner_value in zip(op.outputs, op.body_outputs, strict=False):
            if isinstance(inner_value, int):
                out[outer_value] = inner_value
        out |= _renamed_values(op.body)
    return out


def is_unit(op: Op, values: tuple[Value, ...]) -> bool:
    """Whether the equation applies parameters that a `split` must cut."""
    return op.name in UNITS and any(
        isinstance(v, int) and values[v].param is not None for v in op.inputs
    )
