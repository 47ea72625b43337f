"""Which features hxla refuses together: few, each with a reason, and no others."""

import pytest

from support.feature_pairs import (
    LATER_FORMS,
    LATER_REFUSED,
    PAGE,
    REFUSED,
    REFUSED_AT_FIRST,
    later_pairs,
    page,
    pairs,
    refusal,
)
from support.tiers import rows

ALL = list(map(" + ".join, pairs()))
#: A pair for each reason.
QUICK = [next(iter(named)) for named, _ in REFUSED.values()]
SAID = {name: said for named, said in REFUSED.values() for name in named}
LATER = list(map(" + ".join, later_pairs()))
LATER_SAID = {name: said for named, said in LATER_REFUSED.values() for name in named}
#: A pair for each reason, and one that is not refused for each form.
LATER_QUICK = [
    *(next(iter(named)) for named, _ in LATER_REFUSED.values()),
    *(f"{form} + skip" for form in LATER_FORMS),
]


def test_at_most_half_of_the_first_refusals_are_left():
    assert len(ALL) == 537
    assert not SAID.keys() - set(ALL)
    assert len(SAID) == 32
    assert 2 * len(SAID) <= REFUSED_AT_FIRST


@pytest.mark.parametrize("name", rows(ALL, *QUICK))
def test_a_pair_is_refused_for_a_reason_or_planned_and_lowered(name):
    said = refusal(*name.split(" + "))
    assert bool(said) == (name in SAID), said
    assert SAID.get(name, "") in said


@pytest.mark.parametrize("name", rows(LATER, *LATER_QUICK))
def test_a_pair_of_a_later_form_is_refused_for_a_reason_or_planned_and_lowered(name):
    said = refusal(*name.split(" + "))
    assert bool(said) == (name in LATER_SAID), said
    assert LATER_SAID.get(name, "") in said


def test_the_page_has_all_pairs():
    assert PAGE.read_text() == page(), "python -m support.feature_pairs --page"
