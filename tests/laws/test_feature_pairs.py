"""Which features hxla refuses together: few, each with a reason, and no others."""

import pytest

from support.feature_pairs import REFUSED, REFUSED_AT_FIRST, pairs, refusal
from support.tiers import rows

ALL = list(map(" + ".join, pairs()))
#: A pair for each reason.
QUICK = [next(iter(named)) for named, _ in REFUSED.values()]
SAID = {name: said for named, said in REFUSED.values() for name in named}


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
