"""The cost model: links, collectives, loads, and a step's time that adds up."""

import dataclasses

import hypothesis
import pydantic
import pytest
from hypothesis import strategies as st
from sailor import monotone, stage_loads, was_set

from hxla import Link
from hxla._core._errors import PlanError
from hxla._planner._cost import (
    StageLoad,
    all_gather_seconds,
    exposed_reduction_seconds,
    ring_all_reduce_seconds,
    step_cost,
)
from hxla._profile._profile import LayerSize, LayerTime, Profile, Setting
from hxla._schedule._schedules import gpipe


def line(latency, bandwidth):
    return Link(latency_seconds=latency, bytes_per_second=bandwidth).seconds


def no_time(_):
    return 0.0


def load(forward=1.0, backward=2.0, update=0.5, gradient=8.0, send=4.0):
    return StageLoad(
        forward_seconds=forward,
        backward_seconds=backward,
        update_seconds=update,
        gradient_bytes=gradient,
        send_bytes=send,
    )


def profile(times):
    """One layer; times: microbatch size to (forward, backward)."""
    size = LayerSize(parameter_bytes=10, output_bytes=3, stash_bytes=7)
    return Profile(
        model="m",
        layers=("only",),
        sizes={(b, 1): (size,) for b in times},
        times={
            Setting("gpu", b): (LayerTime(forward=f, backward=g, update=0.25),)
            for b, (f, g) in times.items()
        },
    )


def test_a_ring_moves_each_byte_twice_but_one_part():
    link = line(1e-5, 1e9)
    assert ring_all_reduce_seconds(8e8, 8, link) == pytest.approx(2 * 7 / 8 * 0.8 + 14e-5)
    assert ring_all_reduce_seconds(8e8, 8, link, duplex=False) == pytest.approx(
        2 * ring_all_reduce_seconds(8e8, 8, link)
    )
    assert all_gather_seconds(8e8, 8, link) == pytest.approx(7 / 8 * 0.8 + 7e-5)


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(-1, 1), (0, 0), (0, -1), (float("nan"), 1), (0, float("nan"))]
)
def test_a_link_refuses_what_is_none(latency, bandwidth):
    with pytest.raises(pydantic.ValidationError):
        line(latency, bandwidth)


@pytest.mark.parametrize("num_bytes", [0, 1e6])
def test_one_device_reduces_nothing(num_bytes):
    assert ring_all_reduce_seconds(num_bytes, 1, line(1, 1)) == 0
    assert ring_all_reduce_seconds(0, 4, line(1, 1)) == 0


@hypothesis.given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 20))
def test_what_a_backward_hides_is_less_than_the_backward(reduction, backward, num_buckets):
    exposed = exposed_reduction_seconds(reduction, backward, num_buckets)
    assert reduction / num_buckets - 1e-9 <= exposed <= reduction + 1e-9
    assert reduction - exposed <= backward + 1e-9
    assert exposed_reduction_seconds(reduction, backward, 1) == reduction


def test_a_disturbed_measurement_is_bounded_by_a_larger_microbatch():
    rough = profile({1: (2.0, 3.0), 2: (1.5, 4.0), 4: (3.0, 3.5)})
    smooth = monotone(rough).times
    assert [smooth[Setting("gpu", b)][0].forward for b in (1, 2, 4)] == [1.5, 1.5, 3.0]
    assert [smooth[Setting("gpu", b)][0].backward for b in (1, 2, 4)] == [3.0, 3.5, 3.5]
    assert monotone(monotone(rough)) == monotone(rough)


def test_forwards_of_whole_tenths_of_a_millisecond_were_set():
    measured = LayerTime(forward=1.719e-3, backward=3e-3, update=0.0)
    rounded = LayerTime(forward=1.7e-3, backward=3.141e-3, update=0.0)

    def with_inner(*inner):
        setting = Setting("gpu", 1)
        times = {setting: (measured, *inner, measured)}
        return was_set(dataclasses.replace(profile({}), times=times), setting)

    assert with_inner(rounded, rounded)
    assert not with_inner(rounded, measured)


