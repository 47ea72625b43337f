"""Sharding patterns: which dimensions of an equation can be cut together.

A *factor* of an equation is one index of its loop nest, as an einsum's letters are: it names a
dimension of each operand and result, or none. Cutting an equation along a factor lets every device
compute its shard alone; an operand that lacks the factor is needed whole, and a result that lacks
it is a partial sum, completed by an all-reduce. A dense layer `btc,cf->btf` has four patterns: `b`
and `t` (data), `f` (column parallel) and `c` (row parallel).

References:
    Whale, USENIX ATC 2022, section 3.2.2 (sharding patterns of a sharding unit).
    Shardy's OpShardingRule (openxla/shardy), for factors as the common form of all operations.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core.errors import AnnotationError
from ..jax.fused_attention import PRIMITIVES as ATTENTION
from ..jax.fused_attention import split_dims


@dataclasses.dataclass(frozen=True)
class Factor:
    """One way to cut an equation.

    Attributes:
        name: The name in plans (`batch`, `column`, `row`, `vocabulary`, `d1`, ...).
        operands: The dimension of each operand that it cuts, or None.
        results: The dimension of each result that it cuts, or None.
        partial: Whether results without it are partial sums (or maxima) to be all-reduced.
    """

    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    partial: bool = False


Shape = tuple[int, ...]
#: The ways to cut an equation, from its operands' shapes, its results' shapes and its params.
Pattern = Callable[
    [Sequence[tuple[int, ...]], Sequence[tuple[int, ...]], dict[str, Any]], list[Factor]
]

#: Primitives that carry a unit's parameters; in a `split` each of them must be cut.
UNITS = frozenset(
    {"dot_general", "conv_general_dilated", "gather", "ragged_dot_general", "experts"}
)

# Primitives that may keep their operand's shape but are not element-wise.
_NOT_ELEMENTWISE = frozenset(
    {
        *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "fft"),
        *("cholesky", "qr", "lu", "svd", "eigh", "triangular_solve", "approx_top_k"),
        *("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
        *("scatter_add", "dynamic_update_slice", "random_wrap", "reduce_window", "ppermute"),
        *("select_and_scatter", "select_and_scatter_add", "select_and_gather_add", "while", "cond"),
        *("custom_linear_solve", "householder_product", "schur", "tridiagonal_solve"),
        *("composite", "custom_partitioning", "custom_vmap_call", "linear_call", "run_state"),
        *("ffi_call", "io_callback", "pallas_call", "pure_callback"),
    }
)


class Patterns:
    """Ways to cut equations, by the primitive's name. Immutable: `with_pattern` makes another."""

    def __init__(self, table: dict[str, Pattern]):
        self._table = table

    def with_pattern(self, primitive: str, pattern: Pattern) -> "Patterns":
        """Add a pattern, which takes the place of any for the same primitive.

        Args:
            primitive: The name of a jax primitive, as a jaxpr prints it.
            pattern: A function of the operands' shapes, the results' shapes and the equation's
                params that returns the factors.

        Returns:
            Another set of patterns.

        Raises:
            AnnotationError: If the pattern is not callable.

        Example:
            >>> import hxla
            >>> def sort(operands, results, params):
            ...     dims = [d for d in range(len(operands[0])) if d != params["dimension"]]
            ...     num_in, num_out = len(operands), len(results)
            ...     return [hxla.Factor(f"d{d}", (d,) * num_in, (d,) * num_out) for d in dims]
            >>> patterns = hxla.PATTERNS.with_pattern("sort", sort)
            >>> patterns.factors("sort", [(8, 16)], [(8, 16)], {"dimension": 1})
            [Factor(name='d0', operands=(0,), results=(0,), partial=False)]
        """
        if not callable(pattern):
            raise AnnotationError(f"the pattern for {primitive!r} is not callable: {pattern!r}")
        return Patterns({**self._table, primitive: pattern})

    def factors(
        self,
        primitive: str,
        operands: Sequence[tuple[int, ...]],
        results: Sequence[tuple[int, ...]],
        params: dict[str, Any],
    ) -> list[Factor]:
        """Find all factors of an equation.

        Args:
            primitive: The name of the jax primitive.
            operands: The shapes of the operands.
            results: The shapes of the results.
            params: The parameters of the equation, by name.

        Returns:
            The factors; none if the equation can only run whole.

        Raises:
            AnnotationError: If a pattern returns factors that do not fit the shapes.
        """
        pattern = self._table.get(primitive)
        if pattern is None:
            if primitive in _NOT_ELEMENTWISE:
                return []
            pattern = _elementwise
        factors = pattern(operands, results, params)
        for factor in factors:
            _check(primitive, factor, operands, results)
        return factors


