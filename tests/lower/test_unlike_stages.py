"""Stages with devices and axes of their own: a card alone beside two that share a stage."""

import numpy as np
import pytest

from support.launched import end_of, start
from support.tiers import rows
from support.unlike_stages import CASES, params_of, reference, trained


@pytest.mark.parametrize("name", rows(CASES, "one and two", "annotated", "gpt"))
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
from support.unlike_stages import CASES, params_of, trained

for name in os.environ["NAMES"].split(";"):
    result = trained(CASES[name], visible=False)
    if jax.process_index() == 0:
        losses = [record.loss for record in result.history.steps]
        arrays = dict(enumerate(params_of(result.model)))
        np.savez(f"{name}.npz", losses=losses, **{f"p{k:03}": x for k, x in arrays.items()})
print("ended", jax.process_index())
"""


@pytest.fixture(scope="module")
def job_of_three(tmp_path_factory):
    """Three processes with a device each, and the folder of their results."""
    folder = tmp_path_factory.mktemp("three")
    names = "one and two;gpt;two and one"
    out, err = end_of(start(folder, CODE, "-n", "3", env={"NAMES": names}))
    assert out.count("ended") == 3, err[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one and two", "gpt", "two and one"])
def test_processes_of_unlike_stages_train_as_plain_jax_does(job_of_three, name):
    losses, params = reference(CASES[name])
    found = np.load(job_of_three / f"{name}.npz")
    np.testing.assert_allclose(found["losses"], losses, rtol=2e-5)
    for k, expected in enumerate(params):
        got = found[f"p{k:03}"]
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
