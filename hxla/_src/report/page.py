"""Self-contained HTML pages: no network, no foreign scripts.

A table of text is for a terminal, or for a page.
"""

import contextlib
import html
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..core.errors import HxlaError
from ..core.files import local_path

_SHOWN_ROWS, _MAX_ROWS = 16, 200  # of a table, before and after it is unfolded
CSS = """
:root { color-scheme: light dark; --ink: #1c2029; --muted: #5b6472; --grid: #e3e6eb;
  --paper: #ffffff; --page: #ffffff; --soft: #f5f6f8; --line: #2f6fdb; --idle: #d3d9e2;
  --mark: #b4552d; --good: #1f7a55; --k0: #2f6fdb; --k1: #e39a1d; --k2: #2a9d78; --k3: #7fa9ea;
  --k4: #c8508f; --k5: #7a5bd0; --k6: #9a6a45; --k7: #7f8794; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --muted: #a0a9b8; --grid: #2c323d;
  --paper: #14171d; --page: #14171d; --soft: #1c2028; --line: #6b9ef8; --idle: #414a59;
  --mark: #ec9468; --good: #5cc497; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 3.5rem 1.25rem 5rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 54rem; margin: 0 auto; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 0 0 1rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
p { margin: 0 0 1rem; max-width: 44rem; }
h1, h2, p, li, dt, dd, summary, figcaption { overflow-wrap: anywhere; }
ul { margin: 0 0 1rem; padding-left: 1.2rem; }
li { margin: 0 0 .35rem; }
details { margin: 0 0 .8rem; }
summary { cursor: pointer; padding: .25rem 0; }
.lead { color: var(--muted); margin-bottom: 2rem; max-width: none; }
section { border-top: 1px solid var(--grid); padding: 1.7rem 0 1.1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: 1.5rem 2rem; margin: 0 0 .6rem; }
.tiles div { min-width: 0; display: flex; flex-direction: column; }
.tiles dt { color: var(--muted); font-size: .88rem; }
.tiles dd { margin: 0; font-size: 1.85rem; line-height: 1.3; letter-spacing: -.015em;
  font-variant-numeric: tabular-nums; }
.tiles dd + dd { color: var(--muted); font-size: .88rem; line-height: 1.45; letter-spacing: 0; }
figure { margin: 0 0 1.1rem; }
figure svg { display: block; width: 100%; font-family: inherit; }
figcaption { color: var(--muted); font-size: .92rem; margin: .5rem 0; max-width: 48rem; }
.table { margin-bottom: 1.1rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .42rem 0 .42rem 1.1rem; vertical-align: top;
  border-bottom: 1px solid var(--grid); }
th:first-child { padding-left: 0; }
th { color: var(--muted); font-weight: 500; }
td, tbody th { overflow-wrap: break-word; max-width: 26rem; }
tbody th { color: var(--ink); font-weight: 400; }
.n { text-align: right; }
td.n { white-space: nowrap; }
pre { margin: 0 0 .6rem; padding: 1rem 1.1rem; background: var(--soft); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .82rem/1.55 ui-monospace, "SF Mono", Menlo,
  Consolas, "Liberation Mono", monospace; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .4rem 1.6rem; margin: 0 0 1rem;
  font-size: .95rem; }
.facts dt { color: var(--muted); }
.facts dd { margin: 0; }
code { font: .88em ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
.stack { display: flex; height: 2.1rem; gap: 2px; margin: 0 0 .6rem; border-radius: 3px;
  overflow: hidden; }
.stack i { min-width: 1px; }
td .stack { height: 1rem; min-width: 8rem; margin: .25rem 0; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem;
  font-size: .92rem; }
.legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px;
  margin-right: .45rem; }
.idle { background: var(--idle); fill: var(--idle); }
.hatch { background: repeating-linear-gradient(45deg, var(--k7) 0 3px, var(--page) 3px 6px); }
@media (max-width: 42rem) {
  body { padding-top: 2rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 1.3rem; }
  .facts { grid-template-columns: 6rem minmax(0, 1fr); gap: .4rem .8rem; }
  .wide thead { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); }
  .wide table, .wide tbody, .wide tr, .wide th, .wide td { display: block; max-width: none; }
  .wide tr { border-bottom: 1px solid var(--grid); padding: .5rem 0; }
  .wide tbody th, .wide td { border: 0; padding: .1rem 0; }
  .wide tbody th { font-weight: 600; }
  .wide tbody th::before { content: attr(data-head) " "; color: var(--muted); font-weight: 500; }
  .wide td { display: grid; grid-template-columns: 9rem minmax(0, 1fr); gap: .8rem;
    text-align: left; white-space: normal; }
  .wide td::before { content: attr(data-head); color: var(--muted); }
  .wide td:empty { display: none; }
}
@media print { body { padding: 0; background: none; } .stack, .legend i, rect, circle, path {
  print-color-adjust: exact; } }
"""
CSS += "".join(f".k{i} {{ background: var(--k{i}); fill: var(--k{i}); }}\n" for i in range(8))


class Markup(str):
    """HTML for a cell of a table, which is not escaped again."""


