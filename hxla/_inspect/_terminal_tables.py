"""Programs as tables for a terminal."""

import io
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .._core._format import num_bytes as size
from .._core._format import si, span
from ._program import Collective, Loop, Program

_WIDTH = 160  # where the output is no terminal


def runs_and_trips(found: Sequence[Loop], runs: int | None) -> str:
    """Runs, and the trips of the loops around: `12 = 4 x 3`."""
    if not found:
        return "1" if runs == 1 else str(runs)
    trips = " x ".join("?" if loop.trips is None else str(loop.trips) for loop in found)
    return trips if len(found) == 1 and runs is not None else f"{runs or '?'} = {trips}"


def terminal_tables(programs: Sequence[Program], problems: Sequence[str], *, limit: int) -> str:
    """Tables of hxla's own programs, else of all with anything to tell; a line for the others."""
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, force_terminal=False, highlight=False)
    told, others = shown(programs)
    for program in told:
        _program(console, program, limit)
    if others:
        names = ", ".join(f"{name} x {n}" if n > 1 else name for name, n in others.items())
        console.print(f"other programs: {names}", markup=False)
    for problem in problems:
        console.print(f"not read: {problem}", markup=False)
    return out.getvalue().rstrip() + "\n"


def shown(programs: Sequence[Program]) -> tuple[list[Program], Counter[str]]:
    """hxla's own programs, else all with anything to tell, and how often there are others."""
    has_roles = any(p.role for p in programs)
    told = [p for p in programs if (p.role if has_roles else _tells(p))] or list(programs)
    kept = {id(p) for p in told}
    return told, Counter(p.title for p in programs if id(p) not in kept)


def _tells(program: Program) -> bool:
    has_flops = any(w.flops for w in program.work)
    return bool(program.collectives or program.warnings or program.problems or has_flops)


def _program(console: Console, program: Program, limit: int) -> None:
    mesh = " x ".join(f"{name}={n}" for name, n in program.mesh) or "mesh not known"
    devices = f"{program.num_devices} devices, {mesh}" if program.num_devices > 1 else "1 device"
    say = lambda line: console.print(line, markup=False)  # noqa: E731
    say(f"{program.title}: {devices}, {program.source}")
    for problem in program.problems:
        say(f"  not read: {problem}")
    for warned in program.warnings[:limit]:
        say(f"  warning ({warned.kind}): {warned.text}")
    if program.collectives:
        shown = sorted(program.collectives, key=lambda c: -c.sent_bytes * (c.runs or 1))
        _collectives(console, shown[:limit], len(shown) - limit)
    if program.work:
        _work(console, program)
    if program.memory is not None:
        _memory(console, program, limit)
    elif program.memory_missing:
        say(f"  memory is not known: {program.memory_missing}")
    if program.fusions:
        rows = [
            (
                f.name,
                f.array,
                si(f.flops),
                size(f.num_bytes),
                str(f.runs or "?"),
                f.origin.where,
            )
            for f in program.fusions[: min(limit, 5)]
        ]
        _table(console, "biggest fusions", ("", "makes", "FLOPs", "bytes", "runs", "where"), rows)
    if program.transfers:
        moved = [
            (t.kind, t.name, size(t.num_bytes), str(t.runs or "?"), t.origin.where)
            for t in program.transfers[:limit]
        ]
        _table(console, "host transfers", ("kind", "", "bytes", "runs", "where"), moved)
    say("")


def _collectives(console: Console, found: Sequence[Collective], more: int) -> None:
    rows = [
        (
            c.kind + (" async" if c.is_async else ""),
            ", ".join(c.arrays[:2]) + (f" +{len(c.arrays) - 2}" if len(c.arrays) > 2 else ""),
            size(c.num_bytes),
            c.over,
            runs_and_trips(c.loops, c.runs) + (" at most" if c.is_conditional else ""),
            c.origin.where + (f" ({c.origin.phase})" if c.origin.phase else ""),
            c.origin.source,
            _time(c.seconds),
        )
        for c in found
    ]
    if more > 0:
        rows.append((f"and {more} smaller", "", "", "", "", "", "", ""))
    columns = ("collective", "of", "bytes", "over", "runs", "where", "line", "predicted")
    _table(console, "", columns, rows)


def _work(console: Console, program: Program) -> None:
    rows = [
        (
            w.task_graph or "(outside)",
            si(w.flops) + ("" if w.is_exact else " or more"),
            size(w.num_bytes),
            str(w.num_collectives),
            size(w.collective_bytes),
            _time(w.collective_seconds),
        )
        for w in ([*program.work, program.total] if len(program.work) > 1 else program.work)
    ]
    columns = ("TaskGraph", "FLOPs", "memory traffic", "collectives", "sent", "predicted")
    _table(console, "on one device, in one call", columns, rows)


def _memory(console: Console, program: Program, limit: int) -> None:
    memory = program.memory
    assert memory is not None
    by_owner = ", ".join(f"{owner} {size(n)}" for owner, n in memory.by_owner.items())
    console.print(
        f"  peak memory {size(memory.total_bytes)}: {by_owner} (from {memory.source})",
        markup=False,
    )
    rows = [
        (
            size(b.num_bytes),
            b.owner,
            b.name,
            b.array,
            b.origin.where if b.origin.primitive else "",
        )
        for b in memory.buffers[: min(limit, 10)]
    ]
    _table(console, "", ("bytes", "owner", "buffer", "array", "where"), rows)


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    used = [i for i, name in enumerate(columns) if any(row[i] for row in rows)]
    table = Table(box=None, padding=(0, 1), title=title or None, title_justify="left")
    for i in used:
        right = columns[i] in ("bytes", "FLOPs", "sent", "memory traffic", "collectives")
        table.add_column(columns[i], justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*[_plain(row[i]) for i in used])
    console.print(table)


def _time(value: float | None) -> str:
    return "" if value is None else span(value)


def _plain(cell: str) -> str:
    return cell.replace("[", r"\[")
