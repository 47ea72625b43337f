"""Rows of stacked parameters on their way between storage and the stages that run their layers.

A stacked parameter whose layers the stages divide among them is stored cut between its rows, so a
stage stores some layers and runs others, mostly the same ones. Stage t sends to stage s only what s
runs of what t stores; a permute serves all pairs of the same distance, and for an even cut into
stages nothing moves at all.

Legend of shape suffixes: S stages.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core._types import STAGE_AXIS
from ._words import Words


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRows:
    """The rows that each stage holds of parameters that are stacked alike.

    Attributes:
        dim: The dimension of the rows.
        num_rows: Those of a whole parameter.
        spans: For each stage the first of its rows and the one after the last; None: it has none.
    """

    dim: int
    num_rows: int
    spans: tuple[tuple[int, int] | None, ...]

    @property
    def length(self) -> int:
        """The most rows of a stage."""
        return max(span[1] - span[0] for span in self.spans if span is not None)

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array that has `length` rows, but else is like one of this shape."""
        return _resized(shape, self.dim, self.length)

    def taken(self, x: jax.Array, stage: int) -> jax.Array:
        """The rows of a stage, with zeros behind them up to `length`."""
        span = self.spans[stage]
        assert span is not None
        rows = jax.lax.slice_in_dim(x, *span, axis=self.dim)
        return _with_zeros(rows, self.dim, 0, self.length - rows.shape[self.dim])

    def put(self, x: jax.Array, stage: int) -> jax.Array:
        """What `taken` took in its place, zeros elsewhere."""
        span = self.spans[stage]
        assert span is not None
        start, stop = span
        rows = jax.lax.slice_in_dim(x, 0, stop - start, axis=self.dim)
        return _with_zeros(rows, self.dim, start, self.num_rows - stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRows:
    """A slot for rows of parameters that are stored cut between their rows.

    Attributes:
        stack: Its rows.
        params: For each stage the parameter of which it holds them.
    """

    stack: StackRows
    params: tuple[int | None, ...]

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.params)

    @property
    def num_stored(self) -> int:
        """The rows that each stage stores."""
        return self.stack.num_rows // self.num_stages

    def starts(self, param: int, distance: int) -> tuple[int, ...]:
        """For each stage where the rows begin that the stage at a distance before it stores.

        The place is in the slot with `num_stored` more rows before and behind it; 0 where that
        stage stores no row that this one holds.
        """
        starts = []
        for stage, (own, span) in enumerate(zip(self.params, self.stack.spans, strict=True)):
            stored = (stage - distance) * self.num_stored
            start = 0
            if own == param and span is not None and 0 <= stored < self.stack.num_rows:
                start = max(0, stored + self.num_stored - span[0]) if stored < span[1] else 0
            starts.append(start)
        return tuple(starts)

    def moves(self) -> list[tuple[int, int]]:
        """Each parameter with each distance over which rows of it travel."""
        distances = range(1 - self.num_stages, self.num_stages)
        params = dict.fromkeys(p for p in self.params if p is not None)
        return [(p, d) for p in params for d in distances if any(self.starts(p, d))]


def fill_rows(
    slots: Sequence[StoredRows], stored: Sequence[jax.Array] | Mapping[int, jax.Array]
) -> list[jax.Array]:
    """The slots of this stage from what all stages store; inside a `shard_map`.

    Args:
        slots: To be filled.
        stored: Each parameter as this device stores it.
    """
    made = []
    for slot in slots:
        x = stored[next(p for p in slot.params if p is not None)]
        around = 2 * slot.num_stored + slot.stack.length
        made.append(jnp.zeros(_resized(x.shape, slot.stack.dim, around), x.dtype))
    me = jax.lax.axis_index(STAGE_AXIS)
    for distance, moves in _by_distance(slots).items():
        pairs = sorted({pair for i, p in moves for pair in _pairs(slots[i], p, distance)})
        arrived = _permuted([stored[p] for _, p in moves], pairs)
        for (i, p), x in zip(moves, arrived, strict=True):
            start = jnp.array(slots[i].starts(p, distance))[me]
            made[i] = jax.lax.dynamic_update_slice_in_dim(made[i], x, start, slots[i].stack.dim)
    return [
        jax.lax.slice_in_dim(x, slot.num_stored, -slot.num_stored, axis=slot.stack.dim)
        for slot, x in zip(slots, made, strict=True)
    ]


def collect_rows(
    slots: Sequence[StoredRows], sums: Sequence[Sequence[jax.Array]]
) -> list[tuple[int, list[jax.Array]]]:
    """What the stages summed in slots, on the stages that store it; inside a `shard_map`.

    Args:
        slots: Where the sums are.
        sums: For each slot the arrays that are added up.

    Returns:
        Parameters, each with what is to be added to its sums on this device.
    """
    around = [
        [_with_zeros(x, slot.stack.dim, slot.num_stored, slot.num_stored) for x in own]
        for slot, own in zip(slots, sums, strict=True)
    ]
    me = jax.lax.axis_index(STAGE_AXIS)
    out = []
    for distance, moves in _by_distance(slots).items():
        sent = []
        for i, p in moves:
            start = jnp.array(slots[i].starts(p, distance))[me]
            size, dim = slots[i].num_stored, slots[i].stack.dim
            sent += [jax.lax.dynamic_slice_in_dim(x, start, size, dim) for x in around[i]]
        pairs = {pair for i, p in moves for pair in _pairs(slots[i], p, distance)}
        arrived = iter(_permuted(sent, sorted((b, a) for a, b in pairs)))
        out += [(p, [next(arrived) for _ in around[i]]) for i, p in moves]
    return out


def _by_distance(slots: Sequence[StoredRows]) -> dict[int, list[tuple[int, int]]]:
    """For each distance the slots and parameters of which rows travel so far."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i, slot in enumerate(slots):
        for p, distance in slot.moves():
            found.setdefault(distance, []).append((i, p))
    return dict(sorted(found.items()))


def _pairs(slot: StoredRows, param: int, distance: int) -> list[tuple[int, int]]:
    """The stages that store rows, each with the stage that holds them."""
    starts = slot.starts(param, distance)
    return [(s - distance, s) for s, start in enumerate(starts) if start]


def _permuted(arrays: Sequence[jax.Array], pairs: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """What each stage is sent by its partner; zeros, or its own, where it is sent nothing."""
    if all(a == b for a, b in pairs):
        return list(arrays)
    words = Words.like(arrays)
    return words.unpack(jax.lax.ppermute(words.pack(arrays), STAGE_AXIS, pairs))


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _with_zeros(x: jax.Array, dim: int, before: int, behind: int) -> jax.Array:
    if not before and not behind:
        return x
    widths: list[Any] = [(0, 0)] * x.ndim
    widths[dim] = (before, behind)
    return jnp.pad(x, widths)
