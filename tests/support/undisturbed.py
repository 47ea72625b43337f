"""The small job of elastic tests, run as it is when nothing happens to it."""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile

from support.launched import own_environment
from support.paths import JOBS

JOB = JOBS / "elastic_job.py"
# What `hxla run` gives to processes on a CPU, and the bits depend on.
ALIKE = {"NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}


@functools.cache
def undisturbed(steps, *options, num=1):
    """The SHA-256 of the state after each step of a job that nobody disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        runner = ["-m", "hxla", "run", "-n", str(num)] if num > 1 else []
        command = [sys.executable, *runner, str(JOB), "--steps", str(steps), *options]
        command += ["--digests", f"{folder}/digests"]
        env = own_environment() | ({} if runner else ALIKE)
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        return json.loads(pathlib.Path(folder, "digests").read_text())


def undisturbed_line(steps, *options):
    """What a job prints in the end that nobody disturbs."""
    command = [sys.executable, "-m", "hxla", "run", *options[:2], str(JOB)]
    command += ["--steps", str(steps), *options[2:]]
    env = own_environment()
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    [line] = [line for line in ran.stdout.splitlines() if "sha256" in line]
    return line.split("] ")[-1]
