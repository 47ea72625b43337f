"""Settings: one typed value from every source; every key documented and at work."""

import json
import math
import pathlib
import re

import jax
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
from support.inside.lower import Contribution, Reducer, Replica, Tensors, packs_of
from support.paths import ROOT

DOCS = ROOT / "docs" / "configuration.md"
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


@pytest.mark.parametrize("path", keys())
def test_every_key_is_documented(path):
    assert f"`{path}`" in DOCS.read_text()


def test_every_documented_key_exists():
    documented = {
        line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")
    }
    assert documented == set(keys())


@pytest.mark.parametrize("path", keys())
def test_every_key_is_read_somewhere(path):
    _, key = path.split(".")
    package = pathlib.Path(hxla.__file__).parent
    sources = [p.read_text() for p in package.rglob("*.py") if p.name != "_config.py"]
    assert any(f".{key}" in text for text in sources), path


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


def train(**config):
    return hxla.train(
        models.Dense(nnx.Rngs(0)),
        models.regression(),
        models.squared_error,
        optax.sgd(1e-2),
        batch_size=24,
        steps=2,
        shuffle=False,
        counts="even",
        config=config,
    )


def test_visible_devices_are_those_that_are_used():
    result = train(cluster={"visible_devices": [1, 3, 6]}, pipeline={"num_micro_batch": 8})
    assert result.plan.counts == (3, 3, 2)


def test_the_number_of_microbatches_gives_their_size():
    assert train(pipeline={"num_micro_batch": 8}).plan.microbatch_size == 3


def test_the_gradient_of_a_sum_is_that_of_the_mean_times_the_weight():
    two = {"visible_devices": [0, 1]}
    mean = train(pipeline={"num_micro_batch": 8}, cluster=two)
    total = train(pipeline={"num_micro_batch": 8}, cluster=two, communication={"gradient": "sum"})
    start = models.Dense(nnx.Rngs(0)).layer.kernel[...]
    batch = {k: v[:24] for k, v in models.regression().items()}
    graphdef, params = nnx.split(models.Dense(nnx.Rngs(0)))
    grads = jax.grad(lambda p: models.squared_error(nnx.merge(graphdef, p), batch).sum())(params)
    assert total.history.steps[0].loss == mean.history.steps[0].loss
    first = hxla.train(
        models.Dense(nnx.Rngs(0)),
        iter([batch]),
        models.squared_error,
        optax.sgd(1e-2),
        batch_size=24,
        microbatch_size=3,
        steps=1,
        config={"communication": {"gradient": "sum"}, "cluster": two},
        counts="even",
    )
    moved = first.model.layer.kernel[...] - start
    np.testing.assert_allclose(moved, -1e-2 * grads["layer"]["kernel"][...], rtol=1e-4, atol=1e-6)


def test_small_buckets_give_the_same_bits():
    two = {"visible_devices": [0, 1]}
    cut = {"num_micro_batch": 8}
    usual = train(pipeline=cut, cluster=two)
    small = train(pipeline=cut, cluster=two, communication={"bucket_mib": 1})
    assert usual.sha256 == small.sha256


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


def first_step(reduction="exact", optimizer=None, **config):
    """Movement of the parameters in one step over 8 microbatches of 3, and their gradients."""
    batch = {k: v[:24] for k, v in models.regression().items()}
    start = models.Dense(nnx.Rngs(0))
    graphdef, params = nnx.split(start)

    def gradient(part):
        mean = jax.grad(lambda p: models.squared_error(nnx.merge(graphdef, p), part).mean())
        return mean(params)

    grads = [gradient({k: v[i : i + 3] for k, v in batch.items()}) for i in range(0, 24, 3)]
    result = hxla.train(
        models.Dense(nnx.Rngs(0)),
        iter([batch]),
        models.squared_error,
        optimizer or optax.sgd(1.0),
        batch_size=24,
        microbatch_size=3,
        steps=1,
        counts="even",
        reduction=reduction,
        config={"cluster": {"visible_devices": [0, 1, 2]}, **config},
    )
    return jax.tree.map(lambda new, old: new - old, result.state, params), grads


def mean_of(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def clipped(tree, norm):
    scale = min(1.0, norm / float(optax.tree.norm(tree)))
    return jax.tree.map(lambda x: x * scale, tree)


@pytest.mark.parametrize("clip", ["before", "after"])
def test_gradients_are_clipped_before_or_after_the_sum(clip):
    norm = 0.5 * float(optax.tree.norm(first_step()[1][0]))
    moved, grads = first_step(communication={"clip_norm": norm, "clip": clip})
    want = mean_of([clipped(g, norm) for g in grads])
    if clip == "after":
        want = clipped(mean_of(grads), norm)
    assert float(optax.tree.norm(mean_of(grads))) > norm
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-4, atol=1e-6), moved, want)


