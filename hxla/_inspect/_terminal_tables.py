"""Programs as tables for a terminal."""

from collections.abc import Iterator, Sequence

from .._core._format import num_bytes as size
from .._plan._part_bytes import parts_in_words
from .._plan._plan import Plan
from .._report._lanes import Lanes
from .._report._tables import Table, as_text
from . import _program_tables as tables
from ._program import Program
from ._split_tables import parts_table, waiting_table

_WIDTH = 160


def terminal_tables(
    programs: Sequence[Program],
    problems: Sequence[str],
    *,
    limit: int,
    plan: Plan | None = None,
    step: Lanes | None = None,
) -> str:
    """Tables of hxla's own programs, else of all with anything to tell; a line for the others.

    Args:
        programs: All of them.
        problems: What could not be read.
        limit: The most rows of a table.
        plan: That ran: its parts of unlike sizes are shown.
        step: A measured one: who waited is shown.
    """
    told, others = tables.shown(programs)
    parts = [part for program in told for part in _program(program, limit)]
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
    yield "", tables.collective_table(program.collectives), limit
    yield "on one device, in one call", tables.work_table(program), limit
    if memory is not None:
        yield "held at the peak", tables.buffer_table(memory), min(limit, 10)
    yield "biggest fusions", tables.fusion_table(program), min(limit, 5)
    yield "host transfers", tables.transfer_table(program), limit
    yield ""
