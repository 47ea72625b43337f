"""Which programs of a chain of segments to run when: the fastest gradient in given memory.

`C(s, t, m)` is the least time of the gradients of segments s to t in m bytes, of which the input of
s and the gradient of the outputs of t take their part. The first operations decide. The input of s
is kept, or goes to the host, while segments from s' on are worked through, and then serves those
before. Or the forward of s leaves residuals, which wait for its backward. Or the input of s and
residuals of a later segment are kept, whose backward then waits for forwards before it: that pays
where these residuals are smaller than the gradients that the backward makes (`C_r` has them).

    keep, s'      F(s..s'-1) + C(s', t, m - input of s) + C(s, s'-1, m)
    offload, s'   F(s..s'-1) + copies + C(s', t, m) + C(s, s'-1, m)
    residuals, r  F(s, r) + C(s+1, t, m - r) + B(s, r)
    ready, s', r  F(s..s'-2) + F(s'-1, r) + C(s', t, m - input of s - r) + C_r(s, s'-1, m)

A kept input stays until the backward of its segment. Inputs that are kept, used, dropped and made
again are left out, for no polynomial algorithm is known with them; small chains on which exhaustion
finds anything faster are rare.

References:
    Beaumont, Eyraud-Dubois, Hermann, Joly and Shilova, "Optimal checkpointing for heterogeneous
    chains: how to train deep neural networks with limited memory", 2019, section 4 (there the loss
    is a segment of its own at the end; here the last segment holds it).
    Beaumont, Eyraud-Dubois and Shilova, "Efficient combination of rematerialization and offloading
    for training DNNs", NeurIPS 2021 (offload).
    Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "Rockmate", ICML 2023, section 3.3 (several
    choices of residuals per segment).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from .._core._errors import PlanError
from .._schedule._schedules import BACKWARD, FORWARD
from .._schedule._segment_sequence import SegmentOperation, SegmentSequence
from .._schedule._sequence_replay import (
    Residuals,
    SegmentCost,
    SequenceReplay,
    check_costs,
    replay_sequence,
)
from ._segment_moves import Cell, Moves, SlottedChain

_MOST_ENTRIES = 4_000_000  # of a table of all cells
_LEAST_SLOTS, _MOST_SLOTS = 500, 20_000
_BEYOND = 1.1  # of the limit's slots: what rounding may have made too large


def best_sequence(
    costs: Sequence[SegmentCost], memory_bytes: int, *, num_slots: int | None = None
) -> SequenceReplay:
    """The fastest sequence for a chain within a limit of memory.

    Bytes are counted in slots, each quantity rounded to the nearest number of them. Whether a
    sequence fits is then said by its replay in bytes, and the fastest that does is taken, so that
    the limit holds and rounding costs next to nothing: 500 slots for 100 segments come within
    0.1 % of 4,000, where quantities rounded up lost 0.5 to 3 %. Slots double from the greatest
    common divisor of all quantities, with which nothing is rounded, up to where `num_slots` of
    them reach the limit, and the best of all these sizes counts: then more memory never makes a
    sequence slower.

    Args:
        costs: What each segment takes.
        memory_bytes: What may lie on the device at once, of what `SegmentCost` counts.
        num_slots: The most slots (default: 500 for long chains, 20,000 for short ones).

    Returns:
        The sequence with its seconds and bytes.

    Raises:
        PlanError: If no sequence fits: how many bytes the least one takes, and for which segment.
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
    found = [least]
    while True:
        limit = min(memory_bytes, slot * num_slots)
        if limit >= least.peak_bytes:
            found += _best_in_slots(costs, slot, int(_BEYOND * limit / slot), memory_bytes)
        if limit == memory_bytes:
            return min(found, key=lambda replay: (replay.seconds, replay.peak_bytes))
        slot *= 2


def keep_all(costs: Sequence[SegmentCost]) -> SequenceReplay:
    """The fastest sequence, whatever its memory: each segment with its fastest residuals."""
    check_costs(costs)
    forwards, backwards = [], []
    for i, cost in enumerate(costs):
        # A backward that starts from the input needs a plain forward, behind the last segment none.
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
    """The sequence of least memory; of those the first operations of which take the least time."""
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
    """The fastest sequence that some number of slots up to `num` gives and that fits, if any."""
    chain = SlottedChain(costs, slot)
    table = np.full((*chain.shape, num + 1), np.inf)
    for cell in chain.cells():
        for move in chain.moves(cell):
            times = move.times(table, 0, num + 1).min(axis=0)
            np.minimum(table[cell], times, out=table[cell])

    def choose(cell: Cell, slots: int) -> tuple[Moves, int]:
        moves = list(chain.moves(cell))
        times = [move.times(table, slots, slots + 1)[:, 0] for move in moves]
        best = int(np.argmin([own.min() for own in times]))
        return moves[best], int(np.argmin(times[best]))

    seconds = table[0, 0, 0, -1]
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
