"""Programs as tables for a terminal."""

import io
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from .._core._format import num_bytes as size
from ._program import Program
from ._program_tables import (
    Table,
    buffer_table,
    collective_table,
    fusion_table,
    shown,
    transfer_table,
    work_table,
)

_WIDTH = 160  # where the output is no terminal


def terminal_tables(programs: Sequence[Program], problems: Sequence[str], *, limit: int) -> str:
    """Tables of hxla's own programs, else of all with anything to tell; a line for the others."""
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, force_terminal=False, highlight=False)
    told, others = shown(programs)
    for program in told:
        _print_program(console, program, limit)
    if others:
        console.print(f"other programs: {others}", markup=False)
    for problem in problems:
        console.print(f"not read: {problem}", markup=False)
    return out.getvalue().rstrip() + "\n"


def _print_program(console: Console, program: Program, limit: int) -> None:
    mesh = " x ".join(f"{name}={n}" for name, n in program.mesh) or "mesh not known"
    devices = f"{program.num_devices} devices, {mesh}" if program.num_devices > 1 else "1 device"
    lines = [f"{program.title}: {devices}, {program.source}"]
    lines += [f"  not read: {problem}" for problem in program.problems]
    lines += [f"  warning ({w.kind}): {w.text}" for w in program.warnings[:limit]]
    memory = program.memory
    if memory is not None:
        by_owner = ", ".join(f"{owner} {size(n)}" for owner, n in memory.by_owner.items())
        lines.append(f"  peak memory {size(memory.total_bytes)}: {by_owner} (from {memory.source})")
    elif program.memory_missing:
        lines.append(f"  memory is not known: {program.memory_missing}")
    console.print("\n".join(lines), markup=False)
    _print_table(console, "", collective_table(program.collectives), limit)
    _print_table(console, "on one device, in one call", work_table(program), limit)
    if memory is not None:
        _print_table(console, "held at the peak", buffer_table(memory), min(limit, 10))
    _print_table(console, "biggest fusions", fusion_table(program), min(limit, 5))
    _print_table(console, "host transfers", transfer_table(program), limit)
    console.print()


def _print_table(console: Console, title: str, found: Table, limit: int) -> None:
    """A table without its empty columns; nothing if it has no rows."""
    if not found.rows:
        return
    used = [i for i in range(len(found.heads)) if any(row[i] for row in found.rows)]
    table = RichTable(box=None, padding=(0, 1), title=title or None, title_justify="left")
    for i in used:
        justify: Literal["left", "right"] = "left" if i in found.left else "right"
        table.add_column(found.heads[i], justify=justify, overflow="fold")
    for row in found.rows[:limit]:
        table.add_row(*[escape(row[i]) for i in used])
    if len(found.rows) > limit:
        table.add_row(f"and {len(found.rows) - limit} smaller")
    console.print(table)