def _check(primitive: str, f: Factor, operands: Sequence[Shape], results: Sequence[Shape]) -> None:
    for what, dims, shapes in (("operand", f.operands, operands), ("result", f.results, results)):
        if len(dims) != len(shapes):
            raise AnnotationError(
                f"pattern {f.name!r} of {primitive} names {len(dims)} {what}s of {len(shapes)}"
            )
        for i, (dim, shape) in enumerate(zip(dims, shapes, strict=True)):
            if dim is not None and not 0 <= dim < len(shape):
                raise AnnotationError(
                    f"pattern {f.name!r} of {primitive} cuts dimension {dim} of {what} {i}, whose "
                    f"shape is {list(shape)}"
                )


def fits(
    factor: Factor,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    num_devices: int,
    *,
    unlike: bool = False,
) -> bool:
    """Whether every dimension that the factor cuts divides over the devices.

    Args:
        unlike: Whether shards may differ in size; each device then needs at least one unit.
    """
    cut = [
        shape[dim]
        for dims, shapes in ((factor.operands, operands), (factor.results, results))
        for dim, shape in zip(dims, shapes, strict=True)
        if dim is not None
    ]
    if unlike:
        return math.gcd(*cut) >= num_devices
    return bool(cut) and all(size >= num_devices and size % num_devices == 0 for size in cut)


def _elementwise(ins: Sequence[Shape], outs: Sequence[Shape], _params: dict) -> list[Factor]:
    if not outs:
        return []
    shape = outs[0]
    if any(o != shape for o in outs):
        return []
    for x in ins:
        if x and (len(x) != len(shape) or any(a not in (b, 1) for a, b in zip(x, shape))):  # noqa: B905
            return []
    return [
        Factor(
            f"d{d}",
            tuple(d if x and x[d] == size else None for x in ins),
            (d,) * len(outs),
        )
        for d, size in enumerate(shape)
        if size > 1
    ]


def _dot_general(ins: Sequence[Shape], _outs: Sequence[Shape], params: dict) -> list[Factor]:
    (contract_l, contract_r), (batch_l, batch_r) = params["dimension_numbers"]
    lhs, rhs = ins[:2]
    free_l = [d for d in range(len(lhs)) if d not in (*contract_l, *batch_l)]
    free_r = [d for d in range(len(rhs)) if d not in (*contract_r, *batch_r)]
    out = 0
    factors = []
    for a, b in zip(batch_l, batch_r, strict=True):
        factors.append(Factor("each", (a, b), (out,)))
        out += 1
    for a in free_l:
        factors.append(Factor("left", (a, None), (out,)))
        out += 1
    for b in free_r:
        factors.append(Factor("column", (None, b), (out,)))
        out += 1
    for a, b in zip(contract_l, contract_r, strict=True):
        factors.append(Factor("row", (a, b), (None,), partial=True))
    return factors


