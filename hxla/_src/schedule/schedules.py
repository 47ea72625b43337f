"""Pipeline schedules as data: tables of tick × stage, made by small pure functions.

A stage may hold several chunks of the model (interleaved schedules): chunk `c` of stage `s` is
part `c * num_stages + s` of the chain. An operation needs the operation before it on the way of
its microbatch: a forward needs the forward of the part before, a backward that of the part after.

Shape legend: T ticks, S stages, P parts (S times chunks).
"""

import collections
import dataclasses
import itertools
import numbers
import re
from collections.abc import Callable, Iterator, Sequence

from ..core.errors import PlanError
from ..core.files import listed, shown

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"

_LETTERS = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}
_OPERATION = re.compile(r"([FBW])([0-9]{1,7})(?:\.([0-9]{1,7}))?")
_MOST_ACTIONS = 1 << 15  # of forwards: a table takes some seconds to make


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Action:
    """The work of a stage in a tick.

    Attributes:
        kind: The kind: `forward`, `backward`, or `weight`. In a schedule that has `weight`,
            `backward` is only the gradient of the input, and `weight` that of the parameters.
        microbatch: The microbatch of the replica, from 0.
        chunk: The stage's chunk of the model, from 0.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """As in a written table: `F0`, `B3`, or `W3.1` of chunk 1."""
        return f"{self.kind[0].upper()}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The action of each stage in each tick.

    Attributes:
        name: The name of the kind of schedule.
        num_stages: The number of stages.
        num_microbatches: The microbatches of one replica in a step.
        num_chunks: The chunks of the model on each stage.
        table_TS: The action of each stage in each tick, or None where it waits.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    table_TS: tuple[tuple[Action | None, ...], ...]

    @property
    def num_ticks(self) -> int:
        """The length of the table."""
        return len(self.table_TS)

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each stage in their order, without idle ticks."""
        return tuple(
            tuple(op for tick in self.table_TS if (op := tick[stage]) is not None)
            for stage in range(self.num_stages)
        )

    @property
    def has_weight(self) -> bool:
        """Whether weight gradients are separate actions."""
        return any(op is not None and op.kind == WEIGHT for tick in self.table_TS for op in tick)

    @property
    def peak_stash(self) -> tuple[int, ...]:
        """For each stage the most chunk activations kept at once.

        One is kept from its forward until its last use: the backward, or where the schedule has
        it the weight gradient.
        """
        return tuple(max(_kept(row, self.has_weight), default=0) for row in self.rows)

    @property
    def written(self) -> tuple[tuple[str, ...], ...]:
        """The table as `schedule_from_table` reads it."""
        return tuple(tuple("" if op is None else str(op) for op in tick) for tick in self.table_TS)

    @property
    def bubble(self) -> float:
        """The idle share of the table: idle ticks over all."""
        idle = sum(op is None for tick in self.table_TS for op in tick)
        return idle / (self.num_ticks * self.num_stages)


