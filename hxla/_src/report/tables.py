"""Tables of texts, for a terminal and for a page."""

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable


class Table(NamedTuple):
    """A table.

    Attributes:
        heads: Of the columns; none of them has a word: there is no line for them.
        left: Columns that hold words; all others hold numbers.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)


def as_text(parts: Iterable[str | tuple[str, Table, int]], width: int) -> str:
    """Lines and tables for a terminal, tables without their empty columns.

    Args:
        parts: Lines, and tables with a title and the number of rows that are shown.
        width: Of a line, in characters.
    """
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False)
        elif part[1].rows:
            console.print(_rich_table(*part))
    return out.getvalue().rstrip() + "\n"


def _rich_table(title: str, found: Table, limit: int) -> RichTable:
    used = [i for i in range(len(found.heads)) if any(row[i] for row in found.rows)]
    table = RichTable(box=None, title=title or None, title_justify="left")
    table.show_header = any(found.heads)
    for i in used:
        table.add_column(
            found.heads[i], justify="left" if i in found.left else "right", overflow="fold"
        )
    for row in found.rows[:limit]:
        table.add_row(*[escape(row[i]) for i in used])
    if len(found.rows) > limit:
        table.add_row(f"and {len(found.rows) - limit} more")
    return table
