"""The matrix products of a segment and what moves between them, on one device."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax

from ..graph.graph import Graph
from ..graph.operations import Op, leaves
from ..plan.sharding import Sharded

Shape = tuple[int, ...]

_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """Equal products of matrices, [rows, depth] by [depth, columns].

    A convolution is one too, of the windows of its input by its kernel.

    Attributes:
        count: How many follow one another.
        copies: How many each of them is at once (a batch of products, groups of features).
        rows: Of the first matrix and the result.
        columns: Of the second matrix and the result.
        depth: Over which is summed.
        arithmetic: What it is computed in, as mesh files name rates; `model`: float32 as jax
            computes it by default.

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
        """The operations of all of them, a multiply-add being two."""
        return 2.0 * self.count * self.copies * self.rows * self.columns * self.depth

    @property
    def backward(self) -> tuple["MatrixProduct", "MatrixProduct"]:
        """Those of the gradients of the first and of the second matrix."""
        first = dataclasses.replace(self, columns=self.depth, depth=self.columns)
        second = dataclasses.replace(self, rows=self.depth, depth=self.rows)
        return first, second


def products_of(graph: Graph, ops: Sequence[Op], cut: Sharded) -> tuple[MatrixProduct, ...]:
    """The products of a microbatch's forward on one device; what is not cut, each device repeats.

    Args:
        cut: How the devices of a group share the arrays.
    """
    found: collections.Counter[MatrixProduct] = collections.Counter()
    for op in leaves(tuple(ops)):
        if op.name not in _PRODUCTS:
            continue
        is_dot = op.name == "dot_general"
        own = _of_dot(op, _operands(op, cut)) if is_dot else _of_convolution(op, graph, cut)
        said = graph.arithmetic if graph.arithmetic != "model" else _arithmetic(op)
        found[dataclasses.replace(own, arithmetic=said)] += op.times
    return tuple(dataclasses.replace(own, count=num) for own, num in found.items())


def _arithmetic(op: Op) -> str:
    """By the dtype of its operands, where those of float32 may say that all bits count."""
    dtypes = {v.aval.dtype.name for v in op.eqn.invars[:2]}
    asked = op.eqn.params.get("precision")
    if dtypes == {"float32"}:
        is_whole = asked in (jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2)
        return "float32" if is_whole else "model"
    low = [name for name in ("bfloat16", "float16", "float64") if dtypes == {name}]
    return low[0] if low else "model"


def _operands(op: Op, cut: Sharded) -> list[Shape]:
    """The shapes of one device's operands."""
    shapes = [list(v.aval.shape) for v in op.eqn.invars]
    for axis in cut.axes.values():
        wanted = axis.wanted.get(op.outputs[0], ())
        for shape, dim in zip(shapes, wanted, strict=False):
            if dim is not None:
                shape[dim] = -(-shape[dim] // axis.num_devices)
    return [tuple(shape) for shape in shapes]


def _of_dot(op: Op, operands: Sequence[Shape]) -> MatrixProduct:
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


def _of_convolution(op: Op, graph: Graph, cut: Sharded) -> MatrixProduct:
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
    """The bytes that a forward moves through memory beside its products, as compilers fuse it.

    What lies between two products or reductions is one operation for a compiler, whose inner values
    never reach memory: it reads the results of products, and writes what products take. A reduction
    reads what it sums up once more.

    Args:
        cut: How the devices of a group share the arrays.
    """

    def own(v: int) -> int:
        return graph.values[v].num_bytes // cut.num_parts(v)

    flat = list(leaves(tuple(ops)))
    made = {v for op in flat for v in op.outputs}
    of_products = {v for op in flat if op.name in _PRODUCTS for v in op.outputs}
    taken = {v for op in flat if op.name in _PRODUCTS for v in op.inputs if isinstance(v, int)}
    written = {v for v in (taken & made) - of_products if graph.values[v].param is None}
    reduced = sum(
        own(v) * op.times
        for op in flat
        if op.name.startswith("reduce_")
        for v in op.inputs
        if isinstance(v, int)
    )
    times = {v: op.times for op in flat for v in op.outputs}
    return reduced + sum(own(v) * times[v] for v in (*of_products, *written))
