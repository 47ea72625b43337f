"""Pipeline schedules as data: tables of tick × stage, made by small pure functions.

A stage may hold several chunks of the model (interleaved schedules): chunk `c` of stage `s` is
part `c * num_stages + s` of the chain. An operation needs the operation before it on the way of
its microbatch: a forward needs the forward of the part before, a backward that of the part after.

Shape legend: T ticks, S stages, P parts (S times chunks).
"""

import dataclasses
from collections.abc import Callable, Sequence

from ._errors import PlanError

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Op:
    """One thing that a stage does in a tick.

    Attributes:
        kind: `forward`, `backward`, or `weight`. In a schedule that has `weight`, `backward` is
            only the gradient of the input, and `weight` that of the parameters.
        microbatch: Which microbatch of the replica.
        chunk: Which of the stage's chunks of the model.
    """

    kind: str
    microbatch: int
    chunk: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who does what in which tick.

    Attributes:
        name: Of the kind of schedule.
        num_stages: Stages.
        num_microbatches: Microbatches of one replica in a step.
        num_chunks: Chunks of the model on each stage.
        table_TS: An operation or None (idle) per tick and stage.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    table_TS: tuple[tuple[Op | None, ...], ...]

    @property
    def num_ticks(self) -> int:
        """Length of the table."""
        return len(self.table_TS)

    @property
    def rows(self) -> tuple[tuple[Op, ...], ...]:
        """The operations of each stage in their order, without idle ticks."""
        return tuple(
            tuple(op for tick in self.table_TS if (op := tick[stage]) is not None)
            for stage in range(self.num_stages)
        )

    @property
    def peak_stash(self) -> tuple[int, ...]:
        """Per stage, the most chunk activations kept at once.

        One is kept from its forward until its last use: the backward, or where the schedule has
        it the weight gradient.
        """
        last = WEIGHT if any(op.kind == WEIGHT for op in self.rows[0]) else BACKWARD
        peaks = []
        for row in self.rows:
            kept = peak = 0
            for op in row:
                kept += (op.kind == FORWARD) - (op.kind == last)
                peak = max(peak, kept)
            peaks.append(peak)
        return tuple(peaks)

    @property
    def bubble(self) -> float:
        """Idle share of the table: idle ticks over all."""
        idle = sum(op is None for tick in self.table_TS for op in tick)
        return idle / (self.num_ticks * self.num_stages)


