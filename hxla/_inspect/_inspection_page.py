"""Programs, or what changed from some to others, as one HTML page."""

import html
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from .._core._format import num_bytes as size
from .._core._format import plural, si, span
from .._report._page import page, section, table, tiles
from ._alike_names import alike, group
from ._diff import diff
from ._profiler_trace import COLLECTIVE, MeasuredStep
from ._program import OWNERS, Collective, Memory, Program, Warned
from ._shard_pictures import mesh_and_shards
from ._step_pictures import Lanes, step_section
from ._terminal_tables import runs_and_trips, shown

_SHOWN_ROWS, _MAX_ROWS = 16, 200  # of a table, before and after it is unfolded
_MAX_WARNINGS = 8  # that are shown unfolded

_CSS = """
main { max-width: 72rem; }
:root { --k0: #2f6fdb; --k1: #e39a1d; --k2: #2a9d78; --k3: #7fa9ea; --k4: #c8508f; --k5: #7a5bd0;
  --k6: #9a6a45; --k7: #7f8794; }
h1, h2, p, li, summary, figcaption { overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.2rem 0 .5rem; }
.part { margin: 2.2rem 0 1rem; font-size: 1.35rem; }
.tiles dd { overflow-wrap: anywhere; }
td, tbody th { overflow-wrap: break-word; max-width: 26rem; }
tbody th { white-space: normal; }
ul { margin: 0 0 1rem; padding-left: 1.2rem; }
li { margin: 0 0 .35rem; }
.warned b { color: var(--mark); font-weight: 600; }
details { margin: 0 0 .8rem; }
summary { cursor: pointer; padding: .25rem 0; }
.stack { display: flex; height: 2.1rem; gap: 2px; margin: 0 0 .6rem; border-radius: 4px;
  overflow: hidden; }
.stack i { min-width: 1px; flex-basis: 0; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem;
  font-size: .92rem; }
.legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px;
  margin-right: .45rem; }
.k0 { background: var(--k0); } .k1 { background: var(--k1); } .k2 { background: var(--k2); }
.k3 { background: var(--k3); } .k4 { background: var(--k4); } .k5 { background: var(--k5); }
.k6 { background: var(--k6); } .k7 { background: var(--k7); }
.hatch { background: repeating-linear-gradient(45deg, var(--k7) 0 3px, var(--paper) 3px 6px); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr));
  gap: 1.4rem 1.6rem; margin: 0 0 1rem; }
.cards > div { min-width: 0; font-size: .88rem; overflow-x: auto; }
.cards b, .cards span { display: block; overflow-wrap: anywhere; font-weight: 600; }
.cards span { color: var(--muted); font-weight: 400; margin-bottom: .45rem; }
.cells rect { stroke: var(--paper); stroke-width: 1.5; fill-opacity: .42; }
.cells text { fill: var(--ink); font-size: 11px; text-anchor: middle; pointer-events: none;
  paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-opacity: .55; }
.cells .p0 { fill: var(--k0); } .cells .p1 { fill: var(--k1); } .cells .p2 { fill: var(--k2); }
.cells .p3 { fill: var(--k4); } .cells .p4 { fill: var(--k5); } .cells .p5 { fill: var(--k3); }
.cells .p6 { fill: var(--k6); } .cells .p7 { fill: var(--k7); }
.cells .pad { fill: url(#padding); fill-opacity: 1; stroke: none; }
.meshes svg { display: block; max-width: 100%; }
.meshes { overflow-x: auto; }
.defs { position: absolute; width: 0; height: 0; }
.defs path { stroke: var(--ink); stroke-width: 1.6; }
figure .steps { min-width: 46rem; }
.steps text { fill: var(--ink); font-size: 11px; } .steps .head { font-weight: 600; }
.steps .in { text-anchor: middle; font-size: 10px; fill: #fff; pointer-events: none; }
.steps .tick { fill: var(--muted); text-anchor: middle; }
.steps .axis { stroke: var(--grid); } .steps .end { stroke: var(--mark); stroke-width: 1.5; }
.steps .c0 { fill: var(--k0); } .steps .c1 { fill: var(--k1); } .steps .c2 { fill: var(--k2); }
.steps .c3 { fill: var(--k3); } .steps .c4 { fill: var(--idle); }
"""
_OWNER_COLORS = ("k0", "k3", "k2", "k1", "k5", "hatch", "k6", "k7")
_HATCH = (
    '<svg class="defs" aria-hidden="true"><pattern id="padding" width="6" height="6" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0V6"/></pattern></svg>'
)


