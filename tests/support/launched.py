"""Scripts under `hxla run`, and waiting for what they say."""

import os
import subprocess
import sys
import threading

from support.paths import PYTHONPATH

#: The limit of a wait, however busy the machine is.
PATIENCE_SECONDS = 900.0


def own_environment():
    """Without the fake devices of a test, and with this checkout."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return env | {"PYTHONPATH": PYTHONPATH}


def start(tmp_path, code, *options, env=None, module=("-m", "hxla", "run")):
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.Popen(
        [sys.executable, *module, *options, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own_environment() | (env or {}),
        cwd=tmp_path,
    )


def lines_with(job, word, num=1):
    """The first `num` lines of a job's output that have a word, once they are there."""
    limit = threading.Timer(PATIENCE_SECONDS, job.kill)
    limit.start()
    found = []
    try:
        for line in job.stdout:
            found += [line] if word in line else []
            if len(found) == num:
                return found
    finally:
        limit.cancel()
    raise AssertionError(f"{len(found)} of {num} lines with {word!r}: {job.stderr.read()}")


def end_of(job):
    """What a job printed until its end: standard output and error."""
    try:
        return job.communicate(timeout=PATIENCE_SECONDS)
    finally:
        job.kill()


def slurm_tasks(tmp_path, code, num, env=None):
    """A script in each task of a step of Slurm's, as those see it that something else started."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(num),
        "SLURM_STEP_NUM_TASKS": str(num),
        "SLURM_LOCALID": "0",
        "JAX_PLATFORMS": "cpu",
    } | (env or {})
    return [start(tmp_path, code, env=step | {"SLURM_PROCID": str(rank)}) for rank in range(num)]
