"""A staging's time and memory, from the problem's own numbers."""

import dataclasses

import pytest

from support.inside.choose import (
    Chain,
    Group,
    ReplicaSort,
    Staging,
    staging_cost,
    step_seconds,
    tables,
    tail_seconds,
)

FAST = Group(
    kind="fast",
    num_devices=4,
    memory_bytes=1000.0,
    forward_seconds=(1.0,) * 4,
    backward_seconds=(2.0,) * 4,
    update_seconds=(0.25,) * 4,
    parameter_bytes=(10.0,) * 4,
    stash_bytes=(3.0,) * 4,
)
SLOW = dataclasses.replace(
    FAST, kind="slow", forward_seconds=(2.0,) * 4, backward_seconds=(4.0,) * 4
)
CHAIN = Chain(
    groups=(FAST, SLOW),
    num_microbatches=12,
    output_bytes=(5.0,) * 4,
    workspace_bytes=7.0,
    send_seconds=((0.0, 0.1), (0.1, 0.0)),
    send_latency_seconds=((0.0, 0.5), (0.5, 0.0)),
    reduce_seconds=(0.01, 0.02),
)
MIXED = Staging(
    cuts=(0, 3),
    replicas=(ReplicaSort(groups=(0, 1), count=2, num_microbatches=6),),
    step_seconds=0.0,
)


def test_time_is_pipeline_reduction_and_update():
    cost = staging_cost(CHAIN, MIXED)
    # Three fast layers, one slow layer: 9 s and 6 s a microbatch, transfers of 0.5 + 5 * 0.1 s.
    (timeline,) = cost.timelines
    assert timeline.busy_seconds == (54.0, 36.0)
    assert {round(s.end_seconds - s.start_seconds, 9) for s in timeline.sends} == {1.0}
    # The first stage ends last; its 30 bytes take 0.3 s and its update 0.75 s.
    assert cost.step_seconds == pytest.approx(timeline.finish_seconds[0] + 0.3 + 0.75)


def test_replay_and_closed_formula_assume_the_same_of_transfers():
    """Both stages wait while they send, however long it takes: +0 % and not -30 %.

    All stages spend the same share of their time on the forward, so the replay is never longer.
    """
    slow = dataclasses.replace(
        CHAIN, send_seconds=tuple(tuple(30 * x for x in row) for row in CHAIN.send_seconds)
    )
    (timeline,) = staging_cost(slow, MIXED).timelines
    sent = sum(s.end_seconds - s.start_seconds for s in timeline.sends)
    assert timeline.makespan_seconds >= max(timeline.busy_seconds) + sent - 1e-9
    whole = step_seconds(slow, MIXED.cuts, MIXED.replicas)
    tail = tail_seconds(tables(slow), MIXED.cuts, MIXED.replicas)
    assert 0.97 * (whole - tail) <= timeline.makespan_seconds <= (whole - tail) * (1 + 1e-9)


def test_one_replica_reduces_nothing():
    alone = dataclasses.replace(
        MIXED, replicas=(dataclasses.replace(MIXED.replicas[0], count=1, num_microbatches=12),)
    )
    assert staging_cost(CHAIN, alone).stages[0][0].reduction_seconds == 0.0


def test_unlike_replicas_wait_for_the_slowest():
    both = dataclasses.replace(
        MIXED,
        cuts=(0,),
        replicas=(
            ReplicaSort(groups=(0,), count=1, num_microbatches=8),
            ReplicaSort(groups=(1,), count=1, num_microbatches=4),
        ),
    )
    cost = staging_cost(CHAIN, both)
    # 96 s each; the reduction goes at the pace of the slower group's link.
    assert cost.step_seconds == pytest.approx(96 + 40 * 0.02 + 1.0)
    uneven = dataclasses.replace(
        both, replicas=tuple(dataclasses.replace(r, num_microbatches=6) for r in both.replicas)
    )
    assert staging_cost(CHAIN, uneven).step_seconds == pytest.approx(144 + 0.8 + 1.0)


def test_memory_is_state_stash_and_workspace():
    (stages,) = staging_cost(CHAIN, MIXED).stages
    assert stages[0].memory_bytes == 30 * 4 + 2 * 9 + 7
    assert stages[1].memory_bytes == 10 * 4 + 1 * 3 + 7
    light = dataclasses.replace(CHAIN, state_factor=2.0)
    assert staging_cost(light, MIXED).stages[0][0].memory_bytes == 30 * 2 + 2 * 9 + 7
