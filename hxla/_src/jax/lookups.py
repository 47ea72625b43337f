"""Sparse gradients of tables that are only looked up by rows.

The transpose of a lookup scatters its cotangents into zeros of the table's shape. Here they are
scattered into the rows that were read, so no array has the table's size; each row is the same sum,
in the same order.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .jaxpr import ClosedJaxpr, Literal, debug_info, fresh, inlined, run_equation, splice


class Rows(NamedTuple):
    """The nonzero rows of an array.

    Attributes:
        values: The rows; unused ones are zero.
        places: int32, sorted: the index of each row in the array, without repetition; the array's
            length for unused rows.
    """

    values: jax.Array
    places: jax.Array


@dataclasses.dataclass(frozen=True)
class Lookups:
    """A program whose tables are looked up once each.

    Attributes:
        closed: The program with additional arguments and results: for each table zeros that are
            added to the rows read, whose gradient is that of the rows, and the indices.
        tables: The argument index of each table.
        lookups: The equation that reads each table.
    """

    closed: ClosedJaxpr
    tables: tuple[int, ...]
    lookups: tuple[Any, ...]

    def zeros(self) -> list[jax.Array]:
        """The additional arguments."""
        shapes = (eqn.outvars[0].aval for eqn in self.lookups)
        return [jnp.zeros(x.shape, x.dtype) for x in shapes]

    def rows(self, indices: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[Rows]:
        """The gradient of each table, from the indices and the gradients of the zeros."""
        return list(map(_rows, self.lookups, indices, cotangents))


def lookups_of(closed: ClosedJaxpr, most_rows: Mapping[int, int]) -> Lookups | None:
    """Find the tables that are read by a single lookup of whole rows.

    Args:
        most_rows: For each argument that may be a table, the most rows for which sparse gradients
            pay.

    Returns:
        None if there is no such table.
    """
    flat = inlined(closed)
    jaxpr = flat.jaxpr
    table_of = {jaxpr.invars[i]: i for i in most_rows}
    readers: dict[int, list[Any]] = {i: [] for i in most_rows}
    for eqn in jaxpr.eqns:
        read = [table_of[v] for v in eqn.invars if not isinstance(v, Literal) and v in table_of]
        if read and eqn.primitive.name == "convert_element_type":
            table_of[eqn.outvars[0]] = read[0]
            continue
        for i in read:
            readers[i].append(eqn)
    results = {table_of.get(v) for v in jaxpr.outvars if not isinstance(v, Literal)}
    table_read_by = {
        id(eqns[0]): i
        for i, eqns in readers.items()
        if len(eqns) == 1 and i not in results and _reads_rows(eqns[0], table_of, most_rows[i])
    }
    if not table_read_by:
        return None
    equations, tables, lookups, added = [], [], [], []
    for eqn in jaxpr.eqns:
        if id(eqn) not in table_read_by:
            equations.append(eqn)
            continue
        out = eqn.outvars[0].aval
        [more] = fresh(((out.shape, out.dtype),))
        new = splice(
            eqn.replace(invars=[*eqn.invars, more]),
            lambda table, at, more, eqn=eqn: _with(run_equation(eqn, [table, at])[0], more),
        )
        equations += new
        tables.append(table_read_by[id(eqn)])
        lookups.append(eqn)
        added.append(more)
    new_jaxpr = jaxpr.replace(
        eqns=equations,
        invars=[*jaxpr.invars, *added],
        outvars=[*jaxpr.outvars, *(eqn.invars[1] for eqn in lookups)],
        debug_info=debug_info(len(jaxpr.invars) + len(added), len(jaxpr.outvars) + len(lookups)),
    )
    return Lookups(ClosedJaxpr(new_jaxpr, flat.consts), tuple(tables), tuple(lookups))


@jax.custom_jvp
def _with(rows: jax.Array, _more: jax.Array) -> jax.Array:
    return rows


@_with.defjvp
def _with_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


def _reads_rows(eqn: Any, table_of: Mapping[Any, int], most_rows: int) -> bool:
    """Whether an equation looks up whole rows, and not too many."""
    if eqn.primitive.name != "gather":
        return False
    table, indices = eqn.invars
    if isinstance(table, Literal) or isinstance(indices, Literal) or indices in table_of:
        return False
    numbers, shape = eqn.params["dimension_numbers"], table.aval.shape
    return (
        table in table_of
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and _num_rows(indices.aval.shape) <= most_rows
    )


def _num_rows(shape: Sequence[int]) -> int:
    return math.prod(shape[:-1])


def _rows(eqn: Any, indices: jax.Array, cotangent: jax.Array) -> Rows:
    """The transpose of a lookup, into as many rows as it reads."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    height, numbers = shape[0], params["dimension_numbers"]
    at = indices.reshape(-1)
    if params["mode"] == jax.lax.GatherScatterMode.CLIP:
        at = jnp.clip(at, 0, height - 1)
    at = jnp.where((at >= 0) & (at < height), at, height).astype(jnp.int32)
    places, inverse = jnp.unique(at, size=at.size, fill_value=height, return_inverse=True)
    values = jax.lax.scatter_add(
        jnp.zeros((at.size, *shape[1:]), cotangent.dtype),
        inverse.reshape(indices.shape).astype(jnp.int32),
        cotangent,
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=numbers.offset_dims,
            inserted_window_dims=numbers.collapsed_slice_dims,
            scatter_dims_to_operand_dims=numbers.start_index_map,
        ),
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
    )
    is_row = (places < height).reshape(-1, *[1] * (len(shape) - 1))
    return Rows(jnp.where(is_row, values, jnp.zeros((), values.dtype)), places)
