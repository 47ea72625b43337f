"""Elastic jobs on the nodes of a real local Ray cluster, with the bits of undisturbed ones."""

import collections
import io
import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from hxla.__main__ import main
from support import elastic_chaos, left_behind
from support.launched import PATIENCE_SECONDS
from support.left_behind import wait_until
from support.ray_clusters import add_node, drain, started_cluster
from support.scheduled_runs import LONG, THREE, Scheduled, check_three, has_ended, is_decided_on

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose head has no devices; each test adds nodes and takes them away."""
    found = started_cluster()
    yield found
    found.shutdown()


@pytest.fixture
def connected(cluster):
    """This process has joined the cluster."""
    from support.inside.launch import connect

    connect(cluster.address)
    yield cluster
    ray.shutdown()


@pytest.mark.slow
def test_nodes_join_are_drained_and_die_and_no_bit_moves():
    """In random order, with kills and freezes of processes between."""
    rows = elastic_chaos.disturbed(5, 3, ("join", "leave", "node death"), make=elastic_chaos.RayJob)
    assert len(rows) == 3


def twice(events):
    """The steps of which both parts are on two nodes."""
    hosts = collections.defaultdict(set)
    for e in events:
        if e["what"] == "Copied" and e["num_parts"] == 2:
            hosts[e["step"], e["part"]].add(e["host"])
    steps = {step for step, _ in hosts}
    return sorted(s for s in steps if all(len(hosts[s, part]) == 2 for part in range(2)))


@pytest.mark.slow
def test_a_node_that_dies_takes_no_more_steps_than_since_its_part_was_copied(tmp_path):
    """The other node has both parts of the state: no checkpoint is there, and nobody else."""
    job = elastic_chaos.RayJob(tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.4, 0.4], is_copied=True)
    try:
        job.wait(lambda e: len(twice(e)) > 1, "copies on two nodes")
        job.kill_node("device 1")
        job.wait(lambda e: any(one["what"] == "Save" for one in e), "a state that waits")
        job.add(0.4)
        job.write_mesh()
        job.wait(lambda e: elastic_chaos.runs(e) and e[-1]["what"] == "Completed", "a step")
        job.last.touch()
        code = job.end()
    finally:
        job.stop()
    elastic_chaos.check(job, code)
    _, form = [e for e in job.events() if e["what"] == "Form"]
    assert form["generation"]["first_step"] >= 4
    assert [one["part"] for one in form["sources"]] == [0, 1]
    assert len({(one["device"], one["host"]) for one in form["sources"]}) == 1
    assert "is gone with its host" in job.printed_text()


SAYS_LAST = """
import pathlib, sys, time
print("one", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("two", flush=True)
"""


def test_what_is_printed_last_is_heard_when_a_node_is_let_go(tmp_path, connected):
    """An answer under way has it, and nobody has read that answer when its host is closed."""
    from support.inside.cluster import Cluster, Device, dump_cluster
    from support.inside.launch import RanksStart, RayHost, Seat, Streams

    script, go, printed = tmp_path / "job.py", tmp_path / "go", io.BytesIO()
    script.write_text(SAYS_LAST)
    device = Device(kind="cpu")
    start = RanksStart(
        job="job",
        generation=1,
        num_processes=1,
        address="127.0.0.1:1",
        seats={0: Seat(device=device, place=0, core=None)},
        mesh=dump_cluster(Cluster(name="elastic", devices=(device,))),
        pinned="",
    )
    added = add_node(connected, 0.5)
    [node] = [node for node in ray.nodes() if node["NodeID"] == added.node_id]
    streams = Streams.over(printed, printed)
    host = RayHost(node, [str(script), str(go)], streams, None)
    try:
        wait_until(lambda: host.poll() or host.devices, "devices")
        ranks = host.start(start)
        [pid] = ranks.pids.values()
        ranks.order(begins=True, state=[])
        wait_until(lambda: host.poll() or b"one" in printed.getvalue(), "its first line")
        ray.wait([host._hearing], timeout=PATIENCE_SECONDS)  # else it might have the last line
        go.touch()
        left_behind.wait_until_gone([pid])
        host.poll()
        ray.wait([host._hearing], timeout=PATIENCE_SECONDS)
        assert b"two" not in printed.getvalue()
        host.close()
        assert b"two" in printed.getvalue()
    finally:
        connected.remove_node(added)


def test_nodes_are_shared_out_whole_and_held_as_long_as_a_job_has_them(cluster):
    from support.inside.scheduler import Places, RayFleet

    said = []
    fleet = RayFleet(cluster.address, ["cpu@0.5"], said.append)
    nodes = [add_node(cluster, share) for share in (0.5, 0.25)]
    one, other = (f"node {node.node_id[:8]}" for node in nodes)
    try:
        wait_until(fleet.offered, "a node")
        assert fleet.offered() == {one: ("cpu@0.5", 1)}
        wait_until(lambda: fleet.offered() and said, "a word of the other node")
        assert said == [f"{other} with 1 cpu@0.25 is left out: the jobs use nodes of one cpu@0.5"]
        fleet.keep([one])
        [held] = wait_until(held_groups, "a placement group")
        assert fleet.text(Places([one])) == f"{nodes[0].node_id} {held['name']}\n"
        assert held["bundles"] == {0: {"CPU": 1.0}}
        fleet.keep([one])
        assert [group["name"] for group in held_groups()] == [held["name"]]
        drain(cluster, nodes[0])
        wait_until(lambda: not fleet.offered(), "the node to be drained")
        fleet.keep([])
        wait_until(lambda: not held_groups(), "the placement group to be gone")
    finally:
        fleet.close()
        for node in nodes:
            cluster.remove_node(node)


def said_by(capsys, *options):
    """The exit code of `hxla run` with some options, and the last line of its errors."""
    capsys.readouterr()
    try:
        code = main(["run", *options])
    finally:
        ray.shutdown()
    return code, (capsys.readouterr().err.splitlines() or [""])[-1]


def test_without_a_cluster_it_is_said_what_to_do(capsys):
    code, said = said_by(capsys, "--elastic", "--ray", "127.0.0.1:1", str(elastic_chaos.JOB))
    assert code == 2
    assert said.startswith("hxla: --ray 127.0.0.1:1: ")
    assert "ray start --head" in said


@pytest.mark.slow
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


class ScheduledOnRay(Scheduled):
    """On a Ray cluster of its own, whose nodes have a device each."""

    def __init__(self, folder, jobs, shares):
        self.cluster = started_cluster()
        self.nodes = []
        super().__init__(folder, jobs, shares)

    def where(self):
        return "--ray", self.cluster.address

    def rival(self):
        """One who asks Ray for a fast node as well; when it got one, in a list of Ray's."""
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        options = {"num_cpus": 1, "label_selector": {"core-share": "0.5"}}
        return ray.remote(lambda: time.time()).options(**options).remote()

    def write_devices(self, shares):
        """Nodes are added until there are so many, or the first is drained."""
        if len(shares) < len(self.nodes):
            drain(self.cluster, self.nodes.pop(0))
        for share in shares[len(self.nodes) :]:
            self.nodes.append(add_node(self.cluster, share))


@pytest.mark.slow
def test_three_jobs_share_out_unlike_nodes_and_no_bit_moves(tmp_path):
    """Nodes go from job to job; one is drained and another joins; who waits beside them waits."""
    run = ScheduledOnRay(tmp_path, [LONG], [0.4, 0.5, 0.5])
    try:
        run.wait("long.events", lambda e: e["what"] == "Completed", "a step on all nodes")
        rival = run.rival()
        run.submit(THREE[1:2])
        run.wait("record.jsonl", has_ended("pair"), "its end")
        run.write_devices([0.5, 0.5])
        run.wait("record.jsonl", is_decided_on(2), "a decision on two nodes")
        run.submit(THREE[2:])
        run.wait("record.jsonl", has_ended("late"), "its end")
        until = time.monotonic() + PATIENCE_SECONDS
        while len(held_groups()) < 2:  # those of the nodes that the first job gets back
            assert time.monotonic() < until, run.printed()
            time.sleep(0.2)
        run.write_devices([0.5, 0.5, 0.4])
        run.end()
        check_three(run, [2, 1])  # the slow node beside the fast ones makes no step shorter
        ended = max(path.stat().st_mtime for path in run.out.glob("*.log"))
        assert ray.get(rival, timeout=PATIENCE_SECONDS) > ended - 2
        assert not held_groups()
    finally:
        ray.shutdown()
        run.process.terminate()
        run.process.wait(PATIENCE_SECONDS)
        run.cluster.shutdown()


def held_groups():
    """Placement groups that there are."""
    from ray.util import placement_group_table

    return [own for own in placement_group_table().values() if own["state"] != "REMOVED"]


@pytest.mark.slow
def test_a_run_outlives_a_kill_and_sigterm_writes_a_checkpoint(tmp_path, cluster):
    """Its state is in two parts, each of them on both nodes."""
    saved = tmp_path / "saved"
    options = ("--checkpoints", str(saved))
    job = elastic_chaos.RayJob(
        tmp_path,
        elastic_chaos.MOST_STEPS,
        0.05,
        [0.4, 0.4],
        options,
        is_copied=True,
        cluster=cluster,
    )
    try:
        job.wait(lambda e: len(twice(e)) > 1, "copies on two nodes")
        os.kill(job.pids()["device 1"], signal.SIGKILL)
        job.wait(lambda e: len(forms(e)) == 2 and elastic_chaos.runs(e), "another generation")
        job.wait(lambda e: e[-1]["what"] == "Completed", "a step of it")
        form = forms(job.events())[1]
        assert form["generation"]["first_step"] >= elastic_chaos.EVERY
        assert [one["part"] for one in form["sources"]] == [0, 1]
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(PATIENCE_SECONDS) == 75, job.tail()
        [step] = [int(s) for s in re.findall(r"SIGTERM: ended after (\d+) steps", job.tail())]
        assert any(str(step) in folder.name for folder in saved.iterdir()), list(saved.iterdir())
    finally:
        job.stop()
    left_behind.wait_until_none()


def forms(events):
    return [e for e in events if e["what"] == "Form"]
