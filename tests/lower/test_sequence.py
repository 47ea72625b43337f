"""The mesh axis `sequence`: devices of a replica share the tokens of its examples."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hxla
from support import families, feature_pairs, zoo
from support.inside.graph import leaves
from support.inside.plan import assign_tokens
from support.tiers import rows
from support.token_models import (
    GPT,
    LENGTH,
    REFUSED,
    ROWS,
    TEXT,
    WIDTH,
    next_token,
    weighted,
)
from support.training import train_with
from support.zoo.row import BATCH, MICROBATCH, SEED, STEPS

MOST = 1e-5  # relative error
REFUSED_BESIDE_TENSOR = [name for names, _ in feature_pairs.REFUSED.values() for name in names]
FORMS = {
    "2": {"data": 1, "sequence": 2},
    "4": {"sequence": 4},
    "2 x 2": {"data": 2, "sequence": 2},
    "2 and tensor": {"sequence": 2, "tensor": 2},
    "2 and fsdp": {"fsdp": 2, "sequence": 2},
    "2, fsdp and tensor": {"fsdp": 2, "sequence": 2, "tensor": 2},
}
BESIDE = list(FORMS)[3:]
#: Parts of unlike sizes; 16 tokens over three devices are 6, 5 and 5.
UNEVEN = {
    "3:1": {"data": 1, "sequence": (3, 1)},
    "1:3:2 x 2": {"data": 2, "sequence": (1, 3, 2)},
    "16 over 3": {"data": 1, "sequence": 3},
}
FLOAT = 4


def num_devices(size):
    return len(size) if isinstance(size, tuple) else size


def devices(num):
    return hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * num)


def planned(mesh, model=None, loss=weighted, data=TEXT, **options):
    """The plan of a job, and the job."""
    num = math.prod(map(num_devices, mesh.values()))
    make = model or (lambda: GPT(nnx.Rngs(0)))
    own = hxla.Job(make, data, loss, ROWS["gpt"].optimizer, batch_size=BATCH)
    options = {"rules": rules_of(mesh)} | options
    return own.plan(devices(num), microbatch_size=MICROBATCH, mesh=mesh, **options), own


def rules_of(mesh):
    if "expert" in mesh:
        return "moe"
    return "decoder" if {"tensor", "fsdp"} & set(mesh) else None


def train(row, mesh, memory=None):
    visible = list(range(math.prod(map(num_devices, mesh.values()))))
    return train_with(
        row.make(),
        row.data,
        row.loss,
        row.optimizer,
        batch_size=BATCH,
        microbatch_size=MICROBATCH,
        steps=STEPS,
        seed=SEED,
        shuffle=False,
        variables=row.variables,
        mixes_examples=row.by_microbatch,
        mesh=mesh,
        rules=rules_of(mesh),
        config={"cluster": {"visible_devices": visible}, "memory": memory or {}},
    )


@functools.cache
def expected(name):
    return zoo.plain(ROWS[name])


def as_plain(name, result):
    values, state = expected(name)
    np.testing.assert_allclose([s.loss for s in result.history.steps], values, rtol=MOST)
    worst, path = zoo.error(result.state, state, ROWS[name].floor)
    assert worst < MOST, path


#: Each model on two or on four devices and beside other axes, and one in every form.
CASES = [
    *(f"gpt on {form}" for form in FORMS),
    *(f"{model} on {2 + 2 * (i % 2)}" for i, model in enumerate(ROWS) if model != "gpt"),
    *(f"{model} on {BESIDE[i % 3]}" for i, model in enumerate(ROWS) if model != "gpt"),
]


@pytest.mark.parametrize("name", rows(CASES, "gpt on 2 x 2", "gpt on 2, fsdp and tensor"))
def test_a_model_is_trained_as_plain_jax_does(name):
    model, _, form = name.partition(" on ")
    result = train(ROWS[model], FORMS[form])
    assert result.plan.axis_sizes["sequence"] > 1
    as_plain(model, result)


UNEVEN_CASES = [
    *(f"gpt on {form}" for form in UNEVEN),
    *(f"{model} on {list(UNEVEN)[i % 3]}" for i, model in enumerate(ROWS) if model != "gpt"),
]


@pytest.mark.parametrize("name", rows(UNEVEN_CASES, "gpt on 1:3:2 x 2"))
def test_parts_of_unlike_sizes_are_trained_as_plain_jax_does(name):
    model, _, form = name.partition(" on ")
    result = train(ROWS[model], UNEVEN[form])
    [axis] = result.plan.axes
    assert result.plan.is_uneven
    assert axis.shares == (UNEVEN[form]["sequence"] if "over" not in form else (1, 1, 1))
    as_plain(model, result)


@pytest.mark.slow
def test_experts_of_devices_that_share_tokens_are_trained_as_plain_jax_does():
    text = {"text": np.random.default_rng(0).integers(0, 256, (2 * BATCH, LENGTH + 1))}
    row = zoo.Row(
        make=lambda: families.experts()[0],
        loss=families.token_loss,
        data={"text": text["text"].astype(np.int32)},
        optimizer=ROWS["gpt"].optimizer,
    )
    result = train(row, {"sequence": 2, "expert": 2})
    values, state = zoo.plain(row)
    assert result.plan.device_parameter_bytes < result.plan.parameter_bytes
    np.testing.assert_allclose([s.loss for s in result.history.steps], values, rtol=MOST)
    worst, path = zoo.error(result.state, state, row.floor)
    assert worst < MOST, path


@pytest.mark.slow
@pytest.mark.parametrize("form", ["2", "2 and tensor"])
def test_no_bit_depends_on_replicas_around_it(form):
    found = [train(ROWS["dropout"], {"data": num} | FORMS[form]) for num in (1, 2)]
    assert len({(r.sha256, r.plan.numerics) for r in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        {"zero": 1},
        {"recompute": "boundaries"},
        {"zero": 3, "recompute": "boundaries"},
        {"recompute": "boundaries", "offload": {"stash": "host"}},
    ],
    ids=str,
)
def test_memory_settings_go_with_it(memory):
    for form in ("2 x 2", "2 and tensor"):
        as_plain("gpt", train(ROWS["gpt"], {"data": 2} | FORMS[form], memory))


OTHERS = [
    f"{form}: {name}"
    for form in ("alone", "in unlike parts", "beside tensor")
    for name in feature_pairs.FEATURES
    if name not in feature_pairs.FORMS
    # Both are for four replicas.
    and (form != "beside tensor" or name not in ("shares", "shard groups 2"))
]
FEATURE_FORMS = {
    "alone": {"plan": {"mesh": {"data": 4, "sequence": 2}}},
    "in unlike parts": {"plan": {"mesh": {"data": 4, "sequence": (2, 1)}}},
    "beside tensor": {
        "plan": {"mesh": {"data": 2, "sequence": 2, "tensor": 2}, "rules": "decoder"}
    },
}


@pytest.mark.parametrize(
    "named", rows(OTHERS, "alone: 2 executors", "beside tensor: zero 3", "in unlike parts: fp8")
)
def test_a_feature_goes_with_it_where_it_goes_with_tensor(named, monkeypatch):
    form, name = named.split(": ")
    monkeypatch.setitem(feature_pairs.FEATURES, "sequence", FEATURE_FORMS[form])
    said = feature_pairs.refusal("sequence", name)
    like = "uneven tensor" if form == "in unlike parts" else "tensor"
    assert bool(said) == (f"{like} + {name}" in REFUSED_BESIDE_TENSOR), said


# -- the compiled program --------------------------------------------------------------------------


def microbatch(mesh, model, data, loss=next_token):
    """The compiled program of a microbatch."""
    plan, own = planned(mesh, model, loss, data)
    with own.open(plan, steps=1) as session:
        session._programs.compile_each()  # a step of one device is one program
        return session._programs.runners[0]._programs.of(0)["loss"]


@pytest.mark.parametrize("num", [pytest.param(2), pytest.param(4, marks=pytest.mark.slow)])
def test_only_keys_and_values_are_gathered(num):
    found = hxla.inspect(microbatch({"sequence": num}, None, TEXT)).main
    keys = FLOAT * MICROBATCH * LENGTH * WIDTH
    gathered = sum(c.num_bytes * (c.runs or 1) for c in found.select("all-gather"))
    assert gathered == pytest.approx(2 * 2 * keys, rel=0.05)  # two layers, keys and values
    others = [c for c in found.collectives if c.kind not in ("all-gather", "all-reduce")]
    assert all("s32" in str(c.arrays) for c in others)  # tokens, cut before and after a shift


def test_heads_that_tensor_cuts_are_gathered_by_their_devices_only():
    found = hxla.inspect(microbatch(FORMS["2 and tensor"], None, TEXT)).main
    keys = FLOAT * MICROBATCH * LENGTH * WIDTH
    gathered = sum(c.num_bytes * (c.runs or 1) for c in found.select("all-gather"))
    assert gathered == pytest.approx(2 * 2 * keys / 2, rel=0.05)
    others = [c for c in found.collectives if c.kind not in ("all-gather", "all-reduce")]
    assert all("s32" in str(c.arrays) for c in others)


@pytest.mark.slow
def test_a_device_needs_its_share_of_the_memory():
    length = 1024
    tokens = {"tokens": np.zeros((BATCH, length + 1), np.int32)}

    def temporary(mesh):
        program = microbatch(mesh, lambda: GPT(nnx.Rngs(0), length=length), tokens)
        return program.memory_analysis().temp_size_in_bytes

    alone = temporary({"data": 1})
    for mesh in ({"sequence": 2}, {"sequence": 4}, {"sequence": 2, "tensor": 2}):
        assert temporary(mesh) <= 1.1 * alone / math.prod(mesh.values())


# -- decisions -------------------------------------------------------------------------------------


def test_the_plan_says_what_is_cut_and_sent():
    plan, _ = planned({"data": 2, "sequence": 2})
    assert [axis.roles[0] for axis in plan.axes] == ["tokens"]
    assert not any(names for p in plan.parameters for names in p.spec)
    keys = FLOAT * MICROBATCH * LENGTH * WIDTH
    text = plan.explain()
    assert "sequence cuts the tokens (dimension 1 of float32[2,16]) into 2" in text
    assert f"a device receives {2 * 2 * keys // 2:,} bytes of keys and values" in text
    assert plan.prediction.sent_bytes > 2 * 2 * 2 * keys / 2  # forward and backward
    beside, _ = planned(FORMS["2 and tensor"])
    assert f"a device receives {2 * 2 * keys // 4:,} bytes of keys and values" in beside.explain()


def test_the_plan_says_how_much_is_not_cut():
    class Described(GPT):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.picture = nnx.Linear(512, 512, rngs=rngs)
            self.inward = nnx.Linear(512, WIDTH, rngs=rngs)

    def loss(model, batch):
        known = model.inward(model.picture(batch["picture"]))[:, None]
        return next_token(lambda tokens: model(tokens) + known.mean(-1, keepdims=True), batch)

    data = {"tokens": TEXT["tokens"], "picture": np.ones((2 * BATCH, 512), np.float32)}
    plan, _ = planned({"sequence": 2}, lambda: Described(nnx.Rngs(0)), loss, data)
    assert any("of a forward's operations belong to no token" in line for line in plan.reasons)
    assert "belong to no token" not in planned({"sequence": 2})[0].explain()


def test_parts_follow_speeds_and_are_unlike_where_tokens_do_not_divide():
    def tokens_of(plan):
        return next(line for line in plan.reasons if line.startswith("tokens over sequence"))

    assert tokens_of(planned({"sequence": 3})[0]) == "tokens over sequence: 6 + 5 + 5 of 16"
    assert tokens_of(planned({"sequence": (3, 1)})[0]) == "tokens over sequence: 12 + 4 of 16"
    _, own = planned({"sequence": 2})
    cores = [hxla.Device(kind="cpu", core_share=share) for share in (0.5, 1.0)]
    unlike = hxla.Cluster(name="", devices=tuple(cores))
    plan = own.plan(unlike, microbatch_size=MICROBATCH, mesh={"sequence": 2})
    [axis] = plan.axes
    assert axis.shares[0] < axis.shares[1]
    assert "by the speeds of the devices (estimated" in plan.explain()
    other = plan.replaced(axes=(axis.model_copy(update={"shares": axis.shares[::-1]}),))
    assert other.numerics != plan.numerics


def test_how_tokens_are_cut_decides_bits():
    meshes = ({"data": 2}, {"data": 1, "sequence": 2}, {"sequence": 4})
    numerics = [planned(mesh)[0].numerics for mesh in meshes]
    assert len(set(numerics)) == 3
    assert planned({"data": 2, "sequence": 2})[0].numerics == numerics[1]
    orders = ({"sequence": 2, "tensor": 2}, {"tensor": 2, "sequence": 2}, {"tensor": 2})
    numerics = [planned(mesh)[0].numerics for mesh in orders]
    assert len(set(numerics)) == 3


def test_an_annotation_splits_tokens_as_a_mesh_does():
    class Annotated(GPT):
        def __call__(self, tokens):
            with hxla.split(2, dim="sequence"):
                return super().__call__(tokens)

    own = hxla.Job(
        lambda: Annotated(nnx.Rngs(0)), TEXT, weighted, ROWS["gpt"].optimizer, batch_size=16
    )
    plan = own.plan(devices(4), microbatch_size=MICROBATCH)
    wanted, _ = planned({"data": 2, "sequence": 2})
    assert plan.axis_sizes == {"sequence": 2}
    assert (plan.replicas, plan.parameters) == (wanted.replicas, wanted.parameters)
    assert (
        plan.numerics
        == own.plan(
            devices(4), microbatch_size=MICROBATCH, mesh={"data": 2, "sequence": 2}
        ).numerics
    )
    with pytest.raises(hxla.PlanError, match="splits tokens, and the mesh has no axis 'sequence'"):
        own.plan(
            devices(4), microbatch_size=MICROBATCH, mesh={"data": 2, "tensor": 2}, rules="decoder"
        )
    with pytest.raises(hxla.AnnotationError, match="use 'sequence' to split tokens"):
        hxla.split(dim="length")


def test_tokens_of_a_single_example_are_known_behind_a_cast():
    def loss(model, batch):
        return next_token(model, {"tokens": batch["tokens"].astype(jnp.int32)})

    model, batch = GPT(nnx.Rngs(0)), {"tokens": TEXT["tokens"][:1].astype(np.uint8)}
    [axis] = hxla.make_plan(hxla.trace(model, loss, batch), mesh={"sequence": 2}).axes
    assert axis.roles == ("tokens",)


class Scores(nnx.Module):
    """Attention in which products have the keys before the queries."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(13, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        scores = jnp.einsum("bkd,bqd->bkq", self.key(x), x)
        weights = nnx.softmax(scores + jnp.tril(jnp.ones(2 * tokens.shape[1:])).T, 1)
        return self.embed.attend(jnp.einsum("bkq,bkd->bqd", weights, x))


