"""Settings: one typed value from every source; every key documented and at work."""

import functools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hxla
from hxla import Config, SparseRows, SumsForm
from support import models
from support.inside.core import as_config
from support.inside.lower import (
    Contribution,
    DecisionSpec,
    Reducer,
    Replica,
    SumLayout,
    Tensors,
    packs_of,
)

WANTED = {"cluster": {"share_devices": True}, "pipeline": {"num_micro_batch": 4}}


def keys():
    return [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields
    ]


def test_every_source_gives_the_same_value(tmp_path):
    as_json, as_toml = tmp_path / "c.json", tmp_path / "c.toml"
    as_json.write_text(json.dumps(WANTED))
    as_toml.write_text("[cluster]\nshare_devices = true\n[pipeline]\nnum_micro_batch = 4\n")
    environ = {"HXLA_CLUSTER_SHARE_DEVICES": "true", "HXLA_PIPELINE_NUM_MICRO_BATCH": "4"}
    values = [
        as_config(WANTED, {}),
        as_config(as_json, {}),
        as_config(str(as_toml), {}),
        as_config(None, environ),
        Config.model_validate(WANTED),
    ]
    assert all(v == values[0] for v in values)
    assert values[0] != Config()


def test_what_the_script_says_wins_over_the_environment():
    environ = {"HXLA_PIPELINE_NUM_MICRO_BATCH": "4", "HXLA_BALANCE_WINDOW_STEPS": "3"}
    config = as_config({"pipeline": {"num_micro_batch": 8}}, environ)
    assert (config.pipeline.num_micro_batch, config.balance.window_steps) == (8, 3)


def test_every_variable_name_is_understood():
    for path in keys():
        section, key = path.split(".")
        default = getattr(getattr(Config(), section), key)
        name = f"HXLA_{section}_{key}".upper()
        is_table = isinstance(default, pydantic.BaseModel)
        text = json.dumps(default.model_dump() if is_table else default)
        config = as_config(None, {name: text})
        assert config == Config(), name


def test_every_key_is_read_somewhere():
    package = pathlib.Path(hxla.__file__).parent
    sources = [p.read_text() for p in package.rglob("*.py") if p.name != "_config.py"]
    unread = [
        path for path in keys() if not any(f".{path.split('.')[1]}" in text for text in sources)
    ]
    assert not unread


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [("{", "json", "no JSON"), ("[1]", "json", "no table"), ("a=", "toml", "not TOML")],
)
def test_a_broken_file_is_refused(tmp_path, text, suffix, message):
    path = tmp_path / f"c.{suffix}"
    path.write_text(text)
    with pytest.raises(hxla.ConfigError, match=message):
        as_config(path, {})


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(hxla.ConfigError, match="cannot be read"):
        as_config(tmp_path / "none.toml", {})


def linear():
    """One tensor, which no program has to make."""
    half = nnx.initializers.constant(0.5)
    return nnx.Linear(6, 3, use_bias=False, kernel_init=half, rngs=nnx.Rngs(0))


def planned(**config):
    job = hxla.Job(
        linear(),
        models.regression(),
        models.squared_error,
        optax.sgd(1e-2),
        batch_size=24,
        config=config,
    )
    return job.plan(counts="even")


def test_visible_devices_are_those_that_are_used():
    plan = planned(cluster={"visible_devices": [1, 3, 6]}, pipeline={"num_micro_batch": 8})
    assert plan.counts == (3, 3, 2)
    result = one_step(cluster={"visible_devices": [3, 6]})
    assert result.plan.counts == (4, 4)
    used = [leaf.sharding.device_set for leaf in jax.tree.leaves(result.state)]
    assert all(devices <= {jax.devices()[3], jax.devices()[6]} for devices in used)


def test_the_number_of_microbatches_gives_their_size():
    assert planned(pipeline={"num_micro_batch": 8}).microbatch_size == 3


BATCH = {k: v[:24] for k, v in models.regression().items()}


def started():
    return nnx.split(linear())


def one_step(reduction="exact", batch=BATCH, **config):
    """One step over 8 microbatches of 3 examples."""
    return hxla.train(
        hxla.Job(
            linear(),
            iter([batch]),
            models.squared_error,
            optax.sgd(1.0),
            batch_size=24,
            config={"cluster": {"visible_devices": [0, 1]}, **config},
        ),
        microbatch_size=3,
        steps=1,
        counts="even",
        reduction=reduction,
    )


