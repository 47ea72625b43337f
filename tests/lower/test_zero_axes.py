"""State shared out between copies that are cut by tensor and stage axes."""

import functools
import json
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import families, random_plans, scanned_models, shared_state, tiers
from support.cut_copies import FORMS, job, of_pairs, planned, planned_pairs, trained
from support.inside.job import JobContext
from support.launched import start
from support.paths import TESTS
from support.tensor_gpt import BATCH, gpt, text
from support.tiers import rows

pytestmark = pytest.mark.optimized

SIZES = {"width": 64, "length": 16, "layers": 2}


#: Other forms of the job than ZeRO's stage 1: what of the memory, copies, and their counts.
SPREADS = {
    "stages of few parameters": [
        ({"zero": 3, "shares": [3, 1], "num_groups": 2}, 2, (5, 3)),
        ({"zero": 3, "offload": {"parameters": "host", "optimizer": "host"}}, 2, (3, 5)),
        ({"zero": 1, "offload": {"optimizer": "disk"}}, 2, (3, 5)),
    ],
    "tensor": [  # stages 2 and 3 run segment by segment
        ({"zero": 1, "shard_groups": 2}, 4, (3, 0, 2, 3)),
        ({"zero": 1, "shares": [3, 1], "offload": {"optimizer": "host"}}, 2, (3, 5)),
        ({"zero": 1, "offload": {"optimizer": "disk"}}, 2, (3, 5)),
    ],
    "stage": [
        ({"zero": 2, "offload": {"optimizer": "host"}}, 2, (3, 5)),
        ({"zero": 3, "shares": [3, 1]}, 2, (8, 0)),
        ({"zero": 3, "shard_groups": 2}, 4, (3, 0, 2, 3)),
    ],
    "stage and tensor": [
        ({"zero": 1}, 2, (7, 1)),
        ({"zero": 3, "shares": [3, 1], "offload": {"optimizer": "host"}}, 2, (8, 0)),
    ],
}


def of_few(num_groups=1, **memory):
    config = {"memory": memory, "communication": {"clip_norm": 0.5}}
    config["optimizer"] = {"num_apply_groups": num_groups}
    return shared_state.job(shared_state.Few, config, optax.adamw(1e-2))


def formed(name, memory, copies, counts="even"):
    """A job and its plan."""
    if name in FORMS:
        return (own := job(**memory)), planned(own, copies, FORMS[name], counts)
    own = of_few(**memory)
    mesh = {"data": copies, "stage": 2}
    plan = own.plan(shared_state.cluster(2 * copies), microbatch_size=1, mesh=mesh)
    return own, plan if counts == "even" else plan.with_counts(counts)


@functools.cache
def of_stage_1(name):
    own, plan = formed(name, {"zero": 1}, 2)
    assert plan.placement.zero == 1
    return plan, *trained(own, plan)


@pytest.mark.parametrize("name", rows(SPREADS, "stages of few parameters"))
def test_bits_do_not_depend_on_who_has_what(name):
    """Neither copies, nor counts or groups move one."""
    plan, wanted, _ = of_stage_1(name)
    spreads = SPREADS[name] if tiers.is_all else SPREADS[name][:1]
    for memory, copies, counts in spreads:
        own, spread = formed(name, memory, copies, counts)
        assert spread.placement.zero == memory["zero"]
        assert spread.numerics == plan.numerics
        assert trained(own, spread)[0].sha256 == wanted.sha256


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_each_copy_has_half_of_the_state_and_the_bits_of_whole_state(name):
    plan, found, own_bytes = of_stage_1(name)
    own = job(zero=0)
    whole, whole_bytes = trained(own, planned(own, 2, FORMS[name]))
    assert own_bytes == pytest.approx(whole_bytes / 2, rel=0.02)
    assert plan.numerics == planned(own, 2, FORMS[name]).numerics
    assert found.sha256 == whole.sha256


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "stage"])
def test_a_checkpoint_knows_nothing_of_shares(name, tmp_path):
    axes, own = FORMS[name], job(zero=1)
    plan, wanted, _ = of_stage_1(name)
    trained(own, plan, steps=2, checkpoint_dir=tmp_path)
    other = job(zero=3) if name == "stage" else own
    found, _ = trained(other, planned(other, 4, axes), checkpoint_dir=tmp_path)
    assert found.history.steps[0].step == 3
    assert found.sha256 == wanted.sha256


