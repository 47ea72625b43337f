"""Products in float8 on parts of unlike sizes: each scale is that of the whole operand."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.launched import end_of, start
from support.uneven_runs import NETS, SevenUnits

STEPS, BATCH, MICRO = 3, 16, 4


def job(precision="fp8", net="units"):
    make, loss, data = NETS.get(net, (SevenUnits, models.squared_error, models.regression))
    return hxla.Job(
        lambda: make(nnx.Rngs(0)),
        data(STEPS * BATCH),
        loss,
        optax.sgd(0.2, momentum=0.9),
        batch_size=BATCH,
        shuffle=False,
        mixes_examples=True,
        config={"precision": precision},
    )


@functools.cache
def trained(copies, shares=(), precision="fp8", counts=None, net="units"):
    mesh = {"data": copies, "tensor": shares} if shares else {"data": copies}
    devices = (hxla.Device(kind="cpu"),) * (copies * len(shares or (1,)))
    own, rules = job(precision, net), "decoder" if net == "heads" and shares else None
    cluster = hxla.Cluster(name="", devices=devices)
    plan = own.plan(cluster, microbatch_size=MICRO, mesh=mesh, rules=rules)
    assert plan.is_uneven == bool(shares)
    return run(own, plan.with_counts(counts) if counts else plan)


def run(own, plan):
    with own.open(plan, steps=STEPS) as session:
        for _ in session:
            pass
        return session.result()


def assert_close(found, wanted, rtol, atol):
    losses = [[r.loss for r in result.history.steps] for result in (found, wanted)]
    np.testing.assert_allclose(*losses, rtol=rtol)
    pairs = zip(jax.tree.leaves(found.state), jax.tree.leaves(wanted.state), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("shares", [(2, 1), pytest.param((1, 1, 3), marks=pytest.mark.slow)])
def test_parts_of_unlike_sizes_train_as_one_device_does(shares):
    """A scale of a part alone would round to other numbers, as far off as float32 is."""
    found, one = trained(1, shares), trained(1)
    assert_close(found, one, rtol=1e-5, atol=1e-5)
    exact = trained(1, precision="fp32")
    losses = [[r.loss for r in result.history.steps] for result in (one, exact)]
    assert np.abs(np.subtract(*losses)).max() > 1e-4


@pytest.mark.slow
def test_heads_and_a_vocabulary_of_unlike_sizes_train_as_on_one_device():
    """A result is gathered where the plan wants it whole."""
    found, one = trained(1, (2, 1), net="heads"), trained(1, net="heads")
    assert_close(found, one, rtol=1e-3, atol=2e-3)


@pytest.mark.slow
def test_no_bit_depends_on_copies_and_counts():
    one, two = trained(1, (2, 1)), trained(2, (2, 1), counts=(3, 1))
    assert one.plan.numerics == two.plan.numerics
    assert one.sha256 == two.sha256


CODE = """
import hxla
hxla.join()
import jax, numpy as np
from lower.test_uneven_float8 import MICRO, job, run

own = job()
plan = own.plan(microbatch_size=MICRO, mesh={"data": 1, "tensor": (2, 1)}, counts="even")
result = run(own, plan)
if jax.process_index() == 0:
    np.savez("found.npz", losses=[r.loss for r in result.history.steps])
print("ended", jax.process_index())
"""


@pytest.mark.slow
def test_processes_multiply_their_sizes_only(tmp_path):
    out, err = end_of(start(tmp_path, CODE, "-n", "2"))
    assert out.count("ended") == 2, err[-3000:]
    losses = [r.loss for r in trained(1).history.steps]
    np.testing.assert_allclose(np.load(tmp_path / "found.npz")["losses"], losses, rtol=1e-5)
