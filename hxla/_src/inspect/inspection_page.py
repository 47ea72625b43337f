"""One HTML page of programs, or of what changed between two lists of programs.

Pictures show a mesh and how arrays are sharded over it.
"""

import dataclasses
import html
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..core.format import num_bytes, plural, si
from ..report.lanes import COLLECTIVE, Lanes
from ..report.page import box, fold, items, legend, page, section, stack, table, tiles
from . import tables as tables
from .collectives import Mesh
from .diff import diff, pairs
from .profiler_trace import step_section
from .program import OWNERS, Collective, Memory, Program, ProgramArray, Warned
from .tables import alike, group, ranges

_WIDTH, _HEIGHT = 210.0, 210.0  # pixels, of a square array
_LEAST_CELL = (24.0, 17.0)
_MAX_CELLS = 64  # along a side; more are counted, not drawn
_CHARACTER = 6.3  # pixels
_NUM_COLORS = 8
_MAX_PICTURES = 24
_MAX_NAMES = 6  # below a picture
_LEAST_PICTURE = 0.002  # of all arguments' bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayShard:
    """One shard of an array.

    Attributes:
        index: Along each dimension.
        devices: With this shard, by place in the mesh.
        used: The share of each dimension that is not padding.
    """

    index: tuple[int, ...]
    devices: tuple[int, ...]
    used: tuple[float, ...]


def mesh_and_shards(program: Program) -> Iterator[str]:
    """Draw the mesh, and each sharding of the program's large arrays once."""
    if drawn := mesh_picture(program.mesh):
        *down, across = [f"{name} = {n}" for name, n in program.mesh]
        words = f"across: {across}" + (f"; down: {', then '.join(down)}" if down else "")
        yield (
            '<div class="table cells"><p>The devices by their places in the mesh, '
            f"{html.escape(words)}.</p>{drawn}</div>"
        )
    known = [a for a in program.arrays if a.spec is not None]
    whole = sum(a.num_bytes for a in program.arrays)
    layouts = group(known, lambda _: "", lambda a: (a.dtype, a.shape, a.local_shape, a.spec))
    alikes = sorted(layouts, key=lambda members: -len(members) * members[0].num_bytes)
    large = [
        members
        for members in alikes
        if len(members) * members[0].num_bytes >= _LEAST_PICTURE * whole
        and math.prod(members[0].shape) > 1
    ][:_MAX_PICTURES]
    cards = "".join(_card(members, program.mesh) for members in large)
    yield f'<div class="cards cells">{cards}</div>'
    if any(padded_share(members[0], program.mesh) for members in large):
        yield "<p>Hatched: padding.</p>"
    rest = sum(map(len, alikes)) - sum(map(len, large))
    if rest:
        yield f"<p>{rest} smaller arrays are not drawn.</p>"
    if len(known) < len(program.arrays):
        num = len(program.arrays) - len(known)
        yield f"<p>How {num} arrays are sharded is not known.</p>"


def shards(array: ProgramArray, mesh: Mesh) -> tuple[ArrayShard, ...]:
    """The shards of an array, the last dimension fastest; empty if its spec is not known.

    A dimension that does not divide by its number of shards ends in padding.
    """
    if array.spec is None:
        return ()
    sizes = dict(mesh)
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(n) for _, n in mesh))):
        at = dict(zip(sizes, place, strict=True))
        index = []
        for axes in array.spec:
            number = 0
            for axis in axes:
                number = number * sizes[axis] + at[axis]
            index.append(number)
        holders.setdefault(tuple(index), []).append(device)
    return tuple(
        ArrayShard(
            index=index,
            devices=tuple(devices),
            used=tuple(
                min(1.0, max(0.0, (size - i * local) / local)) if local else 1.0
                for i, size, local in zip(index, array.shape, array.local_shape, strict=True)
            ),
        )
        for index, devices in sorted(holders.items())
    )


def padded_share(array: ProgramArray, mesh: Mesh) -> float:
    """Share of padding in all shards of an array."""
    all_shards = shards(array, mesh)
    used = sum(math.prod(shard.used) for shard in all_shards)
    return 1 - used / len(all_shards) if all_shards else 0.0


def array_picture(array: ProgramArray, mesh: Mesh) -> str:
    """Draw an array, each shard with its devices; padding is hatched."""
    if not array.shape:  # one number is drawn as an array of one
        array = dataclasses.replace(array, shape=(1,), local_shape=(1,), spec=((),))
    all_shards = shards(array, mesh)
    rank = len(array.shape)
    counts = [max(shard.index[d] for shard in all_shards) + 1 for d in range(rank)]
    cut = [d for d in range(rank) if counts[d] > 1]
    *down, across = cut if len(cut) > 1 else sorted({*cut, rank - 1})
    num_across, num_down = counts[across], math.prod(counts[d] for d in down)
    size_down = math.prod(array.shape[d] for d in range(rank) if d != across)
    width, height = _frame(array.shape[across], size_down, num_across, num_down)
    w, h = width / num_across, height / num_down
    cells = []
    is_drawn = max(num_across, num_down) <= _MAX_CELLS
    for shard in all_shards if is_drawn else ():
        row = 0
        for d in down:
            row = row * counts[d] + shard.index[d]
        column = shard.index[across]
        tooltip = _tooltip(shard, array)
        left, top = column * w, row * h
        width_used = w * shard.used[across]
        height_used = h * shard.used[down[-1]] if down else h
        if math.prod(shard.used) < 1:  # the used part is a hole in the hatched one
            whole = f"M{left:.1f} {top:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z"
            used = f"M{left:.1f} {top:.1f}v{height_used:.1f}h{width_used:.1f}v{-height_used:.1f}z"
            path = f'<path class="pad" d="{whole}{used}"/>'
            cells.append(f"<g><title>{html.escape(tooltip)}</title>{path}</g>")
        cells.append(
            box(
                f"k{(row * num_across + column) % _NUM_COLORS}",
                (left, top, width_used, height_used),
                tooltip=tooltip,
                label=_label(shard.devices, width_used),
            )
        )
    if not is_drawn:
        words = f"{len(all_shards)} parts"
        cells = [box("k0", (0, 0, width, height), tooltip=words, label=words)]
    return (
        f'<svg width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}" role="img" '
        f'aria-label="{html.escape(array.path)} in {len(all_shards)} parts">{"".join(cells)}</svg>'
    )