@functools.cache
def usual():
    return one_step()


def movement(result):
    return jax.tree.map(lambda new, old: new - old, result.state, started()[1])


@functools.cache
def gradients():
    """Those of each of the 8 microbatches' means, by plain jax."""
    graphdef, params = started()

    @jax.jit
    def gradient(part):
        mean = jax.grad(lambda p: models.squared_error(nnx.merge(graphdef, p), part).mean())
        return mean(params)

    return [gradient({k: v[i : i + 3] for k, v in BATCH.items()}) for i in range(0, 24, 3)]


def mean_of(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def assert_moved(result, gradient, *, rtol=1e-4, atol=1e-6):
    def check(moved, want):
        np.testing.assert_allclose(moved, -want, rtol=rtol, atol=atol)

    jax.tree.map(check, movement(result), gradient)


def test_the_gradient_of_a_sum_is_that_of_the_mean_times_the_weight():
    total = one_step(communication={"gradient": "sum"})
    assert total.history.steps[0].loss == usual().history.steps[0].loss
    assert_moved(usual(), mean_of(gradients()))
    assert_moved(total, jax.tree.map(lambda mean: 24 * mean, mean_of(gradients())), atol=1e-5)


def test_small_buckets_give_the_same_bits():
    assert one_step(communication={"bucket_mib": 1}).sha256 == usual().sha256


def test_tensors_share_an_array_if_they_are_small_and_of_one_size():
    shapes = [(4, 2), (8,), (3,), (), (1,), (2, 4), (200, 200), (40000,)]
    tensors = Tensors(
        tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes),
        (),
        tuple(map(str, shapes)),
    )
    assert packs_of(tensors, alone=()) == [[0, 1, 5], [2], [3, 4], [6], [7]]
    assert packs_of(tensors, alone=[1]) == [[0, 5], [1], [2], [3, 4], [6], [7]]
    assert packs_of(tensors, alone=None) == [[i] for i in range(8)]


def norm_of(tree):
    return float(optax.tree.norm(tree))


def clipped(tree, norm):
    scale = min(1.0, norm / norm_of(tree))
    return jax.tree.map(lambda x: x * scale, tree)


def clip_norm():
    return 0.5 * norm_of(gradients()[0])


@pytest.mark.parametrize("clip", ["before", "after"])
def test_gradients_are_clipped_before_or_after_the_sum(clip):
    norm = clip_norm()
    want = mean_of([clipped(g, norm) for g in gradients()])
    if clip == "after":
        want = clipped(mean_of(gradients()), norm)
    assert norm_of(mean_of(gradients())) > norm
    assert_moved(one_step(communication={"clip_norm": norm, "clip": clip}), want)


def test_clipping_leaves_what_is_not_finite_to_be_named():
    batch = {k: v.copy() for k, v in BATCH.items()}
    batch["x"][5] = np.nan
    with pytest.raises(hxla.NonFiniteError):
        one_step(batch=batch, communication={"clip_norm": clip_norm(), "clip": "before"})


def test_sums_may_travel_in_half_the_bytes():
    half = one_step("float", communication={"dtype": "bfloat16"})
    assert_moved(half, mean_of(gradients()), rtol=2e-2, atol=1e-3)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):  # which whole ones are
        assert_moved(half, mean_of(gradients()))


def test_exact_sums_are_not_rounded_on_their_way():
    with pytest.raises(hxla.ConfigError, match="reduction='float'"):
        one_step("exact", communication={"dtype": "bfloat16"})


@pytest.mark.parametrize(("layout", "num_copies"), [("all", 1), ([[0], [1]], 2)])
def test_a_layout_places_the_copies(layout, num_copies):
    job = hxla.Job(
        linear(),
        models.regression(),
        hxla.split()(models.squared_error),
        optax.sgd(1e-2),
        batch_size=16,
        config={"cluster": {"layout": layout, "visible_devices": [0, 1]}},
    )
    assert len(job.plan(microbatch_size=8, counts="even").counts) == num_copies


NUM_WORDS = 512


