"""Parameters on the stages of a pipeline: slots of like shapes, filled from evenly cut storage.

Between steps every parameter is cut over all stages in one of its own dimensions, so the optimizer
sees the user's tree, its state is even on unlike stages, and a checkpoint knows nothing of stages.
For a step each stage holds the whole of the parameters it reads, in *slots*: arrays of which each
stage has one of the same shape, as SPMD asks. One all-to-all fills them and one brings back what
was summed in them, or one each for a group of slots. A slot that a stage has no use for is padding.
Where a stage has several devices, each of them does this with its own piece of every parameter.

Of a stacked parameter a stage holds the rows of its own iterations, in a slot that is as long as
the longest stage's; see `_layer_rows` for one that is stored cut between its rows.

Legend of shape suffixes: S stages.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._core._types import STAGE_AXIS
from .._plan._stage_storage import piece_shape, without_stages
from ._contribution import buckets
from ._layer_rows import StackRows, StoredRows, collect_rows, fill_rows
from ._words import Words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """An array that every stage has.

    Attributes:
        shape: Of a parameter in it, whole, or of the rows of one.
        dtype: Of the same.
        spec: How the devices of a stage cut those parameters.
        piece: Shape of what each of these devices has.
        dim: Dimension in which stages store those pieces cut; None: every stage stores them.
        params: For each stage the parameter in it, or None: padding.
        trained: Whether they are trained, and so summed.
        stack: The rows that are in it; None: whole parameters.
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
    def is_stored_by_rows(self) -> bool:
        """Whether stages store the parameters cut in the dimension of which it holds rows."""
        return self.stack is not None and self.stack.dim == self.dim

    @property
    def stored_rows(self) -> StoredRows:
        """The same of which `is_stored_by_rows` is true."""
        assert self.stack is not None
        return StoredRows(stack=self.stack, params=self.params)

    def rows(self, x: jax.Array, stage: int) -> jax.Array:
        """The part of a parameter that is in it on a stage, with zeros up to its length."""
        return x if self.stack is None else self.stack.taken(x, stage)

    def in_place(self, x: jax.Array, stage: int) -> jax.Array:
        """What is in it on a stage, as a part of a parameter that is zero elsewhere."""
        return x if self.stack is None else self.stack.put(x, stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """Where each stage finds its parameters.

    Attributes:
        num_stages: S.
        slots: All of them.
        of: For each stage its parameters and ranges of parameters, and their slots.
        specs: PartitionSpec of each parameter between steps.
        trained: Those parameters that are trained.
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
        """The parameters that are in them, in their order."""
        return tuple(sorted({p for slot in self.slots for p in slot.params if p is not None}))

    def groups(self) -> list[tuple[int, ...]]:
        """Slots that can be filled and emptied apart: no other group has their parameters.

        A group is no larger than it must be for the largest of them. What is not trained is in the
        first besides, for nothing of it is shared out.
        """
        frozen = tuple(i for i, slot in enumerate(self.slots) if not slot.trained)
        first: dict[int, int] = {}
        root = list(range(len(self.slots)))
        for i, slot in enumerate(self.slots):
            own = {_root(root, first.setdefault(p, i)) for p in slot.params if p is not None}
            for j in own | {i}:
                root[j] = min(own | {i})
        tied: dict[int, list[int]] = {}
        for i in self.summed:
            tied.setdefault(_root(root, i), []).append(i)
        every = list(tied.values())
        sizes = [sum(math.prod(self.slots[i].piece) for i in own) for own in every]
        found = [[i for k in bucket for i in every[k]] for bucket in buckets(sizes, max(sizes))]
        return [tuple(sorted((*frozen * (not n), *own))) for n, own in enumerate(found)]

    def only(self, numbers: Sequence[int]) -> "Slots":
        """Those of one of the `groups`, to be filled or emptied without the others."""
        own = dataclasses.replace(self, slots=tuple(self.slots[i] for i in numbers))
        trained = [p for p in self.trained if p in own.params]
        return dataclasses.replace(own, trained=tuple(trained))

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
        """For each stage what this device stores of its parameter, zeros where it has none."""
        some, stage = next((p, s) for s, p in enumerate(slot.params) if p is not None)
        like = jax.eval_shape(lambda x: slot.rows(x, stage), stored[some])
        empty = jnp.zeros(like.shape, slot.dtype)
        return [empty if p is None else slot.rows(stored[p], s) for s, p in enumerate(slot.params)]

    def collect(
        self, sums: Sequence[Sequence[jax.Array]], small: Sequence[jax.Array]
    ) -> tuple[list[tuple[jax.Array, ...]], list[jax.Array]]:
        """What all stages summed, back in the pieces of storage; inside a `shard_map`.

        Args:
            sums: For each slot of `summed` its sums, in one or more parts of the piece's shape.
            small: Arrays that every stage is to see of every stage.

        Returns:
            For each trained parameter its parts, as this device stores it, added over the stages
            that read it; and each small array with a leading dimension of stages.
        """
        num = self.num_stages
        every = [(self.slots[i], own) for i, own in zip(self.summed, sums, strict=True)]
        summed = [(slot, own) for slot, own in every if not slot.is_stored_by_rows]
        by_rows = [(slot, own) for slot, own in every if slot.is_stored_by_rows]
        totals: dict[int, list[Any]] = {}

        def add(param: int, parts: Sequence[jax.Array]) -> None:
            before = totals.get(param)
            totals[param] = (
                list(parts)
                if before is None
                else [a + b for a, b in zip(before, parts, strict=True)]
            )

        def message(stage: int) -> list[jax.Array]:
            own = [_chunk(part, slot.dim, stage, num) for slot, parts in summed for part in parts]
            return [*small, *own]

        of_stage = _exchanged([message(i) for i in range(num)])
        first = len(small)
        for slot, own in summed:
            for stage, param in enumerate(slot.params):
                if param is not None:
                    parts = of_stage[stage][first : first + len(own)]
                    add(param, [slot.in_place(x, stage) for x in parts])
            first += len(own)
        collected = collect_rows(
            [slot.stored_rows for slot, _ in by_rows], [own for _, own in by_rows]
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
        shapes: Of every parameter.
        dtypes: Of every parameter.
        read_by: For each stage the entries it reads; what nobody reads is the first stage's.
        specs: How parameters lie between steps, over the stages too.
        axes: Mesh axes inside a stage, with their sizes.
        trained: Parameters that are trained; None: all.
        entries: What stages read: parameters, with the dimension, the first row and the one after
            the last where it is some rows of one. All parameters come first; None: there are no
            others.
    """
    num_params, num_stages = len(shapes), len(read_by)
    trained = tuple(range(num_params) if trained is None else trained)
    entries = [(p, None) for p in range(num_params)] if entries is None else entries
    unread = set(range(num_params)) - {entries[i][0] for own in read_by for i in own}
    held = [sorted(set(own) | (unread if s == 0 else set())) for s, own in enumerate(read_by)]
    inside = [without_stages(spec) for spec in specs]
    pieces = [
        piece_shape(shape, spec, dict(axes))
        for shape, (spec, _) in zip(shapes, inside, strict=True)
    ]
    table: dict[Any, list[list[int | None]]] = {}
    for stage, own in enumerate(held):
        used: dict[Any, int] = {}
        for i in own:
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
    return Slots(
        num_stages=num_stages,
        slots=tuple(slots),
        of=tuple(
            {entry: i for i, (_, line) in enumerate(every) if (entry := line[s]) is not None}
            for s in range(num_stages)
        ),
        specs=tuple(specs),
        trained=trained,
    )


def _root(root: Sequence[int], i: int) -> int:
    while root[i] != i:
        i = root[i]
    return i


def _exchanged(messages: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
    """What each stage sent to this one, from what this one sends to each; one all-to-all."""
    words = Words.like(messages[0])
    sent = jnp.stack([words.pack(own) for own in messages])
    received = jax.lax.all_to_all(sent, STAGE_AXIS, 0, 0, tiled=True)
    return [words.unpack(received[i]) for i in range(len(messages))]


def _chunk(x: jax.Array, dim: int | None, index: int, num: int) -> jax.Array:
    """One of `num` equal pieces in a dimension; None: the whole."""
    if dim is None:
        return x
    size = x.shape[dim] // num
    return jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=dim)
