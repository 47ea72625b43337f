"""One HTML page of programs, or of what changed between two lists of programs."""

import html
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..core.format import num_bytes as size
from ..core.format import plural, si
from ..report.lanes import COLLECTIVE, Lanes
from ..report.page import fold, items, legend, page, section, stack, table, tiles
from . import tables as tables
from .diff import diff, pairs
from .pictures import mesh_and_shards, step_section
from .program import OWNERS, Collective, Memory, Program, Warned
from .tables import group

_MAX_WARNINGS = 8  # shown unfolded
_CSS = """
main { max-width: 72rem; }
.part { margin: 2.2rem 0 1rem; font-size: 1.35rem; }
.warned { color: var(--mark); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr));
  gap: 1.4rem 1.6rem; margin: 0 0 1rem; }
.cards > div { min-width: 0; font-size: .88rem; overflow-x: auto; }
.cards b, .cards span { display: block; overflow-wrap: anywhere; font-weight: 600; }
.cards span { color: var(--muted); font-weight: 400; margin-bottom: .45rem; }
.cells rect { stroke: var(--paper); stroke-width: 1.5; fill-opacity: .42; }
.cells text { fill: var(--ink); font-size: 11px; text-anchor: middle; pointer-events: none;
  paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-opacity: .55; }
.cells .pad { fill: url(#padding); fill-opacity: 1; stroke: none; }
.defs { position: absolute; width: 0; height: 0; }
.defs path { stroke: var(--ink); stroke-width: 1.6; }
"""
_KIND = {"collective": lambda members: members[0].kind, "over": lambda members: members[0].over}
_OWNER_COLORS = dict(zip(OWNERS, ("k0", "k3", "k2", "k1", "k5", "hatch", "k6", "k7"), strict=True))
_HATCH = (
    '<svg class="defs" aria-hidden="true"><pattern id="padding" width="6" height="6" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0V6"/></pattern></svg>'
)


def inspection_page(
    programs: Sequence[Program],
    problems: Sequence[str],
    *,
    title: str,
    measured: Lanes | None = None,
    predicted: Lanes | None = None,
) -> str:
    """The tables of the terminal, pictures of sharded arrays, and the step's timeline."""
    programs, others = tables.shown(programs)
    parts = [_HATCH]
    warned = [(p, w) for p in programs for w in p.warnings]
    if warned:
        parts.append(section("Warnings", *_warnings(warned, len(programs) > 1)))
    if problems:
        parts.append(_lines("Not read", problems))
    if not programs:
        parts.append("<section><p>There is no program to show.</p></section>")
    if measured is not None or predicted is not None:
        parts.append(step_section(measured, predicted))
    for program in programs:
        parts.append(f'<h2 class="part">{html.escape(program.title)}</h2>')
        parts.append(tiles(list(_tiles(program))))
        parts += _program(program, measured)
    if others:
        parts.append(section("Other programs", f"<p>{html.escape(others)}</p>"))
    lead = f"{_sources(programs)}; "
    lead += f"{plural(len(warned), 'warning') if warned else 'no warnings'}."
    return page(title, html.escape(lead), parts, css=_CSS)


def _sources(programs: Sequence[Program]) -> str:
    """The programs' names and their sources."""
    words = {"live": "a compiled step", "text": "HLO text"}
    sources = {words.get(p.source, p.source) for p in programs}
    names = ", ".join(dict.fromkeys(p.title for p in programs))
    what = names if len(programs) < 3 else f"{len(programs)} programs"
    return f"{what}, from {_folder(sources) or ', '.join(sorted(sources))}"


def _folder(paths: Iterable[str]) -> str:
    """The common folder of all files, or the only file; empty if there is none."""
    distinct = set(paths)
    common = os.path.commonpath(distinct) if distinct and all(map(os.path.isabs, distinct)) else ""
    return common if len(common) > 1 else ""


def diff_page(before: Sequence[Program], after: Sequence[Program], *, title: str) -> str:
    """The page of what changed between two lists of programs."""
    lines = diff(before, after)
    parts = [_lines("What changed", lines or ["Nothing changed."])]
    for old, new in pairs(tables.shown(before)[0], tables.shown(after)[0])[0]:
        parts.append(f'<h2 class="part">{html.escape(new.title)}</h2>')
        parts += _both(old, new)
    lead = f"{plural(len(lines), 'change') if lines else 'no changes'}."
    return page(title, html.escape(lead), parts, css=_CSS)


def _lines(heading: str, lines: Sequence[str]) -> str:
    return section(heading, items(map(html.escape, lines)))


def _program(program: Program, measured: Lanes | None) -> Iterator[str]:
    if program.problems:
        yield _lines("Not read", program.problems)
    if program.collectives:
        yield section("Collectives", *_collectives(program, measured))
    if program.memory is not None:
        yield section("Memory of one device at the peak", *_memory(program.memory))
    else:
        why = html.escape(program.memory_missing or "the program does not tell")
        yield section("Memory", f"<p>Not known: {why}.</p>")
    if program.work:
        yield section("Work of one device in one call", table(*tables.work_table(program)))
    if program.arrays and program.mesh:
        yield section("How arrays are sharded", *mesh_and_shards(program))
    if program.fusions:
        yield section("Biggest fusions", table(*tables.fusion_table(program)))
    if program.transfers:
        yield section("Host transfers", table(*tables.transfer_table(program)))


