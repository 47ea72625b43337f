"""The matrix products and the memory traffic of a segment on one device."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax

from ..graph.graph import Graph, Op, leaves
from ..jax.fused_attention import PRIMITIVES as ATTENTION
from ..jax.fused_attention import attention_shape
from ..plan.sharding import Sharded

Shape = tuple[int, ...]

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", *ATTENTION})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """Equal matrix products, [rows, depth] by [depth, columns].

    A convolution is a product of the windows of its input by its kernel.

    Attributes:
        count: The number of products, one after another.
        copies: The size of each product's batch (batch dimensions, groups of features).
        rows: The rows of the first matrix and the result.
        columns: The columns of the second matrix and the result.
        depth: The size of the contracted dimension.
        arithmetic: The dtype, by the names of rates in mesh files; `model`: float32 as jax computes
            it by default.

    References:
        Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3.1
        (convolutions as products).
    """

    count: int = 1
    copies: int = 1
    rows: int
    columns: int
    depth: int
    arithmetic: str = "model"

    @property
    def flops(self) -> float:
        """The operations of all products, a multiply-add being two."""
        return 2.0 * self.count * self.copies * self.rows * self.columns * self.depth

    @property
    def backward(self) -> tuple["MatrixProduct", "MatrixProduct"]:
        """The products of the gradients of the first and of the second matrix."""
        first = dataclasses.replace(self, columns=self.depth, depth=self.columns)
        second = dataclasses.replace(self, rows=self.depth, depth=self.rows)
        return first, second


def products_of(graph: Graph, ops: Sequence[Op], cut: Sharded) -> tuple[MatrixProduct, ...]:
    """The products of a microbatch's forward on one device of a group.

    Args:
        cut: The sharding over the group; replicated products count on every device.
    """
    counts: collections.Counter[MatrixProduct] = collections.Counter()
    for op in leaves(tuple(ops)):
        if op.name not in _PRODUCTS:
            continue
        arithmetic = graph.arithmetic if graph.arithmetic != "model" else _arithmetic(op)
        for product in _products(op, graph, cut):
            counts[dataclasses.replace(product, arithmetic=arithmetic)] += op.times
    return tuple(dataclasses.replace(product, count=num) for product, num in counts.items())


def _arithmetic(op: Op) -> str:
    """The operands' dtype; float32 only where the highest precision is asked for."""
    dtypes = {v.aval.dtype.name for v in op.eqn.invars[:2]}
    asked = op.eqn.params.get("precision")
    if dtypes == {"float32"}:
        is_highest = asked in (jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2)
        return "float32" if is_highest else "model"
    low = [name for name in ("bfloat16", "float16", "float64") if dtypes == {name}]
    return low[0] if low else "model"


def _operands(op: Op, cut: Sharded) -> list[Shape]:
    """The operands' shapes on one device."""
    shapes = [list(v.aval.shape) for v in op.eqn.invars]
    for axis in cut.axes.values():
        wanted = axis.wanted.get(op.outputs[0], ())
        for shape, dim in zip(shapes, wanted, strict=False):
            if dim is not None:
                shape[dim] = -(-shape[dim] // axis.num_devices)
    return [tuple(shape) for shape in shapes]


def _products(op: Op, graph: Graph, cut: Sharded) -> tuple[MatrixProduct, ...]:
    if op.name in ATTENTION:
        return _attention(op, _operands(op, cut))
    is_dot = op.name == "dot_general"
    return (_dot(op, _operands(op, cut)) if is_dot else _convolution(op, graph, cut),)


def _attention(op: Op, operands: Sequence[Shape]) -> tuple[MatrixProduct, ...]:
    """Queries by keys, and the result by values; a causal kernel skips half of both."""
    of = attention_shape(operands, op.eqn.params)
    keys = max(1, of.keys // 2) if of.is_causal else of.keys
    scores = MatrixProduct(
        copies=of.batch * of.heads, rows=of.queries, columns=keys, depth=of.head_dim
    )
    return scores, dataclasses.replace(scores, columns=of.value_dim, depth=keys)


def _dot(op: Op, operands: Sequence[Shape]) -> MatrixProduct:
    first, second = operands[:2]
    (summed, summed_too), (batch, batch_too) = op.eqn.params["dimension_numbers"]

    def others(shape: Shape, *left_out: int) -> int:
        return math.prod(size for dim, size in enumerate(shape) if dim not in left_out)

    return MatrixProduct(
        copies=math.prod(first[d] for d in batch),
        rows=others(first, *summed, *batch),
        columns=others(second, *summed_too, *batch_too),
        depth=math.prod(first[d] for d in summed),
    )


def _convolution(op: Op, graph: Graph, cut: Sharded) -> MatrixProduct:
    numbers, kernel = op.eqn.params["dimension_numbers"], _operands(op, cut)[1]
    out = math.prod(graph.values[op.outputs[0]].shape) // cut.num_parts(op.outputs[0])
    groups = op.eqn.params["feature_group_count"]
    columns = max(1, kernel[numbers.rhs_spec[0]] // groups)
    return MatrixProduct(
        copies=groups,
        rows=max(1, out // (columns * groups)),
        columns=columns,
        depth=math.prod(size for d, size in enumerate(kernel) if d != numbers.rhs_spec[0]),
    )


def moved_bytes(graph: Graph, ops: Sequence[Op], cut: Sharded) -> int:
    """The bytes that a forward moves through memory between its products, as compilers fuse it.

    The operations between two products or reductions are one fusion, whose inner values never reach
    memory. It reads the results of products and writes the operands of products. A reduction reads
    its operand once more.

    Args:
        cut: The sharding over the devices of a group.
    """

    def device_bytes(v: int) -> int:
        return graph.values[v].num_bytes // cut.num_parts(v)

    flat = list(leaves(tuple(ops)))
    made = {v for op in flat for v in op.outputs}
    of_products = {v for op in flat if op.name in _PRODUCTS for v in op.outputs}
    taken = {v for op in flat if op.name in _PRODUCTS for v in op.inputs if isinstance(v, int)}
    written = {v for v in (taken & made) - of_products if graph.values[v].param is None}
    reduced = sum(
        device_bytes(v) * op.times
        for op in flat
        if op.name.startswith("reduce_")
        for v in op.inputs
        if isinstance(v, int)
    )
    times = {v: op.times for op in flat for v in op.outputs}
    return reduced + sum(device_bytes(v) * times[v] for v in (*of_products, *written))
