"""Under `jax_enable_x64` a model of float32 trains as it does without, in every form."""

import numpy as np
import pytest

from support.forms import FORMS, trained
from support.jax_settings import in_force
from support.tiers import rows


def losses(form):
    return [step.loss for step in trained(form).history.steps]


@pytest.mark.parametrize("form", rows(FORMS, "clipped", "stages", "unlike replicas"))
def test_a_model_of_float32_trains_as_without_it(form):
    usual = losses(form)
    with in_force(jax_enable_x64=True):
        np.testing.assert_allclose(losses(form), usual, rtol=2e-3 if "16" in form else 1e-5)
