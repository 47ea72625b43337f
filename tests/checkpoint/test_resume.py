"""What another call goes on with: its microbatch size, and what is refused, told or taken."""

import dataclasses
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models, tiers
from support.inside.job import JobContext
from support.inside.session import told_differences, told_of_run
from support.jax_settings import in_force
from support.launched import end_of, start
from support.training import train_with

pytestmark = pytest.mark.usefixtures("every_program_is_cached")

BATCH, SIZE = 16, 8  # two microbatches; by default there are eight


class Net(nnx.Module):
    """BatchNorm: other microbatches are other bits."""

    def __init__(self, act=nnx.relu):
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(6, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.last, self.act = nnx.Linear(4, 3, rngs=rngs), act

    def __call__(self, x):
        return self.last(self.act(self.norm(self.first(x))))


def make(devices=1, config=None, **changes):
    given = {
        "model": Net(),
        "data": models.regression(),
        "loss": models.squared_error,
        "optimizer": optax.adam(1e-2),
        "batch_size": BATCH,
        "config": {"cluster": {"visible_devices": list(range(devices))}} | (config or {}),
    }
    return hxla.Job(**given | changes)


def train(steps, folder=None, devices=1, size=None, **changes):
    given = {
        f.name: getattr(make(devices, **changes), f.name) for f in dataclasses.fields(hxla.Job)
    }
    model, data, loss, optimizer = (
        given.pop(name) for name in ("model", "data", "loss", "optimizer")
    )
    return train_with(
        model,
        data,
        loss,
        optimizer,
        steps=steps,
        microbatch_size=size,
        checkpoint_dir=folder,
        **given,
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a checkpoint after one step."""
    folder = tmp_path_factory.mktemp("begun") / "checkpoints"
    train(1, folder, size=SIZE)
    return folder


def test_a_resume_takes_the_size_of_its_checkpoint_on_any_devices(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(begun, tmp_path / "own")
    assert make().plan().microbatch_size != SIZE
    folders = ["~/own", f"file://{tmp_path}/own", tmp_path / "own"]
    for step, (devices, folder) in enumerate(zip((2, 1, 2), folders, strict=True), start=1):
        result = train(step + 1, folder, devices)
        assert result.plan.microbatch_size == SIZE
        assert [record.step for record in result.history.steps] == [step + 1]
        assert "microbatch_size=8, as it was before" in result.plan.reasons
    assert result.sha256 == train(4, size=SIZE).sha256


def test_a_plan_of_ones_own_takes_the_size_of_the_checkpoint(begun, tmp_path):
    assert make().plan(checkpoint_dir=begun).microbatch_size == SIZE
    assert make().plan(checkpoint_dir=begun, microbatch_size="measured").microbatch_size == SIZE
    assert make().plan(checkpoint_dir=begun, microbatch_size=2).microbatch_size == 2
    assert make().plan(checkpoint_dir=tmp_path / "none").microbatch_size == 2
    assert make(batch_size=32).plan(checkpoint_dir=begun).microbatch_size == 4


def test_more_devices_than_the_checkpoint_has_microbatches_are_told_whose_size_it_is(begun):
    with pytest.raises(
        hxla.PlanError,
        match=r"4 devices but only 2 microbatches .*: the size is the checkpoint's, .* resume with "
        r"2 devices or fewer, .* or begin anew in another checkpoint_dir",
    ):
        make(4).plan(checkpoint_dir=begun)
    with pytest.raises(hxla.PlanError, match="use fewer devices or microbatch_size <= 4"):
        make(4).plan(checkpoint_dir=begun, microbatch_size=SIZE)


SCRIPT = """
import hxla, optax
from flax import nnx
from support import models

rngs = nnx.Rngs(0)
model = nnx.Sequential(
    nnx.Linear(6, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
)
result = hxla.train(
    hxla.Job(model, models.regression(), models.squared_error, optax.adam(1e-2), batch_size=16),
    steps={steps}, checkpoint_dir="checkpoints",
)
print("ended", result.sha256)
"""


@pytest.mark.slow
def test_ten_resumes_without_a_size_are_never_refused_and_end_with_one_sha256(tmp_path):
    """From one device to two processes and back."""
    env = {"NPROC": "1"}
    script = "-m", "hxla", "run"
    (tmp_path / "whole").mkdir()
    whole, _ = end_of(start(tmp_path / "whole", SCRIPT.format(steps=11), env=env, module=()))
    for step in range(1, 12):
        several = step % 2 == 0
        module = (*script, "-n", "2") if several else ()
        out, err = end_of(start(tmp_path, SCRIPT.format(steps=step), env=env, module=module))
        assert len(re.findall(r"ended \w+", out)) == 1 + several, err
    assert set(re.findall(r"ended \w+", out)) == set(re.findall(r"ended \w+", whole))


def shifted(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"] - 0.5) ** 2, axis=-1)


def weighted(model, batch):
    return models.squared_error(model, batch), jnp.asarray(batch["mask"], jnp.float32)


OTHERS = {
    "loss": ({"loss": shifted}, "traced loss.*\nthe loss, or the model in it"),
    "weights": ({"loss": weighted}, "traced loss"),
    "activation": ({"model": Net(nnx.gelu)}, "traced loss"),
    "order": ({"shuffle": False}, "shuffle: 'shuffled' in the checkpoint, 'as it comes' asked"),
    "seed": ({"seed": 1}, "seed: 0 in the checkpoint, 1 asked"),
    "files": ({"config": {"io": {"examples_per_file": 4}}}, "'shuffled in files of 4' asked"),
    "sum": ({"config": {"communication": {"gradient": "sum"}}}, "gradient: 'mean' in"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_would_train_something_else_is_refused_by_name(begun, name):
    changes, words = OTHERS[name]
    with pytest.raises(hxla.CheckpointError, match=f"(?s)step 1 of another run:.*{words}"):
        train(2, begun, **changes)


class Counting(nnx.Module):
    def __init__(self, bias=True):
        self.layer = nnx.Linear(6, 3, use_bias=bias, rngs=nnx.Rngs(0))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += len(x)
        return self.layer(x)


def test_another_merge_is_refused_by_name_where_the_loss_is_looked_at(tmp_path):
    train(1, tmp_path, size=SIZE, model=Counting(), merge={"count": "sum"})

    def refused(**changes):
        with pytest.raises(hxla.CheckpointError) as error:
            train(2, tmp_path, merge={"count": "max"}, **changes)
        return str(error.value)

    words = "merge: {'count': 'sum'} in the checkpoint, {'count': 'max'} asked"
    assert words in refused(model=Counting())
    of_others = refused(model=Counting(bias=False))  # told parameter by parameter
    assert "not in this model: params.layer.bias" in of_others
    assert "merge:" not in of_others


SETTINGS = {
    "jax_default_prng_impl": ("threefry2x32", "rbg"),
    "jax_threefry_partitionable": (True, False),
    "jax_enable_x64": (False, True),
    "jax_default_matmul_precision": (None, "bfloat16"),
}


@pytest.mark.parametrize("name", tiers.rows(SETTINGS, "jax_default_prng_impl"))
def test_another_setting_of_jax_is_refused_by_name(begun, name):
    usual, other = SETTINGS[name]
    words = f"{name}: {usual} in .*, {other} in this"
    with in_force(**{name: other}), pytest.raises(hxla.CheckpointError, match=words):
        train(2, begun)


def test_another_flag_of_xla_is_refused_by_name(begun, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_some_flag=7")
    with pytest.raises(hxla.CheckpointError, match=r"xla_some_flag: unset in .*, 7 in this"):
        train(2, begun)


def test_a_plan_made_under_another_setting_is_refused_by_name():
    job = make()
    plan = job.plan()
    words = "jax_enable_x64 is False in the plan, True here"
    with in_force(jax_enable_x64=True), pytest.raises(hxla.PlanError, match=words):
        make().open(plan, steps=1)


def told(before, after):
    jobs = [make(**changes) for changes in (before, after)]
    plans = [job.plan(microbatch_size=SIZE) for job in jobs]
    return list(
        told_differences(*(told_of_run(JobContext(j), p) for j, p in zip(jobs, plans, strict=True)))
    )


def injected(rate):
    return {"optimizer": optax.inject_hyperparams(optax.sgd)(learning_rate=rate)}


def named(size):
    return {"config": {"communication": {"clip_norm": size}}}


TOLD = {
    "nothing": ({}, {}, ()),
    "learning rate": (
        {"optimizer": optax.adam(1e-2)},
        {"optimizer": optax.adam(1e-3)},
        ["another learning rate, and training goes on with the new one"],
    ),
    "schedule": (
        {"optimizer": optax.sgd(optax.cosine_decay_schedule(0.1, 10))},
        {"optimizer": optax.sgd(optax.cosine_decay_schedule(0.1, 20))},
        ["another learning rate"],
    ),
    "learning rate in the state": (
        injected(0.1),
        injected(0.2),
        ["inject_hyperparams, and training goes on with the checkpoint's"],
    ),
    "clip": (named(1.0), named(2.0), ["communication.clip_norm: 1.0, now 2.0"]),
    "nonfinite": ({}, {"nonfinite": "skip"}, ["nonfinite: stop, now skip"]),
    "more data": (
        {"data": models.regression(96), "shuffle": False},
        {"data": models.regression(97), "shuffle": False},
        ["number of examples: 96, now 97; first"],
    ),
    "other data": (
        {},
        {"data": models.regression() | {"x": np.zeros((96, 6), np.float32)}},
        [r"the data is not .*first \['x'\]: float32\[8, 6\] with"],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_may_be_another_is_told_in_a_line_each(name):
    before, after, words = TOLD[name]
    lines = told(before, after)
    assert len(lines) == len(words)
    for line, expected in zip(lines, words, strict=True):
        assert re.search(expected, line), line


def test_a_second_call_says_what_is_another_and_that_nothing_is_left(begun, tmp_path, capfd):
    folder = tmp_path / "own"
    shutil.copytree(begun, folder)
    result = train(1, folder, optimizer=optax.adam(1e-3))
    said = "".join(capfd.readouterr())
    assert "resumed from step 1" in said
    assert "another learning rate, and training goes on with the new one" in said
    assert "nothing is left to train: 1 of 1 steps are done" in said
    assert not result.history.steps


class Named(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.parts = nnx.data(
            {name: nnx.Linear(6, 3, rngs=rngs) for name in ("a/b", "a_b", "c.d")}
            | {name: {key: nnx.Linear(6, 3, rngs=rngs)} for name, key in (("a", "b"), ("c", "d"))}
        )

    def __call__(self, x):
        layers = jax.tree.leaves(self.parts, is_leaf=lambda part: isinstance(part, nnx.Linear))
        return sum(layer(x) for layer in layers)


def test_a_model_whose_names_look_alike_resumes_with_all_of_its_arrays(tmp_path):
    own = {"model": Named(), "optimizer": optax.sgd(0.1)}
    train(1, tmp_path, **own)
    resumed, whole = train(2, tmp_path, **own), train(2, **own | {"model": Named()})
    assert len({layout.name for layout in whole.plan.parameters}) == 10
    assert resumed.sha256 == whole.sha256


@pytest.mark.parametrize("name", ["checkpoint_dir", "run_dir"])
def test_an_address_as_a_folder_is_refused_before_anything_is_made(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    job = make()
    plan = job.plan()
    with pytest.raises(hxla.ConfigError, match=f"{name}='gs://bucket/x' is an address"):
        job.open(plan, steps=1, **{name: "gs://bucket/x"})
    if name == "checkpoint_dir":
        with pytest.raises(hxla.ConfigError, match="is an address"):
            train(1, "s3://bucket")
    assert not list(tmp_path.iterdir())
