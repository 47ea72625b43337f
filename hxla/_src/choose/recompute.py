"""The fastest order of a chain's programs for the gradient within a limit of memory.

With a stash on the host, residuals go there and come back while the segment above runs (or, if all
microbatches of a device run a segment together, while the microbatch before runs). The second
backward reads its residuals at once, so in the former case they stay on the device.

`C(s, t, m)` is the least time of the gradients of segments s to t in m bytes, including the input
of s and the gradient of the outputs of t. The first operations decide. Keep: the input of s is kept
during the segments from s' on, and then used for those before. Residuals: the forward of s leaves
residuals for its backward. Ready: the input of s and the residuals of a later segment are kept, and
its backward runs after the forwards before it. This pays if these residuals are smaller than the
gradients of the backward (`C_r` includes them).

    keep, s'      F(s..s'-1) + C(s', t, m - input of s) + C(s, s'-1, m)
    residuals, r  F(s, r) + C(s+1, t, m - r) + B(s, r)
    ready, s', r  F(s..s'-2) + F(s'-1, r) + C(s', t, m - input of s - r) + C_r(s, s'-1, m)

A kept input stays until the backward of its segment. Inputs that are kept, used, dropped and
recomputed are left out: no polynomial algorithm is known for them, and exhaustive search on small
chains rarely gains by them.

References:
    Beaumont, Eyraud-Dubois, Hermann, Joly and Shilova, "Optimal checkpointing for heterogeneous
    chains: how to train deep neural networks with limited memory", 2019, section 4 (there the loss
    is a separate segment at the end; here it is in the last segment).
    Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "Rockmate", ICML 2023, section 3.3 (several
    choices of residuals per segment).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from ..core.errors import PlanError
from ..schedule.schedules import BACKWARD, FORWARD
from ..schedule.segment_sequence import (
    CUT,
    INPUT,
    Residuals,
    SegmentCost,
    SegmentOperation,
    SegmentSequence,
    SequenceReplay,
    check_costs,
    replay_sequence,
)

#: The place of residuals: on the device; on the host, fetched while the segment above runs; or
#: fetched just before, while another microbatch of the segment runs.
Waits = Literal["device", "host, segment by segment", "host, microbatch by microbatch"]


def keep_texts(num: int, waits: Waits = "device") -> tuple[str, ...]:
    """The sequence that keeps the residuals of all `num` segments."""
    away = _away(range(num - 1), num, waits)
    return tuple(_texts(num, {i: f"F{i}:{CUT}" for i in range(num - 1)}, away, f":{CUT}", waits))


def boundary_texts(num: int, waits: Waits = "device") -> tuple[str, ...]:
    """The sequence that keeps the boundaries between `num` segments."""
    away = _away(range(1, num - 1), num, waits)  # nothing crosses into the first
    return tuple(_texts(num, {i: f"F{i}+" for i in range(num - 1)}, away, "", waits))


def num_again(sequence: Sequence[str]) -> int:
    """The number of recomputed forwards of a sequence."""
    forwards = sum(text.startswith("F") for text in sequence)
    return forwards - sum(text.startswith("B") for text in sequence) + 1


def _away(kept: range, num: int, waits: Waits) -> range:
    """The segments with kept values on the host."""
    if waits == "device":
        return range(0)
    return kept if waits == "host, microbatch by microbatch" else range(kept.start, num - 2)


def _texts(
    num: int, forwards: dict[int, str], away: range, copied: str, waits: Waits
) -> Iterator[str]:
    for i, text in forwards.items():
        yield text
        if i in away:
            yield f"O{i}{copied}"
    yield f"B{num - 1}:{INPUT}"
    for i in reversed(range(num - 1)):
        coming = i if waits == "host, microbatch by microbatch" else i - 1
        if coming in away:
            yield f"I{coming}{copied}"
        if forwards[i] != f"F{i}:{CUT}":
            yield f"F{i}:{CUT}"
        yield f"B{i}:{CUT}"


Array = np.ndarray
READY = "ready"
# The residuals already made of the last segment, from 1 (0: none); first segment; last segment.
Cell = tuple[int, int, int]

_MOST_READY = 32  # segments: longer chains have no ready moves, which would take minutes to search


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """First operations of a cell that differ only in the division of its segments.

    K moves; the k-th begins the upper part at segment s + 1 + k.

    Attributes:
        kind: `forward`: the input is kept; `backward`: residuals of the first segment are kept;
            `ready`: the input and the residuals of the lower part's last segment are kept.
        seconds: [K] Without the two parts.
        need: [K] Slots without the two parts.
        withheld: Slots that the upper part cannot use.
        upper: The cells of the upper parts, as an index of a table.
        lower: The cells of the lower parts.
    """

    kind: str
    residuals: Residuals | None
    seconds: Array
    need: Array
    withheld: int
    upper: Any
    lower: Any

    def times(self, table: Array, low: int, high: int) -> Array:
        """[K, high - low] Seconds with `low` to `high` - 1 slots of memory."""
        times = np.repeat(self.seconds[:, None], high - low, axis=1)
        if self.lower is not None:
            times += table[self.lower][..., low:high]
        if self.upper is not None:
            without = min(max(self.withheld - low, 0), high - low)
            start, stop = low + without - self.withheld, high - self.withheld
            if without < high - low:
                times[:, without:] += table[self.upper][..., start:stop]
            times[:, :without] = np.inf
        times[np.arange(low, high) < self.need[:, None]] = np.inf
        return times


class SlottedChain:
    """A chain whose bytes are counted in slots.

    Args:
        costs: In bytes.
        slot: The bytes of a slot.
    """

    def __init__(self, costs: Sequence[SegmentCost], slot: int) -> None:
        self._costs = [_rounded(cost, slot) for cost in costs]
        num = len(costs)
        gradients = [c.input_gradient_bytes for c in self._costs[1:]] + [0]
        left = [c.parameter_gradient_bytes for c in self._costs]
        # If t is the last segment without its backward: the gradient of its outputs, and the
        # gradients of the parameters behind it.
        self._above = [gradients[t] + sum(left[t + 1 :]) for t in range(num)]
        self._inputs = np.array([c.input_bytes for c in self._costs] + [0], np.int64)
        temporary = np.array([c.forward_temporary_bytes for c in self._costs], np.int64)
        self._forward = self._inputs[:-1] + self._inputs[1:] + temporary
        self._ends = np.cumsum([0.0, *(c.forward_seconds for c in self._costs)])
        # A ready move pays only if the backward makes more bytes than it frees.
        self._light = [
            [r for r in c.residuals if _stash(c, r) < _gradients(c)]
            if i and num <= _MOST_READY
            else []
            for i, c in enumerate(self._costs)
        ]
        self.shape = (1 + max(map(len, self._light)), num, num)

    def cells(self) -> Iterator[Cell]:
        """All cells, each after the cells that its moves read."""
        num = self.shape[1]
        for s in reversed(range(num)):
            for t in range(s, num):
                for ready in reversed(range(1 + len(self._light[t]))):
                    yield ready, s, t

    def moves(self, cell: Cell) -> Iterator[Moves]:
        """Every first operation."""
        ready, s, t = cell
        cost = self._costs[s]
        if s == t and ready:
            yield self._with_residuals(cell, self._light[t][ready - 1])
            return
        for residuals in cost.residuals:
            if not (residuals.is_input and s < t):
                yield self._with_residuals(cell, residuals)
        if s == t:
            return
        above = self._bytes_above(cell)
        passes = np.concatenate([[0], np.maximum.accumulate(self._forward[s + 1 : t])])
        kept = int(self._inputs[s])
        need = np.maximum(self._forward[s], kept + passes)
        seconds = self._ends[s + 1 : t + 1] - self._ends[s]
        for last in range(s + 1, t if ready else t + 1):
            for i, r in enumerate(self._light[last], 1):
                yield self._with_ready(cell, need[last - s - 1] + above, last, i, r)
        if ready:  # nothing has to run for the last segment
            need[-1] = kept
            seconds[-1] = 0.0
        upper, lower = (ready, slice(s + 1, t + 1), t), (0, s, slice(s, t))
        yield Moves(FORWARD, None, seconds, need + above, kept, upper, lower)

    def operations(
        self, choose: Callable[[Cell, int], tuple[Moves, int]], slots: int
    ) -> list[SegmentOperation]:
        """The operations of the whole chain.

        Args:
            choose: Maps a cell and its slots to the moves and the index among them.
            slots: Slots of the whole chain.
        """
        done = []
        todo: list[SegmentOperation | tuple[Cell, int]] = [((0, 0, self.shape[1] - 1), slots)]
        while todo:
            item = todo.pop()
            if isinstance(item, SegmentOperation):
                done.append(item)
            else:
                cell, slots = item
                move, k = choose(cell, slots)
                todo += reversed(self._expanded(cell, slots, move, k))
        return done

    def _expanded(
        self, cell: Cell, slots: int, move: Moves, k: int
    ) -> list[SegmentOperation | tuple[Cell, int]]:
        """A cell's operations and parts after its first move."""
        ready, s, t = cell
        r = move.residuals
        upper: tuple[Cell, int] = ((ready, s + 1 + k, t), slots - move.withheld)
        if move.kind == BACKWARD and r is not None:
            forward = [SegmentOperation(FORWARD, s, r.name)]
            forward *= not (r.is_input or (ready and s == t))
            return [*forward, *([upper] if s < t else []), SegmentOperation(BACKWARD, s, r.name)]
        if move.kind == READY and r is not None:
            last = move.lower[2].start
            forwards = _forwards(s, last)
            if not r.is_input:
                forwards.append(SegmentOperation(FORWARD, last, r.name))
            elif last < t:
                forwards.append(SegmentOperation(FORWARD, last, keeps_input=True))
            upper = (ready, last + 1, t), slots - move.withheld
            lower: tuple[Cell, int] = (*move.lower[:2], last), slots
            return [*forwards, *([upper] if last < t else []), lower]
        first = s + 1 + k  # of the upper part
        forwards = [] if ready and first == t else _forwards(s, first)
        return [*forwards, upper, ((0, s, first - 1), slots)]

    def _with_residuals(self, cell: Cell, r: Residuals) -> Moves:
        ready, s, t = cell
        cost = self._costs[s]
        need = _stash(cost, r) + self._above[s] + _gradients(cost) + r.backward_temporary_bytes
        seconds = r.backward_seconds
        if not (r.is_input or (ready and s == t)):
            need = max(need, self._forward_need(s, r) + self._bytes_above(cell))
            seconds += r.forward_seconds
        upper = (ready, slice(s + 1, s + 2), t) if s < t else None
        return Moves(
            kind=BACKWARD,
            residuals=r,
            seconds=np.array([seconds]),
            need=np.array([need]),
            withheld=_stash(cost, r),
            upper=upper,
            lower=None,
        )

    def _with_ready(self, cell: Cell, need: int, last: int, i: int, r: Residuals) -> Moves:
        ready, s, t = cell
        kept, seconds = int(self._inputs[s]), self._ends[last] - self._ends[s]
        if not r.is_input:
            need = max(need, self._bytes_above(cell) + kept + self._forward_need(last, r))
            seconds += r.forward_seconds
        elif last < t:
            need = max(need, self._bytes_above(cell) + kept + int(self._forward[last]))
            seconds += self._costs[last].forward_seconds
        return Moves(
            kind=READY,
            residuals=r,
            seconds=np.array([seconds]),
            need=np.array([need]),
            withheld=kept + _stash(self._costs[last], r),
            upper=(ready, slice(last + 1, last + 2), t) if last < t else None,
            lower=(i, s, slice(last, last + 1)),
        )

    def _forward_need(self, i: int, r: Residuals) -> int:
        """Slots during the forward that makes residuals."""
        around = int(self._inputs[i] + self._inputs[i + 1])
        return around + r.num_bytes + r.forward_temporary_bytes

    def _bytes_above(self, cell: Cell) -> int:
        """Slots of the gradients behind a cell and of the ready residuals of its last segment."""
        ready, _, t = cell
        made = _stash(self._costs[t], self._light[t][ready - 1]) if ready else 0
        return self._above[t] + made


