"""Replicas whose state is no longer equal: memory was damaged, or devices compute differently."""

import re

import numpy as np
import optax
import pytest
from flax import nnx

import hxla


def test_a_damaged_array_is_named_with_its_replica_and_no_other():
    data = {"x": np.ones((8, 3), np.float32)}
    job = hxla.Job(
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        data,
        lambda model, batch: (model(batch["x"]) ** 2).mean(-1),
        optax.sgd(0.1),
        batch_size=8,
    )
    devices = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 3)
    with job.open(job.plan(devices, auto=False, microbatch_size=1), steps=2) as session:
        session.step()
        arrays = session._store.held[1]
        names = [re.sub(r"\W", "", name) for name in session._store.layout.names()]
        place = next(k for k, name in enumerate(names) if name.endswith("kernel"))
        arrays.params[place] = arrays.params[place].at[0, 0].add(1e-6)
        with pytest.raises(hxla.LaunchError, match="no longer equal") as caught:
            session.result()
    [line] = [line for line in str(caught.value).splitlines() if "has another" in line]
    assert "kernel" in line
    assert "bias" not in line
