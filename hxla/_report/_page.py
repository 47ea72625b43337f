"""HTML pages that need nothing from outside: no network, no script of others."""

import dataclasses
import html
import os
import pathlib
from collections.abc import Sequence

_CSS = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #626b7a; --grid: #e2e5ea;
  --paper: #ffffff; --page: #f6f7f9; --busy: #2f6fdb; --idle: #d3d9e2; --mark: #b4552d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --muted: #9aa4b5; --grid: #2f3642;
  --paper: #1a1e26; --page: #12151b; --busy: #5b93f5; --idle: #414a59; --mark: #e58a5e; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 3rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 58rem; margin: 0 auto; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 0 0 .9rem; }
p { margin: 0 0 1rem; max-width: 44rem; }
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
tbody th { color: var(--ink); font-weight: 400; }
.n { text-align: right; white-space: nowrap; }
pre { margin: 0 0 .6rem; overflow-x: auto; font: .85rem/1.5 ui-monospace, "SF Mono", Menlo,
  Consolas, "Liberation Mono", monospace; }
.warn { color: var(--mark); }
.drawn { background: #ffffff; border-radius: 6px; }
@media print { body { padding: 0; background: none; } section { border: 0; padding: 0; } }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture for a page.

    Attributes:
        svg: An `<svg>` element that needs nothing from outside.
        caption: What to see in it, in words.
    """

    svg: str
    caption: str


def page(title: str, lead: str, parts: Sequence[str], *, css: str = "") -> str:
    """A whole page.

    Args:
        title: Its heading, as plain text.
        lead: What stands below the heading, as HTML.
        parts: Its sections, as HTML.
        css: Styles beyond those that all pages share.
    """
    head = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The browser itself then refuses whatever a page might load.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        f'<title>{head}</title>\n<link rel="icon" href="data:,">\n<style>{_CSS}{css}</style>\n'
        f'</head>\n<body>\n<main>\n<h1>{head}</h1>\n<p class="lead">{lead}</p>\n'
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A section of a page; its parts are HTML."""
    return f"<section>\n<h2>{html.escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def tiles(found: Sequence[tuple[str, str, str]]) -> str:
    """Figures to see first: a label, a value and a detail each."""
    cells = "\n".join(
        f"<div><dt>{html.escape(label[:1].upper() + label[1:])}</dt><dd>{html.escape(value)}</dd>"
        f"<dd>{html.escape(detail)}</dd></div>"
        for label, value, detail in found
    )
    return f'<section>\n<dl class="tiles">\n{cells}\n</dl>\n</section>'


def figure(picture: Picture) -> str:
    """A picture with its caption."""
    text = html.escape(picture.caption)
    svg = picture.svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    return f"<figure>\n{svg}\n<figcaption>{text}</figcaption>\n</figure>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table; the columns in `left` hold words, all others numbers."""

    def cell(tag: str, column: int, text: str, scope: str = "") -> str:
        style = "" if column in left else ' class="n"'
        return f"<{tag}{scope}{style}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", i, h, ' scope="col"') for i, h in enumerate(heads))
    body = "\n".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", i, text) for i, text in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a file; a reader never sees half of it.

    Args:
        path: The file; its folder is made if it is not there.
        text: What to write.

    Raises:
        OSError: The path cannot be written.
    """
    path = pathlib.Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
