"""Programs as tables for a terminal."""

from collections.abc import Iterator, Sequence

from .._core._format import num_bytes as size
from .._report._tables import Table, as_text
from . import _program_tables as tables
from ._program import Program

_WIDTH = 160


def terminal_tables(programs: Sequence[Program], problems: Sequence[str], *, limit: int) -> str:
    """Tables of hxla's own programs, else of all with anything to tell; a line for the others."""
    told, others = tables.shown(programs)
    parts = [part for program in told for part in _program(program, limit)]
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
    yield "", tables.collective_table(program.collectives), limit
    yield "on one device, in one call", tables.work_table(program), limit
    if memory is not None:
        yield "held at the peak", tables.buffer_table(memory), min(limit, 10)
    yield "biggest fusions", tables.fusion_table(program), min(limit, 5)
    yield "host transfers", tables.transfer_table(program), limit
    yield ""