def page(title: str, lead: str, parts: Sequence[str], *, css: str = "") -> str:
    """A whole page.

    Args:
        title: Plain text.
        lead: HTML below the heading.
        css: Styles besides those of all pages.
    """
    head = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # With this the browser refuses everything that a page might load.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        f'<title>{head}</title>\n<link rel="icon" href="data:,">\n<style>{CSS}{css}</style>\n'
        f'</head>\n<body>\n<main>\n<h1>{head}</h1>\n<p class="lead">{lead}</p>\n'
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A section of a page; its parts are HTML."""
    return f"<section>\n<h2>{html.escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """The most important figures: a label, a value and a detail each, in plain text."""
    cells = "\n".join(
        f"<div><dt>{html.escape(label[:1].upper() + label[1:])}</dt><dd>{html.escape(value)}</dd>"
        f"<dd>{html.escape(detail)}</dd></div>"
        for label, value, detail in figures
    )
    return f'<section>\n<dl class="tiles">\n{cells}\n</dl>\n</section>'


def figure(svg: str, caption: str) -> str:
    """An inline picture with its caption."""
    text = html.escape(caption)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    return f"<figure>\n{svg}\n<figcaption>{text}</figcaption>\n</figure>"


def box(
    color: str, place: tuple[float, float, float, float], *, tooltip: str, label: str = ""
) -> str:
    """A rectangle of an SVG picture.

    Args:
        place: Left, top, width and height, in pixels.
    """
    x, y, width, height = place
    text = f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}">{html.escape(label)}</text>'
    return (
        f'<g><title>{html.escape(tooltip)}</title><rect class="{color}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}"/>{text if label else ""}</g>'
    )


def facts(entries: Mapping[str, str]) -> str:
    """Names with their values, as plain text or as `Markup`."""
    cells = "".join(
        f"<dt>{html.escape(name)}</dt>"
        f"<dd>{value if isinstance(value, Markup) else html.escape(value)}</dd>"
        for name, value in entries.items()
    )
    return f'<dl class="facts">{cells}</dl>'


def items(lines: Iterable[str]) -> str:
    """A list of lines of HTML."""
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def fold(summary: str, *parts: str, is_open: bool = False) -> str:
    """HTML that the reader unfolds, below a summary."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{summary}</summary>{''.join(parts)}</details>"


def stack(parts: Sequence[tuple[str, float, str]], whole: float) -> str:
    """A bar of parts beside one another.

    Args:
        parts: For each its colour's class, its length, and its name in plain text.
        whole: The length of a bar as wide as the page.
    """
    drawn = "".join(
        f'<i class="{color}" style="width:{length / (whole or 1):.2%}" '
        f'title="{html.escape(name)}"></i>'
        for color, length, name in parts
    )
    return f'<div class="stack">{drawn}</div>'


def legend(parts: Iterable[tuple[str, str]]) -> str:
    """A legend of colours: the class and the plain-text name of each."""
    entries = "".join(f'<li><i class="{c}"></i>{html.escape(name)}</li>' for c, name in parts)
    return f'<ul class="legend">{entries}</ul>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table without its empty columns; a long one is folded.

    Args:
        heads: Plain text.
        rows: Cells, as plain text or as `Markup`.
        left: Columns of words; all others are numbers.
    """
    used = [i for i in range(len(heads)) if any(row[i] for row in rows)]

    is_wide = len(used) > 3  # a phone has no room for so many columns

    def cell(tag: str, column: int, text: str, attributes: str = "") -> str:
        style = "" if column in left else ' class="n"'
        inside = text if isinstance(text, Markup) else html.escape(text)
        if is_wide and (tag == "td" or "row" in attributes):
            attributes += f' data-head="{html.escape(heads[column])}"'
        return f"<{tag}{attributes}{style}>{inside}</{tag}>"

    def part(some: Sequence[Sequence[str]]) -> str:
        head = "".join(cell("th", i, heads[i], ' scope="col"') for i in used)
        body = "\n".join(
            "<tr>"
            + cell("th", used[0], row[used[0]], ' scope="row"')
            + "".join(cell("td", i, row[i]) for i in used[1:])
            + "</tr>"
            for row in some
        )
        return (
            f'<div class="table{" wide" if is_wide else ""}"><table>\n'
            f"<thead><tr>{head}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody>\n</table></div>"
        )

    out = part(rows[:_SHOWN_ROWS])
    if len(rows) > _SHOWN_ROWS:
        more = f"<p>And {len(rows) - _MAX_ROWS} more.</p>" if len(rows) > _MAX_ROWS else ""
        out += fold(f"{len(rows) - _SHOWN_ROWS} more", part(rows[_SHOWN_ROWS:_MAX_ROWS]), more)
    return out


def write(path: str | os.PathLike[str], text: str, error: type[HxlaError]) -> None:
    """Write a page to a file; a reader never sees half of it.

    Args:
        path: The file; its folder is made if it is not there.
        error: Raised if the path cannot be written.
    """
    path = local_path(path, "path", error)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as failure:
        with contextlib.suppress(OSError):
            part.unlink()
        raise error(
            f"the page cannot be written to {path}: {failure.strerror or failure}. "
            "Give a path that this user may write to"
        ) from failure


class Table(NamedTuple):
    """A table.

    Attributes:
        heads: Of the columns; if all are empty, they have no line.
        left: Columns of words; all others are numbers.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)


def as_text(parts: Iterable[str | tuple[str, Table, int]], width: int) -> str:
    """Lines and tables for a terminal, tables without their empty columns.

    Args:
        parts: Lines, and tables with their titles and the most rows to show.
        width: In characters.
    """
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False)
        elif part[1].rows:
            console.print(_rich_table(*part))
    return out.getvalue().rstrip() + "\n"


def _rich_table(title: str, table: Table, limit: int) -> RichTable:
    used = [i for i in range(len(table.heads)) if any(row[i] for row in table.rows)]
    rich_table = RichTable(box=None, title=title or None, title_justify="left")
    rich_table.show_header = any(table.heads)
    for i in used:
        rich_table.add_column(
            table.heads[i], justify="left" if i in table.left else "right", overflow="fold"
        )
    for row in table.rows[:limit]:
        rich_table.add_row(*[escape(row[i]) for i in used])
    if len(table.rows) > limit:
        rich_table.add_row(f"and {len(table.rows) - limit} more")
    return rich_table
