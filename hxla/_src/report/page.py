"""Self-contained HTML pages: no network, no foreign scripts."""

import contextlib
import html
import os
from collections.abc import Iterable, Sequence

from ..core.errors import HxlaError
from ..core.files import local_path

_SHOWN_ROWS, _MAX_ROWS = 16, 200  # of a table, before and after it is unfolded
CSS = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #626b7a; --grid: #e2e5ea;
  --paper: #ffffff; --page: #f6f7f9; --busy: #2f6fdb; --idle: #d3d9e2; --mark: #b4552d;
  --k0: #2f6fdb; --k1: #e39a1d; --k2: #2a9d78; --k3: #7fa9ea; --k4: #c8508f; --k5: #7a5bd0;
  --k6: #9a6a45; --k7: #7f8794; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --muted: #9aa4b5; --grid: #2f3642;
  --paper: #1a1e26; --page: #12151b; --busy: #5b93f5; --idle: #414a59; --mark: #e58a5e; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 3rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 58rem; margin: 0 auto; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 0 0 .9rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .5rem; }
p { margin: 0 0 1rem; max-width: 44rem; }
h1, h2, p, li, dd, summary, figcaption { overflow-wrap: anywhere; }
ul { margin: 0 0 1rem; padding-left: 1.2rem; }
li { margin: 0 0 .35rem; }
details { margin: 0 0 .8rem; }
summary { cursor: pointer; padding: .25rem 0; }
.lead { color: var(--muted); margin-bottom: 1.8rem; }
section { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px;
  padding: 1.4rem 1.5rem 1.2rem; margin: 0 0 1.25rem; break-inside: avoid; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1.25rem;
  margin: 0; }
.tiles div { min-width: 0; display: flex; flex-direction: column; }
.tiles dt { color: var(--muted); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.55rem; line-height: 1.3; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
.tiles dd + dd { color: var(--muted); font-size: .85rem; letter-spacing: 0; }
figure { margin: 0 0 1.1rem; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 34rem; height: auto; font-family: inherit; }
figcaption { color: var(--muted); font-size: .88rem; margin-top: .5rem; max-width: 48rem; }
.table { overflow-x: auto; margin-bottom: .9rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .38rem .9rem .38rem 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--muted); font-weight: 500; white-space: nowrap; }
td, tbody th { overflow-wrap: break-word; max-width: 26rem; }
tbody th { color: var(--ink); font-weight: 400; white-space: normal; }
.n { text-align: right; white-space: nowrap; }
pre { margin: 0 0 .6rem; overflow-x: auto; font: .85rem/1.5 ui-monospace, "SF Mono", Menlo,
  Consolas, "Liberation Mono", monospace; }
.stack { display: flex; height: 2.1rem; gap: 2px; margin: 0 0 .6rem; border-radius: 4px;
  overflow: hidden; }
.stack i { min-width: 1px; }
td .stack { height: 1rem; min-width: 8rem; margin: .25rem 0; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem;
  font-size: .92rem; }
.legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px;
  margin-right: .45rem; }
.idle { background: var(--idle); fill: var(--idle); }
.hatch { background: repeating-linear-gradient(45deg, var(--k7) 0 3px, var(--paper) 3px 6px); }
@media print { body { padding: 0; background: none; } section { border: 0; padding: 0; } }
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
    """The most important figures: a label, a value and a detail each."""
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
        label: In its middle.
    """
    x, y, width, height = place
    text = f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}">{html.escape(label)}</text>'
    return (
        f'<g><title>{html.escape(tooltip)}</title><rect class="{color}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}"/>{text if label else ""}</g>'
    )


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

    def cell(tag: str, column: int, text: str, scope: str = "") -> str:
        style = "" if column in left else ' class="n"'
        inside = text if isinstance(text, Markup) else html.escape(text)
        return f"<{tag}{scope}{style}>{inside}</{tag}>"

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
            f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
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
