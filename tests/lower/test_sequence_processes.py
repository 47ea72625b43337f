"""Tokens in parts of unlike sizes, with a process for each device."""

import json

import numpy as np
import pytest

from support import zoo
from support.launched import start
from support.tiers import examples, rows
from support.token_models import ROWS
from support.zoo.row import STEPS

LIMIT_SECONDS = 300

CODE = """
import json, os
import hxla
hxla.join()
import jax
from support.token_models import ROWS
from support.zoo.row import BATCH, MICROBATCH, SEED, STEPS

for name in os.environ["NAMES"].split(","):
    row = ROWS[name]
    job = hxla.Job(
        row.make(), row.data, row.loss, row.optimizer, batch_size=BATCH, seed=SEED,
        variables=row.variables, shuffle=False,
    )
    for shares in json.loads(os.environ["SHARES"]):
        mesh = {"sequence": tuple(shares)}
        result = hxla.train(job, steps=STEPS, microbatch_size=MICROBATCH, mesh=mesh)
        if jax.process_index() == 0:
            told = [name, [r.loss for r in result.history.steps], result.plan.axes[0].shares]
            print("RESULT", json.dumps(told))
"""


@pytest.mark.parametrize("names", rows(["gpt", "llama,packed", "translator,dropout"], "gpt"))
def test_processes_train_as_plain_jax_does(tmp_path, names):
    """Each compiles its own sizes, and XLA orders the collectives of each program by itself."""
    ratios = [[1, 4], [3, 1]][: examples(1, 2)]
    env = {"NAMES": names, "SHARES": json.dumps(ratios)}
    job = start(tmp_path, CODE, "-n", "2", env=env)
    out, err = job.communicate(timeout=LIMIT_SECONDS)
    assert job.returncode == 0, err[-3000:]
    told = [json.loads(line.split("RESULT ")[1]) for line in out.splitlines() if "RESULT" in line]
    assert [(name, shares) for name, _, shares in told] == [
        (name, shares) for name in names.split(",") for shares in ratios
    ]
    for name, losses, _ in told:
        assert len(losses) == STEPS
        np.testing.assert_allclose(losses, zoo.plain(ROWS[name])[0], rtol=1e-5)
