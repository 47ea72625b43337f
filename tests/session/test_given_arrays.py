"""The arrays of the user's NNX model leave the devices while a session is open."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.live_bytes import live_bytes

WIDTH = 64
DATA = {"x": np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)}
NUM_BYTES = 4 * (WIDTH * WIDTH + WIDTH + WIDTH)  # of a linear layer and its scale


class Net(nnx.Module):
    """A layer whose scale has two names, and statistics that a call writes."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jnp.full(WIDTH, 2.0))
        self.again = self.scale
        self.norm = nnx.BatchNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x * self.scale[...]))


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean(-1)


def job_of(model, **arguments):
    return hxla.Job(
        model, DATA, loss, optax.adam(1e-2), batch_size=8, mixes_examples=True, **arguments
    )


def mesh_of(device):
    return jax.sharding.Mesh(np.array([jax.devices()[device]]), ("data",))


def opened(job, device):
    mesh = mesh_of(device)
    return job.open(job.plan(mesh=mesh, microbatch_size=4), mesh=mesh)


def numbers(model):
    return [np.array(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.mark.parametrize("device", [0, 1])
def test_no_second_copy_is_on_a_device_and_the_plan_counts_none(device):
    gc.collect()
    before = live_bytes(0)["device"]
    model = Net(nnx.Rngs(0))
    assert live_bytes(0)["device"] - before >= NUM_BYTES
    job = job_of(model)
    with opened(job, device) as session:
        session.step()
        gc.collect()
        rest = live_bytes(0)["device"] - before
        if device:
            assert rest < NUM_BYTES / 10  # a random key and a count
        else:
            # Parameters and two moments, and two limbs of sums.
            assert rest < 5.3 * NUM_BYTES
            [predicted] = session.plan.prediction.devices
            assert rest <= predicted.memory_bytes


def test_the_model_is_usable_meanwhile_and_has_its_arrays_again():
    model = Net(nnx.Rngs(0))
    before, batch = numbers(model), jnp.asarray(DATA["x"])
    expected = model(batch)
    mean = np.array(model.norm.mean)
    with opened(job_of(model), 1) as session:
        session.step()
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        for ours, theirs in zip(numbers(model), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(model(batch), expected)
        assert not np.array_equal(model.norm.mean, mean)  # of one more call
    assert isinstance(model.norm.mean.get_value(), jax.Array)
    kernel = model.layer.kernel.get_value()
    assert kernel.devices() == {jax.devices()[0]}
    assert not kernel.committed
    assert model.again is model.scale
    np.testing.assert_array_equal(model(batch), expected)


def test_after_an_error_every_array_is_where_it_was():
    model, [_, second] = Net(nnx.Rngs(0)), jax.devices()[:2]
    model.layer.kernel[...] = jax.device_put(model.layer.kernel[...], second)
    before = numbers(model)
    with pytest.raises(hxla.DataError), opened(job_of(model), 0) as session:
        session.step({"x": DATA["x"][:3]})
    kernel = model.layer.kernel.get_value()
    assert kernel.devices() == {second}
    assert kernel.committed
    for ours, theirs in zip(numbers(model), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_session_that_fails_to_open_gives_them_back(tmp_path):
    model = Net(nnx.Rngs(0))
    job, mesh = job_of(model), mesh_of(1)
    plan = job.plan(mesh=mesh, microbatch_size=4)
    kernel = model.layer.kernel.get_value()
    (tmp_path / "file").touch()
    with pytest.raises(hxla.ConfigError, match="metrics cannot be written"):
        job.open(plan, mesh=mesh, run_dir=tmp_path / "file")
    assert isinstance(model.layer.kernel.get_value(), jax.Array)
    assert model.layer.kernel.get_value() is not kernel  # it had left


def test_trained_arrays_and_what_the_user_puts_in_stay():
    model = Net(nnx.Rngs(0))
    mine = jnp.ones((WIDTH, WIDTH))
    with opened(job_of(model), 1) as session:
        session.step()
        model.layer.kernel.set_value(mine)
    assert model.layer.kernel.get_value() is mine
    with opened(job_of(model), 1) as session:
        session.step()
        result = session.result()
    assert model.layer.kernel.get_value() is result.state["layer"]["kernel"].get_value()
    assert not np.array_equal(model.layer.kernel.get_value(), mine)


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_job_begins_each_session_with_the_same_arrays(precision):
    model = Net(nnx.Rngs(0))
    job, bits = job_of(model, precision=precision), set()
    for device in (0, 1):
        with opened(job, device) as session:
            session.step(DATA | {"x": DATA["x"][:8]})
            bits.add(session.result().sha256)
    assert len(bits) == 1
