"""Jobs of several real processes: the same bits, and a clean end whatever happens."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from support.paths import PYTHONPATH, TESTS

SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import jax, models, optax, hxla
from flax import nnx

def callback(record, session):
    print("done", record.step, flush=True)
    time.sleep({pause})

kind = {kind!r}
result = hxla.train(
    models.NnxNet(nnx.Rngs(0)) if kind == "nnx" else models.LinenNet(),
    models.tokens(), models.token_loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    batch_size=16, microbatch_size=2, steps={steps}, seed=3, counts={counts!r},
    checkpoint_dir={folder!r}, checkpoint_every={every}, callbacks=[callback],
    config={{"watchdog": {{"heartbeat_timeout_seconds": 4.0}}}},
)
print("sha256", result.sha256, result.step)
"""


def job(
    tmp_path, *options, steps=50, counts="even", pause=0.0, folder=None, every=None, kind="nnx"
):
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(
            tests=str(TESTS),
            steps=steps,
            counts=counts,
            pause=pause,
            folder=folder and str(folder),
            every=every,
            kind=kind,
        )
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    launcher = ["-m", "hxla", "run", *options] if options else []
    return subprocess.Popen(
        [sys.executable, *launcher, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env | {"PYTHONPATH": PYTHONPATH},
    )


def shas(out):
    return re.findall(r"sha256 (\w+)", out)


def wait_for(process, word):
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_processes_and_one_plain_process_give_the_same_bits(tmp_path, kind):
    out1, err1 = job(tmp_path, kind=kind).communicate(timeout=200)
    out3, err3 = job(tmp_path, "-n", "3", counts=[5, 1, 2], kind=kind).communicate(timeout=200)
    found = shas(out1) + shas(out3)
    assert len(found) == 4, err1 + err3
    assert len(set(found)) == 1


@pytest.mark.slow
def test_a_killed_job_resumes_to_the_same_bits_on_other_devices(tmp_path):
    whole, err = job(tmp_path, steps=12).communicate(timeout=200)
    running = job(tmp_path, "-n", "2", steps=12, pause=0.5, folder=tmp_path / "c", every=2)
    wait_for(running, "[1] done 6")
    victim = [p for p in psutil.Process(running.pid).children() if "train.py" in str(p.cmdline())]
    begun = time.monotonic()
    victim[1].kill()
    _, err = running.communicate(timeout=60)
    assert time.monotonic() - begun < 10
    assert running.returncode == 137
    assert "rank 1 was killed by SIGKILL" in err
    resumed, err = job(tmp_path, steps=12, folder=tmp_path / "c").communicate(timeout=200)
    assert "resumed from step" in resumed, err
    assert shas(resumed) == shas(whole)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_process_ends_the_job_and_is_named(tmp_path, rank):
    running = job(tmp_path, "-n", "2", steps=500, pause=0.2)
    wait_for(running, "[1] done 15")  # long enough for the watchdogs to have told each other a step
    children = [p for p in psutil.Process(running.pid).children() if "train.py" in str(p.cmdline())]
    children[rank].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    _, err = running.communicate(timeout=60)
    assert time.monotonic() - begun < 20
    assert running.returncode == 76
    assert re.search(rf"rank {rank} has not answered for .* it is at step \d+ in phase", err)
    assert not psutil.pid_exists(children[rank].pid)


@pytest.mark.slow
def test_sigterm_checkpoints_and_exits_with_75(tmp_path):
    running = job(tmp_path, "-n", "2", steps=500, pause=0.2, folder=tmp_path / "c")
    wait_for(running, "[1] done 3")
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 75
    saved = [int(p.name) for p in (tmp_path / "c").iterdir() if p.name.isdigit()]
    assert saved
    assert max(saved) >= 4
