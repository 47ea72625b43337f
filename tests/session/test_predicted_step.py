"""The predicted step of a session on real processes, before its first step."""

import json

from support.launched import end_of, start

CODE = """
import json
import hxla
hxla.join()
import numpy as np, optax
from flax import nnx

model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
data = {"x": np.ones((32, 64), np.float32)}
loss = lambda model, batch: (model(batch["x"]) ** 2).mean(axis=-1)
job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=32)
plan = job.plan(microbatch_size=4)
with job.open(plan, steps=1, balance=True) as session:
    known, counts = session.plan.prediction, session.plan.counts
    sums = {device.reduction_seconds for device in known.devices}
    print("told", json.dumps([known.step_seconds, known.microbatch_seconds, counts, list(sums)]))
    for _ in session:
        pass
"""


def test_the_predicted_step_of_replicas_has_the_reduction_between_them(tmp_path):
    out, err = end_of(start(tmp_path, CODE, "-n", "2"))
    told = [json.loads(line.partition("told ")[2]) for line in out.splitlines() if "told " in line]
    assert len(told) == 2, err[-3000:]
    assert told[0] == told[1]
    step, seconds, counts, [reduction] = told[0]
    assert reduction > 0
    busy = max(num * each for num, each in zip(counts, seconds, strict=True))
    assert abs(step - busy - reduction) < 1e-9