def test_loads_sum_the_layers_of_a_stage():
    one = profile({1: (1.0, 2.0)})
    two = dataclasses.replace(
        one,
        layers=("a", "b"),
        sizes={k: v * 2 for k, v in one.sizes.items()},
        times={k: v * 2 for k, v in one.times.items()},
    )
    (whole,) = stage_loads(two, [Setting("gpu", 1)], [range(2)])
    assert whole == load(forward=2.0, backward=4.0, update=0.5, gradient=20, send=3)


def test_a_setting_without_times_names_those_that_have():
    with pytest.raises(PlanError, match=r"no times for .*'other'.*only for: .*'gpu'"):
        stage_loads(profile({1: (1.0, 1.0)}), [Setting("other", 1)], [range(1)])


def test_a_step_is_the_slowest_replica_then_reduction_then_update():
    cost = step_cost([[load()], [load(forward=2.0, backward=3.0)]], [4, 3], [[], []], [0.25])
    assert cost.step_seconds == pytest.approx(3 * 5 + 0.25 + 0.5)
    fast, slow = cost.stages
    assert fast[0].compute_seconds == 12
    assert slow[0].compute_seconds == 15
    assert fast[0].wait_seconds == pytest.approx(3)
    assert slow[0].wait_seconds == pytest.approx(0)


def test_an_update_lies_on_its_own_replicas_path_to_the_next_sum():
    late = [load(forward=2.0, backward=3.0, update=0.5)]  # 15.5 s a step
    early = [load(update=3.0)]  # 15 s a step: the other's microbatches run meanwhile
    cost = step_cost([early, late], [4, 3], [[], []], [0.25])
    assert cost.step_seconds == pytest.approx(15.5 + 0.25)
    assert cost.stages[0][0].wait_seconds == pytest.approx(0.5)
    alone = step_cost([early], [4], [[]], [0.25])
    assert alone.step_seconds == pytest.approx(15 + 0.25)


def test_a_barrier_makes_every_stage_wait_for_the_last():
    stages = [load(update=0.0)] * 3
    links = [[no_time] * 2]
    # The last stage is done two backwards before the first, which hides its reduction.
    free = step_cost([stages], [4], links, [0.0, 0.0, 3.0])
    held = step_cost([stages], [4], links, [0.0, 0.0, 3.0], barrier=True)
    assert free.step_seconds == pytest.approx((4 + 2) * 3)
    assert held.step_seconds == pytest.approx((4 + 2) * 3 + 3)


loads_of_4 = st.lists(
    st.builds(load, *[st.floats(0.1, 3)] * 3, st.floats(1, 9), st.floats(1, 9)),
    min_size=4,
    max_size=4,
)


@hypothesis.given(loads_of_4, st.integers(1, 8), st.floats(0, 1), st.booleans(), st.booleans())
def test_the_parts_of_every_stage_add_up_to_the_step(stages, count, latency, blocking, barrier):
    cost = step_cost(
        [stages],
        [count],
        [[line(latency, 10.0)] * 3],
        [0.1, 0.2, 0.3, 0.4],
        blocking=blocking,
        barrier=barrier,
        num_buckets=2,
    )
    for stage in cost.stages[0]:
        assert sum(dataclasses.astuple(stage)) == pytest.approx(cost.step_seconds)
        assert stage.wait_seconds >= -1e-9
    slowest = max(s.forward_seconds + s.backward_seconds for s in stages)
    assert cost.step_seconds >= count * slowest


def test_another_schedule_can_be_asked_for():
    stages, links = [load(update=0.0)] * 2, [[no_time]]
    cost = step_cost([stages], [4], links, [0.0, 0.0], make_schedule=gpipe)
    assert [e.kind for e in cost.timelines[0].events[:4]] == ["forward"] * 4
