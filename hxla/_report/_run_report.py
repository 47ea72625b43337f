"""What a run tells at its end: a few lines for the terminal."""

from collections.abc import Iterator

from .._core._format import plural
from ._history import History
from ._run_summary import summarise
from ._run_tables import change_table, device_tables, event_table, figures, lead, split_table
from ._tables import Table, as_text

_WIDTH = 100
_MAX_DEVICES = 8
_MAX_CHANGES = 5
_MAX_EVENTS = 3


def terminal_report(history: History) -> str:
    """The figures of a run of at least one step as a few lines of plain text."""
    return as_text(_parts(history), _WIDTH)


def _parts(history: History) -> Iterator[str | tuple[str, Table, int]]:
    summary = summarise(history)
    yield f"hxla: {lead(history, summary)}"
    found = list(figures(history, summary))
    yield "", Table(("", "", ""), found, left=(0, 2)), len(found)
    for title, _, table in device_tables(history, summary):
        yield title, table, _MAX_DEVICES
    if history.split is not None:
        title = f"Devices of a split, {plural(history.split.num_steps, 'step')}"
        yield title, split_table(history.split), _MAX_DEVICES
        if history.split.advice:
            yield history.split.advice
    yield "Changes of counts", change_table(history), _MAX_CHANGES
    yield "", event_table(history), _MAX_EVENTS