def _conv(_ins: Sequence[Shape], _outs: Sequence[Shape], params: dict) -> list[Factor]:
    numbers = params["dimension_numbers"]
    factors = [
        Factor("left", (numbers.lhs_spec[0], None), (numbers.out_spec[0],)),
        Factor("column", (None, numbers.rhs_spec[0]), (numbers.out_spec[1],)),
    ]
    if params["feature_group_count"] == 1 and params["batch_group_count"] == 1:
        pair = (numbers.lhs_spec[1], numbers.rhs_spec[1])
        return [*factors, Factor("row", pair, (None,), partial=True)]
    return factors[:1]


def _gather(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    table = ins[0]
    batching = tuple(numbers.operand_batching_dims)
    kept = [d for d in range(len(table)) if d not in (*numbers.collapsed_slice_dims, *batching)]
    factors = [
        Factor("column", (d, None), (out,))
        for d, out in zip(kept, numbers.offset_dims, strict=True)
        if sizes[d] == table[d]
    ]
    batch_out = [d for d in range(len(outs[0])) if d not in numbers.offset_dims]
    paired = dict(zip(numbers.start_indices_batching_dims, batching, strict=True))
    factors += [
        Factor("left" if d not in paired else "each", (paired.get(d), d), (out,))
        for d, out in enumerate(batch_out)
    ]
    return factors + [
        Factor("vocabulary", (d, None), (None,), partial=True)
        for d in numbers.collapsed_slice_dims
        if d in numbers.start_index_map
    ]


def _scatter(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    """Columns of rows; or places: each device keeps what is put into its shard."""
    numbers, [operand, _, updates] = params["dimension_numbers"], ins
    batching, windows = tuple(numbers.operand_batching_dims), numbers.update_window_dims
    inserted, placed = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    kept = [d for d in range(len(operand)) if d not in (*inserted, *batching)]
    factors = [
        Factor("column", (d, None, w), (d,) * len(outs))
        for d, w in zip(kept, windows, strict=True)
        if updates[w] == operand[d] and d not in placed
    ]
    return factors + [
        Factor("place", (d, None, None), (d,) * len(outs)) for d in inserted if d in placed
    ]


def _scatter_add(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    numbers = params["dimension_numbers"]
    scattered = [d for d in range(len(ins[2])) if d not in numbers.update_window_dims]
    batching = numbers.scatter_indices_batching_dims
    return _scatter(ins, outs, params) + [
        Factor("row", (None, i, u), (None,), partial=True)
        for i, u in enumerate(scattered)
        if i not in batching
    ]


def _dims_of_first(
    ins: Sequence[Shape], outs: Sequence[Shape], dims: Iterable[tuple[int | None, int]]
) -> list[Factor]:
    """Factors that cut the first operand and every result; other operands are whole."""
    rest = (None,) * (len(ins) - 1)
    return [Factor(f"d{o}", (d, *rest), (o,) * len(outs)) for d, o in dims]


def _broadcast_in_dim(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    placed = enumerate(params["broadcast_dimensions"])
    source = {out: d for d, out in placed if ins[0][d] == outs[0][out]}
    return _dims_of_first(ins, outs, ((source.get(out), out) for out in range(len(outs[0]))))


def _reshape(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    if params.get("dimensions") is not None or 0 in ins[0]:
        return []
    # Dimensions correspond where the product of the dimensions before them is equal.
    here, there = _by_outer_size(ins[0]), _by_outer_size(outs[0])
    return _dims_of_first(ins, outs, ((here[n], there[n]) for n in here if n in there))


def _by_outer_size(shape: Shape) -> dict[int, int]:
    """Dimensions above size one, by the product of those before them."""
    outer = itertools.accumulate(shape, operator.mul, initial=1)
    return {n: d for d, (n, size) in enumerate(zip(outer, shape, strict=False)) if size > 1}


def _transpose(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    return _dims_of_first(ins, outs, ((d, out) for out, d in enumerate(params["permutation"])))


def _dropping(name: str) -> Pattern:
    """The pattern of an equation that drops the dimensions in a param and keeps the others."""

    def pattern(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
        kept = [d for d in range(len(ins[0])) if d not in params[name]]
        return _dims_of_first(ins, outs, ((d, out) for out, d in enumerate(kept)))

    return pattern


def _reduce(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    partial = [Factor("row", (d,), (None,), partial=True) for d in params["axes"]]
    return [*_dropping("axes")(ins, outs, params), *partial]


def _full_slice(ins: Sequence[Shape], outs: Sequence[Shape], _params: dict) -> list[Factor]:
    whole = [d for d, size in enumerate(ins[0]) if all(out[d] == size for out in outs)]
    return _dims_of_first(ins, outs, ((d, d) for d in whole))


def _along_axis(name: str) -> Pattern:
    """The pattern that cuts all operands and results along any dimension but the one in a param."""

    def pattern(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
        return [
            Factor(f"d{d}", (d,) * len(ins), (d,) * len(outs))
            for d in range(len(ins[0]))
            if d != params[name]
        ]

    return pattern


def _unstack(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    kept = [d for d in range(len(ins[0])) if d != params["axis"]]
    return _dims_of_first(ins, outs, ((d, out) for out, d in enumerate(kept)))


def _stack(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    axis = params["axis"]
    return [
        Factor(f"d{d}", (d,) * len(ins), (d + (d >= axis),) * len(outs)) for d in range(len(ins[0]))
    ]


def _top_k(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    axis = params.get("axis", len(ins[0]) - 1) % len(ins[0])
    return _dims_of_first(ins, outs, ((d, d) for d in range(len(ins[0])) if d != axis))


def _window(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    windows = zip(params["window_dimensions"], params["window_strides"], strict=True)
    return _dims_of_first(ins, outs, ((d, d) for d, one in enumerate(windows) if one == (1, 1)))


def _experts(_ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    """A layer of experts: each device adds the rows of its experts."""
    return [Factor("expert", tuple(params["expert_dims"]), (None,) * len(outs), partial=True)]


def _fused_attention(ins: Sequence[Shape], outs: Sequence[Shape], params: dict) -> list[Factor]:
    return list(itertools.starmap(Factor, split_dims(ins, outs, params)))


def _generated(ins: Sequence[Shape], outs: Sequence[Shape], _params: dict) -> list[Factor]:
    """Results without array operands (iota, random bits): every device makes its shard."""
    return [Factor(f"d{d}", (None,) * len(ins), (d,)) for d in range(len(outs[0]))]


#: The built-in patterns, the default of `Job.patterns`.
PATTERNS = Patterns(
    {
        "dot_general": _dot_general,
        "conv_general_dilated": _conv,
        "gather": _gather,
        "scatter": _scatter,
        "scatter-add": _scatter_add,
        "broadcast_in_dim": _broadcast_in_dim,
        "reshape": _reshape,
        "transpose": _transpose,
        "squeeze": _dropping("dimensions"),
        "reduce_sum": _reduce,
        "reduce_max": _reduce,
        "reduce_min": _reduce,
        "reduce_and": _reduce,
        "reduce_or": _reduce,
        "reduce_prod": _dropping("axes"),
        "argmax": _dropping("axes"),
        "argmin": _dropping("axes"),
        "concatenate": _along_axis("dimension"),
        "pad": _full_slice,
        "slice": _full_slice,
        "dynamic_slice": _full_slice,
        "split": _full_slice,
        "stack": _stack,
        "unstack": _unstack,
        "cumsum": _along_axis("axis"),
        "cumprod": _along_axis("axis"),
        "cummax": _along_axis("axis"),
        "cumlogsumexp": _along_axis("axis"),
        "sort": _along_axis("dimension"),
        "top_k": _top_k,
        "reduce_window_max": _window,
        "reduce_window_sum": _window,
        "reduce_window_min": _window,
        **dict.fromkeys(ATTENTION, _fused_attention),
        "iota": _generated,
        "random_bits": _generated,
        "experts": _experts,
    }
)
