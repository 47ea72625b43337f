"""Unlike stages: a card alone beside two that share a stage."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from support import models
from support.launched import end_of, start
from support.tensor_gpt import BATCH, STEPS
from support.tiers import rows
from support.unlike_stages import CASES, ONE, TWO, params_of, reference, trained


@pytest.mark.parametrize("name", rows(CASES, "one and two", "annotated"))
def test_unlike_stages_train_as_plain_jax_does(name):
    case = CASES[name]
    losses, params = reference(case)
    result = trained(case)
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=2e-5)
    for got, expected in zip(params_of(result.model), params, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


CODE = """
import os
import hxla
hxla.join()
import jax
import numpy as np
from support.unlike_stages import CASES, STEPS, trained

whole = []

def keep(record, session):
    if session.step_number == STEPS:
        whole[:] = jax.tree.leaves(session.gather(session.state.params))

result = trained(CASES[os.environ["NAME"]], visible=False, callbacks=[keep])
if jax.process_index() == 0:
    losses = [record.loss for record in result.history.steps]
    np.savez("found.npz", losses=losses, **{f"p{k:03}": x for k, x in enumerate(whole)})
print("ended", jax.process_index())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one and two", "gpt", "two and one", "of unlike shards"])
def test_processes_of_unlike_stages_train_as_plain_jax_does(tmp_path, name):
    losses, params = reference(CASES[name])
    out, err = end_of(start(tmp_path, CODE, "-n", "3", env={"NAME": name}))
    assert out.count("ended") == 3, err[-3000:]
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_allclose(found["losses"], losses, rtol=2e-5)
    for k, expected in enumerate(params):
        got = found[f"p{k:03}"]
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_checkpoints_and_evaluations_know_nothing_of_stages(tmp_path):
    case = CASES["one and two"]
    held_out = models.regression(10)
    folder = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "eval_data": held_out}
    losses, _ = reference(case)
    trained(case, steps=1, **folder)
    two = trained(case, steps=2, **folder)  # the same stages again
    last = trained(CASES["first of unlike shards"], **folder)
    alone = trained(dataclasses.replace(case, options={}, num_devices=1), eval_data=held_out)
    resumed = [step.loss for r in (two, last) for step in r.history.steps]
    np.testing.assert_allclose(resumed, losses[1:], rtol=2e-5)
    evaluated = [r.history.evaluations[-1].loss for r in (last, alone)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


@pytest.mark.slow
def test_statistics_dropout_and_low_precision_are_those_of_one_device():
    case = dataclasses.replace(
        CASES["one and two"],
        make=lambda: models.NnxNet(nnx.Rngs(0)),
        loss=models.token_loss,
        data=lambda: models.tokens(STEPS * BATCH),
        options={"stages": [TWO, ONE], "rules": "decoder"},
    )
    for precision, rel in (("fp32", 1e-5), ("bf16", 2e-2)):
        split = trained(case, precision=precision)
        one = dataclasses.replace(case, options={}, num_devices=1)
        alone = trained(one, precision=precision)
        for a, b in zip(alone.history.steps, split.history.steps, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=rel)
        statistics = [jax.tree.leaves(nnx.state(r.model, nnx.BatchStat)) for r in (alone, split)]
        for a, b in zip(*statistics, strict=True):
            np.testing.assert_allclose(a, b, rtol=rel, atol=rel / 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one and two", "of unlike shards"])
def test_no_spread_of_microbatches_moves_a_bit(name):
    one = CASES[name]
    two = dataclasses.replace(one, num_devices=2 * one.num_devices)
    results = [trained(one), *(trained(two, counts=counts) for counts in ((5, 3), (2, 6)))]
    assert len({result.plan.numerics for result in results}) == 1
    assert len({result.sha256 for result in results}) == 1


@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_of_all_stages():
    case = CASES["one and two"]
    clipped = {"config": {"communication": {"clip_norm": 0.1}}}
    alone = trained(dataclasses.replace(case, options={}, num_devices=1), **clipped)
    split = trained(case, **clipped)
    for a, b in zip(params_of(alone.model), params_of(split.model), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-5 * np.abs(a).max())
