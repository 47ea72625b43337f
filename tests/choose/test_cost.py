"""The cost model: links, collectives, loads, and a step's time that adds up."""

import dataclasses

import hypothesis
import pydantic
import pytest
from hypothesis import strategies as st

from hxla import LayerSize, LayerTime, Link, PlanError, Profile, Setting
from support.inside.choose import (
    Chain,
    Group,
    ReplicaSort,
    Staging,
    all_gather_seconds,
    ring_all_reduce_seconds,
    staging_cost,
)
from support.sailor import StageLoad, monotone, stage_loads, was_set
from support.tiers import examples


def line(latency, bandwidth):
    return Link(latency_seconds=latency, bytes_per_second=bandwidth).seconds


def group(forward=(1.0,), backward=(2.0,), update=(0.5,)):
    return Group(
        kind="gpu",
        num_devices=1,
        memory_bytes=1e9,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        update_seconds=tuple(update),
        parameter_bytes=(1.0,) * len(forward),
        stash_bytes=(1.0,) * len(forward),
    )


def step(groups, counts, *, stages=1, reduce=0.25, latency=0.0):
    """Every group a replica, one stage for each layer."""
    chain = Chain(
        groups=tuple(groups),
        num_microbatches=sum(counts),
        output_bytes=(4.0,) * stages,
        send_seconds=((0.1,) * len(groups),) * len(groups),
        send_latency_seconds=((latency,) * len(groups),) * len(groups),
        reduce_seconds=(reduce,) * len(groups),
    )
    replicas = tuple(
        ReplicaSort(groups=(k,) * stages, count=1, num_microbatches=m) for k, m in enumerate(counts)
    )
    cuts = tuple(range(stages))
    return staging_cost(chain, Staging(cuts=cuts, replicas=replicas, step_seconds=0.0))


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
    assert whole == StageLoad(
        forward_seconds=2.0,
        backward_seconds=4.0,
        update_seconds=0.5,
        gradient_bytes=20,
        send_bytes=3,
    )


def test_a_setting_without_times_names_those_that_have():
    with pytest.raises(PlanError, match=r"no times for .*'other'.*only for: .*'gpu'"):
        stage_loads(profile({1: (1.0, 1.0)}), [Setting("other", 1)], [range(1)])


def test_a_step_is_the_slowest_replica_then_reduction_then_update():
    cost = step([group(), group(forward=[2.0], backward=[3.0])], [4, 3])
    assert cost.step_seconds == pytest.approx(3 * 5 + 0.25 + 0.5)
    fast, slow = cost.stages
    assert fast[0].compute_seconds == 12
    assert slow[0].compute_seconds == 15
    assert fast[0].wait_seconds == pytest.approx(3)
    assert slow[0].wait_seconds == pytest.approx(0)


def test_an_update_lies_on_its_own_replicas_path_to_the_next_sum():
    late = group(forward=[2.0], backward=[3.0])  # 15.5 s a step
    early = group(update=[3.0])  # 15 s a step: the other's microbatches run meanwhile
    cost = step([early, late], [4, 3])
    assert cost.step_seconds == pytest.approx(15.5 + 0.25)
    assert cost.stages[0][0].wait_seconds == pytest.approx(0.5)
    assert step([early], [4]).step_seconds == pytest.approx(15)


def test_the_last_stage_reduces_while_the_first_still_works():
    # The last stage is done two backwards before the first, which hides most of its reduction.
    stages = group([1.0] * 3, [2.0] * 3, [0.0] * 3)
    alike = step([stages, stages], [4, 4], stages=3, reduce=3.0)
    slowest = max(t.finish_seconds[0] for t in alike.timelines)
    assert alike.step_seconds == pytest.approx(slowest + 3.0)
    last = alike.stages[0][-1]
    assert alike.timelines[0].finish_seconds[-1] + last.reduction_seconds < alike.step_seconds


four = st.lists(st.floats(0.1, 3), min_size=4, max_size=4)


@hypothesis.settings(max_examples=examples(12, 100))
@hypothesis.given(
    st.lists(st.builds(group, four, four, four), min_size=1, max_size=3),
    st.integers(1, 8),
    st.floats(0, 1),
)
def test_the_parts_of_every_stage_add_up_to_the_step(groups, count, latency):
    cost = step(groups, [count] * len(groups), stages=4, latency=latency)
    for own, stages in zip(groups, cost.stages, strict=True):
        for stage in stages:
            busy = stage.compute_seconds + stage.reduction_seconds + stage.update_seconds
            assert busy + stage.wait_seconds == pytest.approx(cost.step_seconds)
            assert stage.wait_seconds >= -1e-9
        slowest = max(map(sum, zip(own.forward_seconds, own.backward_seconds, strict=True)))
        assert cost.step_seconds >= count * slowest