def inspection_page(
    programs: Sequence[Program],
    problems: Sequence[str],
    *,
    title: str,
    measured: MeasuredStep | None = None,
    predicted: Lanes | None = None,
) -> str:
    """What a terminal shows, and how arrays lie on the mesh, and where the step's time goes.

    Args:
        programs: What to show.
        problems: What of a dump could not be read.
        title: Heading of the page.
        measured: A profiled step.
        predicted: To set beside it.
    """
    programs, others = shown(programs)
    parts = [_HATCH]
    warned = [(p, w) for p in programs for w in p.warnings]
    if warned:
        parts.append(section("Warnings", *_warnings(warned, len(programs) > 1)))
    parts += [_problems("Not read", problems)] if problems else []
    if not programs:
        parts.append("<section><p>There is no program to show.</p></section>")
    if len(programs) == 1:
        parts.append(tiles(list(_tiles(programs[0]))))
    if measured is not None or predicted is not None:
        parts.append(step_section(measured, predicted))
    for program in programs:
        if len(programs) > 1:
            parts.append(f'<h2 class="part">{html.escape(program.title)}</h2>')
            parts.append(tiles(list(_tiles(program))))
        parts += _program(program, measured)
    if others:
        names = ", ".join(f"{n} x {count}" if count > 1 else n for n, count in others.items())
        parts.append(section("Other programs", f"<p>{html.escape(names)}</p>"))
    lead = f"{_sources(programs)}; "
    lead += f"{plural(len(warned), 'warning') if warned else 'no warnings'}."
    return page(title, html.escape(lead), parts, css=_CSS)


def _sources(programs: Sequence[Program]) -> str:
    """What is shown, and what it was read from."""
    words = {"live": "a compiled step", "text": "HLO text"}
    sources = {words.get(p.source, p.source) for p in programs}
    whole = os.path.commonpath(sources) if all(map(os.path.isabs, sources)) and sources else ""
    names = ", ".join(dict.fromkeys(p.title for p in programs))
    what = names if len(programs) < 3 else f"{len(programs)} programs"
    return f"{what}, from {whole or ', '.join(sorted(sources))}"


def diff_page(before: Sequence[Program], after: Sequence[Program], *, title: str) -> str:
    """What changed from some programs to others.

    Args:
        before: The first.
        after: The second.
        title: Heading of the page.
    """
    lines = diff(before, after)
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    parts = [section("What changed", f"<ul>{items}</ul>" if lines else "<p>Nothing changed.</p>")]
    olds, _ = shown(before)
    for new in shown(after)[0]:
        old = next((p for p in olds if p.name == new.name), None)
        if old is None and len(olds) == len(after) == 1:
            old = olds[0]
        if old is not None:
            parts.append(f'<h2 class="part">{html.escape(new.title)}</h2>')
            parts += _both(old, new)
    lead = f"{plural(len(lines), 'change') if lines else 'no changes'}."
    return page(title, html.escape(lead), parts, css=_CSS)


def _problems(heading: str, lines: Sequence[str]) -> str:
    return section(heading, f"<ul>{''.join(f'<li>{html.escape(x)}</li>' for x in lines)}</ul>")


def _program(program: Program, measured: MeasuredStep | None) -> Iterator[str]:
    if program.problems:
        yield _problems("Not read", program.problems)
    if program.collectives:
        yield section("Collectives", *_collectives(program, measured))
    if program.memory is not None:
        yield section("Memory of one device at the peak", *_memory(program.memory))
    else:
        why = html.escape(program.memory_missing or "the program does not tell")
        yield section("Memory", f"<p>Not known: {why}.</p>")
    if program.work:
        yield section("Work of one device in one call", _work(program))
    if program.arrays and program.mesh:
        yield section("How arrays lie on the mesh", *mesh_and_shards(program))
    if program.fusions:
        rows = [
            (f.name, f.array, f.origin.where, str(f.runs or "?"), si(f.flops), size(f.num_bytes))
            for f in program.fusions
        ]
        heads = ("", "makes", "where", "runs", "FLOPs", "bytes")
        yield section("Biggest fusions", table(heads, rows, left=(0, 1, 2)))
    if program.transfers:
        rows_ = [
            (t.kind, t.name, t.origin.where, str(t.runs or "?"), size(t.num_bytes))
            for t in program.transfers
        ]
        heads_ = ("transfer", "", "where", "runs", "bytes")
        yield section("Host transfers", table(heads_, rows_, left=(0, 1, 2)))


