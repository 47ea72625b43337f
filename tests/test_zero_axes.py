"""State shared out between copies that are cut by tensor and stage axes."""

import functools

import families
import jax
import numpy as np
import optax
import pytest
from test_pipeline_tensor import BATCH, MICRO, STEPS, gpt, text

import hxla

SIZES = {"width": 64, "length": 16, "layers": 2}
FORMS = {
    "tensor": {"tensor": 2},
    "stage": {"stage": 2},
    "stage and tensor": {"stage": 2, "tensor": 2},
}


def job(optimizer=None, precision="model", weights=None, **memory):
    return hxla.Job(
        functools.partial(gpt, layers=1),
        text(),
        families.token_loss,
        optimizer or optax.adamw(1e-2),
        batch_size=BATCH,
        precision=precision,
        weights=weights,
        config={"memory": memory, "communication": {"clip_norm": 0.5}},
    )


def planned(own, copies, axes, counts="even"):
    mesh = {"data": copies, **axes}
    num = int(np.prod([*mesh.values()]))
    devices = (hxla.Device(kind="cpu"),) * num
    rules = "decoder" if "tensor" in axes else None
    plan = own.plan(
        hxla.Cluster(name="", devices=devices), microbatch_size=MICRO, mesh=mesh, rules=rules
    )
    return plan if counts == "even" else plan.with_counts(counts)


def trained(own, plan, steps=STEPS, **options):
    with own.open(plan, steps=steps, **options) as session:
        for _ in session:
            pass
        if options and steps < STEPS:
            session.save()
        held = session._store.held[0].opt_state
        return session.result(), sum(x.addressable_shards[0].data.nbytes for x in leaves(held))


def leaves(tree):
    return [x for x in jax.tree.leaves(tree) if x.size > 1]


@pytest.mark.parametrize("name", FORMS)
def test_bits_do_not_depend_on_who_has_what(name):
    """Copies, counts and groups move no bit; beside whole state there is rounding."""
    axes = FORMS[name]
    whole, whole_bytes = trained(job(zero=0), planned(job(zero=0), 2, axes))
    own = job(zero=1)
    plan = planned(own, 2, axes)
    assert plan.placement.zero == 1
    found, own_bytes = trained(own, plan)
    assert own_bytes == pytest.approx(whole_bytes / 2, rel=0.02)
    for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)
    assert plan.numerics != planned(job(zero=0), 2, axes).numerics
    spreads = [(own, 2, (7, 1))]
    if name == "tensor":
        spreads.append((job(zero=1, shard_groups=2), 4, (3, 0, 2, 3)))
    else:  # those of tensor alone run segment by segment
        spreads.append((job(zero=2), 2, (3, 5)))
        spreads.append((job(zero=3, shares=[3, 1]), 2, (8, 0)))
    if name == "stage":
        spreads.append((job(zero=3, shard_groups=2), 4, (3, 0, 2, 3)))
    for other, copies, counts in spreads:
        spread = planned(other, copies, axes, counts)
        assert spread.numerics == plan.numerics
        assert trained(other, spread)[0].sha256 == found.sha256


@pytest.mark.parametrize("name", ["tensor", "stage"])
def test_a_checkpoint_knows_nothing_of_shares(name, tmp_path):
    axes, own = FORMS[name], job(zero=1)
    wanted, _ = trained(own, planned(own, 2, axes))
    trained(own, planned(own, 2, axes), steps=2, checkpoint_dir=tmp_path)
    other = job(zero=3) if name == "stage" else own
    found, _ = trained(other, planned(other, 4, axes), checkpoint_dir=tmp_path)
    assert found.history.steps[0].step == 2
    assert found.sha256 == wanted.sha256


@pytest.mark.parametrize("optimizer", ["lamb", "masked"])
def test_sums_over_whole_arrays_and_masks_are_of_all_parts(optimizer):
    """LAMB's norms are of whole parameters; a mask of elements is cut as they are."""
    first = lambda tree: jax.tree.map(lambda x: np.arange(x.size).reshape(x.shape) % 2, tree)  # noqa: E731

    def halved(updates, state, params=None):
        del params
        return jax.tree.map(lambda u, m: u * m, updates, first(updates)), state

    make = {
        "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
        "masked": lambda: optax.chain(
            optax.adam(1e-2), optax.GradientTransformation(lambda _: (), halved)
        ),
    }[optimizer]
    axes = FORMS["tensor"]
    whole, _ = trained(job(make(), zero=0), planned(job(make(), zero=0), 2, axes))
    found, _ = trained(job(make(), zero=1), planned(job(make(), zero=1), 2, axes))
    for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("memory", "optimizer", "copies", "axes", "said"),
    [
        ({"zero": 2, "waves": 2}, None, 2, "stage", "run all microbatches of a step in one"),
        (
            {"zero": 1, "offload": {"optimizer": "host"}},
            *(None, 2, "tensor", "only what copies of one device have can wait elsewhere"),
        ),
        ({"zero": 1}, None, 1, "tensor", "nobody to share with"),
        (
            {"zero": 3, "offload": {"parameters": "host"}},
            *(None, 2, "stage", "only what copies of one device have can wait elsewhere"),
        ),
        ({"zero": 1}, optax.contrib.muon, 2, "tensor", "as a whole, which no device has"),
    ],
    ids=["waves", "offload", "alone", "parameters", "whole parameters"],
)
def test_what_cannot_be_shared_out_so_is_refused(memory, optimizer, copies, axes, said):
    own = job(optimizer and optimizer(1e-2), **memory)
    with pytest.raises(hxla.PlanError, match=said):
        planned(own, copies, FORMS[axes])


def test_stages_take_the_first_form_that_their_devices_hold(tmp_path, monkeypatch):
    """Nobody said ZeRO: with less and less memory less and less of the state is on each device."""
    mesh, four = {"data": 2, "stage": 2}, {"cluster": {"visible_devices": [0, 1, 2, 3]}}

    def bytes_of(zero):
        own = families.gpt_job(8, optax.adamw(1e-2), {"memory": {"zero": zero}, **four}, **SIZES)
        with own.open(own.plan(microbatch_size=2, mesh=mesh, counts="even"), steps=1) as session:
            return session.memory_bytes

    needed = {zero: bytes_of(zero) for zero in (0, 1, 2, 3)}
    assert needed[0] > needed[1] > needed[2] > needed[3]
    inputs = 4096
    for zero, wanted in ((0, 0), (1, 1), (2, 2), (3, 3), (None, 3)):
        room = needed[wanted] + inputs if zero is not None else needed[3] // 2
        file = tmp_path / f"{zero}.toml"
        device = f'[[device]]\nkind = "cpu"\ncount = 4\nmemory_gib = {room / 2**30}\n'
        file.write_text(f'name = "small"\n{device}')
        monkeypatch.setenv("HXLA_MESH", str(file))
        own = families.gpt_job(8, optax.adamw(1e-2), four, **SIZES)
        plan = own.plan(microbatch_size=2, mesh=mesh, counts="even")
        assert plan.placement.zero == wanted
        said = [reason for reason in plan.reasons if reason.startswith("memory.zero=")]
        assert len(said) == (wanted > 0)
        if zero is None:
            assert "and with this one still" in said[0]
