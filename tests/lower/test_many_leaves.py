"""Many small parameters: one program cuts their sums out of a table, the same for all of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import lowering
from support.tiers import rows

NUM, SIZE = 20, 3


def lowered(num_devices):
    """The programs of a microbatch and of the update, for the first device."""

    def sums_of(params, aux, key, batch):
        loss = sum(x.sum() for x in params) * batch.sum()
        return loss, jnp.stack([loss, 1.0]), aux

    shapes = [(SIZE,)] * NUM + [(200, 200), (300, 100)]
    params = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    batch = jax.ShapeDtypeStruct((2,), np.float32)
    made = lowering.programs(sums_of, params, batch, num_devices=num_devices)
    return [program.as_text() for program in made._lowered(0)]


def test_no_leaf_is_cut_out_of_the_sums_at_a_place_of_its_own():
    update = lowered(1)[-1]
    shapes = f"tensor<(?:{NUM}x{SIZE}|{NUM * SIZE})xf32>"
    assert re.findall(f"dynamic_slice .*{shapes}", update)
    assert not re.findall(f"stablehlo.slice .*{shapes}", update)


def test_a_device_runs_the_same_programs_in_every_spread():
    assert lowered(1) == lowered(2) == lowered(3)


class Scales(nnx.Module):
    def __init__(self):
        self.each = nnx.List([nnx.Param(jnp.full(SIZE, 1 + i / NUM)) for i in range(NUM)])

    def __call__(self, x):
        for i, scale in enumerate(self.each):
            x = jnp.tanh(x * scale[...] + i / NUM)
        return x


OPTIMIZERS = {"adamw": optax.adamw(1e-2), "momentum": optax.sgd(0.1, momentum=0.9)}


@pytest.mark.parametrize("name", rows(OPTIMIZERS, "adamw"))
def test_no_spread_moves_a_bit_of_many_leaves(name):
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(8, SIZE)).astype(np.float32) for name in "xy"}

    def trained(num):
        job = hxla.Job(
            Scales(),
            data,
            lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(-1),
            OPTIMIZERS[name],
            batch_size=8,
            config={"cluster": {"visible_devices": list(range(num))}},
        )
        with job.open(job.plan(microbatch_size=2), steps=3) as session:
            return [record.loss for record in session], session.result().sha256

    losses, digest = trained(1)
    assert losses[0] > losses[-1]
    assert trained(2) == (losses, digest)