def _tiles(program: Program) -> Iterator[tuple[str, str, str]]:
    total = program.total
    mesh = " x ".join(f"{name}={n}" for name, n in program.mesh)
    detail = mesh or ("" if program.num_devices == 1 else "mesh not known")
    yield "Devices", str(program.num_devices), detail
    if program.memory is not None:
        owner, most = max(program.memory.by_owner.items(), key=lambda x: x[1], default=("", 0))
        what = f"{size(most)} of it: {owner}" if owner else ""
        yield "Peak memory of a device", size(program.memory.total_bytes), what
    more = "" if total.is_exact else " or more"
    yield "FLOPs of a device", si(total.flops) + more, f"{size(total.num_bytes)} moved in memory"
    time = _span(total.collective_seconds)
    yield (
        "Sent by a device",
        size(total.collective_bytes),
        plural(total.num_collectives, "collective") + (f", predicted {time}" if time else ""),
    )


def _warnings(found: Sequence[tuple[Program, Warned]], is_named: bool) -> Iterator[str]:
    items = []
    for alikes in group(found, lambda f: f[1].text, lambda f: (f[0].title, f[1].kind)):
        (program, first), *rest = alikes
        folded = "".join(f"<li>{html.escape(w.text)}</li>" for _, w in rest)
        more = f"<details><summary>and {len(rest)} like it</summary><ul>{folded}</ul></details>"
        where = f"in {html.escape(program.title)}, " if is_named else ""
        items.append(
            f"<li><b>{html.escape(first.kind)}</b>: {where}{html.escape(first.text)}"
            f"{more if rest else ''}</li>"
        )
    yield f'<ul class="warned">{"".join(items[:_MAX_WARNINGS])}</ul>'
    if len(items) > _MAX_WARNINGS:
        folded = "".join(items[_MAX_WARNINGS:])
        yield f"<details><summary>{len(items) - _MAX_WARNINGS} more</summary>"
        yield f'<ul class="warned">{folded}</ul></details>'


def _span(seconds: float | None) -> str:
    return "" if seconds is None else span(seconds)


def _sent(found: Sequence[Collective]) -> float:
    return sum(c.sent_bytes * (c.runs or 1) for c in found)


def _predicted(found: Sequence[Collective]) -> str:
    times = [c.seconds * (c.runs or 1) for c in found if c.seconds is not None]
    return span(sum(times)) if times and len(times) == len(found) else ""


def _by(found: Sequence[Collective], key: str) -> list[tuple[str, list[Collective]]]:
    """Collectives by TaskGraph or source line, those that send most first."""
    out: dict[str, list[Collective]] = {}
    for collective in found:
        out.setdefault(getattr(collective.origin, key), []).append(collective)
    return sorted(out.items(), key=lambda item: -_sent(item[1]))


def _collectives(program: Program, measured: MeasuredStep | None) -> Iterator[str]:
    took = _took(program, measured)
    rows = []
    kinds = group(program.collectives, lambda c: c.kind, lambda c: c.over)
    for own in sorted(kinds, key=_sent, reverse=True):
        times = [took[c.name] for c in own if c.name in took]
        rows.append(
            (
                own[0].kind,
                own[0].over,
                str(len(own)),
                str(sum(c.runs or 1 for c in own)),
                size(_sent(own)),
                _predicted(own),
                span(sum(times)) if times else "",
            )
        )
    heads = ("collective", "over", "in the text", "runs", "sent by a device", "predicted")
    yield _table((*heads, "measured"), rows, left=(0, 1))
    folder = _folder(program.collectives)
    yield "<h3>By TaskGraph</h3>"
    for number, (task_graph, own) in enumerate(_by(program.collectives, "task_graph")):
        name = html.escape(task_graph or "outside all TaskGraphs")
        runs = sum(c.runs or 1 for c in own)
        said = f"{plural(runs, 'run')}, {size(_sent(own))} sent"
        time = _predicted(own)
        said += f", predicted {time}" if time else ""
        is_open = " open" if number < 3 else ""
        yield f"<details{is_open}><summary><b>{name}</b>: {said}</summary>"
        yield _listed(own, folder) + "</details>"
    lines = [(line, own) for line, own in _by(program.collectives, "source") if line]
    if lines:
        yield "<h3>By source line</h3>"
        yield _table(
            ("line", "function", "collectives", "runs", "sent by a device", "predicted"),
            [
                (
                    line.removeprefix(folder),
                    ", ".join(dict.fromkeys(c.origin.function for c in own if c.origin.function)),
                    ", ".join(f"{n} {k}" for k, n in Counter(c.kind for c in own).items()),
                    str(sum(c.runs or 1 for c in own)),
                    size(_sent(own)),
                    _predicted(own),
                )
                for line, own in lines
            ],
            left=(0, 1, 2),
        )
        yield f"<p>Lines of files in {html.escape(folder)}.</p>" if folder else ""


