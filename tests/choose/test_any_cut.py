"""What `numerics.cut` of `any` plans, and what it refuses before or when a session opens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import hxla
from support import any_cut
from support.any_cut import job, planned, planned_stages


def test_numerics_are_one_for_every_size_of_tensor():
    """And for replicas around them, and whether the user names the axis or not."""
    meshes = ({"data": 1}, {"data": 2, "tensor": 1}, {"data": 2, "tensor": 2}, {"tensor": 4})
    plans = [planned(job("mlp"), mesh) for mesh in meshes]
    assert len({plan.numerics for plan in plans}) == 1
    assert all(plan.axes[-1].granules == 4 for plan in plans)
    assert [plan.axis_sizes["tensor"] for plan in plans] == [1, 1, 2, 4]
    specs = {tuple(p.spec for p in plan.parameters) for plan in plans}
    assert len(specs) == 1
    # A device still has only its shard, and sends nothing if it is alone.
    whole, *_, least = plans
    assert least.device_parameter_bytes < 0.4 * whole.device_parameter_bytes
    sent = [plan.prediction.sent_bytes for plan in plans]
    assert sent[0] == sent[1] == 0 < sent[2] < sent[3]
    assert hxla.Plan.model_validate_json(whole.model_dump_json()).numerics == whole.numerics
    [reason] = [line for line in whole.reasons if "numerics.cut" in line]
    assert "4 granules" in reason


def test_numerics_of_pipelines_and_chains_are_those_of_one_program():
    """Although what is stored where between steps depends on the mesh."""
    meshes = [
        {"data": 1, "tensor": 4},
        {"data": 1, "stage": 2, "tensor": 2},
        {"data": 1, "stage": 4, "tensor": 1},
    ]
    plans = [planned(job("mlp"), mesh) for mesh in (*meshes, {"data": 2, "stage": 3})]
    assert len({plan.pipeline and plan.pipeline.points for plan in plans}) == 4
    assert all(plan.axes[-1].granules == 4 and plan.inner_axes[-1][0] == "tensor" for plan in plans)
    segments = [s for plan in plans if plan.pipeline for s in plan.pipeline.segments]
    assert {segment.keep for segment in segments} == {"inputs"}
    interleaved = {"schedule": "interleaved", "num_chunks": 2}
    plans += [
        planned(job("mlp", pipeline=interleaved), {"data": 1, "stage": 2}),
        planned(job("mlp", recompute="boundaries"), {"data": 2}),
        planned(job("mlp", zero=3), {"data": 2, "tensor": 2}),
    ]
    assert plans[-2].num_segments > 1
    said = str(hxla.determinism(job("mlp").graph(2), plans[1]))
    assert "replicas may be cut in any way" in said
    assert "in the same way" not in said
    assert len({plan.numerics for plan in plans}) == 1
    # Without the setting each cut has numerics of its own.
    others = [planned(job("mlp", cut="planned"), mesh) for mesh in meshes]
    assert len({plan.numerics for plan in others}) == 3


def test_the_number_of_granules_and_the_setting_decide_bits():
    own = [job("mlp"), job("mlp", granules=2), job("mlp", cut="planned")]
    numerics = {planned(each, {"data": 1, "tensor": 2}).numerics for each in own}
    assert len(numerics) == 3


#: The job, the mesh, what else is asked, and the error.
REFUSED = {
    "too many devices": (job("mlp", granules=2), {"tensor": 4}, {}, "2 granules for 4 devices"),
    "no whole granules": (job("mlp"), {"tensor": 3}, {}, "4 granules for 3 devices"),
    "a size that does not divide": (
        job("mlp", granules=32),
        {"tensor": 1},
        {},
        "into 32 granules, set numerics.granules .*\n.*size 48 does not divide into 32",
    ),
    "uneven shards": (job("mlp"), {"tensor": (3, 1)}, {}, "granules of one size.*shares"),
    "another axis": (
        job("mlp"),
        {"fsdp": 2, "tensor": 2},
        {},
        "one axis 'tensor': leave 'fsdp' out",
    ),
    "stages without a mesh": (
        job("mlp"),
        {"data": 2},
        {"stages": 2},
        "stages from a mesh or from tables",
    ),
    "a stage with another axis": (
        job("mlp"),
        {"data": 3},
        {"stages": [{"devices": 1}, {"data": 2}]},
        r"stages\[1\]: use 'tensor' instead of data",
    ),
    "a stage of uneven shards": (
        job("mlp"),
        {"data": 3},
        {"stages": [[{"devices": 1}], [{"tensor": (2, 1)}]]},
        r"stages\[1\]\[0\]: granules are of one size",
    ),
    "a stage of three devices": (
        job("mlp"),
        {"data": 4},
        {"stages": [{"devices": 1}, {"tensor": 3}]},
        r"stages\[1\]: 3 devices do not divide 4 granules",
    ),
    "unlike stages without rules": (
        job("mlp"),
        {"data": 3},
        {"stages": [{"devices": 1}, {"tensor": 2}], "rules": None},
        "the axis 'tensor' of stages cuts: pass rules",
    ),
    "bfloat16": (
        job("mlp", precision="bf16"),
        {"tensor": 2},
        {},
        "bfloat16 is rounded in a way that depends on how a program is cut, use precision",
    ),
    "stages that keep residuals": (
        job("mlp", recompute="none"),
        {"stage": 2},
        {},
        "keep only their inputs.*'boundaries'",
    ),
    "no rules": (job("mlp"), {"data": 2}, {"rules": None}, "nothing says .*rules='decoder'"),
    "float sums": (job("mlp"), {"tensor": 2}, {"reduction": "float"}, "float sums depend"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_lowered_is_refused_with_the_remedy(name):
    own, mesh, options, message = REFUSED[name]
    num = int(np.prod([len(s) if isinstance(s, tuple) else s for s in mesh.values()]))
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * num)
    options = {"microbatch_size": 2, "rules": "decoder", **options}
    with pytest.raises(hxla.HxlaError, match=message):
        own.plan(cluster, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda stages: stages[0]["axes"][0].update(granules=8), "the same name, roles and gran"),
        (lambda stages: stages[0].update(axes=[]), "the same name, roles and granules"),
        (
            lambda stages: next(
                x for x in stages[0]["parameters"] if x["name"] == "up/kernel"
            ).update(spec=[["tensor"], []]),
            "stages cut up/kernel in unlike dimensions",
        ),
    ],
    ids=["granules", "no axis", "dimensions"],
)
def test_an_edited_plan_whose_stages_disagree_is_refused(edit, message):
    plan = planned_stages(job("mlp"), [[{"devices": 1}], [{"tensor": 2}]])
    fields = json.loads(plan.to_json())
    edit(fields["pipeline"]["replicas"][0]["stages"])
    with pytest.raises(hxla.PlanError, match=message):
        hxla.Plan.from_json(json.dumps(fields))


def test_plans_of_unlike_stages_have_the_numerics_of_one_device():
    one = planned(job("mlp"), {"data": 1})
    tables = [{"devices": 1}, {"tensor": 2}], [[{"tensor": 4}], [{"devices": 1}, {"tensor": 2}]]
    for stages in tables:
        assert planned_stages(job("mlp"), stages).numerics == one.numerics
        usual = planned_stages(job("mlp", cut="planned"), stages)
        whole = planned(job("mlp", cut="planned"), {"data": 1, "tensor": 2})
        assert usual.numerics != whole.numerics


def test_accelerators_and_searches_are_refused():
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="h100"),) * 2)
    with pytest.raises(hxla.PlanError, match="tried on CPUs, and not on h100"):
        job("mlp").plan(cluster, microbatch_size=2, mesh={"tensor": 2}, rules="decoder")
    with pytest.raises(hxla.ConfigError, match="which a search chooses"):
        job("mlp").plan(cluster, auto=True)


class Convolved(any_cut.Mlp):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.before = nnx.Conv(1, 1, (3,), rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.before(x[..., None])[..., 0])


over_batch_loss = hxla.over_batch(
    lambda model, batch: model(batch["x"]),
    lambda out, batch: jnp.mean((out - batch["y"] - out.mean(0)) ** 2, -1),
)


@pytest.mark.parametrize(
    ("options", "communication", "message"),
    [
        ({"model": Convolved}, {}, r"conv_general_dilated.* at .*any_cut.py:\d+"),
        ({"precision": "bf16"}, {}, "bfloat16 is rounded"),
        ({"loss": over_batch_loss}, {}, "hxla.over_batch"),
        ({"optimizer": optax.contrib.muon(1e-2)}, {}, "the optimizer reads parameters as a whole"),
        ({}, {"clip_norm": 0.5, "clip": "before"}, "communication.clip"),
    ],
    ids=[
        "a convolution",
        "bfloat16",
        "a loss over the batch",
        "whole parameters",
        "clips of microbatches",
    ],
)
def test_what_a_program_would_do_is_refused_when_it_opens(options, communication, message):
    usual = {"model": any_cut.Mlp, "loss": any_cut.mlp_loss, "optimizer": optax.adam(1e-2)}
    options = {**usual, **options}
    model = options.pop("model")
    own = hxla.Job(
        lambda: model(nnx.Rngs(0)),
        any_cut.mlp_data(),
        batch_size=any_cut.BATCH,
        config={"numerics": {"cut": "any"}, "communication": communication},
        **options,
    )
    with pytest.raises(hxla.PlanError, match=message):
        own.open(planned(own, {"tensor": 2}), steps=1)


class Scanned(nnx.Module):
    """Layers in a scan, all of which read the first values too."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(5, 32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 32, 64)) / 8)

    def __call__(self, x):
        first = self.first(x)

        def layer(y, up):
            return y + jnp.tanh(first + (y @ up)[..., :32]), None

        return self.last(jax.lax.scan(layer, first, self.up[...])[0])


def test_a_scan_whose_layers_read_one_value_is_not_cut():
    own = hxla.Job(
        lambda: Scanned(nnx.Rngs(0)),
        any_cut.mlp_data(),
        any_cut.mlp_loss,
        optax.adam(1e-2),
        batch_size=any_cut.BATCH,
        config={"numerics": {"cut": "any"}},
    )
    rules = hxla.RuleSet(name="up", rules=(hxla.Rule(path="up", axes=((), ("tensor",))),))
    with own.open(planned(own, {"data": 1}, rules=rules), steps=1):
        pass
    plan = planned(own, {"data": 1, "stage": 4}, rules=rules)
    with pytest.raises(hxla.PlanError, match=r"scan at .*any_cut.py:\d+ all read one value"):
        own.open(plan, steps=1)
