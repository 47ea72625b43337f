"""What may come first in the gradient of a part of a chain: the moves of `_recompute`'s program."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._schedule._schedules import BACKWARD, FORWARD
from .._schedule._segment_sequence import FETCH, OFFLOAD, SegmentOperation
from .._schedule._sequence_replay import Residuals, SegmentCost

Array = np.ndarray
READY = "ready"
# Whether the host has the input of the first segment; which residuals of the last segment are made
# already, from 1; the first segment; the last one.
Cell = tuple[int, int, int, int]

_MOST_READY = 32  # segments: of longer chains no backward waits, which would take minutes to search


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """First operations of a cell that differ only in where its segments are divided.

    K moves, the k-th of which begins the upper part at segment s + 1 + k.

    Attributes:
        kind: `forward` where the input is kept, `offload` where it goes to the host, `backward`
            where residuals of the first segment are kept, `ready` where the input is, and residuals
            of the lower part's last segment, whose backward waits.
        residuals: What is made.
        seconds: [K] What they take without their parts.
        need: [K] The slots that they need without their parts.
        withheld: Slots that the upper part lacks.
        upper: The cells of the upper parts, as an index of a table.
        lower: Those of the lower parts.
    """

    kind: str
    residuals: Residuals | None
    seconds: Array
    need: Array
    withheld: int
    upper: Any
    lower: Any

    def times(self, table: Array, low: int, high: int) -> Array:
        """[K, high - low] The times with memory of `low` to `high` - 1 slots."""
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
        # While t is the last segment without its backward: the gradient of its outputs, and those
        # of the parameters behind it.
        self._above = [gradients[t] + sum(left[t + 1 :]) for t in range(num)]
        self._inputs = np.array([c.input_bytes for c in self._costs] + [0], np.int64)
        temporary = np.array([c.forward_temporary_bytes for c in self._costs], np.int64)
        self._forward = self._inputs[:-1] + self._inputs[1:] + temporary
        self._ends = np.cumsum([0.0, *(c.forward_seconds for c in self._costs)])
        # A backward may wait for forwards before it only where it makes more than it frees.
        self._light = [
            [r for r in c.residuals if _held(c, r) < _made(c)] if i and num <= _MOST_READY else []
            for i, c in enumerate(self._costs)
        ]
        offloads = any(c.offload_seconds is not None for c in costs)
        self.shape = (1 + offloads, 1 + max(map(len, self._light)), num, num)

    def cells(self) -> Iterator[Cell]:
        """All cells, each after those that its moves read."""
        num = self.shape[2]
        for s in reversed(range(num)):
            for host in reversed(range(self.shape[0])):
                for t in range(s, num):
                    for ready in reversed(range(1 + len(self._light[t]))):
                        yield host, ready, s, t

    def moves(self, cell: Cell) -> Iterator[Moves]:
        """Every first operation."""
        host, ready, s, t = cell
        cost = self._costs[s]
        if s == t and ready:
            yield self._with_residuals(cell, self._light[t][ready - 1])
            return
        for residuals in cost.residuals:
            if not (residuals.is_input and s < t):
                yield self._with_residuals(cell, residuals)
        if s == t:
            return
        above = self._held_above(cell)
        passes = np.concatenate([[0], np.maximum.accumulate(self._forward[s + 1 : t])])
        kept, first = int(self._inputs[s]), self._forward[s]
        need, need_on_host = np.maximum(first, kept + passes), np.maximum(first, passes)
        seconds = self._ends[s + 1 : t + 1] - self._ends[s]
        for last in range(s + 1, t if ready else t + 1):
            for i, r in enumerate(self._light[last], 1):
                yield self._with_ready(cell, need[last - s - 1] + above, last, i, r)
        if ready:  # nothing has to run for the last segment
            need[-1] = need_on_host[-1] = kept
            seconds[-1] = 0.0
        upper, lower = (0, ready, slice(s + 1, t + 1), t), (host, 0, s, slice(s, t))
        yield Moves(FORWARD, None, seconds, need + above, kept, upper, lower)
        if cost.offload_seconds is not None:
            copies = cost.fetch_seconds + (0.0 if host else cost.offload_seconds)
            lower = (1, 0, s, slice(s, t))
            yield Moves(OFFLOAD, None, seconds + copies, need_on_host + above, 0, upper, lower)

    def operations(
        self, choose: Callable[[Cell, int], tuple[Moves, int]], slots: int
    ) -> list[SegmentOperation]:
        """The operations of the whole chain.

        Args:
            choose: The move of a cell in so many slots, and which of its kind.
            slots: That the whole has.
        """
        done = []
        todo: list[SegmentOperation | tuple[Cell, int]] = [((0, 0, 0, self.shape[2] - 1), slots)]
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
        host, ready, s, t = cell
        r = move.residuals
        upper: tuple[Cell, int] = ((0, ready, s + 1 + k, t), slots - move.withheld)
        if move.kind == BACKWARD and r is not None:
            forward = [SegmentOperation(FORWARD, s, r.name)]
            forward *= not (r.is_input or (ready and s == t))
            return [*forward, *([upper] if s < t else []), SegmentOperation(BACKWARD, s, r.name)]
        if move.kind == READY and r is not None:
            last = move.lower[3].start
            forwards = _forwards(s, last, keeps_input=True)
            if not r.is_input:
                forwards.append(SegmentOperation(FORWARD, last, r.name))
            elif last < t:
                forwards.append(SegmentOperation(FORWARD, last, keeps_input=True))
            upper = (0, ready, last + 1, t), slots - move.withheld
            lower: tuple[Cell, int] = (*move.lower[:3], last), slots
            return [*forwards, *([upper] if last < t else []), lower]
        first = s + 1 + k  # of the upper part
        # A copy on the host that is there already costs nothing; only the device's is dropped.
        forwards = _forwards(s, first, keeps_input=move.kind == FORWARD or not host)
        if ready and first == t:
            forwards = []
        if move.kind == FORWARD:
            return [*forwards, upper, ((host, 0, s, first - 1), slots)]
        out = [SegmentOperation(OFFLOAD, s)] * (not host or not forwards)
        lower = (1, 0, s, first - 1), slots
        fetch = SegmentOperation(FETCH, s)
        return [*forwards[:1], *out, *forwards[1:], upper, fetch, lower]

    def _with_residuals(self, cell: Cell, r: Residuals) -> Moves:
        _, ready, s, t = cell
        cost = self._costs[s]
        need = _held(cost, r) + self._above[s] + _made(cost) + r.backward_temporary_bytes
        seconds = r.backward_seconds
        if not (r.is_input or (ready and s == t)):
            need = max(need, self._made_with(s, r) + self._held_above(cell))
            seconds += r.forward_seconds
        upper = (0, ready, slice(s + 1, s + 2), t) if s < t else None
        return Moves(
            kind=BACKWARD,
            residuals=r,
            seconds=np.array([seconds]),
            need=np.array([need]),
            withheld=_held(cost, r),
            upper=upper,
            lower=None,
        )

    def _with_ready(self, cell: Cell, need: int, last: int, i: int, r: Residuals) -> Moves:
        host, ready, s, t = cell
        kept, seconds = int(self._inputs[s]), self._ends[last] - self._ends[s]
        if not r.is_input:
            need = max(need, self._held_above(cell) + kept + self._made_with(last, r))
            seconds += r.forward_seconds
        elif last < t:
            need = max(need, self._held_above(cell) + kept + int(self._forward[last]))
            seconds += self._costs[last].forward_seconds
        return Moves(
            kind=READY,
            residuals=r,
            seconds=np.array([seconds]),
            need=np.array([need]),
            withheld=kept + _held(self._costs[last], r),
            upper=(0, ready, slice(last + 1, last + 2), t) if last < t else None,
            lower=(host, i, s, slice(last, last + 1)),
        )

    def _made_with(self, i: int, r: Residuals) -> int:
        """Slots of the forward that makes residuals."""
        around = int(self._inputs[i] + self._inputs[i + 1])
        return around + r.num_bytes + r.forward_temporary_bytes

    def _held_above(self, cell: Cell) -> int:
        """Slots of what lies behind a cell, and of what is made already of its last segment."""
        _, ready, _, t = cell
        made = _held(self._costs[t], self._light[t][ready - 1]) if ready else 0
        return self._above[t] + made


def _forwards(start: int, stop: int, *, keeps_input: bool) -> list[SegmentOperation]:
    """Forwards of consecutive segments, of which only the first may keep its input."""
    return [
        SegmentOperation(FORWARD, j, keeps_input=j == start and keeps_input)
        for j in range(start, stop)
    ]


def _held(cost: SegmentCost, r: Residuals) -> int:
    return r.num_bytes + (cost.input_bytes if r.reads_input else 0)


def _made(cost: SegmentCost) -> int:
    return cost.input_gradient_bytes + cost.parameter_gradient_bytes


def _rounded(cost: SegmentCost, slot: int) -> SegmentCost:
    def rounded(value: Any) -> Any:
        names = [f.name for f in dataclasses.fields(value) if f.name.endswith("_bytes")]
        slots = {name: (getattr(value, name) + slot // 2) // slot for name in names}
        if isinstance(value, Residuals) and value.num_bytes:
            slots["num_bytes"] = max(slots["num_bytes"], 1)  # with none they would be the input
        return dataclasses.replace(value, **slots)

    return dataclasses.replace(rounded(cost), residuals=tuple(map(rounded, cost.residuals)))
