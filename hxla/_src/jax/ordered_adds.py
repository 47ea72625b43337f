"""Programs whose scatters leave no order of additions to chance, written for GPUs.

A GPU adds what meets at one place in any order. XLA's option for reproducible bits sorts every
scalar of the updates for it, or runs a loop over them. Here the rows of a scatter are sorted by
their places, and each place's are added in a fixed tree; a scatter whose places are known to be
unlike is marked so, and needs neither. A scatter of one element a row into zeros, the gradient of
a loss over labels, is a selection, which fuses with what is around it. The gradient of a max-pool,
which XLA makes a scatter of, is a sum of slices in a fixed order.

The rewriting is of programs after differentiation, so it reaches all gradients alike: those of
lookups, sorts, `take_along_axis` and user functions, and sums by segment in a forward.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .jaxpr import (
    ClosedJaxpr,
    Literal,
    as_function,
    inner_jaxpr,
    kind_of,
    run_as,
    scan_counts,
    splice,
)
from .known_indices import Known, common, constant, determined, results_of, unknown

_SCATTERS: Mapping[str, Callable[..., jax.Array]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
}
_BLOCK = 16  # rows that one step of a sum adds; of 4096 rows three steps
_MOST_SLICES = 64  # of a max-pool's window


def ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of trees of arrays, its scatters in a fixed order of additions."""
    return run_as(function, lambda closed, arguments: as_function(in_order(closed))(*arguments))


