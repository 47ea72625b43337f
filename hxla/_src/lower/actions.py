"""A schedule as the integers that a pipeline's program reads: actions and buffers.

Legend of shape suffixes: T ticks, S stages, F fields of `FIELDS`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..schedule.schedules import BACKWARD, FORWARD, WEIGHT, Action, Schedule, needs

#: Columns of a table: action (0: none); microbatch of the replica; buffers of the part's input, its
#: output's gradient, its residuals and the residuals of its weight gradient; buffers of arrays that
#: arrive going down and up; the set of boundaries over which arrays travel after the tick.
FIELDS = ("action", "microbatch", "input", "grad", "residual", "late", "down", "up", "exchange")

KINDS = (FORWARD, BACKWARD, WEIGHT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Actions:
    """A schedule, lowered.

    Attributes:
        table_TSF: int32.
        num_inputs: Buffers for inputs of parts.
        num_grads: Buffers for gradients of parts' outputs.
        num_late: Buffers for residuals of weight gradients.
    """

    table_TSF: np.ndarray
    num_inputs: int
    num_grads: int
    num_residuals: int
    num_late: int


def number(program: int, kind: str) -> int:
    """The number of an action in a table."""
    return 1 + len(KINDS) * program + KINDS.index(kind)


def exchanges(num_stages: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Sets of boundaries over which arrays travel together; boundary b is below stage b.

    In the steady state of 1F1B even and odd boundaries are crossed in alternate ticks. Without
    waits in between, a stage runs a forward while its neighbour runs a backward, at no loss.
    """
    last = num_stages if num_chunks > 1 else num_stages - 1
    every = tuple(range(last))
    sets = [(), every[::2], every[1::2], every]
    return tuple(dict.fromkeys(sets))


def exchange_of(schedule: Schedule) -> list[int]:
    """For each tick the smallest of the `exchanges` with all crossed boundaries."""
    sets = exchanges(schedule.num_stages, schedule.num_chunks)
    return [next(i for i, s in enumerate(sets) if used <= set(s)) for used in crossed(schedule)]


def crossed(schedule: Schedule) -> list[set[int]]:
    """Boundaries that arrays cross after each tick."""
    num_stages = schedule.num_stages
    num_parts = num_stages * schedule.num_chunks
    out = []
    for tick in schedule.table_TS:
        used: set[int] = set()
        for stage, op in enumerate(tick):
            if op is None or op.kind == WEIGHT:
                continue
            part = op.chunk * num_stages + stage
            if op.kind == FORWARD and part < num_parts - 1:
                used.add(stage)
            if op.kind == BACKWARD and part > 0:
                used.add((stage - 1) % num_stages)
        out.append(used)
    return out


def lower(schedule: Schedule, *, recompute: bool, programs: Sequence[int]) -> Actions:
    """Number the actions and assign a buffer to every kept array.

    Args:
        schedule: Schedule of one replica's microbatches.
        recompute: Whether a backward runs its forward again from the kept input; else residuals
            are kept from the forward on.
        programs: For each part its program, shared by identical parts. The number of an action is
            `1 + len(KINDS) * program + kind`.
    """
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    num_parts = num_stages * num_chunks
    splits = schedule.has_weight
    ticks = {
        (stage, op): t
        for t, tick in enumerate(schedule.table_TS)
        for stage, op in enumerate(tick)
        if op is not None
    }
    table = np.zeros((schedule.num_ticks, num_stages, len(FIELDS)), np.int32)
    table[:, :, FIELDS.index("exchange")] = np.array(exchange_of(schedule))[:, None]
    sizes = {"input": 1, "grad": 1, "residual": 1, "late": 1}
    for stage in range(num_stages):
        spans: dict[str, list[tuple[int, int, Action]]] = {name: [] for name in sizes}
        for (where, op), t in ticks.items():
            if where != stage:
                continue
            part = op.chunk * num_stages + stage
            table[t, stage, :2] = number(programs[part], op.kind), op.microbatch
            if op.kind != FORWARD:
                continue
            backward = Action(BACKWARD, op.microbatch, op.chunk)
            last = ticks[stage, Action(WEIGHT, op.microbatch, op.chunk) if splits else backward]
            came = needs(op, stage, num_stages, num_chunks)
            if came is not None:
                spans["input"].append((ticks[came] + 1, last if recompute else t, op))
            if part < num_parts - 1:
                came = needs(backward, stage, num_stages, num_chunks)
                assert came is not None
                spans["grad"].append((ticks[came] + 1, last, op))
            if not recompute:
                spans["residual"].append((t, last, op))
            if splits:
                spans["late"].append((ticks[stage, backward], last, op))
        for name, busy in spans.items():
            placed = _colour(busy)
            sizes[name] = max(sizes[name], 1 + max(placed.values(), default=0))
            column = FIELDS.index(name)
            for (_, _, op), buffer in zip(busy, placed.values(), strict=True):
                for kind_name in KINDS:
                    t = ticks.get((stage, Action(kind_name, op.microbatch, op.chunk)), -1)
                    if t >= 0:
                        table[t, stage, column] = buffer
            arrival = {"input": "down", "grad": "up"}.get(name)
            if arrival is not None:
                sizes[name] = max(
                    sizes[name],
                    _arrivals(table[:, stage, FIELDS.index(arrival)], busy, list(placed.values())),
                )
    return Actions(
        table_TSF=table,
        num_inputs=sizes["input"],
        num_grads=sizes["grad"],
        num_residuals=sizes["residual"],
        num_late=sizes["late"],
    )


def _colour(spans: Sequence[tuple[int, int, Action]]) -> dict[tuple[int, int, Action], int]:
    """A buffer for each span, in order; overlapping spans share none."""
    free_from: list[int] = []
    buffers: dict[tuple[int, int, Action], int] = {}
    for span in sorted(spans):
        start, end, _ = span
        buffer = next((i for i, f in enumerate(free_from) if f <= start), len(free_from))
        if buffer == len(free_from):
            free_from.append(0)
        free_from[buffer] = end + 1
        buffers[span] = buffer
    return {span: buffers[span] for span in spans}


def _arrivals(
    column_T: np.ndarray, spans: Sequence[tuple[int, int, Action]], buffers: Sequence[int]
) -> int:
    """Choose the buffer of each tick's arrival, a free one if useless; return the number needed."""
    num = 1 + max(buffers, default=0)
    busy = np.zeros((len(column_T) + 2, num + 1), bool)
    for (start, end, _), buffer in zip(spans, buffers, strict=True):
        busy[start : end + 1, buffer] = True
    # In most ticks nothing useful arrives, but the neighbour's array needs a free buffer.
    column_T[:] = [int(np.argmin(busy[t + 1])) for t in range(len(column_T))]
    for (start, _, _), buffer in zip(spans, buffers, strict=True):
        column_T[start - 1] = buffer
    return int(column_T.max(initial=0)) + 1
