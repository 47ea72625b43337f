"""Element-wise work on parts of unlike sizes: each device's own, the padding left as it is."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hxla
from hxla._lower._across import Cut
from hxla._lower._granules import Granules
from hxla._lower._own_updates import NotByElementError, on_own_parts
from hxla._lower._padding import Padding
from hxla._profile._profile import LayerTime, Profile, Setting


def test_granules_cover_each_part_and_stay_in_the_array():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = tuple(int(n) for n in rng.integers(1, 400, rng.integers(2, 5)))
        granules = Granules.of(Cut(0, sizes, "tensor"))
        assert max(sizes) % granules.size == 0
        for own, count in zip(sizes, granules.counts, strict=True):
            assert own <= count * granules.size <= max(sizes)


SIZES = (12, 5)
PADDING = Padding(((), SIZES))


def update_of(optimizer, state_def):
    def run(p, g, whole, gw, *state):
        params, grads = {"a": p, "b": whole}, {"a": g, "b": gw}
        updates, new = optimizer.update(grads, jax.tree.unflatten(state_def, state), params)
        params = optax.apply_updates(params, updates)
        return [params["a"], g, params["b"], gw, *jax.tree.leaves(new)]

    return run


def test_an_update_by_own_parts_is_that_of_whole_arrays():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    rng = np.random.default_rng(1)
    p, g = (rng.normal(size=(3, sum(SIZES))).astype("float32") for _ in range(2))
    b, gb = (rng.normal(size=4).astype("float32") for _ in range(2))
    leaves, state_def = jax.tree.flatten(optimizer.init({"a": p, "b": b}))
    run = update_of(optimizer, state_def)
    arrays = [p, g, b, gb, *leaves]
    is_cut = [np.shape(x) == p.shape for x in arrays]
    cuts = [Cut(1, SIZES, "tensor") if cut else None for cut in is_cut]
    specs = [P(None, "tensor") if cut else P() for cut in is_cut]
    mapped = jax.shard_map(
        on_own_parts(run, cuts, "tensor"),
        mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)),
        in_specs=tuple(specs),
        out_specs=specs,
        check_vma=False,
    )
    given = [PADDING.pad(np.asarray(x)) if c else x for x, c in zip(arrays, is_cut, strict=True)]
    found, wanted = jax.jit(mapped)(*given), run(*arrays)
    for x, y, cut in zip(found, wanted, is_cut, strict=True):
        own = PADDING.unpad(np.asarray(x)) if cut else x
        np.testing.assert_allclose(own, y, rtol=2e-6, atol=1e-7)
        if cut:
            np.testing.assert_array_equal(np.asarray(x), PADDING.pad(own))


def test_what_mixes_elements_is_refused():
    cut = Cut(0, SIZES, "tensor")
    mapped = jax.shard_map(
        on_own_parts(lambda x: [jnp.cumsum(x)], [cut], "tensor"),
        mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)),
        in_specs=P("tensor"),
        out_specs=[P("tensor")],
        check_vma=False,
    )
    with pytest.raises(NotByElementError, match="cumsum"):
        mapped(jnp.zeros(24))


@pytest.fixture
def job(monkeypatch):
    """Of a Transformer with 12 heads."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "examples"))
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


def test_memory_is_that_of_the_compiled_programs(job):
    config = {"cluster": {"visible_devices": [0, 1]}}
    own = job(config=config)
    plan = own.plan(microbatch_size=4, mesh={"data": 1, "tensor": (3, 1)}, rules="decoder")
    with own.open(plan, steps=1) as session:
        next(iter(session))
        programs = session._programs
        stats = programs.runners[0]._compiled.memory_analysis()
    # Parameters, two limbs of sums of each, and a batch of bytes.
    assert stats.argument_size_in_bytes == pytest.approx(3 * plan.device_parameter_bytes, rel=0.03)
    assert programs._bytes_of_params() == plan.device_parameter_bytes