def test_clipping_leaves_what_is_not_finite_to_be_named():
    batch = {k: v[:24].copy() for k, v in models.regression().items()}
    next(iter(batch.values()))[5] = np.nan
    with pytest.raises(hxla.NonFiniteError):
        hxla.train(
            models.Dense(nnx.Rngs(0)),
            iter([batch]),
            models.squared_error,
            optax.sgd(1.0),
            batch_size=24,
            microbatch_size=3,
            steps=1,
            config={"communication": {"clip_norm": 1.0, "clip": "before"}},
        )


def test_sums_may_travel_in_half_the_bytes():
    moved, grads = first_step("float", communication={"dtype": "bfloat16"})
    whole, _ = first_step("float")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, -b, rtol=2e-2, atol=1e-3),
        moved,
        mean_of(grads),
    )
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(whole), strict=True)
    )


def test_exact_sums_are_not_rounded_on_their_way():
    with pytest.raises(hxla.ConfigError, match="reduction='float'"):
        first_step("exact", communication={"dtype": "bfloat16"})


def test_a_layout_places_the_copies():
    def names(layout):
        result = hxla.train(
            models.Dense(nnx.Rngs(0)),
            models.regression(),
            hxla.split()(models.squared_error),
            optax.sgd(1e-2),
            batch_size=16,
            microbatch_size=8,
            steps=1,
            counts="even",
            config={"cluster": {"layout": layout, "visible_devices": [0, 1]}},
        )
        return len(result.plan.counts)

    assert (names("all"), names([[0], [1]])) == (1, 2)


class Words(nnx.Module):
    """Few of many words in a batch."""

    def __init__(self, rngs, tied=False):
        self.embed = nnx.Embed(4096, 8, rngs=rngs)
        self.out = nnx.Linear(8, 4096, rngs=rngs)
        self.tied = tied

    def __call__(self, words):
        x = self.embed(words)
        return self.embed.attend(x) if self.tied else self.out(x)


def read_words(reduction="exact", tied=False, counts=(3, 4, 1), **communication):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 4096, (64, 2)).astype(np.int32)
    words[:8] = 7  # a word that every device reads, more than once
    return hxla.train(
        Words(nnx.Rngs(0), tied),
        {"words": words},
        lambda m, b: optax.softmax_cross_entropy_with_integer_labels(
            m(b["words"])[:, 0], b["words"][:, 1]
        ),
        optax.adam(1e-2),
        batch_size=16,
        microbatch_size=2,
        steps=3,
        reduction=reduction,
        counts=counts,
        config={
            "cluster": {"visible_devices": list(range(len(counts)))},
            "communication": communication,
        },
    )


@pytest.mark.parametrize("rows", [None, {0: 5}])
def test_only_touched_rows_are_sent(rows):
    replicas = [Replica(i, (d,)) for i, d in enumerate(jax.devices()[:3])]
    table = jax.ShapeDtypeStruct((1000, 8), np.float32)
    contribution = Contribution.of(SumsForm(), num_terms=4)
    tensors = Tensors((table,), (), ("t",))
    reducer = Reducer(replicas, contribution, tensors, [P()], row_shape=(4, 2), rows=rows)
    [lowered] = reducer.lower()
    text = lowered.compile().as_text()
    kinds = r"(all-gather|reduce-scatter|collective-permute|all-reduce)"
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* {kinds}\(", text)
    largest = max(math.prod(int(d) for d in shape.split(",") if d) for shape, _ in found)
    assert largest == (3 * 5 * 8 if rows else 3 * math.ceil(8000 / 3))


@pytest.mark.slow
def test_rows_of_an_embedding_travel_one_by_one_and_give_the_same_bits():
    whole, rows = read_words(), read_words(sparse_embeddings=True)
    assert whole.sha256 == rows.sha256
    assert read_words(counts=(8,), sparse_embeddings=True).sha256 == whole.sha256
    assert any("at most 32 of 4096 rows" in r for r in rows.plan.reasons)
    floats = read_words("float", sparse_embeddings=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5),
        floats.state,
        whole.state,
    )


@pytest.mark.parametrize(
    ("name", "most_rows", "reason"),
    [
        ("out/kernel", 4096, "out/kernel is not only looked up by rows"),
        ("embed/embedding", 5, "128 rows of embed/embedding may be touched, not 5"),
    ],
)
def test_a_plan_that_would_lose_rows_is_refused(name, most_rows, reason):
    words = np.zeros((64, 2), np.int32)
    job = hxla.Job(
        Words(nnx.Rngs(0)),
        {"x": words, "y": words},
        lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
            model(batch["x"]), batch["y"]
        ).mean(-1),
        optax.sgd(1.0),
        batch_size=64,
    )
    plan = job.plan(microbatch_size=8, counts="even")
    sparse = (SparseRows(name=name, most_rows=most_rows),)
    rows = plan.sums.model_copy(update={"sparse": sparse})
    with pytest.raises(hxla.PlanError, match=reason):
        job.open(plan.replaced(sums=rows))


def test_a_tied_embedding_is_summed_whole_and_the_plan_says_so():
    result = read_words(tied=True, sparse_embeddings=True)
    assert result.sha256 == read_words(tied=True).sha256
    assert any("no parameter is only looked up" in r for r in result.plan.reasons)
