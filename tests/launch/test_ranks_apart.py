"""Ranks of a job that call hxla unlike one another, and ranks that fail alike and go on."""

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.launched import PATIENCE_SECONDS, slurm_tasks, start

TRAIN = """
import jax, numpy as np, optax
from flax import nnx
import hxla
hxla.join()

def train(data, **known):
    known = {"microbatch_size": 4, "steps": 3} | known
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    loss = lambda m, batch: (m(batch["x"]) ** 2).mean(-1)
    job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=16, shuffle=False)
    return hxla.train(job, **known)

whole = {"x": np.ones((64, 8), np.float32)}
"""
CAUGHT = """
for _ in range(2):
    try:
        train({"x": np.ones((16, 8), np.float32)} for _ in range(2))
    except hxla.DataError:
        print("caught", flush=True)
print("sha256", train(whole).sha256, flush=True)
"""
ONE_RANK = """
if jax.process_index() == 0:
    train(whole)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A job whose ranks fail alike, train, and of which one then trains alone."""
    job = start(tmp_path_factory.mktemp("apart"), TRAIN + CAUGHT + ONE_RANK, "-n", "2")
    out, err = job.communicate(timeout=PATIENCE_SECONDS)
    return out, err, job.returncode


def test_an_error_that_every_rank_catches_ends_nothing(told):
    out, err, _ = told
    assert out.count("caught") == 4, err
    wanted = hxla.train(
        hxla.Job(
            nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
            {"x": np.ones((64, 8), np.float32)},
            lambda m, batch: (m(batch["x"]) ** 2).mean(-1),
            optax.sgd(0.1),
            batch_size=16,
            shuffle=False,
            config={"cluster": {"visible_devices": [0]}},
        ),
        microbatch_size=4,
        steps=3,
    )
    assert out.count(f"sha256 {wanted.sha256}") == 2


def test_a_rank_whose_script_is_over_is_named_where_another_waits_for_it(told):
    _, err, code = told
    assert code == 1
    assert "LaunchError: rank 1 ended its script, and another rank waits for it" in err
    assert "SIGABRT" not in err


@pytest.mark.slow
def test_so_it_is_without_the_launcher(tmp_path):
    jobs = slurm_tasks(tmp_path, TRAIN + ONE_RANK, 2)
    said = [job.communicate(timeout=PATIENCE_SECONDS)[1] for job in jobs]
    assert jobs[0].returncode == 1
    assert "rank 1 ended its script, and another rank waits for it" in said[0]
