"""Elastic jobs on the nodes of a real local Ray cluster, with the bits of undisturbed ones."""

import collections
import contextlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
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
    from support.inside.launch import Logs, Output, RayHost, Seat, Streams, WorkersStart

    script, go, printed = tmp_path / "job.py", tmp_path / "go", io.BytesIO()
    script.write_text(SAYS_LAST)
    lock = threading.Lock()
    out, err = (Output(printed, lock, lambda _: None) for _ in range(2))
    device = Device(kind="cpu")
    start = WorkersStart(
        generation=1,
        num_processes=1,
        address="127.0.0.1:1",
        seats={0: Seat(device=device, place=0, core=None)},
        mesh=dump_cluster(Cluster(name="elastic", devices=(device,))),
        pinned="",
    )
    added = add_node(connected, 0.5)
    [node] = [node for node in ray.nodes() if node["NodeID"] == added.node_id]
    streams = Streams(out=out, err=err, logs=Logs())
    host = RayHost(node, [str(script), str(go)], streams, None)
    try:
        wait_until(lambda: host.poll() or host.devices, "devices")
        workers = host.start(start)
        [pid] = workers.pids.values()
        workers.order(begins=True, state=[])
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
        assert len(held_groups()) >= 2
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


class DetachedJob(elastic_chaos.RayJob):
    """A run of the name `job`, whose first command is followed by others."""

    def command(self, *options):
        """Another command about it."""
        return [sys.executable, "-m", "hxla", "run", "--ray", self.cluster.address, *options]

    def detach_again(self, *options):
        """What the command says that starts another run of the same name."""
        command = self.command("--elastic", "--detach", "job", *options, str(elastic_chaos.JOB))
        return self.ran(command)

    def ran(self, command):
        """A command that has ended."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
            env=elastic_chaos.own_environment(),
        )

    def follow(self):
        """Attach to it."""
        self.process = self.began(self.command("--attach", "job"), self.printed)

    @contextlib.contextmanager
    def attached(self, path, command=()):
        """Another command that follows it, whose output is in a file."""
        with path.open("wb") as printed:
            process = self.began(command or self.command("--attach", "job"), printed)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def began(self, command, printed):
        return subprocess.Popen(
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=elastic_chaos.own_environment(),
            start_new_session=True,
        )


@pytest.mark.slow
def test_a_run_goes_on_when_its_command_is_killed_and_ends_with_the_same_bits(tmp_path):
    """It uses a node that joins afterwards, too: nothing that it needs was the command's."""
    last = tmp_path / "stop"
    job = DetachedJob(
        tmp_path,
        elastic_chaos.MOST_STEPS,
        0.05,
        [0.4, 0.4],
        ("--stop-when", str(last)),
        launcher=("--detach", "job"),
    )
    try:
        job.wait(elastic_chaos.runs, "the first generation")
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        before = elastic_chaos.last_step(job.events())[0]
        wait_until(lambda: elastic_chaos.last_step(job.events())[0] > before + 5, "steps")
        refused = job.detach_again()
        assert refused.returncode == 2
        assert "hxla: --detach job: a run of this name is there already" in refused.stderr
        job.printed.seek(0)
        job.printed.truncate()
        job.follow()
        job.add(0.4)
        job.write_mesh()
        number = len([e for e in job.events() if e["what"] == "Form"])
        job.wait(
            lambda e: (
                len([x for x in e if x["what"] == "Form"]) > number
                and elastic_chaos.runs(e)
                and e[-1]["what"] == "Completed"
            ),
            "a generation with a new node",
        )
        last.touch()
        assert job.process.wait(PATIENCE_SECONDS) == 0, job.tail()
        text = job.printed_text()
        assert "generation 1 from the beginning" in text  # what was printed before it was attached
        [told] = [line.split("] ")[-1] for line in text.splitlines() if "sha256" in line]
        assert told == elastic_chaos.undisturbed_line(job.ledger()["runs"][-1]["end"], "-n", "1")
    finally:
        job.stop()


