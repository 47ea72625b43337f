"""Tables of text, for a terminal and for a page."""

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable


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