def _forwards(start: int, stop: int) -> list[SegmentOperation]:
    """Forwards of consecutive segments, of which the first keeps its input."""
    return [SegmentOperation(FORWARD, j, keeps_input=j == start) for j in range(start, stop)]


def _stash(cost: SegmentCost, r: Residuals) -> int:
    return r.num_bytes + (cost.input_bytes if r.reads_input else 0)


def _gradients(cost: SegmentCost) -> int:
    return cost.input_gradient_bytes + cost.parameter_gradient_bytes


def _rounded(cost: SegmentCost, slot: int) -> SegmentCost:
    def rounded(value: Any) -> Any:
        names = [f.name for f in dataclasses.fields(value) if f.name.endswith("_bytes")]
        slots = {name: (getattr(value, name) + slot // 2) // slot for name in names}
        if isinstance(value, Residuals) and value.num_bytes:
            slots["num_bytes"] = max(slots["num_bytes"], 1)  # 0 bytes would mean the input alone
        return dataclasses.replace(value, **slots)

    return dataclasses.replace(rounded(cost), residuals=tuple(map(rounded, cost.residuals)))


_MOST_ENTRIES = 4_000_000  # of a table of all cells
_LEAST_SLOTS, _MOST_SLOTS = 500, 20_000
_BEYOND = 1.1  # of the limit's slots, against rounding up


def best_sequence(
    costs: Sequence[SegmentCost], memory_bytes: int, *, num_slots: int | None = None
) -> SequenceReplay:
    """The fastest sequence for a chain within a limit of memory.

    Bytes are counted in slots, each quantity rounded to the nearest number of slots. A replay in
    bytes decides whether a sequence fits, and the fastest that fits is taken. So the limit is exact
    and rounding costs little: 500 slots for 100 segments come within 0.1 % of 4,000 slots;
    quantities rounded up lost 0.5 to 3 %. Slots double from the greatest common divisor of all
    quantities, which rounds nothing, until `num_slots` of them reach the limit. The best of all
    sizes counts, so more memory never makes a sequence slower.

    Args:
        memory_bytes: The most bytes on the device at once, as `SegmentCost` counts them.
        num_slots: The most slots (default: 500 for long chains, 20,000 for short ones).

    Returns:
        The sequence with its seconds and bytes.

    Raises:
        PlanError: If no sequence fits, with the bytes of the least one and its segment.
    """
    fastest = keep_all(costs)
    if fastest.peak_bytes <= memory_bytes:
        return fastest
    least = least_memory(costs)
    if least.peak_bytes > memory_bytes:
        op = least.peak_operation
        raise PlanError(
            f"a microbatch does not fit: with all recomputed that can be, the {op.kind} of segment "
            f"{op.segment} ({costs[op.segment].name}) still needs {least.peak_bytes:,} bytes of "
            f"{memory_bytes:,}. Give it {least.peak_bytes:,} bytes, a smaller microbatch_size, or "
            "shorter segments"
        )
    if num_slots is None:
        num_slots = min(max(_MOST_ENTRIES // len(costs) ** 2, _LEAST_SLOTS), _MOST_SLOTS)
    slot = math.gcd(*(b for cost in costs for b in _quantities(cost))) or 1
    replays = [least]
    while True:
        limit = min(memory_bytes, slot * num_slots)
        if limit >= least.peak_bytes:
            replays += _best_in_slots(costs, slot, int(_BEYOND * limit / slot), memory_bytes)
        if limit == memory_bytes:
            return min(replays, key=lambda replay: (replay.seconds, replay.peak_bytes))
        slot *= 2


def keep_all(costs: Sequence[SegmentCost]) -> SequenceReplay:
    """The fastest sequence without a limit: each segment with its fastest residuals."""
    check_costs(costs)
    forwards, backwards = [], []
    for i, cost in enumerate(costs):
        # A backward from the input needs a plain forward before it, except in the last segment.
        plain = cost.forward_seconds if i + 1 < len(costs) else 0.0
        seconds = {
            r.name: (plain if r.is_input else r.forward_seconds) + r.backward_seconds
            for r in cost.residuals
        }
        best = min(cost.residuals, key=lambda r: (seconds[r.name], r.num_bytes))
        if not best.is_input:
            forwards.append(SegmentOperation(FORWARD, i, best.name))
        elif i + 1 < len(costs):
            forwards.append(SegmentOperation(FORWARD, i, keeps_input=True))
        backwards.append(SegmentOperation(BACKWARD, i, best.name))
    return _replay(costs, [*forwards, *reversed(backwards)])


def least_memory(costs: Sequence[SegmentCost]) -> SequenceReplay:
    """The sequence of least memory; among equals the least time at each first operation."""
    check_costs(costs)
    chain = SlottedChain(costs, slot=1)
    peaks = np.zeros(chain.shape, np.int64)
    seconds = np.zeros(chain.shape)
    moves: dict[Cell, tuple[Moves, int]] = {}
    for cell in chain.cells():
        options: list[tuple[int, float, int, Moves, int]] = []
        for move in chain.moves(cell):
            need, time = move.need, move.seconds
            if move.upper is not None:
                need = np.maximum(need, peaks[move.upper] + move.withheld)
                time = time + seconds[move.upper]
            if move.lower is not None:
                need = np.maximum(need, peaks[move.lower])
                time = time + seconds[move.lower]
            k = int(np.lexsort((time, need))[0])
            options.append((int(need[k]), float(time[k]), len(options), move, k))
        peaks[cell], seconds[cell], _, move, k = min(options, key=lambda option: option[:3])
        moves[cell] = move, k
    return _replay(costs, chain.operations(lambda cell, _: moves[cell], 0))


def _best_in_slots(
    costs: Sequence[SegmentCost], slot: int, num: int, memory_bytes: int
) -> list[SequenceReplay]:
    """The fastest sequence that fits, over all numbers of slots up to `num`, if any."""
    chain = SlottedChain(costs, slot)
    table = np.full((*chain.shape, num + 1), np.inf)
    for cell in chain.cells():
        for move in chain.moves(cell):
            times = move.times(table, 0, num + 1).min(axis=0)
            np.minimum(table[cell], times, out=table[cell])

    def choose(cell: Cell, slots: int) -> tuple[Moves, int]:
        moves = list(chain.moves(cell))
        times = [move.times(table, slots, slots + 1)[:, 0] for move in moves]
        best = int(np.argmin([by_place.min() for by_place in times]))
        return moves[best], int(np.argmin(times[best]))

    seconds = table[0, 0, -1]
    faster = np.flatnonzero(seconds < np.concatenate([[np.inf], seconds[:-1]]))
    for slots in reversed(faster.tolist()):
        replay = _replay(costs, chain.operations(choose, slots))
        if replay.peak_bytes <= memory_bytes:
            return [replay]
    return []


def _quantities(cost: SegmentCost) -> Iterator[int]:
    values: list[SegmentCost | Residuals] = [cost, *cost.residuals]
    for value in values:
        names = (field.name for field in dataclasses.fields(value))
        yield from (getattr(value, name) for name in names if name.endswith("_bytes"))


def _replay(costs: Sequence[SegmentCost], operations: Sequence[SegmentOperation]) -> SequenceReplay:
    sequence = SegmentSequence(num_segments=len(costs), operations=tuple(operations))
    return replay_sequence(sequence, costs)
