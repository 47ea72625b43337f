"""Small models in the styles that people write, each with its loss, data and optimizer."""

from . import as_written, attention, convolutions, generative, recurrent, structures, updates
from .row import Row, error, plain

#: Name to row, as `tests/laws/test_zoo.py` trains them.
ROWS: dict[str, Row] = {
    **convolutions.ROWS,
    **attention.ROWS,
    **recurrent.ROWS,
    **generative.ROWS,
    **structures.ROWS,
    **updates.ROWS,
    **as_written.ROWS,
}

__all__ = ["ROWS", "error", "plain"]