def needs(
    op: Action, stage: int, num_stages: int, num_chunks: int = 1
) -> tuple[int, Action] | None:
    """The stage and operation that an operation waits for, besides the order of its row."""
    part = op.chunk * num_stages + stage
    if op.kind == WEIGHT:
        return stage, Action(BACKWARD, op.microbatch, op.chunk)
    if op.kind == FORWARD:
        if part == 0:
            return None
        source = part - 1
    elif part == num_stages * num_chunks - 1:
        return stage, Action(FORWARD, op.microbatch, op.chunk)
    else:
        source = part + 1
    return source % num_stages, Action(op.kind, op.microbatch, source // num_stages)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: `2 (M + S - 1)` ticks, M microbatches kept.

    References:
        Huang et al., "GPipe", NeurIPS 2019, section 2.3: bubble (S - 1) / (M + S - 1).
    """
    _check(num_stages, num_microbatches)
    row = [Action(FORWARD, m) for m in range(num_microbatches)]
    row += [Action(BACKWARD, m) for m in range(num_microbatches)]
    return from_rows("gpipe", [row] * num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward: `2 (M + S - 1)` ticks, `min(M, S - s)` kept on stage s.

    References:
        Narayanan et al., "PipeDream", SOSP 2019, and "Efficient Large-Scale Language Model
        Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2.1 (with a flush).
    """
    _check(num_stages, num_microbatches)
    return _alternating("1f1b", num_stages, num_microbatches, 1)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B with several chunks per stage: `2 (M v + S - 1)` ticks of a chunk each.

    The bubble of `S - 1` microbatches shrinks by the number of chunks v.

    References:
        Narayanan et al., SC 2021, section 2.2.2: M is a multiple of S, the bubble is
        (S - 1) (t_f + t_b) / v.
    """
    _check(num_stages, num_microbatches, num_chunks)
    if num_chunks < 1:
        raise PlanError(f"num_chunks is {num_chunks}; use 1 or more")
    if num_microbatches % num_stages:
        raise PlanError(
            f"{num_microbatches} microbatches over {num_stages} interleaved stages leave "
            f"{num_microbatches % num_stages} over; use a multiple of {num_stages}"
        )
    return _alternating("interleaved", num_stages, num_microbatches, num_chunks)


def _alternating(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """On each stage some forwards to warm up, then forwards and backwards by turns."""
    total = num_microbatches * num_chunks

    def order(kind: str, chunk_of: Callable[[int], int]) -> list[Action]:
        return [
            Action(
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
    rows = []
    for first in (min(w, total) for w in warm_up):
        pairs = zip(order_F[first:], order_B, strict=False)
        steady = itertools.chain.from_iterable(pairs)
        rows.append([*order_F[:first], *steady, *order_B[total - first :]])
    return from_rows(name, rows, num_chunks)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Backward split in two, the weight gradients filling bubbles: `3 M + S - 1` ticks.

    Every stage keeps at most S microbatches, as the first stage of 1F1B does. The tick count holds
    from M = S on.

    References:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2: the bubble is
        (S - 1) (t_F + t_B - t_W).
    """
    rows = one_f_one_b(num_stages, num_microbatches).rows
    return from_rows("zb-h1", rows, fill_with_weights=True)


def from_rows(
    name: str,
    rows: Sequence[Sequence[Action]],
    num_chunks: int = 1,
    *,
    fill_with_weights: bool = False,
) -> Schedule:
    """The table in which every operation takes one tick and starts as early as possible.

    Args:
        rows: The operations of each stage, in order.
        num_chunks: Chunks of the model on each stage.
        fill_with_weights: Whether each backward leaves a weight gradient. It runs when the next
            operation of the row cannot, or would make the stage keep more microbatches than there
            are stages.

    Raises:
        PlanError: If the rows wait for one another in a circle, naming the first operations.
    """
    num_stages = len(rows)
    left = [collections.deque(row) for row in rows]
    weights: list[collections.deque[Action]] = [collections.deque() for _ in rows]
    kept = [0] * num_stages
    done: set[tuple[int, Action]] = set()
    table: list[tuple[Action | None, ...]] = []
    while any(left) or any(weights):
        tick: list[Action | None] = []
        for s, row in enumerate(left):
            need = needs(row[0], s, num_stages, num_chunks) if row else None
            full = fill_with_weights and kept[s] >= num_stages
            if row and (need is None or need in done) and not (full and row[0].kind == FORWARD):
                tick.append(row[0])
            else:
                tick.append(weights[s][0] if weights[s] else None)
        if not any(tick):
            waiting = [row[0] for row in left if row]
            raise PlanError(f"schedule {name} cannot go on: its stages wait with {waiting}")
        for s, ran in enumerate(tick):
            if ran is None:
                continue
            done.add((s, ran))
            (left if left[s] and left[s][0] == ran else weights)[s].popleft()
            kept[s] += (ran.kind == FORWARD) - (ran.kind == WEIGHT)
            if fill_with_weights and ran.kind == BACKWARD:
                weights[s].append(Action(WEIGHT, ran.microbatch))
        table.append(tuple(tick))
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=len({op.microbatch for op in rows[0]}),
        num_chunks=num_chunks,
        table_TS=tuple(table),
    )


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Make a schedule by its name.

    Args:
        name: The name: `gpipe`, `1f1b`, `interleaved` or `zb-h1`.
        num_stages: The number of stages.
        num_microbatches: The microbatches of one replica in a step.
        num_chunks: The chunks of the model on each stage; more than 1 for `interleaved` only.

    Returns:
        The schedule, a table of ticks and stages.

    Raises:
        PlanError: If the name is unknown, or the schedule cannot take the numbers.

    Example:
        >>> import hxla
        >>> hxla.make_schedule("1f1b", 2, 2).written
        (('F0', ''), ('F1', 'F0'), ('', 'B0'), ('B0', 'F1'), ('', 'B1'), ('B1', ''))

    References:
        Huang et al., "GPipe", NeurIPS 2019, section 2.3; Narayanan et al., "Efficient Large-Scale
        Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2 (1F1B,
        interleaved); Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 (zb-h1).
    """
    if name == "interleaved":
        return interleaved(num_stages, num_microbatches, num_chunks)
    if name not in _ONE_CHUNK:
        known = ", ".join(map(repr, sorted((*_ONE_CHUNK, "interleaved"))))
        raise PlanError(f"schedule {name!r} is unknown; use one of {known}, or a table of your own")
    if num_chunks != 1:
        raise PlanError(
            f"schedule {name!r} has 1 chunk per stage, not {num_chunks}: use 'interleaved'"
        )
    return _ONE_CHUNK[name](num_stages, num_microbatches)


_ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zero_bubble_h1}


def needs_even_counts(schedule: object) -> bool:
    """Whether a schedule, a name or a table, needs equal microbatch counts on all pipelines."""
    return schedule == "interleaved" or not isinstance(schedule, str)


def schedule_from_table(
    table_TS: Sequence[Sequence[str]],
    *,
    name: str = "own",
    stash_limits_S: Sequence[int] | None = None,
) -> Schedule:
    """Read a schedule that you wrote.

    Args:
        table_TS: What each stage does in each tick: `F2` the forward of microbatch 2, `B2` its
            backward, `W2` its weight gradient, each with `.1` for the stage's chunk 1, and `""`
            where it waits. With any `W`, a `B` is only the gradient of the input. Microbatches and
            chunks are counted from 0.
        name: The name in reports.
        stash_limits_S: The most chunk activations that each stage may keep (default: any number).

    Returns:
        The schedule, validated.

    Raises:
        PlanError: If it cannot run, with every failure: its tick, stage and microbatch, and what to
            change.

    Example:
        >>> import hxla
        >>> hxla.schedule_from_table([["F0", ""], ["", "F0"], ["", "B0"], ["B0", ""]]).num_ticks
        4
    """
    failures: list[str] = []
    table: list[tuple[Action | None, ...]] = []
    if not isinstance(table_TS, list | tuple):
        raise PlanError(
            f"a schedule is a list of ticks, each a list of texts, not {shown(table_TS)}"
        )
    rows = [row for row in table_TS if isinstance(row, list | tuple)]
    num_stages = len(rows[0]) if rows else 0
    for tick, written in enumerate(table_TS):
        if not isinstance(written, list | tuple) or len(written) != num_stages:
            failures.append(
                f"tick {tick}: {shown(written)} is not a list of {num_stages} texts, one per "
                'stage; write "" for a stage that waits'
            )
            continue
        ops = [_OPERATION.fullmatch(text) if isinstance(text, str) else None for text in written]
        failures += [
            f'tick {tick}, stage {stage}: {shown(text)} is no operation; write "F2", "B2" or "W2" '
            'for microbatch 2, "F2.1" for its chunk 1, "" to wait'
            for stage, (text, op) in enumerate(zip(written, ops, strict=True))
            if op is None and text != ""
        ]
        table.append(
            tuple(op and Action(_LETTERS[op[1]], int(op[2]), int(op[3] or 0)) for op in ops)
        )
    _raise(name, failures)
    every = [op for ops in table for op in ops if op is not None]
    num_microbatches = max((op.microbatch + 1 for op in every), default=0)
    num_chunks = max((op.chunk + 1 for op in every), default=0)
    if num_microbatches * num_chunks > 16 * len(table):
        # A stage does one operation in a tick. Missing operations are listed only if they are few.
        raise PlanError(
            f"schedule {name} cannot run: it names {num_microbatches:,} microbatches of "
            f"{num_chunks:,} chunks, of which each stage does a forward and a backward, in "
            f"{len(table):,} ticks; number both from 0 and leave none out"
        )
    schedule = Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        table_TS=tuple(table),
    )
    validate(schedule, stash_limits_S)
    return schedule


def validate(schedule: Schedule, stash_limits_S: Sequence[int] | None = None) -> None:
    """Check that a schedule can run: the laws that every pipeline keeps.

    Every stage does every operation of every microbatch and chunk once. Its inputs are computed at
    least one tick before, because a result is sent at the end of its tick: forwards go down the
    parts, backwards up, a backward follows its forward, a weight gradient its backward. No stage
    keeps more activations than its limit.

    Args:
        stash_limits_S: The most chunk activations that each stage may keep, as `peak_stash`
            counts them.

    Raises:
        PlanError: With every failure: its tick, stage and microbatch, and what to change.
    """
    num_stages = schedule.num_stages
    if num_stages < 1 or schedule.num_microbatches < 1:
        _raise(schedule.name, ["it holds no operation; write at least F0 and B0 of every stage"])
    failures = [
        f"tick {tick}: {len(ops)} stages; give each of the {num_stages} one entry"
        for tick, ops in enumerate(schedule.table_TS)
        if len(ops) != num_stages
    ]
    _raise(schedule.name, failures)
    done: dict[tuple[int, Action], int] = {}
    for tick, ops in enumerate(schedule.table_TS):
        for stage, op in enumerate(ops):
            if op is not None and (first := done.setdefault((stage, op), tick)) != tick:
                failures.append(
                    f"tick {tick}, stage {stage}: {op} was already done in tick {first}; "
                    "remove one of them"
                )
    failures += _incomplete(schedule, done)
    failures += _too_early(schedule, done)
    if stash_limits_S is not None:
        failures += _too_many(schedule, done, stash_limits_S)
    _raise(schedule.name, failures)


def _incomplete(schedule: Schedule, done: dict[tuple[int, Action], int]) -> Iterator[str]:
    kinds = (FORWARD, BACKWARD, WEIGHT)[: 2 + schedule.has_weight]
    sizes = range(schedule.num_microbatches), range(schedule.num_chunks)
    wanted = [Action(kind, *numbers) for kind in kinds for numbers in itertools.product(*sizes)]
    for stage in range(schedule.num_stages):
        lacks = [str(op) for op in wanted if (stage, op) not in done]
        if lacks:
            more = f" and {len(lacks) - 8} more" if len(lacks) > 8 else ""
            yield f"stage {stage}: never does {', '.join(lacks[:8])}{more}; add them"
    known = set(wanted)
    for (stage, op), tick in done.items():
        if op not in known:
            yield (
                f"tick {tick}, stage {stage}: {op} is beyond {schedule.num_microbatches} "
                f"microbatches of {schedule.num_chunks} chunks; remove it"
            )


def _too_early(schedule: Schedule, done: dict[tuple[int, Action], int]) -> Iterator[str]:
    for (stage, op), tick in done.items():
        waits = [needs(op, stage, schedule.num_stages, schedule.num_chunks)]
        if op.kind == BACKWARD:
            waits.append((stage, dataclasses.replace(op, kind=FORWARD)))
        for need in dict.fromkeys(waits):
            if need is not None and done.get(need, -1) >= tick:
                where = "" if need[0] == stage else f" of stage {need[0]}"
                yield (
                    f"tick {tick}, stage {stage}: {op} needs {need[1]}{where}, which runs in tick "
                    f"{done[need]}; move it to tick {done[need] + 1} or later"
                )


def _too_many(
    schedule: Schedule, done: dict[tuple[int, Action], int], limits_S: Sequence[int]
) -> Iterator[str]:
    if len(limits_S) != schedule.num_stages:
        yield f"{len(limits_S)} stash limits for {schedule.num_stages} stages; give one per stage"
        return
    last = "weight gradient" if schedule.has_weight else "backward"
    for stage, (row, limit) in enumerate(zip(schedule.rows, limits_S, strict=True)):
        for op, kept in zip(row, _kept(row, schedule.has_weight), strict=True):
            if op.kind == FORWARD and kept > limit:
                yield (
                    f"tick {done[stage, op]}, stage {stage}: {op} makes {kept} activations kept, "
                    f"of {limit} allowed; do a {last} before it, or allow {kept}"
                )


def _kept(row: Sequence[Action], has_weight: bool) -> Iterator[int]:
    """Activations kept after each operation of a stage."""
    last = WEIGHT if has_weight else BACKWARD
    return itertools.accumulate((op.kind == FORWARD) - (op.kind == last) for op in row)


def _raise(name: str, failures: Sequence[str]) -> None:
    if failures:
        lines = listed(failures)
        raise PlanError(f"schedule {name} cannot run (ticks and stages count from 0):{lines}")


def _check(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    for value in (num_stages, num_microbatches, num_chunks):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise PlanError(f"a pipeline's numbers are whole numbers, not {shown(value)}")
    if num_stages * num_microbatches * num_chunks > _MOST_ACTIONS:
        raise PlanError(
            f"a pipeline of {num_stages:,} stages, {num_microbatches:,} microbatches and "
            f"{num_chunks:,} chunks: a table has {_MOST_ACTIONS:,} forwards at most"
        )
    if num_stages < 1 or num_microbatches < 1:
        raise PlanError(
            f"a pipeline of {num_stages} stages and {num_microbatches} microbatches: "
            "use 1 or more of each"
        )