def _tiles(program: Program) -> Iterator[tuple[str, str, str]]:
    total = program.total
    detail = program.mesh_text or ("" if program.num_devices == 1 else "mesh not known")
    yield "Devices", str(program.num_devices), detail
    if program.memory is not None:
        owner, most = max(program.memory.by_owner.items(), key=lambda x: x[1], default=("", 0))
        what = f"{owner}: {size(most)}" if owner else ""
        yield "Peak memory of a device", size(program.memory.total_bytes), what
    more = "" if total.is_exact else " or more"
    yield "FLOPs of a device", si(total.flops) + more, f"{size(total.num_bytes)} moved in memory"
    seconds = tables.time(total.collective_seconds)
    detail = plural(total.num_collectives, "collective")
    detail += f", predicted {seconds}" if seconds else ""
    yield "Sent by a device", size(total.collective_bytes), detail


def _warnings(warned: Sequence[tuple[Program, Warned]], is_named: bool) -> Iterator[str]:
    lines = []
    for alikes in group(warned, lambda w: w[1].text, lambda w: (w[0].title, w[1].kind)):
        (program, first), *rest = alikes
        where = f"in {program.title}, " if is_named else ""
        more = items(html.escape(warning.text) for _, warning in rest)
        lines.append(
            f'<b class="warned">{html.escape(first.kind)}</b>: {html.escape(where + first.text)}'
            + (fold(f"and {len(rest)} like it", more) if rest else "")
        )
    yield items(lines[:_MAX_WARNINGS])
    if len(lines) > _MAX_WARNINGS:
        yield fold(f"{len(lines) - _MAX_WARNINGS} more", items(lines[_MAX_WARNINGS:]))


def _collectives(program: Program, measured: Lanes | None) -> Iterator[str]:
    kinds = group(program.collectives, lambda c: c.kind, lambda c: c.over)
    yield table(*tables.sums_table(kinds, _KIND, _took(program, measured)))
    located = [c for c in program.collectives if c.origin.source]
    folder = _folder(os.path.dirname(c.origin.source) for c in located)
    prefix = f"{folder}/" if folder else ""
    yield "<h3>By TaskGraph</h3>"
    task_graphs = group(program.collectives, lambda _: "", lambda c: c.origin.task_graph)
    for number, members in enumerate(sorted(task_graphs, key=tables.sent_bytes, reverse=True)):
        task_graph = members[0].origin.task_graph
        name = html.escape(task_graph or "outside all TaskGraphs")
        runs = plural(tables.num_runs(members), "run")
        summary = f"{runs}, {size(tables.sent_bytes(members))} sent"
        seconds = tables.predicted(members)
        summary += f", predicted {seconds}" if seconds else ""
        listed = table(*tables.collective_table(members, task_graph, prefix))
        yield fold(f"<b>{name}</b>: {summary}", listed, is_open=number < 3)
    if located:
        yield "<h3>By source line</h3>"
        words = {
            "line": lambda members: members[0].origin.source.removeprefix(prefix),
            "function": _functions,
            "collectives": _kinds,
        }
        lines = group(located, lambda _: "", lambda c: c.origin.source)
        yield table(*tables.sums_table(lines, words))
        yield f"<p>Lines of files in {html.escape(prefix)}.</p>" if prefix else ""


def _functions(members: Sequence[Collective]) -> str:
    return ", ".join(dict.fromkeys(c.origin.function for c in members if c.origin.function))


def _kinds(members: Sequence[Collective]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in Counter(c.kind for c in members).items())


def _took(program: Program, measured: Lanes | None) -> dict[str, float]:
    """Measured seconds of each collective in a step."""
    took = measured.mean_seconds() if measured is not None else {}
    return {
        label: seconds
        for (label, kind, name), seconds in took.items()
        if (kind, name) == (COLLECTIVE, program.name)
    }


def _owners(memory: Memory, whole: int) -> str:
    """A bar of the bytes of each owner, and its legend; `whole` bytes are as wide as the page."""
    parts = [
        (_OWNER_COLORS[owner], n, f"{owner} {size(n)}") for owner, n in memory.by_owner.items()
    ]
    total = max(memory.total_bytes, 1)
    return stack(parts, whole) + legend(
        (color, f"{text} ({n / total:.0%})") for color, n, text in parts
    )


def _memory(memory: Memory) -> Iterator[str]:
    total = memory.total_bytes
    yield _owners(memory, total)
    yield (
        f"<p>{size(total)} = {size(memory.argument_bytes)} of arguments + "
        f"{size(memory.output_bytes)} of results + {size(memory.temp_bytes)} of temporaries - "
        f"{size(memory.alias_bytes)} that results take over; from "
        f"{html.escape(memory.source)}.</p>"
    )
    yield f"<h3>{len(memory.buffers)} buffers, largest first</h3>"
    yield table(*tables.buffer_table(memory))


def _both(old: Program, new: Program) -> Iterator[str]:
    if old.memory is not None and new.memory is not None:
        whole = max(old.memory.total_bytes, new.memory.total_bytes)
        parts = []
        for word, memory in (("Before", old.memory), ("After", new.memory)):
            parts.append(f"<h3>{word}: {size(memory.total_bytes)}</h3>")
            parts.append(_owners(memory, whole))
        yield section("Memory of one device at the peak", *parts)
    words = {**_KIND, "of": lambda members: members[0].origin.task_graph}
    key = lambda c: (c.over, c.origin.task_graph)  # noqa: E731
    sides = [
        tables.sums_table(group(p.collectives, lambda c: c.kind, key), words) for p in (old, new)
    ]
    if any(side.rows for side in sides):
        yield section("Collectives", table(*tables.side_by_side(*sides)))
    both = tables.side_by_side(tables.work_table(old), tables.work_table(new))
    yield section("Work of one device in one call", table(*both))