def _took(program: Program, measured: MeasuredStep | None) -> dict[str, float]:
    """MeasuredStep seconds of each collective in a step, the mean over devices."""
    out: dict[str, float] = defaultdict(float)
    if measured is None:
        return out
    for op in measured.operations:
        if op.program == program.name and op.kind == COLLECTIVE:
            out[op.name] += (op.end_seconds - op.start_seconds) / len(measured.devices)
    return out


def _folder(found: Sequence[Collective]) -> str:
    """The folder that all source lines are in, with its slash; empty if there is none."""
    folders = {os.path.dirname(c.origin.source) for c in found if c.origin.source}
    absolute = folders and all(map(os.path.isabs, folders))
    common = os.path.commonpath(folders) if absolute else ""
    return f"{common}/" if len(common) > 1 else ""


def _listed(found: Sequence[Collective], folder: str) -> str:
    alikes = group(
        found,
        lambda c: c.origin.module,
        lambda c: (c.kind, c.is_async, c.is_conditional, c.arrays, c.over, c.runs, len(c.loops)),
        lambda c: (c.origin.phase, c.origin.source, c.origin.missing),
    )
    rows = []
    for own in sorted(alikes, key=_sent, reverse=True):
        c = own[0]
        words = alike(x.origin.module for x in own) or c.origin.function
        words = words or (f"? {c.origin.missing}" if c.origin.missing else "")
        arrays = Counter(c.arrays)
        first = [f"{n} x {a}" if n > 1 else a for a, n in arrays.most_common(2)]
        loop = next((x.where for x in reversed(c.loops) if x.where), "")
        rows.append(
            (
                f"{len(own)} x {c.kind}" if len(own) > 1 else c.kind,
                ", ".join(first) + (f" and {len(arrays) - 2} kinds" if len(arrays) > 2 else ""),
                c.over,
                words + (f" ({c.origin.phase})" if c.origin.phase else ""),
                c.origin.source.removeprefix(folder),
                (f"{len(own)} x " if len(own) > 1 else "")
                + runs_and_trips(c.loops, c.runs)
                + (" at most" if c.is_conditional else "")
                + (f", loop in {loop}" if loop else ""),
                "async" if c.is_async else "",
                size(c.num_bytes),
                size(_sent(own)),
                _predicted(own),
            )
        )
    heads = ("collective", "of", "over", "where", "line", "runs", "", "bytes", "sent", "predicted")
    return _table(heads, rows, left=(0, 1, 2, 3, 4, 6))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """A table without its empty columns; what is too much of it is folded."""
    used = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    cut = [[row[i] for i in used] for row in rows[:_MAX_ROWS]]
    words = [n for n, i in enumerate(used) if i in left]
    names = [heads[i] for i in used]
    out = table(names, cut[:_SHOWN_ROWS], left=words)
    if len(cut) > _SHOWN_ROWS:
        more = f"<p>And {len(rows) - _MAX_ROWS} more.</p>" if len(rows) > _MAX_ROWS else ""
        out += (
            f"<details><summary>{len(rows) - _SHOWN_ROWS} more</summary>"
            f"{table(names, cut[_SHOWN_ROWS:], left=words)}{more}</details>"
        )
    return out


def _stack(memory: Memory, whole: int) -> str:
    """A bar of what each owner holds; `whole` bytes are as wide as the page."""
    parts = []
    for owner, held in memory.by_owner.items():
        color = _OWNER_COLORS[OWNERS.index(owner)]
        parts.append(
            f'<i class="{color}" style="flex-grow:{held}" title="{owner}: {size(held)}"></i>'
        )
    rest = whole - memory.total_bytes
    parts += [f'<i style="flex-grow:{rest}"></i>'] if rest > 0 else []
    return f'<div class="stack">{"".join(parts)}</div>'


