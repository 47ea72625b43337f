"""Parameters on the stages of a pipeline: slots of like shapes, filled from evenly cut storage.

Between steps every parameter is sharded over all stages in one of its dimensions. So the optimizer
sees the user's tree, its state is even on unlike stages, and a checkpoint knows nothing of stages.

For a step each stage has whole copies of the parameters it reads, in *slots*: SPMD arrays of one
shape on every stage. One all-to-all fills them and one brings back their sums, or one of each for a
group of slots. A slot that a stage does not need is padding. Where a stage has several devices,
each does this with its piece of every parameter.

Of a stacked parameter a stage reads the rows of its iterations, in a slot of the longest stage's
length. If such a parameter is stored cut between its rows, a stage stores some layers and runs
others, mostly the same ones. Then stage t sends stage s only the rows that t stores and s runs. One
permute serves all pairs of the same distance; for an even cut into stages nothing moves.

Legend of shape suffixes: S stages.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.types import STAGE_AXIS
from ..plan.layout import piece_shape, without_stages
from .bitcast_packing import BitcastPacking
from .contribution import buckets


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRows:
    """The rows that each stage reads of parameters that are stacked alike.

    Attributes:
        dim: The dimension of the rows.
        num_rows: Rows of a whole parameter.
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
        """A shape with `length` rows in place of its number of rows."""
        return _resized(shape, self.dim, self.length)

    def taken(self, x: jax.Array, stage: int) -> jax.Array:
        """The rows of a stage, with zeros behind them up to `length`."""
        span = self.spans[stage]
        assert span is not None
        rows = jax.lax.slice_in_dim(x, *span, axis=self.dim)
        return _with_zeros(rows, self.dim, 0, self.length - rows.shape[self.dim])

    def put(self, x: jax.Array, stage: int) -> jax.Array:
        """The rows of `taken` in their place, zeros elsewhere."""
        span = self.spans[stage]
        assert span is not None
        start, stop = span
        rows = jax.lax.slice_in_dim(x, 0, stop - start, axis=self.dim)
        return _with_zeros(rows, self.dim, start, self.num_rows - stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRows:
    """A slot for rows of parameters that are stored cut between their rows.

    Attributes:
        params: For each stage the parameter of its rows; None: padding.
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
        """For each stage where the rows stored `distance` stages before it begin in its slot.

        The slot has `num_stored` more rows before and behind it; 0: none of those rows is read.
        """
        starts = []
        for stage, (read, span) in enumerate(zip(self.params, self.stack.spans, strict=True)):
            stored = (stage - distance) * self.num_stored
            start = 0
            if read == param and span is not None and 0 <= stored < self.stack.num_rows:
                start = max(0, stored + self.num_stored - span[0]) if stored < span[1] else 0
            starts.append(start)
        return tuple(starts)

    def moves(self) -> list[tuple[int, int]]:
        """Pairs of a parameter and a distance over which its rows travel."""
        distances = range(1 - self.num_stages, self.num_stages)
        params = dict.fromkeys(p for p in self.params if p is not None)
        return [(p, d) for p in params for d in distances if any(self.starts(p, d))]


def fill_rows(
    slots: Sequence[StoredRows], stored: Sequence[jax.Array] | Mapping[int, jax.Array]
) -> list[jax.Array]:
    """The slots of this stage from the storage of all stages; inside a `shard_map`.

    Args:
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
    """Sums in the slots, sent to the stages that store them; inside a `shard_map`.

    Args:
        sums: For each slot its sums, in one or more parts.

    Returns:
        Parameters, each with the terms of its sums on this device.
    """
    around = [
        [_with_zeros(x, slot.stack.dim, slot.num_stored, slot.num_stored) for x in parts]
        for slot, parts in zip(slots, sums, strict=True)
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
    """For each distance the slots and parameters whose rows travel over it."""
    by_distance: dict[int, list[tuple[int, int]]] = {}
    for i, slot in enumerate(slots):
        for p, distance in slot.moves():
            by_distance.setdefault(distance, []).append((i, p))
    return dict(sorted(by_distance.items()))


def _pairs(slot: StoredRows, param: int, distance: int) -> list[tuple[int, int]]:
    """Pairs of the stage that stores rows and the stage that reads them."""
    starts = slot.starts(param, distance)
    return [(s - distance, s) for s, start in enumerate(starts) if start]


def _permuted(arrays: Sequence[jax.Array], pairs: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """The arrays of each stage's partner; zeros, or unchanged arrays, without a partner."""
    if all(a == b for a, b in pairs):
        return list(arrays)
    words = BitcastPacking.like(arrays)
    return words.unpack(jax.lax.ppermute(words.pack(arrays), STAGE_AXIS, pairs))


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _with_zeros(x: jax.Array, dim: int, before: int, behind: int) -> jax.Array:
    if not before and not behind:
        return x
    widths: list[Any] = [(0, 0)] * x.ndim
    widths[dim] = (before, behind)
    return jnp.pad(x, widths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """An array of one shape on every stage, for one parameter of each.

    Attributes:
        shape: Shape of its parameters, or of their rows.
        spec: PartitionSpec of its parameters over the devices of a stage.
        piece: Shape on each of these devices.
        dim: Dimension in which the pieces are stored cut over stages; None: every stage stores all.
        params: For each stage the parameter in it; None: padding.
        trained: Whether its parameters are trained, so that their gradients are summed.
        stack: The rows in it; None: whole parameters.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: P
    piece: tuple[int, ...]
    dim: int | None
    params: tuple[int | None, ...]
    trained: bool
    stack: StackRows | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on each device of a stage."""
        return math.prod(self.piece) * jnp.dtype(self.dtype).itemsize

    @property
    def is_stored_by_rows(self) -> bool:
        """Whether its parameters are stored cut in the dimension of their rows."""
        return self.stack is not None and self.stack.dim == self.dim

    @property
    def stored_rows(self) -> StoredRows:
        """This slot as `StoredRows`, if `is_stored_by_rows`."""
        assert self.stack is not None
        return StoredRows(stack=self.stack, params=self.params)

    def rows(self, x: jax.Array, stage: int) -> jax.Array:
        """A parameter as it is in the slot of a stage: its rows, with zeros up to the length."""
        return x if self.stack is None else self.stack.taken(x, stage)

    def in_place(self, x: jax.Array, stage: int) -> jax.Array:
        """The slot of a stage as a whole parameter, zero outside of its rows."""
        return x if self.stack is None else self.stack.put(x, stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """Where each stage finds its parameters.

    Attributes:
        of: For each stage its parameters and ranges of parameters, and their slots.
        specs: PartitionSpec of each parameter between steps.
    """

    num_stages: int
    slots: tuple[Slot, ...]
    of: tuple[Mapping[int, int], ...]
    specs: tuple[P, ...]
    trained: tuple[int, ...]

    @property
    def summed(self) -> tuple[int, ...]:
        """The slots in which gradients are summed."""
        return tuple(i for i, slot in enumerate(self.slots) if slot.trained)

    @property
    def params(self) -> tuple[int, ...]:
        """The parameters in the slots, sorted."""
        return tuple(sorted({p for slot in self.slots for p in slot.params if p is not None}))

    def groups(self) -> list[tuple[int, ...]]:
        """Slots that can be filled and emptied apart: groups share no parameter.

        The largest set of slots that share parameters limits a group. Untrained parameters are in
        the first group, for they are never sharded over replicas.
        """
        frozen = tuple(i for i, slot in enumerate(self.slots) if not slot.trained)
        first: dict[int, int] = {}
        root = list(range(len(self.slots)))
        for i, slot in enumerate(self.slots):
            roots = {_root(root, first.setdefault(p, i)) for p in slot.params if p is not None}
            for j in roots | {i}:
                root[j] = min(roots | {i})
        tied: dict[int, list[int]] = {}
        for i in self.summed:
            tied.setdefault(_root(root, i), []).append(i)
        every = list(tied.values())
        sizes = [sum(math.prod(self.slots[i].piece) for i in group) for group in every]
        groups = [[i for k in bucket for i in every[k]] for bucket in buckets(sizes, max(sizes))]
        return [tuple(sorted((*frozen * (not n), *group))) for n, group in enumerate(groups)]

    def only(self, numbers: Sequence[int]) -> "Slots":
        """The slots of one of the `groups`, to be filled or emptied without the others."""
        group = dataclasses.replace(self, slots=tuple(self.slots[i] for i in numbers))
        trained = [p for p in self.trained if p in group.params]
        return dataclasses.replace(group, trained=tuple(trained))

    def fill(self, stored: Sequence[jax.Array] | Mapping[int, jax.Array]) -> list[jax.Array]:
        """The slots of this stage from its pieces of all parameters; inside a `shard_map`.

        Args:
            stored: Each parameter as this device stores it.
        """
        me = jax.lax.axis_index(STAGE_AXIS)
        by_rows = [slot for slot in self.slots if slot.is_stored_by_rows]
        cut = [slot for slot in self.slots if slot.dim is not None and slot not in by_rows]
        pieces = {slot: self._piece(slot, stored) for slot in cut}
        received: dict[Slot, jax.Array] = {}
        if cut:
            of_stage = _exchanged([[pieces[s][i] for s in cut] for i in range(self.num_stages)])
            for slot, *parts in zip(cut, *of_stage, strict=True):
                received[slot] = jnp.concatenate(parts, slot.dim)
        filled = fill_rows([slot.stored_rows for slot in by_rows], stored)
        received |= zip(by_rows, filled, strict=True)
        out = []
        for slot in self.slots:
            if slot.dim is not None:
                out.append(received[slot])
                continue
            choices = jnp.stack(self._piece(slot, stored))
            out.append(jax.lax.dynamic_index_in_dim(choices, me, keepdims=False))
        return out

    def _piece(
        self, slot: Slot, stored: Sequence[jax.Array] | Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """For each stage this device's piece of the parameter in the slot; zeros: padding."""
        some, stage = next((p, s) for s, p in enumerate(slot.params) if p is not None)
        like = jax.eval_shape(lambda x: slot.rows(x, stage), stored[some])
        empty = jnp.zeros(like.shape, slot.dtype)
        return [empty if p is None else slot.rows(stored[p], s) for s, p in enumerate(slot.params)]

    def collect(
        self, sums: Sequence[Sequence[jax.Array]], small: Sequence[jax.Array]
    ) -> tuple[list[tuple[jax.Array, ...]], list[jax.Array]]:
        """The sums of all stages, back in the pieces of storage; inside a `shard_map`.

        Args:
            sums: For each slot of `summed` its sums, in one or more parts of the piece's shape.
            small: Arrays to gather from every stage on every stage.

        Returns:
            For each trained parameter its parts, as this device stores it, added over the stages
            that read it; and each small array with a leading dimension of stages.
        """
        num = self.num_stages
        every = [(self.slots[i], parts) for i, parts in zip(self.summed, sums, strict=True)]
        summed = [(slot, parts) for slot, parts in every if not slot.is_stored_by_rows]
        by_rows = [(slot, parts) for slot, parts in every if slot.is_stored_by_rows]
        totals: dict[int, list[Any]] = {}

        def add(param: int, parts: Sequence[jax.Array]) -> None:
            before = totals.get(param)
            totals[param] = (
                list(parts)
                if before is None
                else [a + b for a, b in zip(before, parts, strict=True)]
            )

        def message(stage: int) -> list[jax.Array]:
            chunks = [_chunk(x, slot.dim, stage, num) for slot, parts in summed for x in parts]
            return [*small, *chunks]

        of_stage = _exchanged([message(i) for i in range(num)])
        first = len(small)
        for slot, sent in summed:
            for stage, param in enumerate(slot.params):
                if param is not None:
                    parts = of_stage[stage][first : first + len(sent)]
                    add(param, [slot.in_place(x, stage) for x in parts])
            first += len(sent)
        collected = collect_rows(
            [slot.stored_rows for slot, _ in by_rows], [parts for _, parts in by_rows]
        )
        for param, parts in collected:
            add(param, parts)
        missing = [p for p in self.trained if p not in totals]
        assert not missing, missing
        gathered = [jnp.stack([arrays[i] for arrays in of_stage]) for i in range(len(small))]
        return [tuple(totals[p]) for p in self.trained], gathered


def make_slots(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    read_by: Sequence[Sequence[int]],
    specs: Sequence[P],
    axes: Sequence[tuple[str, int]] = (),
    trained: Sequence[int] | None = None,
    entries: Sequence[tuple[int, tuple[int, int, int] | None]] | None = None,
) -> Slots:
    """Give each stage's parameters slots of their shapes.

    Args:
        read_by: For each stage the entries it reads; unread ones go to the first stage.
        specs: PartitionSpecs of parameters between steps, over the stages too.
        axes: Mesh axes inside a stage, with their sizes.
        trained: Parameters that are trained; None: all.
        entries: Parameters that stages read; for rows of one also their dimension, the first row
            and the one after the last. All whole parameters come first; None: no rows.
    """
    num_params, num_stages = len(shapes), len(read_by)
    trained = tuple(range(num_params) if trained is None else trained)
    entries = [(p, None) for p in range(num_params)] if entries is None else entries
    unread = set(range(num_params)) - {entries[i][0] for read in read_by for i in read}
    # Several entries of a whole parameter, or of the same rows, have one slot.
    first: dict[Any, int] = {}
    alike = [first.setdefault(entry, i) for i, entry in enumerate(entries)]
    read_by = [sorted(set(read) | (unread if s == 0 else set())) for s, read in enumerate(read_by)]
    numbers = [sorted({alike[i] for i in read}) for read in read_by]
    inside = [without_stages(spec) for spec in specs]
    pieces = [
        piece_shape(shape, spec, dict(axes))
        for shape, (spec, _) in zip(shapes, inside, strict=True)
    ]
    table: dict[Any, list[list[int | None]]] = {}
    for stage, entries_of_stage in enumerate(numbers):
        used: dict[Any, int] = {}
        for i in entries_of_stage:
            p, rows = entries[i]
            stacked = None if rows is None else rows[0]
            dtype = jnp.dtype(dtypes[p])
            kind = (shapes[p], dtype, pieces[p], *inside[p], p in trained, stacked)
            lines = table.setdefault(kind, [])
            number = used.get(kind, 0)
            used[kind] = number + 1
            if number == len(lines):
                lines.append([None] * num_stages)
            lines[number][stage] = i
    slots = []
    every = [(kind, line) for kind, lines in table.items() for line in lines]
    for (shape, dtype, piece, spec, dim, is_trained, stacked), line in every:
        slot = Slot(
            shape=shape,
            dtype=dtype,
            piece=piece,
            spec=spec,
            dim=dim,
            params=tuple(None if i is None else entries[i][0] for i in line),
            trained=is_trained,
        )
        if stacked is not None:
            spans = [None if i is None else entries[i][1] for i in line]
            stack = StackRows(
                dim=stacked,
                num_rows=shape[stacked],
                spans=tuple(None if span is None else span[1:] for span in spans),
            )
            slot = dataclasses.replace(
                slot, shape=stack.shape_of(shape), piece=stack.shape_of(piece), stack=stack
            )
        slots.append(slot)
    of_first = [{line[s]: i for i, (_, line) in enumerate(every)} for s in range(num_stages)]
    return Slots(
        num_stages=num_stages,
        slots=tuple(slots),
        of=tuple(
            {i: slot_of[alike[i]] for i in read}
            for read, slot_of in zip(read_by, of_first, strict=True)
        ),
        specs=tuple(specs),
        trained=trained,
    )


def _root(root: Sequence[int], i: int) -> int:
    while root[i] != i:
        i = root[i]
    return i


def _exchanged(messages: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
    """Exchange one message with each stage, in one all-to-all."""
    words = BitcastPacking.like(messages[0])
    sent = jnp.stack([words.pack(arrays) for arrays in messages])
    received = jax.lax.all_to_all(sent, STAGE_AXIS, 0, 0, tiled=True)
    return [words.unpack(received[i]) for i in range(len(messages))]


def _chunk(x: jax.Array, dim: int | None, index: int, num: int) -> jax.Array:
    """One of `num` equal pieces in a dimension; None: the whole."""
    if dim is None:
        return x
    size = x.shape[dim] // num
    return jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=dim)
