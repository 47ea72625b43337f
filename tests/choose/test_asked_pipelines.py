"""Plans of pipelines that arguments ask for, on clusters that are only described."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.models import Blocks, mean_square

WIDTH, LENGTH, LAYERS, BATCH = 16, 8, 8, 16


@functools.cache
def traced(batch_size=BATCH, length=LENGTH, layers=LAYERS, *, recompute=None, **pipeline):
    model = nnx.eval_shape(lambda: Blocks(nnx.Rngs(0), WIDTH, layers))
    data = {"x": jax.ShapeDtypeStruct((batch_size, length, WIDTH), np.float32)}
    config = {"pipeline": pipeline, "memory": {"recompute": recompute}}
    return hxla.Job(model, data, mean_square, optax.sgd(0.1), batch_size=batch_size, config=config)


def cluster(*memory_bytes, kinds=None, speeds=None):
    devices = tuple(
        hxla.Device(
            kind=kind,
            memory_bytes=memory,
            memory_bytes_per_second=1e11,
            rates=(hxla.Rate(dtype="float32", flops_per_second=1e10 * speed),),
        )
        for kind, memory, speed in zip(
            kinds or "A" * len(memory_bytes),
            memory_bytes,
            speeds or (1,) * len(memory_bytes),
            strict=True,
        )
    )
    node = hxla.Node(name="n", link=hxla.Link(bytes_per_second=1e10))
    return hxla.Cluster(name="described", devices=devices, nodes=(node,))


ROOM = 1 << 30
TWO, FOUR = cluster(ROOM, ROOM), cluster(*[ROOM] * 4)


def layers_of(plan):
    """How many layers each stage has: the segments but for the loss's own end."""
    parts = [segment.part for segment in plan.pipeline.segments]
    return [parts.count(part) for part in sorted(set(parts))]


def test_a_number_of_stages_makes_pipelines_of_as_many_devices():
    plan = traced(32).plan(FOUR, stages=2)
    assert [replica.devices for replica in plan.replicas] == [(0, 1), (2, 3)]
    assert plan.microbatch_size == 2  # two pipelines of two stages, each with four or more
    assert any("at least 4 per stage" in reason for reason in plan.reasons)
    a, b = layers_of(plan)
    assert abs(a - b) <= 1


def test_one_stage_is_no_pipeline():
    """So a script may give as many stages as there are devices."""
    for mesh, num in (({"data": 2, "stage": 1}, 2), ({"stage": 1}, 1)):
        plan = traced(32).plan(cluster(*[ROOM] * num), mesh=mesh)
        assert plan.pipeline is None
        assert [replica.devices for replica in plan.replicas] == [(i,) for i in range(num)]


def test_shares_of_the_work_are_what_the_stages_get():
    plan = traced().plan(TWO, stages=(3, 1), microbatch_size=1)
    a, b = layers_of(plan)
    assert 2 < a / b < 4
    assert a + b == len(plan.pipeline.segments) >= LAYERS


def test_a_profile_cuts_stages_that_take_as_long_and_larger_memory_comes_first():
    job = traced()
    even = job.plan(TWO, stages=2, microbatch_size=1)
    names = tuple(segment.name for segment in even.pipeline.segments)
    seconds = {"A": 3e-3, "B": 1e-3}
    times = {
        hxla.Setting(kind, 1): (hxla.LayerTime(forward=s / 3, backward=s * 2 / 3),) * len(names)
        for kind, s in seconds.items()
    }
    known = hxla.Profile(model="", layers=names, num_segments=len(names), sizes={}, times=times)
    plan = job.plan(cluster(ROOM, ROOM, kinds="AB"), stages=2, microbatch_size=1, profile=known)
    a, b = layers_of(plan)
    ranks = plan.replicas[0].devices
    each = [seconds["AB"[rank]] * num for rank, num in zip(ranks, (a, b), strict=True)]
    assert max(each) <= 3e-3 * len(names) / 4 + 3e-3
    assert any("cut by measured times" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    "speeds", [(2,) * 8 + (1,) * 8, tuple(1 + i / 8 for i in range(12))], ids=["two kinds", "all"]
)
def test_many_devices_get_stages_by_their_speed(speeds):
    """A search that told all devices apart would have 65,536 sets of them."""
    num = len(speeds)
    described = cluster(*[ROOM] * num, kinds=[f"K{x}" for x in speeds], speeds=speeds)
    plan = traced(64, 64, 48).plan(described, stages=num, microbatch_size=1)
    layers = dict(zip(plan.replicas[0].devices, layers_of(plan), strict=True))
    assert sorted(layers) == list(range(num))
    slowest = max(count / speeds[rank] for rank, count in layers.items())
    whole = 1 / min(speeds)  # of a layer, on the slowest
    assert slowest <= sum(layers.values()) / sum(speeds) + whole