@pytest.mark.slow
def test_two_who_follow_a_run_read_all_of_it_and_without_its_actor_are_told(tmp_path):
    """The actor is killed as with the head node; a new run goes on from the checkpoint."""
    saved, last = tmp_path / "saved", tmp_path / "stop"
    options = ("--checkpoints", str(saved), "--checkpoint-every", "5", "--stop-when", str(last))
    job = DetachedJob(
        tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.4], options, launcher=("--detach", "job")
    )
    try:
        job.wait(lambda e: elastic_chaos.last_step(e)[0] > 10, "steps")
        pids = list(job.pids().values())
        with job.attached(tmp_path / "first.txt") as first:
            wait_until(lambda: "] step " in (tmp_path / "first.txt").read_text(), "a step")
            [raylet] = job.cluster.head_node.all_processes["raylet"]
            workers = psutil.Process(raylet.process.pid).children()
            [actor] = [p for p in workers if p.name().startswith("ray::Detached")]
            actor.kill()
            for process in (job.process, first):
                assert process.wait(PATIENCE_SECONDS) == 2
        for text in (job.printed_text(), (tmp_path / "first.txt").read_text()):
            assert "generation 1 from the beginning" in text
            assert text.splitlines()[-1].startswith("hxla: run job is gone, and its processes with")
        left_behind.wait_until_gone(pids)
        again = [
            *job.command("--elastic", "--detach", "job"),
            str(elastic_chaos.JOB),
            "--steps",
            str(elastic_chaos.MOST_STEPS),
        ]
        with job.attached(tmp_path / "second.txt", [*again, "--slow", "0.05", *options]) as second:
            wait_until(lambda: "] step " in (tmp_path / "second.txt").read_text(), "a step")
            with job.attached(tmp_path / "third.txt") as third:
                last.touch()
                assert (second.wait(PATIENCE_SECONDS), third.wait(PATIENCE_SECONDS)) == (0, 0)
        texts = [(tmp_path / f"{name}.txt").read_text() for name in ("second", "third")]
        assert texts[0] == texts[1]
        assert "resumed from step" in texts[0]
        [told] = [line.split("] ")[-1] for line in texts[0].splitlines() if "sha256" in line]
        assert told == elastic_chaos.undisturbed_line(int(told.split()[-2]), "-n", "1")
        left_behind.wait_until_none()
    finally:
        job.stop()


def test_a_run_of_which_nobody_read_the_end_goes_by_itself(tmp_path, connected):
    """And keeps its name until then, unless someone reads it."""
    from support.inside.launch import DetachedActor, ElasticWishes

    options = DetachedActor.options(name="job", lifetime="detached", num_cpus=0)
    wishes = ElasticWishes(command=["job.py"])
    missing = str(tmp_path / "missing")
    actor = options.remote(wishes, missing, unread_seconds=1.0)
    with contextlib.suppress(ray.exceptions.RayActorError):  # it may be gone before it is asked
        ray.get(actor.standing.remote())
    wait_until(lambda: not ray.util.list_named_actors(), "the end of the first")
    actor = options.remote(wishes, missing, unread_seconds=3600.0)
    wait_until(lambda: ray.get(actor.standing.remote()) == (2, False), "the end of its run")
    heard = ray.get(actor.follow.remote(0))
    assert b"is not on the head node" in b"".join(text for _, text in heard.output.pieces)
    assert not ray.get(actor.follow.remote(heard.output.end)).output.pieces
    wait_until(lambda: not ray.util.list_named_actors(), "the end of the second")


def test_a_run_outlives_a_kill_and_stop_writes_a_checkpoint(tmp_path, cluster, capsys):
    """Its state is in two parts, each of them on both nodes; who follows it ends with 75."""
    saved = tmp_path / "saved"
    options = ("--checkpoints", str(saved))
    job = DetachedJob(
        tmp_path,
        elastic_chaos.MOST_STEPS,
        0.05,
        [0.4, 0.4],
        options,
        launcher=("--detach", "job"),
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
        there = ("--ray", cluster.address)
        assert said_by(capsys, *there, "--attach", "another") == (
            2,
            "hxla: --attach another: no such run on the Ray cluster; there are job",
        )
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(PATIENCE_SECONDS) == 130
        assert "run job goes on" in job.tail()
        code, said = said_by(capsys, *there, "--stop", "job")
        assert code == 0, said
        job.follow()
        assert job.process.wait(PATIENCE_SECONDS) == 75, job.tail()
        [step] = [int(s) for s in re.findall(r"SIGTERM: ended after (\d+) steps", job.tail())]
        assert any(str(step) in folder.name for folder in saved.iterdir()), list(saved.iterdir())
        # What was read has gone, and its name is free.
        again = ("--elastic", "--detach", "job", "--nodes", str(tmp_path / "missing"))
        code, said = said_by(capsys, *there, *again, str(elastic_chaos.JOB))
        assert code == 2
        assert "cannot be read" in said
    finally:
        job.stop()
    left_behind.wait_until_none()


def forms(events):
    return [e for e in events if e["what"] == "Form"]
