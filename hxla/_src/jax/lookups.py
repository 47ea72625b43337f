"""Gradients of tables that are only looked up by rows, as these rows.

The transpose of a lookup scatters its cotangents into zeros of the table's shape. Here the
cotangents of the rows that were read are taken as they are, so that nothing of the table's size is
made; each row is then the same sum, in the same order.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .jaxpr import ClosedJaxpr, Literal, debug_info, fresh, inlined, run_equation, splice


class Rows(NamedTuple):
    """An array of which only some rows are not zero.

    Attributes:
        values: The rows, of which those that stand for nothing are zero.
        places: int32, sorted: the row of the array that each is; beyond its end for nothing. No
            place within it comes twice.
    """

    values: jax.Array
    places: jax.Array


@dataclasses.dataclass(frozen=True)
class Lookups:
    """A program whose tables are looked up once each.

    Attributes:
        closed: From its arguments, and for each table what is added to the rows that are read, to
            its results, and for each table the indices. What is added changes no value, only
            gradients.
        tables: For each table its place among the arguments.
        lookups: For each table the equation that reads it.
    """

    closed: ClosedJaxpr
    tables: tuple[int, ...]
    lookups: tuple[Any, ...]

    def zeros(self) -> list[jax.Array]:
        """What is added, of no consequence."""
        shapes = (eqn.outvars[0].aval for eqn in self.lookups)
        return [jnp.zeros(x.shape, x.dtype) for x in shapes]

    def rows(self, indices: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[Rows]:
        """The gradient of each table, from the indices and the gradients of what is added."""
        return list(map(_rows, self.lookups, indices, cotangents))


def lookups_of(closed: ClosedJaxpr, most_rows: Mapping[int, int]) -> Lookups | None:
    """Find the tables that are read by one lookup of whole rows, and by nothing else.

    Args:
        most_rows: For each argument that may be such a table the most rows that are worth it.

    Returns:
        None if there is none.
    """
    flat = inlined(closed)
    jaxpr = flat.jaxpr
    table_of = {jaxpr.invars[i]: i for i in most_rows}
    readers: dict[int, list[Any]] = {i: [] for i in most_rows}
    for eqn in jaxpr.eqns:
        of = [table_of[v] for v in eqn.invars if not isinstance(v, Literal) and v in table_of]
        if of and eqn.primitive.name == "convert_element_type":
            table_of[eqn.outvars[0]] = of[0]
            continue
        for i in of:
            readers[i].append(eqn)
    results = {table_of.get(v) for v in jaxpr.outvars if not isinstance(v, Literal)}
    found = {
        id(own[0]): i
        for i, own in readers.items()
        if len(own) == 1 and i not in results and _reads_rows(own[0], table_of, most_rows[i])
    }
    if not found:
        return None
    equations, tables, lookups, added = [], [], [], []
    for eqn in jaxpr.eqns:
        if id(eqn) not in found:
            equations.append(eqn)
            continue
        out = eqn.outvars[0].aval
        [more] = fresh(((out.shape, out.dtype),))
        new = splice(
            eqn.replace(invars=[*eqn.invars, more]),
            lambda table, at, more, eqn=eqn: _with(run_equation(eqn, [table, at])[0], more),
        )
        equations += new
        tables.append(found[id(eqn)])
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
