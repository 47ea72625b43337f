"""Errors of hxla end in the user's script; `JAX_TRACEBACK_FILTERING=off` shows frames of hxla."""

import pathlib
import traceback

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.core import _keywords

PACKAGE = pathlib.Path(hxla.__file__).parent


def job(loss=models.squared_error):
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    return hxla.Job(model, models.regression(), loss, optax.sgd(0.1), batch_size=16)


@pytest.fixture
def filtering(monkeypatch):
    """jax's setting, which the tests' own set-up turns off.

    A test that joins a launcher in this process would keep all frames from then on.
    """
    monkeypatch.setattr(_keywords, "_is_kept_whole", False)
    before = jax.config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


def frames(call, error):
    """The functions of an error's traceback: of hxla, and of others."""
    with pytest.raises(error) as caught:
        call()
    found = traceback.extract_tb(caught.value.__traceback__)
    own = [f.name for f in found if pathlib.Path(f.filename).is_relative_to(PACKAGE)]
    return own, [f.name for f in found if f.name not in own]


REFUSED = {
    "train": lambda: hxla.train(job(), steps=1, microbatch_size=5),
    "unknown": lambda: hxla.train(job(), step=1),
    "plan": lambda: job().plan(microbatch_size=5),
    "job": lambda: hxla.Job(None, {"x": np.ones(3)}, models.squared_error, optax, batch_size=1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_ends_in_the_users_line(name, filtering):
    filtering("auto")
    own, others = frames(REFUSED[name], hxla.HxlaError)
    assert own == []
    assert others == ["frames", "<lambda>"]
    filtering("off")
    own, _ = frames(REFUSED[name], hxla.HxlaError)
    assert own != []


def test_what_the_users_loss_called_stays(filtering):
    filtering("auto")

    def loss(model, batch):
        raise hxla.DataError("planted")

    own, others = frames(lambda: job(loss).plan(microbatch_size=2), hxla.DataError)
    assert own == []
    assert others[-1] == "loss"


def test_an_error_that_is_not_of_hxla_keeps_every_frame(filtering):
    filtering("auto")

    def loss(model, batch):
        raise ZeroDivisionError("planted")

    own, others = frames(lambda: job(loss).plan(microbatch_size=2), ZeroDivisionError)
    assert "plan" in own
    assert others[-1] == "loss"
