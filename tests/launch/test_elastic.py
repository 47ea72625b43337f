"""Jobs whose devices come and go: real processes and signals, the bits of undisturbed ones."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import hxla
from hxla.__main__ import main
from support import elastic_chaos, left_behind
from support.inside.checkpoint import _hand_over
from support.inside.launch import (
    Copied,
    Order,
    Report,
    Status,
    _run,
    new_channel,
    open_channel,
)
from support.inside.session import _session_member
from support.launched import PATIENCE_SECONDS
from support.models import mesh, regression, squared_error


@pytest.mark.slow
# Twenty; each third seed has a job whose state is shared out, and whose events take longest.
@pytest.mark.parametrize(("seed", "num"), [(1, 8), (3, 4)])
def test_random_events_lose_nothing_and_move_no_bit(seed, num):
    rows = elastic_chaos.disturbed(seed, num)
    assert len(rows) == num


def formed(events):
    """How many members each generation had."""
    return [len(e["generation"]["members"]) for e in events if e["what"] == "Form"]


def train_on(job):
    """Some steps more."""
    first = elastic_chaos.last_step(job.events())[0]
    job.wait(lambda e: elastic_chaos.last_step(e)[0] >= first + 5, "steps")


@pytest.mark.slow
def test_an_experiment_of_easyscale_ends_with_the_bits_of_one_device(tmp_path):
    """Steps on 4 devices, then on 2, then on 3 unlike ones (section 5.1.1) are those of one."""
    ends = ("--stop-when", str(tmp_path / "last"))  # however long three take to be prepared
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.4, 0.4, 0.4, 0.4], ends)
    changes = {20: [0.4, 0.4], 150: [0.5, 0.4, 0.3]}
    try:
        job.wait(elastic_chaos.runs, "the first generation")
        for step, shares in changes.items():
            job.wait(lambda e, n=step: elastic_chaos.last_step(e)[0] >= n, "steps")
            job.shares = shares
            job.write_mesh()
            job.wait(lambda e, s=shares: formed(e)[-1] == len(s), "other devices")
        job.wait(elastic_chaos.runs, "the last generation")
        job.last.touch()
        assert job.end() == 0, job.tail()
    finally:
        job.stop()
    events = job.events()
    assert formed(events) == [4, 2, 3]
    assert elastic_chaos.check_states(events)
    steps = job.ledger()["runs"][-1]["end"]
    assert elastic_chaos.undisturbed_line(steps, "-n", "1") in job.tail()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["stages", "unlike"])
def test_a_job_is_cut_again_for_the_devices_that_are_left(tmp_path, form):
    """Three stages, two, one device and two again have the bits of one device.

    So has a replica of one device beside one of two that share its layers.
    """
    options = ("--stop-when", str(tmp_path / "last"), "--any-cut", "--batch-size", "16")
    options += ("--unlike",) * (form == "unlike")
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.1, [0.4, 0.4, 0.4], options)
    try:
        job.wait(elastic_chaos.runs, "the first generation")
        for shares in ([0.4, 0.4], [0.4], [0.4, 0.39]):
            train_on(job)
            job.shares = shares
            job.write_mesh()
            job.wait(
                lambda e, s=shares: formed(e)[-1] == len(s) and elastic_chaos.runs(e), "others"
            )
        job.last.touch()
        assert job.end() == 0, job.tail()
    finally:
        job.stop()
    assert formed(job.events()) == [3, 2, 1, 2]
    steps = job.ledger()["runs"][-1]["end"]
    assert elastic_chaos.undisturbed_line(steps, "-n", "1", *options[2:]) in job.tail()


@pytest.mark.slow
def test_stages_of_unlike_devices_outlive_a_kill_and_go_on_with_another_share(tmp_path):
    options = ("--stop-when", str(tmp_path / "last"), "--in-memory-every", "4")
    options += ("--unlike", "--batch-size", "16")
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.1, [0.4, 0.4, 0.4], options)

    try:
        job.wait(elastic_chaos.runs, "the first generation")
        train_on(job)
        os.kill(job.pids()["device 1"], signal.SIGKILL)
        job.wait(lambda e: len(formed(e)) == 2 and elastic_chaos.runs(e), "the second")
        train_on(job)
        job.shares = [0.4, 0.4, 0.5]
        job.write_mesh()
        job.wait(lambda e: len(formed(e)) == 3 and elastic_chaos.runs(e), "the third")
        job.last.touch()
        assert job.end() == 0, job.tail()
    finally:
        job.stop()
    assert formed(job.events()) == [3, 3, 3]
    assert elastic_chaos.num_lost(job.events(), 4) <= 4
    steps = job.ledger()["runs"][-1]["end"]
    assert elastic_chaos.undisturbed_line(steps, "-n", "3", *options[4:]) in job.tail()


def compiled_in_pauses(job):
    """What was compiled after a generation took over the state of another, before its first step.

    Of a job that says what it compiles; its processes have other things to do then.
    """
    found, is_pause = [], False
    for line in job.printed_text().splitlines():
        if line.startswith("hxla: generation"):
            is_pause = "state left by" in line
        elif line.startswith("step "):
            is_pause = False
        elif is_pause and "Compiling" in line:
            found.append(line)
    return found


@pytest.mark.slow
def test_shared_state_is_handed_over_at_a_planned_change_and_saved_for_others(
    tmp_path, monkeypatch
):
    """ZeRO 1: whole on nobody, so a kill goes back to the checkpoint, and says so."""
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    saves = ("--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "5", "--zero", "1")
    ends = ("--stop-when", str(tmp_path / "last"))  # however long events take
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.4, 0.4], (*saves, *ends))
    try:
        job.wait(elastic_chaos.runs, "the first generation")
        elastic_chaos.one(job, "join", random.Random(0))
        elastic_chaos.one(job, "kill", random.Random(0))
        job.last.touch()
        assert job.end() == 0, job.tail()
    finally:
        job.stop()
    events, ledger = job.events(), job.ledger()
    steps = ledger["runs"][-1]["end"]
    assert 0 < ledger["num_lost"] <= 15
    said = [e["words"] for e in events if e["what"] == "Tell"]
    assert any("run again: nobody left them" in words for words in said)
    assert "if a process is killed, the steps since the last checkpoint" in job.printed_text()
    left = [e for e in events if e["what"] == "LeftState"]
    assert {(e["part"], e["num_parts"]) for e in left} == {(0, 2), (1, 2)}
    assert "Compiling" in job.printed_text()
    assert not compiled_in_pauses(job)
    assert elastic_chaos.undisturbed_line(steps, "-n", "2", "--zero", "1") in job.tail()


@pytest.mark.slow
def test_of_the_devices_that_a_job_needs_one_is_exchanged_and_nobody_waits(tmp_path):
    """The one that goes trains until processes are ready for the one that comes."""
    ends = ("--stop-when", str(tmp_path / "last"), "--zero", "1")
    job = elastic_chaos.Job(
        tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.4, 0.4], ends, launcher=("--min", "2")
    )
    try:
        job.wait(elastic_chaos.runs, "the first generation")
        job.wait(lambda e: elastic_chaos.last_step(e)[0] > 3, "steps")
        job.remove(0)
        job.add(0.45)
        job.write_mesh()
        job.wait(lambda e: len(formed(e)) == 2 and elastic_chaos.runs(e), "the second one")
        job.last.touch()
        assert job.end() == 0, job.tail()
    finally:
        job.stop()
    events = job.events()
    decided = [e["what"] for e in events if e["what"] in ("Prepare", "Stop", "Save", "Form")]
    assert decided == ["Form", "Prepare", "Stop", "Form"]
    left = [e for e in events if e["what"] == "LeftState"]
    assert {(e["device"], e["part"]) for e in left} == {("device 0", 0), ("device 1", 1)}
    steps = job.ledger()["runs"][-1]["end"]
    assert elastic_chaos.undisturbed_line(steps, "-n", "2", "--zero", "1") in job.tail()


def generations_in_memory(job):
    """Those of which states are kept, whole or half written."""
    [folder] = left_behind.folders_of(job.process.pid)
    return {int(p.name.partition("-")[0]) for p in folder.iterdir() if p.name[0].isdecimal()}


@pytest.mark.slow
def test_copies_in_memory_outlive_a_kill_where_the_state_is_shared_out(tmp_path):
    """ZeRO 1 without a checkpoint: members that are killed take no more than the steps since."""
    ends = ("--stop-when", str(tmp_path / "last"))  # however long another takes to be prepared
    options = ("--zero", "1", "--in-memory-every", "4", *ends)
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.4, 0.4], options)
    try:
        job.wait(lambda e: sum(one["what"] == "Copied" for one in e) > 3, "two copies")
        for seed in range(3):
            elastic_chaos.one(job, ("kill", "join", "kill")[seed], random.Random(seed))
        last = [e for e in job.events() if e["what"] == "Form"][-1]["generation"]["number"]
        job.wait(lambda _: generations_in_memory(job) == {last}, "nothing of the others")
        job.last.touch()
        assert job.end() == 0, job.tail()
    finally:
        job.stop()
    events, ledger = job.events(), job.ledger()
    steps = ledger["runs"][-1]["end"]
    assert 0 <= ledger["num_lost"] <= 2 * 4
    forms = [e for e in events if e["what"] == "Form"]
    assert forms[1]["generation"]["first_step"] >= 4
    assert [one["part"] for one in forms[1]["sources"]] == [0, 1]
    assert forms[-1]["generation"]["first_step"] > forms[1]["generation"]["first_step"]
    copied = [e for e in events if e["what"] == "Copied"]
    first = {e["step"] for e in copied if e["generation"] == 1}
    assert first
    assert all(step % 4 == 0 for step in first)
    assert "every 4 steps the state is copied into memory, in 2 parts" in job.printed_text()
    assert elastic_chaos.undisturbed_line(steps, "-n", "2", "--zero", "1") in job.tail()


@pytest.mark.slow
def test_of_devices_that_are_alike_the_one_that_left_is_the_one_that_is_gone(tmp_path):
    """A file that lists one device less after one has left takes nobody else."""
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.4, 0.4])
    try:
        job.wait(elastic_chaos.runs, "the first generation")
        elastic_chaos.one(job, "SIGTERM", random.Random(2))  # the first one
        job.add(0.4)
        job.write_mesh()
        job.wait(lambda e: formed(e)[-1] == 2 and elastic_chaos.runs(e), "another")
    finally:
        job.stop()
    assert formed(job.events()) == [2, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["tensor", "stages"])
def test_copies_of_several_devices_come_and_go(tmp_path, cut):
    """Two devices, four, and one of them asked back: three cannot be used, so two are."""
    options = ("--batch-size", "16", f"--{cut}", "2")
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.1, [0.4, 0.4], options)

    def trains(*nums):
        # Three are found out to be too many before they are formed, or after.
        own = lambda e: tuple(num for num in formed(e) if num != 3)  # noqa: E731
        job.wait(lambda e: own(e) == nums and elastic_chaos.runs(e), f"{nums} devices")
        train_on(job)

    try:
        job.wait(elastic_chaos.runs, "the first generation")
        job.shares = [0.4, 0.4, 0.4, 0.4]
        job.write_mesh()
        trains(2, 4)
        os.kill(job.pids()["device 1"], signal.SIGTERM)
        trains(2, 4, 2)
        job.shares = [0.45, 0.45]
        job.write_mesh()
        trains(2, 4, 2, 2)
    finally:
        job.stop()
    assert "it is tried without" in job.printed_text()
    states = [e for e in job.events() if e["what"] == "LeftState"]
    assert {(e["part"], e["num_parts"]) for e in states} == {(0, 2), (1, 2)}
    assert len(elastic_chaos.check_states(states, *options, num=2)) >= 3


@pytest.mark.slow
def test_a_script_that_fails_ends_the_job_with_its_error(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import hxla\nraise ValueError('planted')\n")
    command = [sys.executable, "-m", "hxla", "run", "--elastic", "-n", "1", str(script)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert ran.returncode == 1
    assert "hxla: device 0 failed: ValueError: planted; ending the job\n" in ran.stderr


@pytest.mark.slow
def test_silence_is_judged_by_the_authority_alone(tmp_path):
    """The watchdog of a process, which gives up after seven seconds, would leave no state."""
    job = elastic_chaos.Job(
        tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.9, 0.9], launcher=("--heartbeat", "9")
    )
    try:
        job.wait(lambda e: elastic_chaos.last_step(e)[0] >= 5, "steps")
        assert elastic_chaos.one(job, "freeze", random.Random(0))["pause"] > 9
    finally:
        job.stop()
    events = job.events()
    assert [e["device"] for e in events if e["what"] == "LeftState"]
    [said] = [e["words"] for e in events if e["what"] == "Tell"]
    assert "for 9 s" in said


@pytest.mark.slow
def test_a_job_that_waits_for_devices_says_what_is_lost_with_it(tmp_path):
    job = elastic_chaos.Job(
        tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.5, 0.5], launcher=("--min", "2")
    )
    try:
        job.wait(lambda e: elastic_chaos.last_step(e)[0] >= 5, "steps")
        os.kill(job.pids()["device 1"], signal.SIGTERM)
        [saved] = job.wait(lambda e: [x for x in e if x["what"] == "Save"], "waiting")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 143
    finally:
        job.stop()
    step = saved["step"]
    assert f"the state of step {step} waits in memory" in job.tail()
    assert f"the state of step {step} was in memory only and is gone: give" in job.tail()


HOSTILE = {
    "min above max": (["--elastic", "--min", "3", "--max", "2", "-n", "2"], "--min 3 --max 2"),
    "min without elastic": (["--min", "2", "-n", "2"], "--min needs --elastic"),
    "no time": (["--elastic", "--heartbeat", "0.1", "-n", "2"], "--heartbeat 0.1"),
    "no time for steps": (["--elastic", "--grace", "-1", "-n", "2"], "--grace -1"),
    "a plan": (["--elastic", "--plan", str(elastic_chaos.JOB), "-n", "2"], "leave out --plan"),
    "no folder": (
        ["--elastic", "-n", "1", "--events", "/nowhere/x"],
        "there is no folder '/nowhere'",
    ),
}


def refused(options, capsys):
    """The one line with which `hxla run` refuses some options."""
    assert main(["run", *options, str(elastic_chaos.JOB)]) == 2
    [said] = capsys.readouterr().err.splitlines()
    return said


def test_tasks_that_something_else_started_are_not_elastic(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    said = refused(["--elastic"], capsys)
    assert "one of Slurm with 2 tasks: start one task, or leave it out" in said


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_options_are_refused(name, capsys):
    options, words = HOSTILE[name]
    assert words in refused(options, capsys)


def tree():
    """Arrays as a store has them, some over devices."""
    rows = NamedSharding(mesh(data=2), PartitionSpec("data"))
    return {
        "params": {"a": jax.device_put(np.arange(8, dtype=np.float32), rows)},
        "count": jax.numpy.int32(7),
        "low": jax.numpy.ones((3, 2), jax.numpy.bfloat16),
        "exponents": np.array([3, 4], np.int32),
        "none": np.zeros((0, 4), np.float32),
    }


def test_a_state_in_memory_is_read_as_it_was_left(tmp_path):
    digest = _hand_over.leave_state(tree(), {"step": 3}, tmp_path / "state")
    found = _hand_over.load_state([tmp_path / "state"], tree())
    assert _hand_over.facts_of_state([tmp_path / "state"]) == {"step": 3}
    assert hxla.fingerprint(found) == hxla.fingerprint(tree())
    assert found["params"]["a"].sharding == tree()["params"]["a"].sharding
    assert _hand_over.leave_state(found, {"step": 9}, tmp_path / "again") == digest


def test_a_state_of_another_model_is_refused(tmp_path):
    _hand_over.leave_state(tree(), {}, tmp_path / "state")
    with pytest.raises(hxla.CheckpointError, match=r"of another model or optimizer: exponents"):
        _hand_over.load_state([tmp_path / "state"], tree() | {"exponents": np.zeros(3, np.int32)})
    with pytest.raises(hxla.CheckpointError, match=r"of another model or optimizer: count"):
        _hand_over.load_state(
            [tmp_path / "state"], {k: v for k, v in tree().items() if k != "count"}
        )


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_memory_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_hand_over, "_BYTES", "../../../../../../../../../../../dev/full")
    with pytest.raises(hxla.CheckpointError, match=r"has no room for .* No space left on device"):
        _hand_over.leave_state(tree(), {}, tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


class Place:
    """A host that has folders."""

    is_lost = False

    def __init__(self, name):
        self.name, self.let_go = name, []

    def state_folder(self, generation, rank):
        return f"{self.name}/{generation}-{rank}"

    def forget(self, folder):
        self.let_go.append(folder)


@dataclasses.dataclass
class Way:
    """From a folder to another."""

    source: str
    target: str
    found: bool | None = None

    def arrived(self):
        return self.found


def carried(num_hosts):
    """A copy of part 1 of 3 that was written on the first host; the folders, hosts and ways."""
    ways = []

    def carry(source, target):
        ways.append(Way(source.folder, target.folder))
        return ways[-1]

    places = [Place(name) for name in "AB"[:num_hosts]]
    hosts = {"d0": places[0], "d1": places[0], "d2": places[-1]}
    folders = _run.StateFolders(carry)
    event = Copied(at_seconds=0, generation=3, device="d1", step=8, digest="x", part=1, num_parts=3)
    return folders.wrote(event, 1, hosts), folders, places, ways


def test_a_copy_is_carried_to_the_next_host_and_counts_once_it_is_there():
    event, folders, [here, there], [way] = carried(2)
    assert (event.host, event.spread) == ("A", 2)
    assert way == Way("A/3-1-8", "B/3-1-8")
    assert list(folders.arrived(1.0)) == []
    assert set(folders.paths) == {"A/3-1-8", "B/3-1-8"}
    way.found = True
    [copy] = folders.arrived(2.0)
    assert copy == dataclasses.replace(event, device="d2", host="B", at_seconds=2.0)
    assert [one.folder for one in folders.of([event.kept, copy.kept])] == ["A/3-1-8", "B/3-1-8"]
    folders.keep({copy.kept})
    assert (here.let_go, there.let_go) == (["A/3-1-8"], [])


def test_where_no_other_host_can_take_a_copy_nobody_waits_for_it():
    event, folders, _, [way] = carried(2)
    way.found = False
    assert [(one.kept, one.spread) for one in folders.arrived(2.0)] == [(event.kept, 1)]
    assert list(folders.arrived(3.0)) == []
    _, folders, [here, _], [way] = carried(2)
    way.found = False
    folders.keep(set())  # a newer one is safe
    assert list(folders.arrived(2.0)) == []
    assert here.let_go == ["A/3-1-8"]


def test_on_one_host_nothing_is_carried():
    event, _, _, ways = carried(1)
    assert (event.spread, ways) == (1, [])


@functools.cache
def plan_of_one():
    job = hxla.Job(
        nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
        regression(),
        squared_error,
        optax.sgd(0.1),
        batch_size=8,
    )
    one = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),))
    return job.plan(one, mesh={"data": 1})


class Copying:
    """A process that copies its state after every step, beside a launcher that does nothing."""

    def __init__(self, folder):
        self.folder, self.said = folder, {}
        self.own = types.SimpleNamespace(
            folder=str(folder / "3-0"),
            num_neighbours=1,
            ends=False,
            changing=contextlib.nullcontext(),
            tell=self.said.update,
        )
        settings = hxla.Config(checkpoint={"in_memory_every": 1})
        source = types.SimpleNamespace(state=lambda step: None)
        self.member = _session_member.SessionMember(
            self.own,
            types.SimpleNamespace(wanted=tree, saved=tree, is_shared=False),
            None,
            types.SimpleNamespace(source=source, settings=settings),
            types.SimpleNamespace(is_in_memory=False, saved_metadata=dict),
        )

    def step(self):
        with self.member.updating(None, plan_of_one(), 0.1):
            pass
        self.member.copy()

    def there(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def when_it_waits(monkeypatch):
    """Registers what is done as soon as a copy waits, which is once."""
    done = []

    def sleep(_):
        done.pop()()

    monkeypatch.setattr(_session_member, "time", types.SimpleNamespace(sleep=sleep))
    yield lambda do, *arguments: done.append(functools.partial(do, *arguments))
    assert not done


def test_a_third_copy_waits_until_the_first_is_let_go(tmp_path, when_it_waits):
    copying = Copying(tmp_path)
    copying.step()
    copying.step()
    assert copying.there() == ["3-0-1", "3-0-2"]
    when_it_waits(shutil.rmtree, tmp_path / "3-0-1")
    copying.step()
    assert copying.there() == ["3-0-2", "3-0-3"]
    assert sorted(copying.said["copies"]) == ["2", "3"]


def test_nobody_waits_for_copies_where_the_run_ends(tmp_path, when_it_waits):
    """Its launcher lets go of none any more, and the last checkpoint is still to be written."""
    copying = Copying(tmp_path)
    copying.step()
    copying.step()
    when_it_waits(setattr, copying.own, "ends", True)
    copying.step()
    assert copying.there() == ["3-0-1", "3-0-2"]


def test_copies_that_memory_has_no_room_for_are_refused_at_the_start(tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=10)
    monkeypatch.setattr(_session_member.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(hxla.ConfigError, match=r"in_memory_every: states need .* has only 10 "):
        Copying(tmp_path)
    (tmp_path / "of the generation before").write_bytes(bytes(10_000))
    assert not Copying(tmp_path).said


def test_a_copy_for_which_there_is_no_room_any_more_is_told_and_training_goes_on(
    tmp_path, monkeypatch
):
    copying = Copying(tmp_path)
    copying.step()
    with monkeypatch.context() as patched:
        patched.setattr(_hand_over, "_BYTES", "../" * 20 + "dev/full")
        copying.step()
    assert "has no room" in copying.said["note"]
    copying.step()
    assert copying.there() == ["3-0-1", "3-0-3"]
    assert sorted(copying.said["copies"]) == ["1", "3"]


def test_a_text_half_written_is_no_message():
    channel, path = new_channel(2)
    other = open_channel(path, 2)
    other.tell(1, Report(step=4, digest="ab"))
    channel.tell(1, Order(begins=True, state=["/x"]))
    assert channel.read(Report, 1) == Report(step=4, digest="ab")
    assert other.read(Order, 1) == Order(begins=True, state=["/x"])
    assert (channel.read(Report, 0), channel.read(Status, 1)) == (Report(), Status())
    begin = other._begin(Report, 1)
    other._page[begin : begin + 20] = b'00000000{"step": 9}\n'
    assert channel.read(Report, 1) == Report(step=4, digest="ab")  # what was said before


@pytest.mark.slow
def test_members_outlive_the_process_that_they_were_forked_from(tmp_path):
    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.5, 0.5])
    try:
        job.wait(lambda e: elastic_chaos.last_step(e)[0] >= 5, "steps")
        stat = pathlib.Path(f"/proc/{job.pids()['device 0']}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        first = elastic_chaos.last_step(job.events())[0]
        job.wait(lambda e: elastic_chaos.last_step(e)[0] >= first + 20, "steps")
        assert formed(job.events()) == [2]
        job.shares = [0.5]
        job.write_mesh()  # and others are forked from another one
        job.wait(lambda e: formed(e) == [2, 1] and elastic_chaos.runs(e), "one device")
    finally:
        job.stop()


@pytest.mark.slow
def test_a_first_ctrl_c_saves_and_a_second_ends_at_once(tmp_path):
    folder = tmp_path / "saved"
    saves = ("--checkpoints", str(folder))

    def steps_done():
        return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]

    job = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 0.05, [0.5, 0.5], saves)
    try:
        job.wait(lambda e: elastic_chaos.last_step(e)[0] >= 5, "steps")
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 75, job.tail()
    finally:
        job.stop()
    [saved] = steps_done()
    assert saved >= 5
    words = f"Ctrl-C: ended after {saved} steps; run again to resume from a checkpoint"
    assert words in job.tail()
    job.log.unlink()
    again = elastic_chaos.Job(tmp_path, elastic_chaos.MOST_STEPS, 1e6, [0.5, 0.5], saves)
    try:
        again.wait(lambda e: elastic_chaos.last_step(e)[0] > saved, "a step, whose callback waits")
        assert f"resumed from step {saved}" in again.printed_text()
        for number in (signal.SIGINT, signal.SIGINT):
            again.process.send_signal(number)
            left_behind.wait_until(
                lambda: "Ctrl-C: the running step is finished" in again.printed_text(),
                again.tail,
            )
        assert again.end() == 130, again.tail()
    finally:
        again.stop()
    assert steps_done() == [saved]


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_nothing_and_its_checkpoint_goes_on(tmp_path):
    saves = ("--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "5")
    job = elastic_chaos.Job(tmp_path, 400, 0.05, [0.5, 0.5], saves)
    try:
        job.wait(lambda e: elastic_chaos.last_step(e)[0] >= 20, "steps")
        pids = left_behind.started_by(job.process.pid)
        assert len(pids) > 3  # also what they are forked from, and their coordinator
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
    finally:
        job.stop()
    left_behind.wait_until_gone(pids)
    left_behind.wait_until_none(lambda: left_behind.folders_of(job.process.pid))
    again = elastic_chaos.Job(tmp_path, 400, 0.0, [0.5], saves)
    try:
        assert again.end() == 0, again.tail()
    finally:
        again.stop()
    assert "resumed from step" in again.printed_text()
    assert again.ledger()["runs"][-1]["end"] == 400
    assert elastic_chaos.undisturbed_line(400, "-n", "1") in again.tail()
