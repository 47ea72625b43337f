"""What is given in another form than usual, and settings of jax's: each right, or refused."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import hxla
from support import models
from support.inside.data import _data
from support.launched import end_of, start
from support.training import train_with

pytestmark = pytest.mark.usefixtures("every_program_is_cached")

DATA = {
    "x": np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32),
}
BATCHES = [{k: v[i : i + 16] for k, v in DATA.items()} for i in range(0, 64, 16)]


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def train(data=DATA, model=None, loss=loss, optimizer=None, **options):
    arguments = {"batch_size": 16, "microbatch_size": 4, "steps": 3, "shuffle": False} | options
    model = model or nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    arguments.setdefault("mesh", models.mesh(data=2))
    return train_with(model, data, loss, optimizer or optax.sgd(0.1), **arguments)


class Numbers(nnx.Module):
    """Numbers of Python's where arrays are usual."""

    def __init__(self):
        self.layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.scale = nnx.Param(1.0)
        self.shift, self.is_on = nnx.Variable(2), nnx.Variable(True)

    def __call__(self, x):
        shift = self.shift.get_value() * self.is_on.get_value()
        return self.layer(x) * self.scale.get_value() + shift


def test_numbers_of_python_in_a_model_are_trained_as_plain_flax_does():
    model, plain = Numbers(), Numbers()
    train(model=model)
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    for batch in BATCHES[:3]:
        optimizer.update(plain, nnx.grad(lambda m, b=batch: loss(m, b).mean())(plain))
    np.testing.assert_allclose(model.scale[...], plain.scale[...], rtol=1e-5)
    np.testing.assert_allclose(model.layer.kernel[...], plain.layer.kernel[...], rtol=1e-4)
    assert (model.shift[...], model.is_on[...]) == (2, True)


def test_numbers_of_python_in_variables_and_in_a_state_are_arrays():
    def update(grads, state, params=None):
        new = {"rate": state["rate"], "count": state["count"] + 1}
        return jax.tree.map(lambda g: -state["rate"] * g, grads), new

    own = optax.GradientTransformation(lambda params: {"rate": 0.1, "count": 0}, update)
    result = train(optimizer=own)
    assert result.opt_state["count"] == 3
    plain = train()
    for ours, theirs in zip(*map(jax.tree.leaves, (result.state, plain.state)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) * self.param("scale", lambda key: jnp.float32(1))

    variables = Scaled().init(jax.random.key(0), DATA["x"])
    variables["params"]["scale"] = 1.0
    assert train(model=Scaled(), variables=variables).state["params"]["scale"] != 1


def test_whole_numbers_of_numpy_are_taken():
    numbers = {"batch_size": np.int64(16), "microbatch_size": np.int32(4), "steps": np.int16(3)}
    result = train(**numbers, seed=np.uint8(0), counts=np.array([1, 3]))
    assert result.sha256 == train(counts=(1, 3)).sha256


def explicit():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    return jax.tree.map(lambda x: jax.device_put(x, where), DATA)


def endless():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(64).map(lambda i: {k: v[i] for k, v in DATA.items()}).repeat()


@pytest.mark.parametrize("data", [explicit, endless, lambda: iter(BATCHES)])
def test_data_in_another_form_is_the_same_data(data):
    assert train(data()).sha256 == train().sha256


@pytest.mark.filterwarnings("ignore")
def test_a_session_runs_under_the_checks_of_jax():
    with jax.enable_checks(True):
        assert train().sha256 == train().sha256


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (lambda: jax.set_mesh(models.mesh(d=2)), r"jax\.set_mesh\(\.\.\.\) is in force"),
        (lambda: jax.transfer_guard("disallow"), "jax_transfer_guard.* disallows transfers"),
        (lambda: jax.transfer_guard_host_to_device("disallow_explicit"), "host_to_device disallow"),
        (jax.disable_jit, "jit is disabled"),
    ],
)
def test_settings_under_which_nothing_runs_are_refused(context, words):
    job = hxla.Job(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), DATA, loss, optax.sgd(0.1), batch_size=16)
    plan = job.plan(microbatch_size=4, mesh=models.mesh(data=1))
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    for use in (lambda: train(model=model, mesh=None), lambda: job.open(plan), job.plan):
        with context(), pytest.raises(hxla.ConfigError, match=words):
            use()


def batched():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(64).batch(16).map(lambda rows: {"x": rows})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (batched, r"a grain\.MapDataset of batches: hxla batches it, leave out \.batch"),
        (lambda: BATCHES, r"a list of 4 global batches, .*data=iter\(batches\)"),
        (lambda: [DATA["x"], DATA["y"]], r"for columns pass a tuple, \(x, y\)"),
    ],
)
def test_data_that_seems_to_be_something_else_is_named(data, words):
    with pytest.raises(hxla.DataError, match=words):
        train(data())


def test_names_of_metrics_are_texts():
    with pytest.raises(hxla.LossError, match="1 names a metric: names are texts"):
        train(loss=lambda m, b: (loss(m, b), {1: jnp.float32(1), "a": jnp.float32(2)}))


class Passes:
    """Global batches that can be read again, in a random order of each pass."""

    def __init__(self, num=4):
        self.num, self.begun = num, 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.begun += 1
        return iter(BATCHES[self.begun % 2 :][: self.num])


def test_an_iterable_that_has_a_length_has_epochs():
    source = _data.as_source(Passes(), batch_size=16, seed=0)
    with pytest.raises(hxla.DataError, match="ended after 3 global batches"):
        source.fetch(3, np.arange(2))
    data = Passes(3)
    data.__class__ = type("Short", (Passes,), {"__len__": lambda self: 3})
    result = train(data, steps=None, epochs=2)
    assert len(result.history.steps) == 6
    assert data.begun == 2
    with pytest.raises(
        hxla.DataError, match=r"has length 4, but a pass ended after 3 global batches: pass"
    ):
        train(Passes(), steps=None, epochs=2)
    for unknown in (iter(BATCHES), lambda i: {k: v[i % 64] for k, v in DATA.items()}):
        with pytest.raises(hxla.DataError, match="epochs need data of known length"):
            train(unknown, steps=None, epochs=2)


@pytest.mark.slow
def test_a_module_runs_as_python_runs_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("NAME = 'other'")
    (package / "work.py").write_text(
        "import sys\nfrom .other import NAME\nprint(__name__, __spec__.name, NAME, sys.argv[1:])\n"
    )
    running = start(tmp_path, "", module=("-m", "hxla", "run", "-n", "2", "-m", "package.work"))
    out, err = end_of(running)
    assert running.returncode == 0, err
    path = str(tmp_path / "script.py")
    for rank in (0, 1):
        assert f"[{rank}] __main__ package.work other {[path]}" in out
    assert sys.path  # of this process, which imported nothing of it
    assert "package.work" not in sys.modules
