"""Programs and splits as tables, for a terminal and for a page.

Names that differ in numbers only are joined: `Block_0/up` and on become `Block_0-11/up`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from ..core.format import num_bytes, percent, si, span
from ..core.format import num_bytes as size
from ..plan.description import parts_in_words
from ..plan.plan import Plan
from ..report.lanes import COLLECTIVE, COMPUTATION, Lanes
from ..report.page import Table, as_text
from .program import Collective, Memory, Program

_NUMBER = re.compile(r"\d+")
_MAX_RANGES = 8
_Value = TypeVar("_Value")


def alike(names: Iterable[str]) -> str:
    """One name for names that differ in numbers only."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    words = _NUMBER.split(distinct[0])
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in distinct), strict=True)
    numbers = (ranges(column) for column in columns)
    return "".join(word + number for word, number in zip(words, [*numbers, ""], strict=True))


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,6` of 0, 1, 2, 3 and 6; of many ranges only the first and the last number."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    if len(out) > _MAX_RANGES:
        return f"{out[0][0]}..{out[-1][1]}"
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def group(
    values: Iterable[_Value], name: Callable[[_Value], str], *keys: Callable[[_Value], object]
) -> list[Sequence[_Value]]:
    """Values whose names differ in numbers only and whose keys are equal, in order."""
    out: dict[object, list[_Value]] = {}
    for value in values:
        shape = _NUMBER.sub("#", name(value))
        out.setdefault((shape, *(key(value) for key in keys)), []).append(value)
    return list(out.values())


def shown(programs: Sequence[Program]) -> tuple[list[Program], str]:
    """hxla's programs, or else all programs with content; and the names of the others."""
    has_roles = any(p.role for p in programs)
    selected = [p for p in programs if (p.role if has_roles else _has_content(p))] or list(programs)
    ids = {id(p) for p in selected}
    others = Counter(p.title for p in programs if id(p) not in ids)
    return selected, ", ".join(counted(name, n) for name, n in others.items())


def _has_content(program: Program) -> bool:
    has_flops = any(w.flops for w in program.work)
    return bool(program.collectives or program.warnings or program.problems or has_flops)


def counted(what: str, num: int) -> str:
    """`3 x what`, or what alone if there is one."""
    return f"{num} x {what}" if num > 1 else what


def time(seconds: float | None) -> str:
    """Seconds in words; empty if not known."""
    return "" if seconds is None else span(seconds)


def num_runs(collectives: Sequence[Collective]) -> int:
    """Runs of collectives; a loop of unknown trips counts once."""
    return sum(c.runs or 1 for c in collectives)


def sent_bytes(collectives: Sequence[Collective]) -> float:
    """Bytes that one device sends in all runs."""
    return sum(c.sent_bytes * (c.runs or 1) for c in collectives)


def predicted(collectives: Sequence[Collective]) -> str:
    """Predicted time of all runs in words; empty if one is not known."""
    times = [c.seconds * (c.runs or 1) for c in collectives if c.seconds is not None]
    return span(sum(times)) if times and len(times) == len(collectives) else ""


def sums_table(
    alikes: Iterable[Sequence[Collective]],
    words: Mapping[str, Callable[[Sequence[Collective]], str]],
    took: Mapping[str, float] | None = None,
) -> Table:
    """Collectives that are alike in one row, those that send most first.

    Args:
        words: Descriptive columns, by their heads.
        took: Measured seconds, by name of the collective.
    """
    rows = []
    for members in sorted(alikes, key=sent_bytes, reverse=True):
        times = [took[c.name] for c in members if c.name in took] if took else []
        rows.append(
            (
                *(word(members) for word in words.values()),
                str(len(members)),
                str(num_runs(members)),
                size(sent_bytes(members)),
                predicted(members),
                span(sum(times)) if times else "",
            )
        )
    figures = ("in the text", "runs", "sent by a device", "predicted", "measured")
    return Table((*words, *figures), rows, left=range(len(words)))


def side_by_side(before: Table, after: Table) -> Table:
    """Join two tables by the words in their first columns; a figure that changed shows both."""
    num_words, num = len(before.left), len(before.heads)
    sides = [{tuple(row[:num_words]): row for row in table.rows} for table in (before, after)]
    rows = []
    for words in {**sides[0], **sides[1]}:
        old, new = (side.get(words, (*words, *[""] * (num - num_words))) for side in sides)
        both = zip(old, new, strict=True)
        rows.append([a if a == b else f"{a or 'none'} -> {b or 'none'}" for a, b in both])
    return before._replace(rows=rows)


def collective_table(
    collectives: Sequence[Collective], task_graph: str = "", folder: str = ""
) -> Table:
    """Collectives that differ in numbers only in one row, those that send most first.

    Args:
        task_graph: Of all collectives, if a heading names it already.
        folder: Of all source lines, if a note names it already.
    """
    alikes = group(
        collectives,
        lambda c: c.origin.where,
        lambda c: (c.kind, c.is_async, c.is_conditional, c.arrays, c.over, c.runs, len(c.loops)),
        lambda c: (c.origin.phase, c.origin.source, c.origin.task_graph),
    )
    rows = []
    for members in sorted(alikes, key=sent_bytes, reverse=True):
        c = members[0]
        arrays = Counter(c.arrays)
        array_names = ", ".join(counted(array, n) for array, n in arrays.most_common(2))
        where = alike(x.origin.where for x in members).removeprefix(f"{task_graph} ")
        rows.append(
            (
                counted(c.kind, len(members)) + (" async" if c.is_async else ""),
                array_names + (f" and {len(arrays) - 2} kinds" if len(arrays) > 2 else ""),
                size(c.num_bytes),
                c.over,
                counted(_runs(c), len(members)),
                where + (f" ({c.origin.phase})" if c.origin.phase else ""),
                c.origin.source.removeprefix(folder),
                size(sent_bytes(members)),
                predicted(members),
            )
        )
    heads = ("collective", "of", "bytes", "over", "runs", "where", "line", "sent", "predicted")
    return Table(heads, rows, left=(0, 1, 3, 4, 5, 6))


def _runs(c: Collective) -> str:
    """Runs, trips of the loops around, and the loop: `12 = 4 x 3, loop in blocks`."""
    text = str(c.runs or "?")
    if c.loops:
        trips = " x ".join("?" if loop.trips is None else str(loop.trips) for loop in c.loops)
        text = trips if len(c.loops) == 1 and c.runs is not None else f"{text} = {trips}"
    loop = next((x.where for x in reversed(c.loops) if x.where), "")
    return text + (" at most" if c.is_conditional else "") + (f", loop in {loop}" if loop else "")


def work_table(program: Program) -> Table:
    """The work of each TaskGraph."""
    whole = program.total
    rows = [
        (
            "all" if w is whole else w.task_graph or "outside all TaskGraphs",
            si(w.flops) + ("" if w.is_exact else " or more"),
            f"{w.flops / whole.flops:.0%}" if whole.flops else "",
            size(w.num_bytes),
            str(w.num_collectives),
            size(w.collective_bytes),
            time(w.collective_seconds),
        )
        for w in ([*program.work, whole] if len(program.work) > 1 else program.work)
    ]
    heads = ("TaskGraph", "FLOPs", "share", "memory traffic", "collectives", "sent", "predicted")
    return Table(heads, rows, left=(0,))


def buffer_table(memory: Memory) -> Table:
    """The buffers at the peak, largest first; names that differ in numbers only share a row."""
    alikes = group(
        memory.buffers, lambda b: b.name, lambda b: (b.owner, b.array), lambda b: b.origin.phase
    )
    rows = []
    for members in sorted(alikes, key=lambda members: -sum(b.num_bytes for b in members)):
        total = sum(b.num_bytes for b in members)
        wheres = group([b for b in members if b.origin.primitive], lambda b: b.origin.where)
        where = alike(b.origin.where for b in wheres[0]) if wheres else ""
        rows.append(
            (
                alike(b.name for b in members),
                members[0].owner,
                counted(members[0].array, len(members)),
                where + (" and others" if len(wheres) > 1 else ""),
                size(total),
                f"{total / max(memory.total_bytes, 1):.1%}",
            )
        )
    return Table(("buffer", "owner", "array", "where", "bytes", "share"), rows, left=(0, 1, 2, 3))


def fusion_table(program: Program) -> Table:
    """The biggest fusions."""
    rows = [
        (f.name, f.array, f.origin.where, str(f.runs or "?"), si(f.flops), size(f.num_bytes))
        for f in program.fusions
    ]
    return Table(("", "makes", "where", "runs", "FLOPs", "bytes"), rows, left=(0, 1, 2))


def transfer_table(program: Program) -> Table:
    """The transfers between host and device."""
    rows = [
        (t.kind, t.name, t.origin.where, str(t.runs or "?"), size(t.num_bytes))
        for t in program.transfers
    ]
    return Table(("transfer", "", "where", "runs", "bytes"), rows, left=(0, 1, 2))


def parts_table(plan: Plan) -> Table:
    """Parameters with uneven shards, and their padding; the largest first."""
    rows = []
    for layout in sorted(plan.parameters, key=lambda p: -p.num_bytes):
        for dim, parts in enumerate(layout.sizes):
            if parts:
                padding = max(parts) * len(parts) - sum(parts)
                rows.append(
                    (
                        layout.name,
                        str(dim),
                        " + ".join(map(str, parts)),
                        f"{max(parts)} on each",
                        percent(padding / layout.shape[dim]),
                        num_bytes(layout.num_bytes // layout.shape[dim] * padding),
                    )
                )
    heads = ("parameter", "dimension", "parts", "padded to", "padding", "of all devices")
    return Table(heads, rows)


def waiting_table(step: Lanes) -> Table:
    """The time of each device of a measured step.

    A device that enters a collective early waits in it for the last one. Its waiting is its time in
    collectives beyond the least of all devices.
    """
    lanes = range(len(step.names))
    computing = [step.busy_seconds(lane, COMPUTATION) for lane in lanes]
    joining = [step.busy_seconds(lane, COLLECTIVE) for lane in lanes]
    rows = [
        (
            step.names[lane],
            span(computing[lane]),
            span(joining[lane]),
            span(joining[lane] - min(joining)),
            percent((joining[lane] - min(joining)) / step.seconds),
        )
        for lane in lanes
    ]
    return Table(("device", "computes", "in collectives", "waits there", "of the step"), rows)


_WIDTH = 160


def terminal_tables(
    programs: Sequence[Program],
    problems: Sequence[str],
    *,
    limit: int,
    plan: Plan | None = None,
    step: Lanes | None = None,
) -> str:
    """Tables of hxla's programs, or else of all programs with content; a line for the others.

    Args:
        limit: The most rows of a table.
        plan: Of the run, whose uneven shards are shown.
        step: A measured one, whose waiting is shown.
    """
    selected, others = shown(programs)
    parts = [part for program in selected for part in _program(program, limit)]
    if plan is not None:
        parts.append(("parts of unlike sizes", parts_table(plan), limit))
        parts += [
            line
            for axis in plan.axes
            if plan.is_uneven
            for line in parts_in_words(plan.parameters, axis.name, axis.size)
        ]
    if step is not None:
        parts += [("who waits", waiting_table(step), limit), step.note]
    parts += [f"other programs: {others}"] if others else []
    parts += [f"not read: {problem}" for problem in problems]
    return as_text(parts, _WIDTH)


def _program(program: Program, limit: int) -> Iterator[str | tuple[str, Table, int]]:
    mesh = program.mesh_text or "mesh not known"
    devices = f"{program.num_devices} devices, {mesh}" if program.num_devices > 1 else "1 device"
    yield f"{program.title}: {devices}, {program.source}"
    yield from (f"  not read: {problem}" for problem in program.problems)
    yield from (f"  warning ({w.kind}): {w.text}" for w in program.warnings[:limit])
    memory = program.memory
    if memory is not None:
        by_owner = ", ".join(f"{owner} {size(n)}" for owner, n in memory.by_owner.items())
        yield f"  peak memory {size(memory.total_bytes)}: {by_owner} (from {memory.source})"
    elif program.memory_missing:
        yield f"  memory is not known: {program.memory_missing}"
    yield "", collective_table(program.collectives), limit
    yield "on one device, in one call", work_table(program), limit
    if memory is not None:
        yield "buffers at the peak", buffer_table(memory), min(limit, 10)
    yield "biggest fusions", fusion_table(program), min(limit, 5)
    yield "host transfers", transfer_table(program), limit
    yield ""
