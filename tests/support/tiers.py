"""The two tiers: `make test` runs a covering set of each table, `make test-all` all of it."""

from collections.abc import Iterable

import pytest

#: Whether the slow tests run too: `pytest --all`. Set before a test file is imported.
is_all = False


def rows(table: Iterable, *quick, ids=str):
    """Each row of a table as a parameter of a test; those that `quick` leaves out are slow.

    Args:
        table: The rows, or the names of a mapping's.
        quick: The covering set: each value of each dimension at least once.
        ids: From a row to its name in pytest's output.
    """
    table, quick = list(table), list(quick)
    unknown = [row for row in quick if row not in table]
    assert not unknown, f"no rows of this table: {unknown}"
    return [
        pytest.param(row, id=ids(row), marks=() if row in quick else pytest.mark.slow)
        for row in table
    ]


def examples(quick: int, whole: int) -> int:
    """How many examples a property test draws: few in the quick tier, many in the whole."""
    return whole if is_all else quick
