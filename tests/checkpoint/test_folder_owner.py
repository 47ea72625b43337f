"""One session at a time writes to a folder of checkpoints, and the next is told who does."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.inside.checkpoint import FolderOwner, _folder_owner
from support.launched import end_of, lines_with, own_environment, start

pytestmark = pytest.mark.usefixtures("every_program_is_cached")

DATA = {"x": np.ones((16, 6), np.float32)}
OWNS = """
import os, sys, pathlib
from support.inside.checkpoint import FolderOwner
owner = FolderOwner(pathlib.Path(sys.argv[1]), lambda _, text: (text,))
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
sys.stdin.read()
if child:
    owner.close()
"""


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean(-1)


def job():
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    return hxla.Job(
        model,
        DATA,
        loss,
        optax.sgd(0.1),
        batch_size=16,
        config={"cluster": {"visible_devices": [0]}},
    )


def opened(folder):
    found = job()
    return found.open(found.plan(microbatch_size=8, checkpoint_dir=folder), checkpoint_dir=folder)


@contextlib.contextmanager
def owned_by_another(folder, **env):
    """A process that has the folder, and a child of it that outlives it."""
    other = subprocess.Popen(
        [sys.executable, "-c", OWNS, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=own_environment() | env,
    )
    try:
        own, child = map(int, other.stdout.readline().split())
        assert own == other.pid
        yield other
        os.kill(child, signal.SIGKILL)
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


def test_a_second_job_is_told_who_has_the_folder_and_a_kill_lets_go_of_it(tmp_path):
    with owned_by_another(tmp_path) as other:
        with pytest.raises(hxla.CheckpointError) as refused:
            opened(tmp_path)
        said = str(refused.value)
        start = json.loads((tmp_path / "hxla-owner.json").read_text())["start"]
        for fact in (f"process {other.pid} on {socket.gethostname()}, since {start}", tmp_path):
            assert str(fact) in said
        assert "wait until it ends, or end it, or use another checkpoint_dir" in said
        other.kill()
        other.wait()
        with opened(tmp_path) as session:
            session.step()
            session.save()
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_sessions_of_a_process_have_a_folder_one_after_another(tmp_path):
    for step in range(2):
        with opened(tmp_path) as session:
            assert session.step_number == step
            session.step()
            session.save()
            with pytest.raises(hxla.CheckpointError, match=f"process {os.getpid()}.*close that"):
                opened(tmp_path)
            with opened(tmp_path / "another"):
                pass
            assert session.evaluate(DATA).num_examples == 16
    (tmp_path / "2" / "meta" / "metadata").write_text("")
    (tmp_path / "1" / "meta" / "metadata").write_text("")
    for _ in range(2):  # what could not be opened is nobody's
        with pytest.raises(hxla.CheckpointError, match=r"no checkpoint in .* can be read"):
            opened(tmp_path)


def test_the_next_generation_of_a_job_waits_for_what_the_last_one_has(tmp_path, monkeypatch):
    waited = []
    with owned_by_another(tmp_path, HXLA_JOB="this") as other:

        def sleep(_):
            waited.append(other.pid)
            other.kill()
            other.wait()

        # Not the whole process': another thread may sleep meanwhile.
        own_time = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr(_folder_owner, "time", own_time)
        monkeypatch.setenv("HXLA_JOB", "another")
        with pytest.raises(hxla.CheckpointError):
            FolderOwner(tmp_path, lambda _, text: (text,))
        monkeypatch.setenv("HXLA_JOB", "this")
        FolderOwner(tmp_path, lambda _, text: (text,)).close()
    assert waited == [other.pid]


def test_a_folder_that_cannot_be_locked_is_said_to_be_so(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(_folder_owner.fcntl, "flock", flock)
    with FolderOwner(tmp_path, lambda _, text: (text,)) as owner:
        [said] = owner.notes
    assert f"{tmp_path} cannot be locked (No locks available)" in said


TRAINS = """
import jax, numpy as np, optax, sys, hxla
from flax import nnx

def callback(record, session):
    print("done", record.step, flush=True)

job = hxla.Job(
    nnx.Linear(6, 3, rngs=nnx.Rngs(0)), {{"x": np.ones((32, 6), "f")}},
    lambda model, batch: (model(batch["x"]) ** 2).mean(-1), optax.adam(0.1), batch_size=16,
)
hxla.train(
    job, microbatch_size=4, steps={steps}, checkpoint_dir={folder!r}, counts="even",
    callbacks=[callback],
)
"""


@pytest.mark.slow
def test_of_two_jobs_of_processes_the_second_ends_and_the_first_trains_on(tmp_path):
    folder = str(tmp_path / "c")
    (tmp_path / "second").mkdir()
    first = start(tmp_path, TRAINS.format(steps=100_000, folder=folder), "-n", "2")
    lines_with(first, "[1] done 3")
    second = start(tmp_path / "second", TRAINS.format(steps=4, folder=folder), "-n", "2")
    _, err = end_of(second)
    assert second.returncode == 1
    assert f"CheckpointError: checkpoint_dir {folder} is used by another session: process " in err
    first.send_signal(signal.SIGTERM)
    _, err = end_of(first)
    assert first.returncode == 75, err
    assert [name for name in os.listdir(folder) if not name.isdigit()] == []