class Words(nnx.Module):
    """Few of many words in a batch, whose rows are only looked up, or attended to as well."""

    def __init__(self, rngs, tied=False):
        zeros = nnx.initializers.zeros
        self.embed = nnx.Embed(NUM_WORDS, 8, embedding_init=zeros, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((8, 1)))
        self.tied = tied

    def __call__(self, words):
        x = self.embed(words) + self.scale[:, 0]
        return self.embed.attend(x) if self.tied else x


def read_words(tied=False, num_devices=2, **communication):
    """A job of batches of 16 examples in microbatches of 2."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, NUM_WORDS, (64, 2)).astype(np.int32)
    words[:8] = 7  # a word that every device reads, more than once
    return hxla.Job(
        Words(nnx.Rngs(0), tied),
        {"words": words},
        lambda m, b: optax.softmax_cross_entropy_with_integer_labels(
            m(b["words"])[:, 0], b["words"][:, 1] % 8
        ),
        optax.sgd(0.1),
        batch_size=16,
        config={
            "cluster": {"visible_devices": list(range(num_devices))},
            "communication": communication,
        },
    )


def plan_of_words(job, counts=(3, 5), reduction="exact"):
    return job.plan(microbatch_size=2, counts=counts, reduction=reduction)


@functools.cache
def words_trained(reduction="exact", counts=(3, 5), *, sparse):
    job = read_words(num_devices=len(counts), sparse_embeddings=sparse)
    plan = plan_of_words(job, counts, reduction)
    with job.open(plan, steps=2) as session:
        for _ in session:
            pass
        return session.result()


@pytest.mark.parametrize("rows", [None, {0: 5}])
def test_only_touched_rows_are_sent(rows):
    replicas = [Replica(i, (d,)) for i, d in enumerate(jax.devices()[:3])]
    table = jax.ShapeDtypeStruct((1000, 8), np.float32)
    contribution = Contribution.of(SumsForm(), num_terms=4)
    tensors = Tensors((table,), (), ("t",))
    decisions = DecisionSpec(limbs=contribution.limbs, num_params=1, mean=True)
    layout = SumLayout(
        tensors=tensors,
        specs=[P()],
        contribution=contribution,
        num_replicas=len(replicas),
        row_shape=(4, 2),
        packs=[[0]],
        rows=rows or {},
    )
    [lowered] = Reducer(replicas, layout, decisions=decisions).lower()
    text = lowered.compile().as_text()
    kinds = r"(all-gather|reduce-scatter|collective-permute|all-reduce)"
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* {kinds}\(", text)
    largest = max(math.prod(int(d) for d in shape.split(",") if d) for shape, _ in found)
    assert largest == (3 * 5 * 8 if rows else 3 * math.ceil(8000 / 3))


def test_rows_of_an_embedding_travel_one_by_one_and_give_the_same_bits():
    rows = words_trained(sparse=True)
    assert rows.sha256 == words_trained(sparse=False).sha256
    assert any(f"at most 32 of {NUM_WORDS} rows" in r for r in rows.plan.reasons)


@pytest.mark.slow
def test_rows_of_an_embedding_give_the_same_bits_on_one_device_and_in_floats_nearly_so():
    exact = words_trained(sparse=True)
    assert words_trained(counts=(8,), sparse=True).sha256 == exact.sha256
    floats = words_trained("float", sparse=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5),
        floats.state,
        exact.state,
    )


@pytest.mark.parametrize(
    ("name", "most_rows", "reason"),
    [
        ("scale", 8, "scale is not only looked up by rows"),
        ("embed/embedding", 5, "32 rows of embed/embedding may be touched, not 5"),
    ],
)
def test_a_plan_that_would_lose_rows_is_refused(name, most_rows, reason):
    job = read_words()
    plan = plan_of_words(job)
    sparse = (SparseRows(name=name, most_rows=most_rows),)
    rows = plan.sums.model_copy(update={"sparse": sparse})
    with pytest.raises(hxla.PlanError, match=reason):
        job.open(plan.replaced(sums=rows))


def test_a_tied_embedding_is_summed_whole_and_the_plan_says_so():
    plan = plan_of_words(read_words(tied=True, sparse_embeddings=True))
    assert any("no parameter is only looked up" in r for r in plan.reasons)
    assert plan.sums == plan_of_words(read_words(tied=True)).sums
    assert not plan.sums.sparse
