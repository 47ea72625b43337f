"""A session that is over goes with all its arrays, before Python looks for cycles."""

import gc
import os
import weakref

import jax
import pytest

from support import models
from support.forms import FORMS, trained
from support.tiers import rows

#: Mappings of a small program, at least.
FEW = 4


@pytest.fixture
def no_cycles_found():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycles_found")
@pytest.mark.parametrize("form", rows(FORMS, "zero 1", "stages", "unlike replicas"))
def test_nothing_of_a_session_stays(form, tmp_path):
    """On a GPU the next session would not fit beside it."""
    known = []

    def see(_record, session):
        if session.step_number == 3:  # where islands have one state
            state = jax.tree.leaves(session.state.opt_state)
            known.extend(map(weakref.ref, (session, *state)))

    options = {"eval_data": models.regression(8), "checkpoint_dir": tmp_path}
    result = trained(form, callbacks=[see], **options)
    assert len(known) > 3
    assert result.step == 3
    del result
    assert not [found for ref in known if (found := ref()) is not None]


def mappings():
    """Of this process: each compiled program has some, and Linux allows 65,530."""
    with open("/proc/self/maps", "rb") as file:
        return sum(1 for _ in file)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux counts mappings")
@pytest.mark.parametrize("form", rows(FORMS, "zero 1", "stages"))
def test_no_program_outlives_its_job(form):
    counts = []
    for _ in range(3):
        trained(form, eval_data=models.regression(8))
        gc.collect()
        counts.append(mappings())
    assert counts[2] - counts[1] < FEW, counts
