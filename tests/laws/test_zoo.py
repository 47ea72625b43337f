"""The zoo: every row as plain JAX trains it, and the same bits however the work is spread."""

import functools
import shutil

import jax
import numpy as np
import pytest

import hxla
from support import models, zoo
from support.tiers import rows
from support.training import train_with
from support.zoo.row import BATCH, MICROBATCH, SEED, STEPS

MOST = 1e-5  # relative error
SPREADS = [(5, 3), (1, 7), (3, 5)]  # more devices are test_train's and test_equal_numerics' part
RESUMED = 3  # every third row is trained again from a checkpoint on


@pytest.fixture(autouse=True)
def small_programs_are_cached():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def train(row, counts=(8,), **options):
    arguments = {"steps": STEPS, "counts": counts} | options
    if "stages" not in arguments:
        arguments = {"mesh": models.mesh(data=len(counts))} | arguments
    return train_with(
        row.make(),
        row.data,
        row.loss,
        row.optimizer,
        batch_size=BATCH,
        microbatch_size=MICROBATCH,
        seed=SEED,
        shuffle=False,
        variables=row.variables,
        trainable=row.trainable,
        mixes_examples=row.by_microbatch,
        **arguments,
    )


@functools.cache
def expected(name):
    return zoo.plain(zoo.ROWS[name])


def losses(result):
    return [step.loss for step in result.history.steps]


def as_plain(name, result):
    values, state = expected(name)
    np.testing.assert_allclose(losses(result), values, rtol=MOST)
    worst, path = zoo.error(result.state, state, zoo.ROWS[name].floor)
    assert worst < MOST, path


#: Of each family the rows that two stages train, and those that two devices share.
STAGED = ("linen resnet", "llama", "experts", "fourier", "vae", "graph", "labels", "fine-tuning")
CUT = ("u-net", "gpt", "nn.scan", "mamba", "contrastive", "linen methods", "lamb", "diffusion")


@pytest.mark.parametrize("name", rows(zoo.ROWS, "multi steps"))
def test_a_row_is_trained_as_plain_jax_does(name, tmp_path):
    row = zoo.ROWS[name]
    one = train(row, checkpoint_dir=tmp_path, checkpoint_every=2)
    as_plain(name, one)
    number = [*zoo.ROWS].index(name)
    spread = train(row, SPREADS[number % len(SPREADS)])
    assert spread.sha256 == one.sha256
    assert losses(spread) == losses(one)
    if number % RESUMED:
        return
    shutil.rmtree(tmp_path / str(STEPS))
    resumed = train(row, SPREADS[number // RESUMED % len(SPREADS)], checkpoint_dir=tmp_path)
    assert [step.step for step in resumed.history.steps] == [3]
    assert resumed.sha256 == one.sha256


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_two_stages_train_a_row(name):
    row = zoo.ROWS[name]
    config = {"cluster": {"visible_devices": [0, 1]}}
    as_plain(name, train(row, stages=2, counts="even", config=config))


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_two_devices_share_a_row(name):
    row = zoo.ROWS[name]
    rules = hxla.RuleSet(
        name="zoo",
        rules=tuple(
            hxla.Rule(path=path + end, axes=((),) * (rank - 1) + (("tensor",),), rank=rank)
            for path in row.cut
            for end, rank in ((".*kernel", 2), (".*kernel", 3), (".*kernel", 4), (".*bias", 1))
        ),
    )
    result = train(row, counts="even", mesh=models.mesh(data=1, tensor=2), rules=rules)
    assert any("tensor" in axes for p in result.plan.parameters for axes in p.spec)
    as_plain(name, result)


UNLIKE = {
    "parameters, examples": [{"tensor": 2}, {"data": 2}],
    "one, parameters": [{"devices": 1}, {"tensor": 2}],
    "examples, one": [{"data": 2}, {"devices": 1}],
}
#: Each row in a form, in turns.
UNLIKE_ROWS = [
    (name, [*UNLIKE][i % len(UNLIKE)])
    for i, name in enumerate(zoo.ROWS)
    if name != "ensemble"  # all of it is one part
]


@pytest.mark.parametrize(
    "case", rows(sorted({*UNLIKE_ROWS, ("dropout", "examples, one")}), ("dropout", "examples, one"))
)
def test_unlike_stages_train_a_row(case):
    """In the quick row no parameter is left for the last stage, which is one device."""
    name, form = case
    num = sum(stage.get("tensor", 1) * stage.get("data", 1) for stage in UNLIKE[form])
    config = {"cluster": {"visible_devices": list(range(num))}}
    as_plain(name, train(zoo.ROWS[name], stages=UNLIKE[form], counts="even", config=config))


def test_the_losses_of_a_gan_are_refused_aloud():
    def both(model, batch):
        return model(batch["x"]).mean(), (model(batch["y"][:, :1] * batch["x"]) ** 2).mean()

    row = zoo.ROWS["warm-up"]
    with pytest.raises(hxla.LossError, match="a scalar loss is a mean already"):
        hxla.train(
            hxla.Job(row.make(), row.data, both, row.optimizer, batch_size=BATCH),
            steps=1,
        )


def test_there_are_rows_enough():
    assert len(zoo.ROWS) >= 24
