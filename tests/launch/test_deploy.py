"""What batch systems are given: a script for Slurm, a manifest for Kubernetes."""

import copy
import os
import pathlib
import signal
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from support.launched import PATIENCE_SECONDS
from support.left_behind import wait_until
from support.paths import JOBS, PYTHONPATH, ROOT

DEPLOY = ROOT / "deploy"
JOB = JOBS / "elastic_job.py"
STEPS = 150


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_the_manifest_has_the_form_of_the_api(version):
    job = yaml.safe_load((DEPLOY / "job.yaml").read_text())
    kubernetes_validate.validate(job, version, strict=True)
    wrong = copy.deepcopy(job)
    wrong["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["value"] = [75]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_manifest_repeats_what_was_saved_and_counts_errors():
    spec = yaml.safe_load((DEPLOY / "job.yaml").read_text())["spec"]
    [saved, evicted] = spec["podFailurePolicy"]["rules"]
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [75])
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    [container] = spec["template"]["spec"]["containers"]
    grace = int(container["command"][-1].split("--grace ")[1].split()[0])
    assert grace < spec["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.slow
def test_a_job_that_slurm_stops_is_queued_again_and_ends_as_if_nothing_had_been(tmp_path):
    """The script as Slurm runs it; what stands for `scontrol` writes down how it is called."""
    asked = tmp_path / "asked"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"PATH": path, "RUN_OPTIONS": "-n 2", "SLURM_JOB_ID": "7", "PYTHONPATH": PYTHONPATH}
    command = ["bash", str(DEPLOY / "train.sbatch"), str(JOB), "--steps", str(STEPS)]
    command += ["--slow", "0.1", "--checkpoints", str(tmp_path / "saved")]
    printed = tmp_path / "printed"
    with printed.open("wb") as out:
        job = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: "\nstep " in printed.read_text(), printed.read_text)
            job.send_signal(signal.SIGTERM)
            assert job.wait(PATIENCE_SECONDS) == 75
        finally:
            if job.poll() is None:
                job.kill()
    assert asked.read_text() == "requeue 7\n"
    again = subprocess.run(
        [*command[:-4], *command[-2:]],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert "resumed from step" in again.stderr
    assert asked.read_text() == "requeue 7\n"
    alone = [sys.executable, "-m", "hxla", "run", "-n", "1", str(JOB), "--steps", str(STEPS)]
    undisturbed = subprocess.run(alone, env=env, capture_output=True, text=True, check=True)
    [line] = [line for line in undisturbed.stdout.splitlines() if "sha256" in line]
    assert line.split("] ")[-1] in again.stdout