@pytest.mark.slow
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
    jobs = [of_pairs(make(), zero=zero) for zero in (0, 1)]
    whole, found = (trained(own, planned_pairs(own, 2))[0] for own in jobs)
    for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("memory", "optimizer", "copies", "axes", "said"),
    [
        ({"zero": 2, "waves": 2}, None, 2, "stage", "run all microbatches of a step in one wave"),
        ({"zero": 1}, None, 1, "tensor", "nobody to share with"),
        (
            {"zero": 3, "offload": {"stash": "host"}},
            *(None, 2, "stage", "stages run as one program, which offloads nothing"),
        ),
        (
            {"zero": 2, "offload": {"parameters": "host"}},
            *(None, 2, "stage", "needs memory.zero of 3"),
        ),
        (
            {"zero": 1, "offload": {"optimizer": "host"}},
            *(optax.lamb, 2, "tensor", "sums over whole parameters.* read its state"),
        ),
    ],
    ids=["waves", "alone", "stash", "parameters", "sums of state"],
)
def test_what_cannot_be_shared_out_so_is_refused(memory, optimizer, copies, axes, said):
    own = job(optimizer and optimizer(1e-2), **memory)
    with pytest.raises(hxla.PlanError, match=said):
        planned(own, copies, FORMS[axes])


def of_frozen():
    return functools.partial(
        hxla.Job,
        functools.partial(gpt, layers=2),
        text(),
        families.token_loss,
        optax.adamw(1e-2),
        batch_size=BATCH,
        trainable="blocks/",
    )


def of_scanned():
    """Layers in one stacked array, of which stages have unlike numbers of rows."""
    return functools.partial(
        hxla.Job,
        lambda: scanned_models.NnxNet(),
        scanned_models.data(24),
        scanned_models.loss,
        optax.adam(1e-2),
        batch_size=8,
    )


def of_statistics():
    """BatchNorm's, which are averaged and no parameters."""
    return functools.partial(
        hxla.Job,
        lambda: random_plans.Conv(nnx.Rngs(0)),
        random_plans.conv_data(),
        random_plans.conv_loss,
        optax.sgd(0.1, momentum=0.9),
        batch_size=8,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "stages", "pipeline"),
    [
        (of_frozen, (1, 2), {}),
        (of_scanned, (1, 2), {}),
        (of_statistics, (1, 2), {}),
        (of_frozen, 2, {"schedule": "interleaved", "num_chunks": 2}),
    ],
)
def test_stages_of_any_model_share_out_their_parameters(make, stages, pipeline):
    devices = (hxla.Device(kind="cpu"),) * 4
    found = []
    for zero in (1, 2, 3):
        start_job = make()
        own = start_job(config={"memory": {"zero": zero}, "pipeline": pipeline})
        cluster = hxla.Cluster(name="", devices=devices)
        plan = own.plan(cluster, microbatch_size=2, stages=stages, counts="even")
        with own.open(plan, steps=2) as session:
            for _ in session:
                pass
            loss = session.evaluate(start_job.args[1]).loss
            found.append((session.result().sha256, plan.numerics, loss))
    assert len(set(found)) == 1


CODE = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
import hxla
hxla.join()
import jax
from support.cut_copies import job, planned, trained
for memory in {{"zero": 1}}, {{"zero": 3, "shares": [1, 2], "offload": {{"optimizer": "host"}}}}:
    own = job(precision="bf16", **memory)
    found, _ = trained(own, planned(own, 2, {{"stage": 2}}, (5, 3)))
    if jax.process_index() == 0:
        print("RESULT", json.dumps([found.sha256, [r.loss for r in found.history.steps]]))
