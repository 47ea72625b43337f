"""A split's step is predicted from its devices alone, within a tenth of what was measured."""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import LayerTime, Profile, Setting
from support.inside.choose import split_time
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import gpt

RECORDED = json.loads((ROOT / "benchmarks" / "results" / "uneven_split.json").read_text())["meshes"]
MICROBATCH, NUM = 8, 4  # of benchmarks/uneven_split_worker.py
#: Ratios that ran: two of 16 heads and three are 7:1 and 13:3.
RATIOS = {
    "cpu-1.0-0.5": {"unlike": (23, 7), "unlike, estimated": (7, 3), "even": (1, 1)},
    "cpu-1.0-0.33": {"unlike": (7, 1), "unlike, as planned": (13, 3), "even": (1, 1)},
    "cpu-1.0-1.0": {"even": (1, 1)},
}


@functools.cache
def a_job(width=1024, heads=16):
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), width=width, heads=heads, layers=1))
    data = {"text": jax.ShapeDtypeStruct((MICROBATCH * NUM, gpt.LENGTH + 1), np.uint8)}
    return hxla.Job(model, data, gpt.loss, optax.adamw(2e-3), batch_size=MICROBATCH * NUM)


def alone(seconds, update=0.0, splits=()):
    """A profile of devices alone: of each kind, a microbatch's seconds and an update's."""
    times = {
        Setting(kind, MICROBATCH): (LayerTime(forward=s / 3, backward=2 * s / 3, update=update),)
        for kind, s in seconds.items()
    }
    return Profile(model="", layers=("all",), sizes={}, times=times, splits=splits)


def planned(job, mesh, ratio, profile):
    shares = {"data": 1, "tensor": ratio}
    return job.plan(mesh, microbatch_size=MICROBATCH, mesh=shares, rules="decoder", profile=profile)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", RATIOS)
def test_a_split_takes_what_follows_from_its_devices_alone(mesh):
    job, told = a_job(), RECORDED[mesh]["seconds of a step"]
    devices = hxla.load_cluster(mesh).devices
    # Measured with its update, which is a hundredth of it.
    seconds = {d.label: told[f"{d.core_share or 1.0} alone, 16 units"] / NUM for d in devices}
    for name, ratio in RATIOS[mesh].items():
        plan = planned(job, mesh, ratio, alone(seconds))
        assert plan.prediction.step_seconds == pytest.approx(told[name], rel=0.1), (name, plan)


def test_an_update_is_of_the_largest_part_and_unmeasured_devices_predict_nothing():
    job = a_job(width=64, heads=4)
    labels = [d.label for d in hxla.load_cluster("cpu-1.0-0.5").devices]
    times = dict(zip(labels, (1.0, 2.0), strict=True))
    without = planned(job, "cpu-1.0-0.5", (3, 1), alone(times)).prediction
    plan = planned(job, "cpu-1.0-0.5", (3, 1), alone(times, update=1.0))
    assert without.step_seconds == pytest.approx(NUM * without.microbatch_seconds[0])
    part = plan.device_parameter_bytes / plan.parameter_bytes
    assert plan.prediction.fixed_seconds == pytest.approx((part,))
    assert plan.prediction.step_seconds == pytest.approx(without.step_seconds + part)
    # Of four heads the fast device has three; more of its time is repeated.
    assert 0.75 < without.microbatch_seconds[0] < 1.2
    some = planned(job, "cpu-1.0-0.5", (3, 1), alone({labels[0]: 1.0})).prediction
    assert not some.step_seconds


def test_what_a_measured_split_takes_beyond_its_devices_counts_for_other_parts_too():
    job, cluster = a_job(width=64, heads=4), hxla.load_cluster("cpu-1.0-0.5")
    times = dict(zip([d.label for d in cluster.devices], (1.0, 2.0), strict=True))

    def micro(ratio, splits=()):
        plan = planned(job, "cpu-1.0-0.5", ratio, alone(times, splits=splits))
        return plan, plan.prediction.microbatch_seconds[0]

    plan, before = micro((3, 1))
    _, even_before = micro((1, 1))
    ran = split_time(plan, cluster, before + 0.3)
    assert ran.kinds == tuple(times)
    assert ran.parts == pytest.approx((0.75, 0.25))
    # With the parts that ran, what was measured; with others, as much more than without.
    assert micro((3, 1), (ran,))[1] == pytest.approx(before + 0.3)
    assert micro((1, 1), (ran,))[1] == pytest.approx(even_before + 0.3)
    # Another size of a microbatch, another way to cut, other devices: nothing is known of them.
    for other in (
        {"microbatch_size": MICROBATCH + 1},
        {"sent_bytes": ran.sent_bytes + 1},
        {"kinds": ran.kinds[::-1]},
    ):
        unlike = dataclasses.replace(ran, **other)
        assert micro((3, 1), (unlike,))[1] == pytest.approx(before)
    # A split cannot take less than no time.
    fast = dataclasses.replace(ran, seconds=0.0)
    assert micro((1, 1), (fast,))[1] >= 0