def in_order(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose scatters have a fixed order, in its loops and branches too.

    Returns:
        The same object if it has no scatter that needs one.
    """
    return _rewritten(closed, [unknown(v.aval) for v in closed.jaxpr.invars])[0]


def _rewritten(closed: ClosedJaxpr, arguments: Sequence[Known]) -> tuple[ClosedJaxpr, list[Known]]:
    """The program, and what is known of its results."""
    jaxpr = closed.jaxpr
    known: dict[Any, Known] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {v: constant(v.aval, x) for v, x in zip(jaxpr.constvars, closed.consts, strict=True)}

    def read(v: Any) -> Known:
        return constant(v.aval, v.val) if isinstance(v, Literal) else known[v]

    equations: list[Any] = []
    filled = {eqn.outvars[0] for eqn in jaxpr.eqns if _is_fill(eqn)}
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        new, results = _equation(eqn, operands, filled)
        equations += new
        known.update(zip(eqn.outvars, results, strict=True))
    results = [read(v) for v in jaxpr.outvars]
    if len(equations) == len(jaxpr.eqns) and all(map(_is, equations, jaxpr.eqns)):
        return closed, results
    return ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts), results


def _is(a: Any, b: Any) -> bool:
    return a is b


def _is_fill(eqn: Any) -> bool:
    """Whether the result's elements are one constant."""
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def _equation(
    eqn: Any, operands: Sequence[Known], filled: Collection[Any]
) -> tuple[list[Any], list[Known]]:
    """What replaces an equation, and what is known of its results.

    Args:
        filled: Variables whose elements are one constant.
    """
    name, kind, inner = eqn.primitive.name, kind_of(eqn), inner_jaxpr(eqn)
    nothing = [unknown(v.aval) for v in eqn.outvars]
    if name in _SCATTERS:
        return _scatter(eqn, operands[1], eqn.invars[0] in filled), nothing
    if name == "select_and_scatter_add":
        return _pool(eqn), nothing
    if name == "cond":
        each = [_rewritten(branch, operands[1:]) for branch in eqn.params["branches"]]
        branches = tuple(branch for branch, _ in each)
        known = [common(results) for results in zip(*(r for _, r in each), strict=True)]
        return _with(eqn, branches=branches), known
    if name == "while":
        programs = {key: in_order(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr")}
        return _with(eqn, **programs), nothing
    if inner is None:
        return [eqn], results_of(eqn, operands)
    if kind == "scan":
        num_consts, num_carry = scan_counts(eqn)
        first = num_consts + num_carry
        carried = [unknown(v.aval) for v in eqn.invars[num_consts:first]]
        slices = [known.sliced() for known in operands[first:]]
        body, known = _rewritten(inner, [*operands[:num_consts], *carried, *slices])
        stacked = [x.stacked() for x in known[num_carry:]]
        return _with(eqn, jaxpr=body), [*nothing[:num_carry], *stacked]
    if kind in ("inlined", "remat"):
        body, known = _rewritten(inner, operands)
        return _with(eqn, **_in_place_of(eqn, body)), known
    if kind == "custom":  # nothing differentiates the program any more
        body, known = _rewritten(inner, operands)
        return ([eqn] if body is inner else splice(eqn, as_function(body))), known
    if name == "shard_map":
        return _with(eqn, **_in_place_of(eqn, in_order(inner))), nothing
    return [eqn], nothing


def _in_place_of(eqn: Any, body: ClosedJaxpr) -> dict[str, Any]:
    """The parameter of an equation that has its program."""
    key = next(k for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params)
    return {key: body if isinstance(eqn.params[key], ClosedJaxpr) else body.jaxpr}


def _with(eqn: Any, **params: Any) -> list[Any]:
    """An equation with other programs, or itself if they are its own."""

    def is_same(key: str, value: Any) -> bool:
        old = eqn.params[key]
        if isinstance(value, tuple):
            return all(map(_is, value, old))
        return value is old

    if all(is_same(key, value) for key, value in params.items()):
        return [eqn]
    return [eqn.replace(params=eqn.params | params)]


# -- scatters ------------------------------------------------------------------------------------


def _scatter(eqn: Any, indices: Known, is_filled: bool) -> list[Any]:
    operand, places, updates = (v.aval for v in eqn.invars)
    name, params = eqn.primitive.name, eqn.params
    commutes = name != "scatter" and not jnp.issubdtype(operand.dtype, jnp.inexact)
    if params["unique_indices"] or commutes or 0 in (*updates.shape, *operand.shape):
        return [eqn]
    axes = _ScatterAxes(eqn)
    if is_filled and axes.is_one_each:
        return splice(eqn, lambda *arrays: _selected(eqn, axes, *arrays))
    if _is_distinct(axes, params["mode"], places.shape, indices):
        return [eqn.replace(params=params | {"unique_indices": True})]
    if axes.num_places + places.size * axes.num_offsets >= 2**31:
        return [eqn]  # places are int32
    return splice(eqn, lambda *arrays: _in_sorted_order(eqn, axes, *arrays))


class _ScatterAxes:
    """The axes of a scatter's arrays by their part in it.

    Attributes:
        batch: Operand axes along which scatters are separate.
        columns: The operand axis of each column of the indices.
        indexed: These axes, sorted, and those of which an update has a part only.
        rest: The other operand axes: those of a row.
        windows: Of each operand axis the size of an update.
        sizes: The sizes of `indexed`.
        num_places: The number of places that an index can name.
        num_offsets: The number of places that an update has along `indexed`.
        is_one_each: Whether each batch has one update, at one index of one axis.
    """

    def __init__(self, eqn: Any):
        operand, places, updates = (v.aval.shape for v in eqn.invars)
        numbers = eqn.params["dimension_numbers"]
        self.batch = tuple(map(int, numbers.operand_batching_dims))
        self.index_batch = tuple(map(int, numbers.scatter_indices_batching_dims))
        self.columns = tuple(map(int, numbers.scatter_dims_to_operand_dims))
        self.update_windows = tuple(map(int, numbers.update_window_dims))
        self.in_updates = [
            d
            for d in range(len(operand))
            if d not in numbers.inserted_window_dims and d not in self.batch
        ]
        self.windows = [1] * len(operand)
        for d, window in zip(self.in_updates, self.update_windows, strict=True):
            self.windows[d] = updates[window]
        others = set(range(len(operand))).difference(self.batch, self.columns)
        self.rest = tuple(sorted(d for d in others if self.windows[d] == operand[d]))
        self.indexed = tuple(sorted({*self.columns, *others}.difference(self.rest)))
        self.sizes = tuple(operand[d] for d in self.indexed)
        self.num_places = math.prod(self.sizes)
        self.num_offsets = math.prod(self.windows[d] for d in self.indexed)
        self.limits = {d: operand[d] - self.windows[d] for d in self.indexed}
        self.num_index_axes = len(places) - 1
        is_one_index = len(self.columns) == 1 and self.indexed == self.columns
        is_one_update = math.prod(places) == math.prod(places[d] for d in self.index_batch)
        self.is_one_each = is_one_index and is_one_update and self.num_offsets == 1


def _is_distinct(axes: _ScatterAxes, mode: Any, shape: Sequence[int], indices: Known) -> bool:
    """Whether no two updates meet at a place."""
    wide = {d for d, size in enumerate(shape[:-1]) if size > 1}
    if wide <= set(axes.index_batch):
        return True
    columns = indices.columns or ((indices,) if shape[-1] == 1 else ())
    if axes.num_offsets > 1 or len(columns) != len(axes.columns):
        return False
    if mode == jax.lax.GatherScatterMode.CLIP:  # what lies outside may meet at the edge
        pairs = zip(columns, axes.columns, strict=True)
        columns = tuple(c for c, d in pairs if c.low >= 0 and c.high <= axes.limits[d])
    return determined(columns, axes.index_batch) >= wide


def _selected(
    eqn: Any, axes: _ScatterAxes, operand: jax.Array, indices: jax.Array, updates: jax.Array
) -> jax.Array:
    """A scatter of one update a batch into equal elements, all of which are written anyway."""
    [axis] = axes.columns
    size = operand.shape[axis]
    others = [d for d in range(axes.num_index_axes) if d not in axes.index_batch]
    batch = [operand.shape[d] if d in axes.batch else 1 for d in range(operand.ndim)]
    index = indices.transpose(*axes.index_batch, *others, axes.num_index_axes).reshape(batch)
    if jnp.iinfo(index.dtype).max < size:
        index = index.astype(jnp.int32)
    if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, size - 1)
    shape = [size if d == axis else 1 for d in range(operand.ndim)]
    is_here = jax.lax.broadcasted_iota(index.dtype, shape, axis) == index
    scatter_axes = [d for d in range(updates.ndim) if d not in axes.update_windows]
    of_axis = dict(zip(axes.in_updates, axes.update_windows, strict=True))
    of_axis |= {d: scatter_axes[i] for d, i in zip(axes.batch, axes.index_batch, strict=True)}
    order = [of_axis[d] for d in range(operand.ndim) if d in of_axis]
    order += [d for d in range(updates.ndim) if d not in order]
    rows = [1 if d == axis else n for d, n in enumerate(operand.shape)]
    updates = updates.transpose(order).reshape(rows)
    written = {
        "scatter": updates,
        "scatter-add": operand + updates,
        "scatter-sub": operand - updates,
    }
    return jnp.where(is_here, written[eqn.primitive.name], operand)


def _in_sorted_order(
    eqn: Any, axes: _ScatterAxes, operand: jax.Array, indices: jax.Array, updates: jax.Array
) -> jax.Array:
    """A scatter whose updates are sorted by place, and joined where they meet."""
    params, name = eqn.params, eqn.primitive.name
    ids, rows = _ids_and_rows(axes, params["mode"], indices, updates)
    rows = jax.lax.optimization_barrier(rows)  # else each block of sums would compute them again
    num_batches = ids.shape[0]
    are_sorted = params["indices_are_sorted"] and num_batches == 1 and len(axes.columns) == 1
    if not (are_sorted and axes.num_offsets == 1):
        ids, order = _sorted_by_id(ids, axes.num_places)
        rows = jnp.take_along_axis(rows, order[:, :, None], axis=1, mode="promise_in_bounds")
    if name != "scatter":
        rows = _running_sums(rows, ids).astype(operand.dtype)
    # The last row of a place has the sum of all, or is the last that is written to it.
    others = axes.num_places + jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    is_last = jnp.concatenate([ids[:, 1:] != ids[:, :-1], jnp.ones((num_batches, 1), bool)], axis=1)
    places = jnp.where(is_last & (ids < axes.num_places), ids, others)
    order_of_axes = (*axes.batch, *axes.indexed, *axes.rest)
    moved = operand.transpose(order_of_axes)
    flat = moved.reshape(num_batches, axes.num_places, -1)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2,),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    if num_batches == 1:
        flat, rows, places = flat[0], rows[0], places[0]
        numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
        )
    made = _SCATTERS[name](
        flat,
        places[..., None],
        rows,
        numbers,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )
    back = [order_of_axes.index(d) for d in range(operand.ndim)]
    return made.reshape(moved.shape).transpose(back)