def mesh_picture(mesh: Mesh) -> str:
    """The mesh's devices, its last axis across; nothing if it is too large to draw."""
    sizes = tuple(n for _, n in mesh)
    if max(sizes[-1], math.prod(sizes[:-1])) > _MAX_CELLS:
        return ""
    devices = ProgramArray(
        path="the mesh",
        owner="",
        dtype="",
        shape=sizes,
        local_shape=(1,) * len(sizes),
        spec=tuple((name,) for name, _ in mesh),
    )
    return array_picture(devices, mesh)


def _card(members: Sequence[ProgramArray], mesh: Mesh) -> str:
    array = members[0]
    dims = [
        f"{n} over {'+'.join(axes)}" if axes else str(n)
        for n, axes in zip(array.shape, array.spec or (), strict=True)
    ]
    num_replicas = len(shards(array, mesh)[0].devices)
    words = f"{num_bytes(array.num_bytes)} on a device, "
    words += "one replica" if num_replicas == 1 else f"{num_replicas} replicas"
    padded = padded_share(array, mesh)
    words += f"; {padded:.1%} padding" if padded else ""
    names = [
        alike(a.path for a in alikes) + (f", {len(alikes)} arrays" if len(alikes) > 1 else "")
        for alikes in group(members, lambda a: a.path)
    ]
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    listed = "<br>".join(html.escape(name) for name in (*names[:_MAX_NAMES], *more))
    head = f"{array.dtype}[{', '.join(dims)}]"
    return (
        f"<div><b>{html.escape(head)}</b><span>{html.escape(words)}</span>"
        f"{array_picture(array, mesh)}<span>{listed}</span></div>"
    )


def _frame(across: int, down: int, num_across: int, num_down: int) -> tuple[float, float]:
    """Width and height in the array's proportions, but none too thin for its labels."""
    ratio = min(2.5, max(0.4, math.sqrt(down / across))) if across and down else 1.0
    width = _WIDTH / max(1.0, ratio)
    height = _HEIGHT * min(1.0, ratio)
    least_width = min(num_across, _MAX_CELLS) * _LEAST_CELL[0]
    least_height = min(num_down, _MAX_CELLS) * _LEAST_CELL[1]
    return max(width, least_width), max(height / 1.6, least_height)


def _label(devices: Sequence[int], width: float) -> str:
    for label in (ranges(devices), f"x{len(devices)}"):
        if len(label) * _CHARACTER < width - 2:
            return label
    return ""


def _tooltip(shard: ArrayShard, array: ProgramArray) -> str:
    bounds = []
    for d, (i, local, size) in enumerate(
        zip(shard.index, array.local_shape, array.shape, strict=True)
    ):
        if local == size:
            continue
        start, stop = min(size, i * local), min(size, (i + 1) * local)
        words = f"{start} to {stop - 1}" if stop > start else "padding only"
        more = f" and {local - (stop - start)} of padding" if start < stop < (i + 1) * local else ""
        bounds.append(f"dimension {d}: {words}{more}")
    noun = "device" if len(shard.devices) == 1 else "devices"
    return f"{noun} {ranges(shard.devices)}: {'; '.join(bounds) or 'all of it'}"


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
        what = f"{owner}: {num_bytes(most)}" if owner else ""
        yield "Peak memory of a device", num_bytes(program.memory.total_bytes), what
    more = "" if total.is_exact else " or more"
    moved = f"{num_bytes(total.num_bytes)} moved in memory"
    yield "FLOPs of a device", si(total.flops) + more, moved
    seconds = tables.time(total.collective_seconds)
    detail = plural(total.num_collectives, "collective")
    detail += f", predicted {seconds}" if seconds else ""
    yield "Sent by a device", num_bytes(total.collective_bytes), detail


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
        summary = f"{runs}, {num_bytes(tables.sent_bytes(members))} sent"
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
        (_OWNER_COLORS[owner], n, f"{owner} {num_bytes(n)}") for owner, n in memory.by_owner.items()
    ]
    total = max(memory.total_bytes, 1)
    return stack(parts, whole) + legend(
        (color, f"{text} ({n / total:.0%})") for color, n, text in parts
    )


def _memory(memory: Memory) -> Iterator[str]:
    total = memory.total_bytes
    yield _owners(memory, total)
    yield (
        f"<p>{num_bytes(total)} = {num_bytes(memory.argument_bytes)} of arguments + "
        f"{num_bytes(memory.output_bytes)} of results + {num_bytes(memory.temp_bytes)} of "
        f"temporaries - {num_bytes(memory.alias_bytes)} that results take over; from "
        f"{html.escape(memory.source)}.</p>"
    )
    yield f"<h3>{len(memory.buffers)} buffers, largest first</h3>"
    yield table(*tables.buffer_table(memory))


def _both(old: Program, new: Program) -> Iterator[str]:
    if old.memory is not None and new.memory is not None:
        whole = max(old.memory.total_bytes, new.memory.total_bytes)
        parts = []
        for word, memory in (("Before", old.memory), ("After", new.memory)):
            parts.append(f"<h3>{word}: {num_bytes(memory.total_bytes)}</h3>")
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