def _legend(memory: Memory) -> str:
    total = max(memory.total_bytes, 1)
    items = "".join(
        f'<li><i class="{_OWNER_COLORS[OWNERS.index(owner)]}"></i>{owner} {size(held)} '
        f"({held / total:.0%})</li>"
        for owner, held in memory.by_owner.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _memory(memory: Memory) -> Iterator[str]:
    total = memory.total_bytes
    yield _stack(memory, total) + _legend(memory)
    yield (
        f"<p>{size(total)} = {size(memory.argument_bytes)} of arguments + "
        f"{size(memory.output_bytes)} of results + {size(memory.temp_bytes)} of temporaries - "
        f"{size(memory.alias_bytes)} that results take over; from "
        f"{html.escape(memory.source)}.</p>"
    )
    rows = []
    alikes = group(
        memory.buffers, lambda b: b.name, lambda b: (b.owner, b.array), lambda b: b.origin.phase
    )
    for own in sorted(alikes, key=lambda own: -sum(b.num_bytes for b in own)):
        held = sum(b.num_bytes for b in own)
        wheres = group([b for b in own if b.origin.primitive], lambda b: b.origin.where)
        where = alike(b.origin.where for b in wheres[0]) if wheres else ""
        where += " and others" if len(wheres) > 1 else ""
        rows.append(
            (
                alike(b.name for b in own),
                own[0].owner,
                f"{len(own)} x {own[0].array}" if len(own) > 1 else own[0].array,
                where,
                size(held),
                f"{held / max(total, 1):.1%}",
            )
        )
    heads = ("buffer", "owner", "array", "where", "bytes", "")
    yield f"<h3>{len(memory.buffers)} buffers, largest first</h3>"
    yield _table(heads, rows, left=(0, 1, 2, 3))


def _work(program: Program) -> str:
    whole = program.total
    rows = [
        (
            w.task_graph or ("outside all TaskGraphs" if w is not whole else "all"),
            si(w.flops) + ("" if w.is_exact else " or more"),
            f"{w.flops / whole.flops:.0%}" if whole.flops else "",
            size(w.num_bytes),
            str(w.num_collectives),
            size(w.collective_bytes),
            _span(w.collective_seconds),
        )
        for w in (*program.work, *((whole,) if len(program.work) > 1 else ()))
    ]
    heads = ("TaskGraph", "FLOPs", "share", "moved in memory", "collectives", "sent", "predicted")
    return _table(heads, rows, left=(0,))


def _both(old: Program, new: Program) -> Iterator[str]:
    if old.memory is not None and new.memory is not None:
        whole = max(old.memory.total_bytes, new.memory.total_bytes)
        parts = []
        for word, memory in (("Before", old.memory), ("After", new.memory)):
            parts.append(f"<h3>{word}: {size(memory.total_bytes)}</h3>")
            parts.append(_stack(memory, whole) + _legend(memory))
        yield section("Memory of one device at the peak", *parts)
    befores = {_shape(own): own for own in _kinds(old)}
    afters = {_shape(own): own for own in _kinds(new)}
    rows = []
    for key in {**befores, **afters}:
        a, b = befores.get(key, []), afters.get(key, [])
        rows.append((*key, *_changed(a, b)))
    if rows:
        heads = ("collective", "over", "TaskGraph", "runs before", "after", "sent before", "after")
        yield section("Collectives", table(heads, rows, left=(0, 1, 2)))
    works = {w.task_graph: w for w in old.work}, {w.task_graph: w for w in new.work}
    rows_ = [
        (
            name or "outside all TaskGraphs",
            *(si(w[name].flops) if name in w else "" for w in works),
            *(size(w[name].num_bytes) if name in w else "" for w in works),
        )
        for name in {**works[0], **works[1]}
    ]
    heads_ = ("TaskGraph", "FLOPs before", "after", "moved in memory before", "after")
    yield section("Work of one device in one call", table(heads_, rows_))


def _kinds(program: Program) -> list[Sequence[Collective]]:
    return group(
        program.collectives, lambda c: c.kind, lambda c: c.over, lambda c: c.origin.task_graph
    )


def _shape(own: Sequence[Collective]) -> tuple[str, str, str]:
    return own[0].kind, own[0].over, own[0].origin.task_graph


def _changed(a: Sequence[Collective], b: Sequence[Collective]) -> tuple[str, str, str, str]:
    runs = [str(sum(c.runs or 1 for c in own)) for own in (a, b)]
    return runs[0], runs[1], size(_sent(a)), size(_sent(b))