"""


@pytest.mark.slow
def test_a_process_for_each_stage_of_each_copy(tmp_path):
    """They time the pieces of a step first; parameters travel in 16 bits and in 32."""
    own = job(precision="bf16", zero=2)
    found, _ = trained(own, planned(own, 2, FORMS["stage"], (5, 3)))
    wanted = [found.sha256, [r.loss for r in found.history.steps]]
    out, err = start(tmp_path, CODE, "-n", "4").communicate(timeout=900)
    told = re.findall(r"\[0\] RESULT (.*)", out)
    assert [json.loads(text) for text in told] == [wanted] * 2, out[-3000:] + err[-3000:]


@pytest.mark.slow
def test_stages_take_the_first_form_that_their_devices_hold(tmp_path, monkeypatch):
    """Nobody said ZeRO: with less and less memory less and less of the state is on each device."""
    mesh, four = {"data": 2, "stage": 2}, {"cluster": {"visible_devices": [0, 1, 2, 3]}}

    def bytes_of(zero):
        own = families.gpt_job(8, optax.adamw(1e-2), {"memory": {"zero": zero}, **four}, **SIZES)
        with own.open(own.plan(microbatch_size=2, mesh=mesh, counts="even"), steps=1) as session:
            return session.running_plan.memory_bytes

    needed = {zero: bytes_of(zero) for zero in (0, 1, 2, 3)}
    assert needed[0] > needed[1] > needed[2] > needed[3]
    inputs = 4096

    def planned_with(room):
        file = tmp_path / "small.toml"
        device = f'[[device]]\nkind = "cpu"\ncount = 4\nmemory_gib = {room / 2**30}\n'
        file.write_text(f'name = "small"\n{device}')
        monkeypatch.setenv("HXLA_MESH", str(file))
        own = families.gpt_job(8, optax.adamw(1e-2), four, **SIZES)
        return own.plan(microbatch_size=2, mesh=mesh, counts="even")

    for zero in (0, 1, 2, 3):
        plan = planned_with(needed[zero] + inputs)
        assert plan.placement.zero == zero
        said = [reason for reason in plan.reasons if "as compiled" in reason]
        assert len(said) == (zero > 0)
        before = ["state not sharded", *(f"memory.zero {stage}" for stage in range(1, zero))]
        for layout in before[:zero]:
            assert f"with {layout}" in said[0]
    words = r"lacks .* with state not sharded, .* with memory\.zero 3, as"
    with pytest.raises(hxla.PlanError, match=words):
        planned_with(needed[3] // 2)


@pytest.mark.slow
def test_a_pipeline_has_room_for_the_inputs_of_all_that_it_may_run(tmp_path, monkeypatch):
    """Its programs take those of a whole step, whatever the counts are."""
    mesh, four = {"data": 2, "stage": 2}, {"cluster": {"visible_devices": [0, 1, 2, 3]}}

    def opened(plan=None):
        config = {"memory": {"zero": 0}, **four}
        own = shared_state.job(shared_state.Few, config, optax.sgd(0.1))
        plan = plan or own.plan(microbatch_size=2, mesh=mesh, counts="even")
        with own.open(plan, steps=1) as session:
            return plan, session.running_plan.memory_bytes, JobContext(own).batch_bytes(2)

    plan, needed, each = opened()
    assert plan.counts == (2, 2)
    file = tmp_path / "small.toml"
    for room in (needed + 4 * each, needed + 3 * each):
        device = f'[[device]]\nkind = "cpu"\ncount = 4\nmemory_gib = {room / 2**30}\n'
        file.write_text(f'name = "small"\n{device}')
        monkeypatch.setenv("HXLA_MESH", str(file))
        if room == needed + 4 * each:
            opened(plan)
            continue
        with pytest.raises(hxla.PlanError, match="a pipeline of 4 microbatches needs"):
            opened(plan)