def needs(op: Op, stage: int, num_stages: int, num_chunks: int = 1) -> tuple[int, Op] | None:
    """The stage and operation that an operation waits for, besides its own row's order."""
    part = op.chunk * num_stages + stage
    if op.kind == WEIGHT:
        return stage, Op(BACKWARD, op.microbatch, op.chunk)
    if op.kind == FORWARD:
        if part == 0:
            return None
        source = part - 1
    elif part == num_stages * num_chunks - 1:
        return stage, Op(FORWARD, op.microbatch, op.chunk)
    else:
        source = part + 1
    return source % num_stages, Op(op.kind, op.microbatch, source // num_stages)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: `2 (M + S - 1)` ticks, M microbatches kept.

    References:
        Huang et al., "GPipe", NeurIPS 2019, section 2.3: bubble (S - 1) / (M + S - 1).
    """
    _check(num_stages, num_microbatches)
    row = [Op(FORWARD, m) for m in range(num_microbatches)]
    row += [Op(BACKWARD, m) for m in range(num_microbatches)]
    return from_rows("gpipe", [row] * num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward: `2 (M + S - 1)` ticks, `min(M, S - s)` kept on stage s.

    References:
        Narayanan et al., "PipeDream", SOSP 2019, and "Efficient Large-Scale Language Model
        Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2.1 (with a flush).
    """
    _check(num_stages, num_microbatches)
    order_F = [Op(FORWARD, m) for m in range(num_microbatches)]
    order_B = [Op(BACKWARD, m) for m in range(num_microbatches)]
    warm_up = [num_stages - 1 - s for s in range(num_stages)]
    return from_rows("1f1b", [_alternate(order_F, order_B, w) for w in warm_up])


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B with several chunks per stage: `2 (M v + S - 1)` ticks of a chunk each.

    The bubble of `S - 1` microbatches shrinks by the number of chunks v.

    References:
        Narayanan et al., SC 2021, section 2.2.2: M is a multiple of S, the bubble is
        (S - 1) (t_f + t_b) / v.
    """
    _check(num_stages, num_microbatches)
    if num_chunks < 1:
        raise PlanError(f"num_chunks is {num_chunks}; use 1 or more")
    if num_microbatches % num_stages:
        raise PlanError(
            f"{num_microbatches} microbatches over {num_stages} interleaved stages leave "
            f"{num_microbatches % num_stages} over; use a multiple of {num_stages}"
        )
    total = num_microbatches * num_chunks

    def order(kind: str, chunk_of: Callable[[int], int]) -> list[Op]:
        return [
            Op(
                kind,
                k // (num_stages * num_chunks) * num_stages + k % num_stages,
                chunk_of(k // num_stages % num_chunks),
            )
            for k in range(total)
        ]

    order_F = order(FORWARD, lambda c: c)
    order_B = order(BACKWARD, lambda c: num_chunks - 1 - c)
    warm_up = [
        2 * (num_stages - s - 1) + (num_chunks - 1) * num_stages
        if num_chunks > 1
        # With one chunk this is plain 1F1B, whose stages need half the warm-up.
        else num_stages - s - 1
        for s in range(num_stages)
    ]
    rows = [_alternate(order_F, order_B, min(w, total)) for w in warm_up]
    return from_rows("interleaved", rows, num_chunks)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Backward split in two, the weight gradients filling bubbles: `3 M + S - 1` ticks.

    Every stage keeps at most S microbatches, as the first stage of 1F1B does. The tick count holds
    from M = S on.

    References:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2: the bubble is
        (S - 1) (t_F + t_B - t_W).
    """
    _check(num_stages, num_microbatches)
    rows = one_f_one_b(num_stages, num_microbatches).rows
    done: dict[tuple[int, Op], int] = {}
    position = [0] * num_stages
    count = [{FORWARD: 0, BACKWARD: 0, WEIGHT: 0} for _ in range(num_stages)]
    table: list[tuple[Op | None, ...]] = []
    while any(c[WEIGHT] < num_microbatches for c in count):
        tick: list[Op | None] = []
        for s, c in enumerate(count):
            # Forwards and backwards keep the order of 1F1B; a weight gradient goes where the next
            # of them cannot run yet, or would keep more than S microbatches.
            choice = None
            if position[s] < len(rows[s]):
                op = rows[s][position[s]]
                full = op.kind == FORWARD and c[FORWARD] - c[WEIGHT] >= num_stages
                need = needs(op, s, num_stages)
                if not full and (need is None or done.get(need, len(table)) < len(table)):
                    choice = op
            if choice is None and c[WEIGHT] < c[BACKWARD]:
                choice = Op(WEIGHT, c[WEIGHT])
            tick.append(choice)
        for s, ran in enumerate(tick):
            if ran is not None:
                done[s, ran] = len(table)
                count[s][ran.kind] += 1
                position[s] += ran.kind != WEIGHT
        table.append(tuple(tick))
    return Schedule(
        name="zb-h1",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=1,
        table_TS=tuple(table),
    )


def from_rows(name: str, rows: Sequence[Sequence[Op]], num_chunks: int = 1) -> Schedule:
    """The table in which every operation takes one tick and starts as early as it can.

    Raises:
        PlanError: If the rows wait for one another in a circle, naming the first operations.
    """
    num_stages = len(rows)
    done: dict[tuple[int, Op], int] = {}
    position = [0] * num_stages
    table: list[tuple[Op | None, ...]] = []
    while any(p < len(row) for p, row in zip(position, rows, strict=True)):
        tick: list[Op | None] = [None] * num_stages
        for s, row in enumerate(rows):
            if position[s] < len(row):
                op = row[position[s]]
                need = needs(op, s, num_stages, num_chunks)
                if need is None or done.get(need, len(table)) < len(table):
                    tick[s] = op
        if not any(tick):
            waiting = [row[p] for p, row in zip(position, rows, strict=True) if p < len(row)]
            raise PlanError(f"schedule {name} cannot go on: its stages wait with {waiting}")
        for s, ran in enumerate(tick):
            if ran is not None:
                done[s, ran] = len(table)
                position[s] += 1
        table.append(tuple(tick))
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=len({op.microbatch for op in rows[0]}),
        num_chunks=num_chunks,
        table_TS=tuple(table),
    )


def _alternate(order_F: list[Op], order_B: list[Op], warm_up: int) -> list[Op]:
    warm_up = min(warm_up, len(order_F))
    steady = len(order_F) - warm_up
    pairs = zip(order_F[warm_up:], order_B[:steady], strict=True)
    return [*order_F[:warm_up], *(op for pair in pairs for op in pair), *order_B[steady:]]


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise PlanError(
            f"a pipeline of {num_stages} stages and {num_microbatches} microbatches: "
            "use 1 or more of each"
        )
