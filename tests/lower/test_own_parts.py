"""What a device of an uneven split does and holds: its own part of the sums, sizes, memory."""

import collections
import math

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import LayerTime, Profile, Setting
from support.inside.lower import Cut, Granules
from support.paths import ROOT


def test_granules_cover_each_part_and_stay_in_the_array():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = tuple(int(n) for n in rng.integers(1, 400, rng.integers(2, 5)))
        granules = Granules.of(Cut(0, sizes, "tensor"))
        assert max(sizes) % granules.size == 0
        for own, count in zip(sizes, granules.counts, strict=True):
            assert own <= count * granules.size <= max(sizes)


@pytest.fixture
def job(monkeypatch):
    """Of a Transformer with 12 heads."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import gpt

    def make(**given):
        model = gpt.GPT(nnx.Rngs(0), width=192, heads=12, layers=1)
        return hxla.Job(model, gpt.library(), gpt.loss, optax.adamw(1e-3), batch_size=8, **given)

    return make


def sizes(plan, name="blocks/0/up/kernel"):
    [layout] = [p for p in plan.parameters if p.name == name]
    return layout.sizes[1]


def test_sizes_follow_measured_times_where_a_profile_has_them(job):
    wishes = {"microbatch_size": 4, "mesh": {"data": 1, "tensor": 2}, "rules": "decoder"}

    def profile(slow):
        times = {"cpu": 1.0, "cpu@0.5": slow}
        return Profile(
            model="",
            layers=("all",),
            sizes={},
            times={
                Setting(label, 4): (LayerTime(forward=s / 3, backward=s * 2 / 3),)
                for label, s in times.items()
            },
        )

    described = job().plan("cpu-1.0-0.5", **wishes)
    as_described, slower, alike = (
        job().plan("cpu-1.0-0.5", profile=profile(s), **wishes) for s in (2.0, 4.0, 1.0)
    )
    assert abs(sizes(described)[0] - sizes(as_described)[0]) <= 0.1 * sum(sizes(described))
    assert sizes(slower)[1] < sizes(as_described)[1]
    assert "measured; of their time" in slower.explain()
    assert not alike.is_uneven


def test_a_workstation_with_unlike_cards_gets_unlike_parts_said_with_their_padding(job):
    wishes = {"microbatch_size": 4, "mesh": {"data": 1, "tensor": 2}, "rules": "decoder"}
    plan = job().plan("workstation-3090-4090", **wishes)
    small, large = sizes(plan)
    assert 0.3 < small / (small + large) < 0.5
    words = plan.explain()
    padding = plan.device_parameter_bytes - sum(
        p.num_bytes // p.shape[d] * p.parts(d, 2)[0]
        if (d := p.dim_of("tensor")) is not None
        else p.num_bytes
        for p in plan.parameters
    )
    assert f"and {padding:,} of padding" in words
    assert "(NVIDIA GeForce RTX 4090) works all the time" in words


def padded_bytes(plan, num):
    """Of the parameters of one device: what is cut counts by its largest part."""
    total = 0
    for p in plan.parameters:
        dims = list(p.shape)
        dim = p.dim_of("tensor")
        if dim is not None:
            parts = p.sizes[dim] if p.sizes else ()
            dims[dim] = max(parts, default=dims[dim] // num)
        total += 4 * math.prod(dims)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 2, 1)])
def test_memory_is_that_of_the_compiled_programs(job, shares):
    own = job(config={"cluster": {"visible_devices": list(range(len(shares)))}})
    plan = own.plan(microbatch_size=4, mesh={"data": 1, "tensor": shares}, rules="decoder")
    with own.open(plan, steps=1) as session:
        next(iter(session))
        programs = session._programs
        stats = programs.runners[0]._programs.of(0)["loss"].memory_analysis()
        held = session._store.held[0]
        live = collections.Counter()
        for x in held.params:
            for shard in x.addressable_shards:
                live[shard.device] += shard.data.nbytes
    expected = padded_bytes(plan, len(shares))
    assert set(live.values()) == {expected}
    assert len(live) == len(shares)
    assert plan.device_parameter_bytes == programs._bytes_of_params() == expected
    # Parameters, two limbs of sums of each, and a batch of bytes.
    assert stats.argument_size_in_bytes == pytest.approx(3 * expected, rel=0.03)