def test_queries_are_cut_wherever_they_stand():
    batch = {"tokens": TEXT["tokens"][:2]}
    graph = hxla.trace(Scores(nnx.Rngs(0)), next_token, batch)
    found = assign_tokens(graph, 2).axis({})
    scores = [
        v
        for op in leaves(graph.ops)
        for v in op.outputs
        if graph.values[v].shape == (2, LENGTH, LENGTH)
    ]
    assert {found.made[v] for v in scores} == {2}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_along_tokens_is_refused(name):
    make, loss, said = REFUSED[name]
    graph = hxla.Job(make(), TEXT, loss, ROWS["gpt"].optimizer, batch_size=BATCH).graph(MICROBATCH)
    with pytest.raises(hxla.PlanError, match=said):
        hxla.make_plan(graph, mesh={"sequence": 2})


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        ({"sequence": 3, "tensor": 2}, {}, r"16 tokens do not divide: pad them to 18"),
        ({"sequence": 17}, {}, r"over 17 devices, and there are 16: ask for 16"),
        ({"sequence": 2, "tensor": (2, 1)}, {}, "one axis"),
        ({"stage": 2, "sequence": (2, 1), "tensor": 2}, {}, "shards need stages with one axis"),
    ],
    ids=str,
)
def test_other_forms_are_refused(mesh, options, said):
    with pytest.raises(hxla.HxlaError, match=said):
        planned(mesh, **options)


