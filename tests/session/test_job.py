"""Jobs of several real processes: the same bits, and a clean end whatever happens."""

import re
import signal

import psutil
import pytest

from support.launched import end_of, lines_with, start
from support.left_behind import wait_until_gone

SCRIPT = """
import time
import jax, optax, hxla
from flax import nnx
from support import models

def callback(record, session):
    print("done", record.step, flush=True)
    time.sleep({pause})

JOBS = {{
    "nnx": lambda: (models.NnxNet(nnx.Rngs(0)), models.tokens(), models.token_loss),
    "linen": lambda: (models.LinenNet(), models.tokens(), models.token_loss),
    "small": lambda: (models.Dense(nnx.Rngs(0)), models.regression(), models.squared_error),
}}
job = hxla.Job(
    *JOBS[{kind!r}](), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    batch_size=16, seed=3, config={{"watchdog": {{"heartbeat_timeout_seconds": 4.0}}}},
)
result = hxla.train(
    job, microbatch_size=2, steps={steps}, counts={counts!r}, checkpoint_dir={folder!r},
    callbacks=[callback],
)
print("sha256", result.sha256, result.step)
"""


def job(tmp_path, *options, steps=500, counts="even", pause=0.2, folder=None, kind="small"):
    values = {"steps": steps, "counts": counts, "pause": pause, "kind": kind}
    code = SCRIPT.format(folder=folder and str(folder), **values)
    return start(tmp_path, code, *options, module=("-m", "hxla", "run") if options else ())


def shas(out):
    return re.findall(r"sha256 (\w+)", out)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "counts"), [("nnx", [5, 1, 2]), ("linen", [5, 3])])
def test_processes_and_one_plain_process_give_the_same_bits(tmp_path, kind, counts):
    same = {"kind": kind, "steps": 12, "pause": 0.0}
    out, err = end_of(job(tmp_path, **same))
    outs, errs = end_of(job(tmp_path, "-n", str(len(counts)), counts=counts, **same))
    found = shas(out) + shas(outs)
    assert len(found) == 1 + len(counts), err + errs
    assert len(set(found)) == 1


def ranks_of(running):
    children = psutil.Process(running.pid).children()
    return [p for p in children if "script.py" in str(p.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_process_ends_the_job_and_is_named(tmp_path, rank):
    running = job(tmp_path, "-n", "2")
    lines_with(running, "[1] done 15")  # long enough for the watchdogs to have told a step
    frozen = ranks_of(running)[rank]
    frozen.send_signal(signal.SIGSTOP)
    _, err = end_of(running)
    assert running.returncode == 76
    assert re.search(rf"rank {rank} has not answered for .* it is at step \d+ in phase", err)
    wait_until_gone([frozen.pid])


@pytest.mark.slow
def test_sigterm_checkpoints_and_exits_with_75(tmp_path):
    running = job(tmp_path, "-n", "2", folder=tmp_path / "c")
    lines_with(running, "[1] done 3")
    running.send_signal(signal.SIGTERM)
    end_of(running)
    assert running.returncode == 75
    saved = [int(p.name) for p in (tmp_path / "c").iterdir() if p.name.isdigit()]
    assert saved
    assert max(saved) >= 4
