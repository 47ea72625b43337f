"""The memory model: what each device holds, and when it fits for sure."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from hxla import LayerSize, PlanError, make_schedule
from support.device_memory import MemoryRule, pipeline_memory, stash_bytes
from support.tiers import examples

RULE = MemoryRule(buffer_factor=1.0, context_bytes=50.0, allocator_share=0.5, margin=0.1)


def layer(parameters=10.0, stash=3.0):
    return LayerSize(parameter_bytes=parameters, output_bytes=1.0, stash_bytes=stash)


def test_a_device_holds_state_stash_workspace_fragments_and_context():
    first, second = pipeline_memory(
        [[layer(), layer(stash=4.0)], [layer(20.0)]], make_schedule("1f1b", 2, 8), RULE
    )
    assert first.parameter_bytes == first.gradient_bytes == first.buffer_bytes == 20
    assert first.optimizer_bytes == 40
    assert first.stash_bytes == 2 * 7
    assert second.stash_bytes == 3
    assert first.workspace_bytes == 4
    assert first.context_bytes == 50
    # The allocator rounds what it hands out, and not what the driver holds.
    assert first.allocator_bytes == (20 * 5 + 14 + 4) / 2
    assert first.total_bytes == (20 * 5 + 14 + 4) * 1.5 + 50


def test_what_fits_includes_the_margin_and_what_lacks_is_said():
    (memory,) = pipeline_memory([[layer()]], make_schedule("1f1b", 1, 1), RULE)
    needed = memory.total_bytes * 1.1
    assert memory.fits(needed)
    assert not memory.fits(needed - 0.01)
    assert memory.missing_from(needed - 7) == pytest.approx(7)
    assert memory.missing_from(2 * needed) == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@hypothesis.settings(max_examples=examples(15, 60))
@hypothesis.given(st.integers(1, 5), st.integers(1, 8))
def test_like_stashes_peak_as_the_schedule_says(name, num_stages, num_microbatches):
    schedule = make_schedule(name, num_stages, num_microbatches)
    assert stash_bytes(schedule, [2.0] * num_stages) == tuple(2 * n for n in schedule.peak_stash)


def test_unlike_chunks_are_weighed():
    schedule = make_schedule("interleaved", 2, 4, 2)
    assert stash_bytes(schedule, [1.0] * 4) == schedule.peak_stash == (5, 3)
    # Of the 5 that the first stage keeps, 4 may be of its first chunk and 2 of its second.
    assert stash_bytes(schedule, [1.0, 1.0, 0.0, 0.0]) == (4, 3)
    assert stash_bytes(schedule, [0.0, 0.0, 1.0, 1.0]) == (2, 1)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(MemoryRule)])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_rule_refuses_what_is_no_amount(field, value):
    with pytest.raises(PlanError, match=field):
        MemoryRule(**{field: value})


def test_parts_and_schedule_must_agree():
    with pytest.raises(PlanError, match=r"1 parts for 2 stages of 1 chunks: give 2"):
        pipeline_memory([[layer()]], make_schedule("1f1b", 2, 2), RULE)