def test_rules_and_edited_plans_cannot_cut_parameters_over_tokens():
    rule = hxla.Rule(path=".*kernel", axes=((), ("sequence",)), rank=2)
    rules = hxla.RuleSet(name="mine", rules=(rule,))
    with pytest.raises(hxla.AnnotationError, match="'sequence' cuts tokens, and no parameters"):
        planned({"sequence": 2}, rules=rules)
    plan, _ = planned({"sequence": 2})
    [axis] = plan.axes
    other = axis.model_copy(update={"roles": ("replicate",) * len(axis.roles)})
    with pytest.raises(hxla.PlanError, match="'sequence' cuts 'tokens', and no other axis does"):
        plan.replaced(axes=(other,))


def test_a_split_of_parameters_disagrees():
    class Split(GPT):
        def __call__(self, tokens):
            with hxla.split():
                return super().__call__(tokens)

    with pytest.raises(hxla.PlanError, match="splits parameters, and the mesh axis 'sequence'"):
        planned({"sequence": 2}, lambda: Split(nnx.Rngs(0)))
    plan, _ = planned({"sequence": 2, "tensor": 2}, lambda: Split(nnx.Rngs(0)), rules=None)
    assert [set(axis.roles) for axis in plan.axes] == [{"tokens"}, {"split"}]
    assert plan.device_parameter_bytes < 0.7 * plan.parameter_bytes