def _ids_and_rows(
    axes: _ScatterAxes, mode: Any, indices: jax.Array, updates: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each update's place and its row, as `[batches, n]` and `[batches, n, elements of a row]`.

    A place outside of the operand is `axes.num_places`.
    """
    others = [d for d in range(axes.num_index_axes) if d not in axes.index_batch]
    order = [*axes.index_batch, *others]
    sizes = [indices.shape[d] for d in order]
    num_batches = math.prod(sizes[: len(axes.index_batch)])
    indices = indices.transpose(*order, axes.num_index_axes).reshape(
        num_batches, -1, len(axes.columns)
    )
    scatter_axes = [d for d in range(updates.ndim) if d not in axes.update_windows]
    window_of = dict(zip(axes.in_updates, axes.update_windows, strict=True))
    windows = [window_of[d] for d in (*axes.indexed, *axes.rest) if d in window_of]
    updates = updates.transpose(*(scatter_axes[d] for d in order), *windows)
    rest = [axes.windows[d] for d in axes.rest]
    updates = updates.reshape(num_batches, -1, *rest)
    places = jnp.zeros(indices.shape[:2], jnp.int32)
    is_inside = jnp.ones(indices.shape[:2], bool)
    windows = [axes.windows[d] for d in axes.indexed]
    offsets = jnp.zeros(windows, jnp.int32)
    for k, (d, size) in enumerate(zip(axes.indexed, axes.sizes, strict=True)):
        places *= size
        if d in axes.columns:
            index = indices[:, :, axes.columns.index(d)]
            info = jnp.iinfo(index.dtype)
            limit = min(axes.limits[d], int(info.max))
            if mode == jax.lax.GatherScatterMode.CLIP:
                index = jnp.clip(index, 0, limit)
            inside = index <= limit
            if info.min < 0:
                inside &= index >= 0
            is_inside &= inside
            places += jnp.where(inside, index, 0).astype(jnp.int32)
        offsets = offsets * size + jax.lax.broadcasted_iota(jnp.int32, windows, k)
    places = places[:, :, None] + offsets.reshape(-1)
    places = jnp.where(is_inside[:, :, None], places, axes.num_places)
    num_rows = places.shape[1] * places.shape[2]
    return places.reshape(num_batches, num_rows), updates.reshape(num_batches, num_rows, -1)


def _sorted_by_id(ids: jax.Array, num_places: int) -> tuple[jax.Array, jax.Array]:
    """The ids of each batch in order, and where each was; equal ones keep their order."""
    num = ids.shape[1]
    if (num_places + 1) * num <= 2**32:  # both in one word: half the work
        words = ids.astype(jnp.uint32) * num
        words += jax.lax.broadcasted_iota(jnp.uint32, ids.shape, 1)
        words = jax.lax.sort(words, dimension=1)
        return (words // num).astype(jnp.int32), (words % num).astype(jnp.int32)
    numbers = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    ids, order = jax.lax.sort((ids, numbers), dimension=1, num_keys=1)
    return ids, order


def _running_sums(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """For each row the sum of the rows up to it that have its id.

    Rows of a block are added one by one, then blocks of blocks. The sums of 16-bit floats are
    float32.

    Args:
        ids: Of each row; equal ones are neighbours.
    """
    num_batches, num, width = rows.shape
    size = min(num, _BLOCK)
    missing = -num % size
    if missing:
        rows = jnp.pad(rows, ((0, 0), (0, missing), (0, 0)))
        ids = jnp.pad(ids, ((0, 0), (0, missing)), constant_values=-1)
    rows = rows.reshape(num_batches, -1, size, width)
    ids = ids.reshape(num_batches, -1, size)
    is_up_to = jnp.tri(size, dtype=bool)
    joins = (ids[:, :, :, None] == ids[:, :, None, :]) & is_up_to
    dtype = jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype
    zero = jnp.zeros((), rows.dtype)
    terms = jnp.where(joins[..., None], rows[:, :, None], zero)
    sums = jnp.sum(terms, axis=3, dtype=dtype)
    if rows.shape[1] > 1:
        lasts = ids[:, :-1, -1]
        before = _running_sums(sums[:, :-1, -1], lasts)
        before = jnp.pad(before, ((0, 0), (1, 0), (0, 0)))
        lasts = jnp.pad(lasts, ((0, 0), (1, 0)), constant_values=-1)
        continues = ids == lasts[:, :, None]
        sums += jnp.where(continues[..., None], before[:, :, None], jnp.zeros((), dtype))
    return sums.reshape(num_batches, -1, width)[:, :num]


# -- max-pools -----------------------------------------------------------------------------------


def _pool(eqn: Any) -> list[Any]:
    shapes = [v.aval.shape for v in eqn.invars]
    num = math.prod(eqn.params["window_dimensions"])
    if num > _MOST_SLICES or any(0 in shape for shape in shapes):
        return [eqn]
    return splice(eqn, lambda *arrays: _pool_gradient(eqn, *arrays))


def _pool_gradient(eqn: Any, cotangents: jax.Array, operand: jax.Array) -> jax.Array:
    """The gradient of a max-pool: of equal elements of a window the first gets all.

    Windows add to an element in their order, as XLA's loop does on a CPU.
    """
    params = eqn.params
    window, strides = params["window_dimensions"], params["window_strides"]
    lows = [low for low, _ in params["padding"]]
    shape, sizes = cotangents.shape, operand.shape
    zero = jnp.zeros((), operand.dtype)
    padded = jax.lax.pad(operand, zero, [(low, high, 0) for low, high in params["padding"]])
    spans = [(num - 1) * stride + 1 for num, stride in zip(shape, strides, strict=True)]
    offsets = list(itertools.product(*map(range, window)))
    chosen = jnp.full(shape, -1, jnp.int8)
    best = jnp.zeros(shape, operand.dtype)
    for k, offset in enumerate(offsets):
        ends = [o + span for o, span in zip(offset, spans, strict=True)]
        element = jax.lax.slice(padded, offset, ends, strides)
        takes = (chosen < 0) | ~params["select_prim"].bind(best, element)
        for d, (o, low, span) in enumerate(zip(offset, lows, spans, strict=True)):
            if o < low or o - low + span > sizes[d]:  # some windows have padding here
                place = jax.lax.broadcasted_iota(jnp.int32, shape, d) * strides[d] + (o - low)
                takes &= (place >= 0) & (place < sizes[d])
        chosen = jnp.where(takes, jnp.int8(k), chosen)
        best = jnp.where(takes, element, best)
    total = jnp.zeros(sizes, operand.dtype)
    for k, offset in reversed(list(enumerate(offsets))):
        term = jnp.where(chosen == k, cotangents, zero)
        befores = [o - low for o, low in zip(offset, lows, strict=True)]
        config = [
            (before, size - before - span, stride - 1)
            for before, size, span, stride in zip(befores, sizes, spans, strides, strict=True)
        ]
        total += jax.lax.pad(term, zero, config)
    return total
