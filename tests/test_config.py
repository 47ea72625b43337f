"""Settings: one typed value from every source; every key documented and at work."""

import json
import pathlib

import jax
import models
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla._config import Config, as_config

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "configuration.md"
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
        config = as_config(None, {name: json.dumps(default)})
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
    [("{", "json", "no valid json"), ("[1]", "json", "no table"), ("a=", "toml", "no valid toml")],
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
        split="even",
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
        split="even",
    )
    moved = first.model.layer.kernel[...] - start
    np.testing.assert_allclose(moved, -1e-2 * grads["layer"]["kernel"][...], rtol=1e-4, atol=1e-6)


def test_small_buckets_give_the_same_bits():
    two = {"visible_devices": [0, 1]}
    cut = {"num_micro_batch": 8}
    usual = train(pipeline=cut, cluster=two)
    small = train(pipeline=cut, cluster=two, communication={"bucket_mib": 1})
    assert usual.sha256 == small.sha256
