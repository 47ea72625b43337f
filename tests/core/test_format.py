"""Numbers for people."""

import math

import pytest

from support.inside.core import clock, num_bytes, si, span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "0:07"), (83, "1:23"), (1799.6, "30:00"), (7384, "2:03:04"), (math.inf, "?")],
)
def test_a_duration_is_shown_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (si(412), "412"),
        (si(5_120), "5.1k"),
        (si(999_600), "1.0M"),
        (span(0.0841), "84 ms"),
        (span(1.234), "1.23 s"),
        (num_bytes(536), "536 B"),
        (num_bytes(7.5 * 2**30), "7.5 GiB"),
    ],
)
def test_a_number_has_its_unit(made, text):
    assert made == text