def test_a_pipeline_that_does_not_fit_is_refused_before_anything_runs():
    options = {"stages": 2, "microbatch_size": 2, "counts": "even"}
    kept = traced().plan(TWO, **options)
    most = max(device.memory_bytes for device in kept.prediction.devices)
    assert traced().plan(cluster(*[int(most)] * 2), **options).numerics == kept.numerics
    with pytest.raises(hxla.PlanError, match=r"does not fit .* or memory\.recompute = 'auto'"):
        traced().plan(cluster(*[int(most) - 1] * 2), **options)


def test_sizes_of_microbatches_that_are_tried_are_made_finer_until_one_fits():
    """Of the divisors of 134 only 2 suits two devices."""
    job = traced(134, 512)
    need = job.plan(cluster(ROOM), auto=True, microbatch_size=1).prediction.devices[0]
    plan = job.plan(cluster(*[int(0.6 * need.memory_bytes)] * 2))
    assert plan.microbatch_size == 1
    assert any("finer ones were tried" in reason for reason in plan.reasons)


def test_stages_recompute_where_residuals_do_not_fit():
    options = {"stages": 2, "microbatch_size": 2, "counts": "even"}
    kept = traced(recompute="auto").plan(TWO, **options)
    assert not kept.pipeline.recompute
    assert kept.numerics == traced(recompute="none").plan(TWO, **options).numerics
    less = cluster(*[int(kept.prediction.devices[0].memory_bytes) - 1] * 2)
    again = traced(recompute="auto").plan(less, **options)
    assert again.pipeline.recompute
    assert again.prediction.devices[0].memory_bytes < kept.prediction.devices[0].memory_bytes
    assert again.numerics == traced(recompute="boundaries").plan(TWO, **options).numerics


REFUSED = [
    ({"stages": 3}, {}, "4 devices cannot make pipelines of 3 stages: use 2 or 4 stages"),
    ({"stages": "two"}, {}, "neither a number of stages nor one share"),
    ({"stages": (1, -1)}, {}, "must be positive shares of the work"),
    ({"stages": 2}, {"num_chunks": 2}, "needs pipeline.schedule='interleaved'"),
    (
        {"stages": 2},
        {"schedule": "zb-h1", "recompute": "boundaries"},
        "run each forward three times",
    ),
    ({"mesh": {"stage": 2, "tensor": 2}}, {}, "neither rules nor a hxla.split in the model say"),
    (
        {"mesh": {"stage": 2, "tensor": 2}, "rules": "decoder"},
        {"recompute": "none"},
        "stages of 2 devices each keep no residuals",
    ),
    ({"mesh": {"stage": 2, "fsdp": 2}}, {}, "would cut the batch inside a stage"),
    ({"mesh": {"data": 3}}, {}, "takes 3 devices, there are 4"),
    ({"mesh": 4}, {}, "mesh=4 is no mesh"),
    ({"rules": "decoder"}, {}, "need a mesh whose axes they name"),
    ({"microbatch_size": 5}, {}, "the nearest size that fits is 4"),
    ({"microbatch_size": 8, "mesh": {"data": 4}}, {}, "4 devices but only 2 microbatches"),
    ({"microbatch_size": 1}, {"num_micro_batch": 8}, "disagree: 16 examples in 8 microbatches"),
    ({}, {"num_micro_batch": 5}, "not divisible into pipeline.num_micro_batch=5"),
    ({"stages": 4, "microbatch_size": 8}, {"schedule": "interleaved"}, "use a multiple of 4"),
    (
        {"stages": 2, "microbatch_size": 2, "counts": (6, 2)},
        {"schedule": "interleaved"},
        "this schedule gives every pipeline as many microbatches",
    ),
]


def test_what_cannot_be_is_refused_with_the_remedy():
    said = {}
    for options, pipeline, words in REFUSED:
        try:
            said[words] = repr(traced(**pipeline).plan(FOUR, **options).mesh_in_words)
        except hxla.HxlaError as error:
            if words not in str(error):
                said[words] = str(error)
    assert not said
