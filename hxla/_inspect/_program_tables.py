"""What programs do, as tables of texts for a terminal and for a page."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from .._core._format import num_bytes as size
from .._core._format import si, span
from .._report._tables import Table
from ._alike_names import alike, group
from ._program import Collective, Memory, Program


def shown(programs: Sequence[Program]) -> tuple[list[Program], str]:
    """hxla's own programs, else all with anything to tell; and names of the others."""
    has_roles = any(p.role for p in programs)
    told = [p for p in programs if (p.role if has_roles else _tells(p))] or list(programs)
    kept = {id(p) for p in told}
    others = Counter(p.title for p in programs if id(p) not in kept)
    return told, ", ".join(counted(name, n) for name, n in others.items())


def _tells(program: Program) -> bool:
    has_flops = any(w.flops for w in program.work)
    return bool(program.collectives or program.warnings or program.problems or has_flops)


def counted(what: str, num: int) -> str:
    """`3 x what`, or what alone if there is one."""
    return f"{num} x {what}" if num > 1 else what


def time(seconds: float | None) -> str:
    """A time that may not be known."""
    return "" if seconds is None else span(seconds)


def num_runs(found: Sequence[Collective]) -> int:
    """Of collectives, those in loops of unknown trips counting once."""
    return sum(c.runs or 1 for c in found)


def sent_bytes(found: Sequence[Collective]) -> float:
    """By one device, in all runs."""
    return sum(c.sent_bytes * (c.runs or 1) for c in found)


def predicted(found: Sequence[Collective]) -> str:
    """Time of all runs; empty if one's is not known."""
    times = [c.seconds * (c.runs or 1) for c in found if c.seconds is not None]
    return span(sum(times)) if times and len(times) == len(found) else ""


def sums_table(
    alikes: Iterable[Sequence[Collective]],
    words: Mapping[str, Callable[[Sequence[Collective]], str]],
    took: Mapping[str, float] | None = None,
) -> Table:
    """Collectives that are alike in one row, those that send most first.

    Args:
        alikes: What to show.
        words: Columns that say what they are, by their heads.
        took: Measured seconds, by name.
    """
    rows = []
    for own in sorted(alikes, key=sent_bytes, reverse=True):
        times = [took[c.name] for c in own if c.name in took] if took else []
        rows.append(
            (
                *(word(own) for word in words.values()),
                str(len(own)),
                str(num_runs(own)),
                size(sent_bytes(own)),
                predicted(own),
                span(sum(times)) if times else "",
            )
        )
    figures = ("in the text", "runs", "sent by a device", "predicted", "measured")
    return Table((*words, *figures), rows, left=range(len(words)))


def side_by_side(before: Table, after: Table) -> Table:
    """Two tables that begin with their words as one: where a figure changed, both."""
    num_words, num = len(before.left), len(before.heads)
    sides = [{tuple(row[:num_words]): row for row in table.rows} for table in (before, after)]
    rows = []
    for words in {**sides[0], **sides[1]}:
        old, new = (side.get(words, (*words, *[""] * (num - num_words))) for side in sides)
        both = zip(old, new, strict=True)
        rows.append([a if a == b else f"{a or 'none'} -> {b or 'none'}" for a, b in both])
    return before._replace(rows=rows)


def collective_table(found: Sequence[Collective], task_graph: str = "", folder: str = "") -> Table:
    """Collectives that differ in numbers only in one row, those that send most first.

    Args:
        found: What to show.
        task_graph: That all are of, where it is said above the table.
        folder: Of all source lines, where it is said below the table.
    """
    alikes = group(
        found,
        lambda c: c.origin.where,
        lambda c: (c.kind, c.is_async, c.is_conditional, c.arrays, c.over, c.runs, len(c.loops)),
        lambda c: (c.origin.phase, c.origin.source, c.origin.task_graph),
    )
    rows = []
    for own in sorted(alikes, key=sent_bytes, reverse=True):
        c = own[0]
        arrays = Counter(c.arrays)
        of = ", ".join(counted(array, n) for array, n in arrays.most_common(2))
        where = alike(x.origin.where for x in own).removeprefix(f"{task_graph} ")
        rows.append(
            (
                counted(c.kind, len(own)) + (" async" if c.is_async else ""),
                of + (f" and {len(arrays) - 2} kinds" if len(arrays) > 2 else ""),
                size(c.num_bytes),
                c.over,
                counted(_runs(c), len(own)),
                where + (f" ({c.origin.phase})" if c.origin.phase else ""),
                c.origin.source.removeprefix(folder),
                size(sent_bytes(own)),
                predicted(own),
            )
        )
    heads = ("collective", "of", "bytes", "over", "runs", "where", "line", "sent", "predicted")
    return Table(heads, rows, left=(0, 1, 3, 4, 5, 6))


def _runs(c: Collective) -> str:
    """Runs, the trips of the loops around, and which loop: `12 = 4 x 3, loop in blocks`."""
    text = str(c.runs or "?")
    if c.loops:
        trips = " x ".join("?" if loop.trips is None else str(loop.trips) for loop in c.loops)
        text = trips if len(c.loops) == 1 and c.runs is not None else f"{text} = {trips}"
    loop = next((x.where for x in reversed(c.loops) if x.where), "")
    return text + (" at most" if c.is_conditional else "") + (f", loop in {loop}" if loop else "")


def work_table(program: Program) -> Table:
    """What each TaskGraph does."""
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
    """What is held at the peak, what differs in numbers only in one row, the largest first."""
    alikes = group(
        memory.buffers, lambda b: b.name, lambda b: (b.owner, b.array), lambda b: b.origin.phase
    )
    rows = []
    for own in sorted(alikes, key=lambda own: -sum(b.num_bytes for b in own)):
        held = sum(b.num_bytes for b in own)
        wheres = group([b for b in own if b.origin.primitive], lambda b: b.origin.where)
        where = alike(b.origin.where for b in wheres[0]) if wheres else ""
        rows.append(
            (
                alike(b.name for b in own),
                own[0].owner,
                counted(own[0].array, len(own)),
                where + (" and others" if len(wheres) > 1 else ""),
                size(held),
                f"{held / max(memory.total_bytes, 1):.1%}",
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
    """What moves between host and device."""
    rows = [
        (t.kind, t.name, t.origin.where, str(t.runs or "?"), size(t.num_bytes))
        for t in program.transfers
    ]
    return Table(("transfer", "", "where", "runs", "bytes"), rows, left=(0, 1, 2))
