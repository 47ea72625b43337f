"""Elastic jobs on the nodes of a real local Ray cluster, with the bits of undisturbed ones."""

import subprocess
import sys

import elastic_chaos
import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.slow


def test_nodes_join_are_drained_and_die_and_no_bit_moves():
    """In random order, with kills and freezes of processes between."""
    rows = elastic_chaos.disturbed(3, 3, ("join", "leave", "node death"), make=elastic_chaos.RayJob)
    assert len(rows) == 3


def test_without_a_cluster_it_is_said_what_to_do():
    command = [sys.executable, "-m", "hxla", "run", "--elastic", "--ray", "127.0.0.1:1"]
    command.append(str(elastic_chaos.JOB))
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=elastic_chaos.own_environment()
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1].startswith("hxla: --ray 127.0.0.1:1: ")
    assert "ray start --head" in ran.stderr


def test_the_example_ends_with_the_bits_of_an_undisturbed_run():
    script = elastic_chaos.ROOT / "examples" / "13_ray.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--steps", "60"],
        capture_output=True,
        text=True,
        check=False,
        env=elastic_chaos.own_environment(),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the first node is drained" in ran.stdout
