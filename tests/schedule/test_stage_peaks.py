"""The bytes of a pipeline's stages, beside closed formulas."""

import pytest

import hxla
from support.inside.schedule import HopBytes, PartBytes, stage_peaks

NOTHING = HopBytes()


@pytest.mark.parametrize(("kind", "waiting"), [("1f1b", [3, 2, 1]), ("gpipe", [8, 8, 8])])
def test_a_stage_keeps_the_residuals_of_the_microbatches_that_wait(kind, waiting):
    schedule = hxla.make_schedule(kind, 3, 8)
    part, loss = PartBytes(kept=100, backward=7), PartBytes(backward=50, is_loss=True)
    hops = [(NOTHING, NOTHING)] * 2
    peaks = stage_peaks(schedule, ([part], [part], [part, loss]), hops, keeps_inputs=False)
    # The last stage runs a microbatch's forward and backward in one action.
    assert peaks == [100 * waiting[0] + 7, 100 * waiting[1] + 7, 100 + 50]


def test_stages_that_keep_inputs_have_one_microbatch_of_residuals():
    schedule = hxla.make_schedule("1f1b", 3, 8)
    first = PartBytes(kept=100, backward=7)
    second = PartBytes(inputs=10, kept=100, gradients=4, backward=7)
    loss = PartBytes(inputs=10, gradients=4, is_loss=True)
    hop, back = HopBytes(sent=10, received=10), HopBytes(sent=4, received=4)
    stages, hops = ([first], [second], [loss]), [(hop, back)] * 2
    peaks = stage_peaks(schedule, stages, hops, keeps_inputs=True)
    # The residuals of this microbatch and the gradients on both sides; the second stage has the
    # inputs of one that waits for its backward, and of one that waits for its forward.
    assert peaks == [100 + 7 + 4, 2 * 10 + 100 + 7 + 2 * 4, 2 * 10 + 4]


def test_what_moves_is_on_both_sides_for_a_while():
    schedule = hxla.make_schedule("1f1b", 2, 1)
    hop = HopBytes(sent=10, received=20, at_sender=300, at_receiver=400)
    stages = [PartBytes(kept=100)], [PartBytes(inputs=20, is_loss=True)]
    assert stage_peaks(schedule, stages, [(hop, NOTHING)], keeps_inputs=False) == [410, 400]


@pytest.mark.parametrize(("read", "written"), [(0, 0), (6, 0), (0, 3), (6, 3), (10, 8)])
def test_a_backward_reads_inputs_and_results_that_wait_once(read, written):
    schedule = hxla.make_schedule("gpipe", 2, 5)
    part = PartBytes(inputs=10, read=read, kept=100, written=written)
    parts = [PartBytes(kept=1), part, PartBytes(inputs=8, read=2, kept=50)]
    stages, hop = (parts, [PartBytes(is_loss=True)]), (HopBytes(sent=5), NOTHING)
    peak, _ = stage_peaks(schedule, stages, [hop], keeps_inputs=False)
    each = 1 + read + 100 + max(written, 2) + 50
    # The last forward has the inputs of all five, of which four are reduced to what is read.
    assert peak == max(
        5 * each, 4 * each + 1 + max(10, read) + 100 + 8, 4 * each + 1 + read + 100 + 8 + 50 + 5
    )
