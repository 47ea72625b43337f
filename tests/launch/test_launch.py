"""`hxla run` with real processes."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import optax
import psutil
import pytest
from flax import nnx

import hxla
from hxla import LaunchError, MeshError, load_cluster
from hxla.__main__ import main
from support import left_behind
from support.inside.core import names
from support.inside.launch import Logs, _throttle, planned_mesh
from support.inside.launch import _launcher as _run
from support.launched import PATIENCE_SECONDS, end_of, lines_with, own_environment, start
from support.left_behind import wait_until
from support.paths import PYTHONPATH
from support.tiers import rows

#: What a process does that waits for the end of the job.
WAITS = "import signal\nwhile True:\n    signal.pause()\n"
UP = "print('up', flush=True)\n"

JOINED = """
import ipaddress, jax, psutil, signal
from jax.experimental import multihost_utils as m
import numpy as np
print(jax.process_index(), m.process_allgather(np.int32(jax.process_index() + 5)), flush=True)
for c in psutil.Process().net_connections():
    if c.status == 'LISTEN':
        ip = ipaddress.ip_address(c.laddr.ip.removeprefix('::ffff:'))
        print('listens to', 'itself' if ip.is_loopback else ip, flush=True)
m.sync_global_devices('all have looked')
if jax.process_index() == 1:
    raise ValueError('mine')
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """Two processes that join, look around, and of which one fails: the job after its end."""
    folder = tmp_path_factory.mktemp("joined")
    job = start(folder, JOINED, "-n", "2")
    out, err = end_of(job)
    return folder / "script.py", out, err, job.returncode


def test_two_processes_join_and_their_lines_are_prefixed(joined):
    _, out, err, _ = joined
    assert "[0] 0 [5 6]" in out, err
    assert "[1] 1 [5 6]" in out


def test_no_process_of_a_local_job_listens_to_other_machines(joined):
    _, out, err, _ = joined
    told = [line for line in out.splitlines() if "listens to" in line]
    assert set(told) == {"[0] listens to itself", "[1] listens to itself"}, err


def test_the_users_own_lines_are_shown_and_the_rest_is_in_a_log(joined):
    script, _, err, code = joined
    *traceback, blame, rest = err.splitlines()
    number = JOINED.splitlines().index("    raise ValueError('mine')") + 1
    assert traceback == [
        "[1] Traceback (most recent call last):",
        f'[1]   File "{script}", line {number}, in <module>',
        "[1]     raise ValueError('mine')",
        "[1] ValueError: mine",
    ]
    assert blame == (
        "hxla: rank 1 failed (ValueError) before its first step, in phase 'script'; ending the job"
    )
    log = pathlib.Path(rest.removeprefix("hxla: the rest of the output is in "))
    assert "run_joined" in (log / "rank-1.log").read_text()
    assert code == 1


#: Processes of a job: one does it for what is true of each, two for what they do together.
NUMBERS = rows([1, 2], 1)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_failing_rank_ends_the_others_and_gives_the_exit_code(number, tmp_path):
    code = (
        "import os, sys\n"
        f"if os.environ['HXLA_PROCESS_ID'] == '{number - 1}':\n"
        "    print('last words', end='')\n    sys.exit(7)\n"
    )
    job = start(tmp_path, code + WAITS, "-n", str(number))
    out, err = end_of(job)
    assert job.returncode == 7
    said = f"hxla: rank {number - 1} failed (sys.exit(7)) before its first step, in phase 'script'"
    assert said in err
    assert ("last words" if number == 1 else f"[{number - 1}] last words") in out


NAMES = """
import multiprocessing
from multiprocessing import shared_memory
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=8)
print("names", lock._semlock.name, memory.name, flush=True)
"""


def names_in_memory(job, num):
    """The files of the locks and memories of `num` ranks, once all of them are there."""
    found = []
    for line in lines_with(job, "names ", num):
        lock, memory = line.partition("names ")[2].split()
        found += [pathlib.Path(f"/dev/shm/sem.{lock[1:]}"), pathlib.Path(f"/dev/shm/{memory}")]
    assert all(path.exists() for path in found)
    return found


def ranks_of(job):
    children = psutil.Process(job.pid).children()
    return [p for p in children if "script.py" in str(p.cmdline())]


def test_a_killed_launcher_leaves_no_orphan_no_cgroup_and_no_name_in_shared_memory(tmp_path):
    """As a data loader's names: Python unlinks them where its resource tracker lives on."""
    job = start(tmp_path, NAMES + WAITS, "--mesh", "cpu-1.0-0.5")
    found = names_in_memory(job, 2)
    children = ranks_of(job)
    assert len(children) == 2
    job.send_signal(signal.SIGKILL)
    end_of(job)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_SECONDS)
    assert not alive
    place = _throttle.cgroup_parent()
    if place is not None:
        left_behind.wait_until_none(lambda: list(place[1].glob(f"hxla-{job.pid}-*")))
    left_behind.wait_until_none(lambda: [path for path in found if path.exists()])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_killed_rank_is_named_and_leaves_no_name_in_shared_memory(number, tmp_path):
    job = start(tmp_path, NAMES + WAITS, "-n", str(number))
    found = names_in_memory(job, number)
    ranks_of(job)[-1].send_signal(signal.SIGKILL)
    _, err = end_of(job)
    assert job.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL before its first step, in phase 'script'" in err
    left_behind.wait_until_none(lambda: [path for path in found if path.exists()])


RECEIVES = """
import os, pathlib, sys, time
from support.inside.launch import LocalHost
host, closed = LocalHost(None, None, None, keeps_state=True), pathlib.Path(sys.argv[1])
memory = pathlib.Path(host.memory)
print(memory, flush=True)
others = []
while len(others) < 3 and 0 not in others:
    others.append(os.fork())  # of a host other threads, which wait for one another
if 0 in others:
    ends = False
    while not ends:
        ends = closed.exists()  # after a last time
        folder = memory / f"0-0-{len(others)}-received.part"
        try:
            folder.mkdir(exist_ok=True)
            for name in range(20):
                (folder / str(name)).write_bytes(bytes(100))
        except FileNotFoundError:
            pass  # it goes
    os._exit(0)
while len(list(memory.glob("*-received.part/19"))) < 3:
    time.sleep(0.01)
host.close()
closed.touch()
for pid in others:
    os.waitpid(pid, 0)
"""


def test_what_a_host_still_receives_as_it_closes_goes_too(tmp_path):
    """A file that comes while the folder's others go keeps the folder."""
    done = subprocess.run(
        [sys.executable, "-c", RECEIVES, str(tmp_path / "closed")],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        timeout=PATIENCE_SECONDS,
    )
    folder = pathlib.Path(done.stdout.strip())
    left_behind.wait_until_none(lambda: [p for p in [folder] if p.exists()])


@pytest.mark.parametrize("number", NUMBERS)
def test_sigterm_is_passed_on(number, tmp_path):
    code = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(75))\n" + UP
    job = start(tmp_path, code + WAITS, "-n", str(number))
    lines_with(job, "up", number)
    job.send_signal(signal.SIGTERM)
    end_of(job)
    assert job.returncode == 75


@pytest.mark.parametrize("number", NUMBERS)
def test_sigterm_ends_what_does_not_handle_it(number, tmp_path):
    """jax's preemption service, where it is on, only takes note of the signal."""
    job = start(tmp_path, UP + WAITS, "-n", str(number))
    lines_with(job, "up", number)
    job.send_signal(signal.SIGTERM)
    _, err = end_of(job)
    assert job.returncode == 128 + signal.SIGTERM
    said, *besides = err.splitlines()
    assert said == "hxla: SIGTERM: ended before the first step"
    # XLA may have complained in the one that ended last; where that is, is one line.
    assert [line.split(" is in ")[0] for line in besides] in (
        [],
        ["hxla: the rest of the output"],
    )


@pytest.mark.parametrize("number", NUMBERS)
def test_what_does_not_end_by_sigterm_is_killed_and_named(number, tmp_path):
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + UP
    job = start(tmp_path, code + WAITS, "-n", str(number), "--grace", "0.5")
    lines_with(job, "up", number)
    job.send_signal(signal.SIGTERM)
    _, err = end_of(job)
    assert job.returncode == 128 + signal.SIGTERM
    for rank in range(number):
        assert f"hxla: rank {rank} did not end within 0.5 s" in err
    assert all(line.startswith("hxla: ") for line in err.splitlines())


def test_ctrl_c_ends_with_130_and_one_line(tmp_path):
    job = start(tmp_path, UP + WAITS, "-n", "2")
    lines_with(job, "up", 2)
    job.send_signal(signal.SIGINT)
    _, err = end_of(job)
    first, *others = err.splitlines()
    assert (job.returncode, first) == (130, "hxla: interrupted before the first step")
    # A process that ends last on a busy machine may tell of the others, in its log.
    assert all(line.startswith("hxla: the rest of the output") for line in others)


SIGNALS = """
import signal, sys
from support.inside.launch import Wakeup

wake, num, is_inside = Wakeup(), 0, False

def handler(*_):
    global num, is_inside
    is_inside, num = True, num + 1
    wake.set()
    is_inside = False

def before_each_line(frame, event, arg):
    if num < 200 and not is_inside and frame.f_code is not handler.__code__:
        signal.raise_signal(signal.SIGUSR1)
    return before_each_line

signal.signal(signal.SIGUSR1, handler)
sys.settrace(before_each_line)
for _ in range(5):
    wake.wait(0.01)
sys.settrace(None)
print("woken by", num)
"""


def test_a_signal_may_come_anywhere_in_a_wait_that_it_ends():
    """The handler of a signal runs between any two lines of the loop that it wakes."""
    ran = subprocess.run(
        [sys.executable, "-c", SIGNALS],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        env=own_environment(),
    )
    assert ran.stdout == "woken by 200\n", ran.stderr


@pytest.mark.parametrize("number", NUMBERS)
def test_a_job_whose_output_nobody_reads_ends(number, tmp_path):
    code = UP + "import time\nwhile True:\n    print('x' * 1000, flush=True)\n    time.sleep(0.01)"
    job = start(tmp_path, code, "-n", str(number))
    lines_with(job, "up", number)
    job.stdout.close()
    assert job.wait(timeout=PATIENCE_SECONDS) == 128 + signal.SIGPIPE
    # A rank that outlives the first by a moment may lose the coordination service, which it logs.
    said, *rest = job.stderr.read().splitlines()
    assert said == "hxla: nobody reads the output any more: ended before the first step"
    assert all("the rest of the output is in" in line for line in rest)
    assert len(rest) <= 1


def test_a_script_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (["run"], ["plan", "--mesh", "cpu-1.0-0.5"], ["profile"]):
        assert main([*command, "nothing.py"]) == 2, command
        assert capsys.readouterr().err == f"hxla: no script 'nothing.py' in {tmp_path}\n", command


def test_a_task_that_has_not_joined_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    model, data = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), {"x": np.zeros(1, np.float32)}
    with pytest.raises(LaunchError, match="Slurm with 4 tasks"):
        hxla.train(
            hxla.Job(model, data, lambda m, b: 0.0, optax.sgd(1.0), batch_size=1),
            steps=1,
        )


@pytest.fixture
def child():
    """A process of which nothing is known but its number, in a group of its own."""
    process = subprocess.Popen(["sleep", "infinity"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_cgroup_holds_a_process_to_its_share():
    """What it takes beyond its quota in a period is throttled."""
    if _throttle.cgroup_parent() is None:
        pytest.skip("no cgroup may be written here")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        throttle, how = _throttle.make_throttle(busy.pid, 0, 0.3)
        assert "cgroup v" in how
        version, _ = _throttle.cgroup_parent()
        assert throttle.share_of(throttle.folder, version) == pytest.approx(0.3)
        stat = throttle.folder / "cpu.stat"

        def times():
            [found] = [x.split()[1] for x in stat.read_text().splitlines() if "nr_thr" in x]
            return int(found)

        wait_until(lambda: times() > 2, "a period in which it was throttled")
    finally:
        busy.kill()
        busy.wait()
        throttle.close()
    assert not throttle.folder.exists()


def test_without_a_cgroup_a_process_is_stopped_for_the_rest_of_each_cycle(child, monkeypatch):
    done, kill, sleep = [], os.killpg, time.sleep

    def signalled(pid, number):
        done.append((pid, signal.Signals(number)))
        kill(pid, number)

    def slept(seconds):
        if threading.current_thread() is throttle._thread:
            done.append(round(seconds, 6))
        sleep(seconds)

    throttle = _throttle.DutyCycle(child.pid)
    monkeypatch.setattr(_throttle.os, "killpg", signalled)
    monkeypatch.setattr(_throttle.time, "sleep", slept)
    throttle.set_share(0.3)
    wait_until(lambda: done.count((child.pid, signal.SIGSTOP)) > 2, "cycles")
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, "a stop")
    throttle.close()
    begin = done.index((child.pid, signal.SIGCONT))
    cycle = [(child.pid, signal.SIGCONT), 0.006, (child.pid, signal.SIGSTOP), 0.014]
    assert done[begin : begin + 8] == cycle * 2
    assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED


def test_jobs_beside_each_other_hold_cores_of_their_own(child, monkeypatch):
    place = _throttle.cgroup_parent()
    if place is None:
        pytest.skip("no cgroup may be written here")
    version, parent = place
    alone = parent / f"alone-{os.getpid()}"  # where no job of another test is
    alone.mkdir()
    if not (alone / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).exists():
        alone.rmdir()
        pytest.skip("cgroups in cgroups have no quota here")
    throttle = None
    try:
        monkeypatch.setattr(_throttle, "cgroup_parent", lambda: (version, alone))
        cores = _throttle.own_cores()
        assert cores == sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(child.pid, {cores[0]})
        throttle, _ = _throttle.make_throttle(child.pid, 98, 0.7)
        assert _throttle.own_cores() == [*cores[1:], cores[0]]
    finally:
        child.kill()
        child.wait()
        if throttle is not None:
            throttle.close()
        alone.rmdir()


@pytest.mark.parametrize("share", [1.0, 0.5, 0.05, 0.04, 0.001])
def test_every_share_of_a_mesh_file_is_a_quota_that_linux_takes(share, child):
    quota, period = _throttle.quota_and_period(share)
    assert 20_000 <= period <= 1_000_000
    assert quota == -1 if share == 1 else quota >= 1000
    if share < 1:
        assert quota / period == pytest.approx(share, rel=0.01)
    throttle, _ = _throttle.make_throttle(child.pid, 99, share)
    try:
        for again in (0.9, share):
            throttle.set_share(again)
    finally:
        child.kill()
        child.wait()
        throttle.close()


def test_shares_are_packed_on_cores_or_refused():
    assert _throttle.pack([0.3, 0.9, 0.5, 0.2], [4, 7]) == [7, 4, 7, 7]
    with pytest.raises(LaunchError, match=r"sum to 2\.1 and do not fit on 2 cores"):
        _throttle.pack([0.7, 0.7, 0.7], [0, 1])


def test_shipped_meshes_are_valid():
    clusters = {name: load_cluster(name) for name in names("meshes")}
    assert len(clusters) > 3
    assert not [n for n, found in clusters.items() if found.name != n or not found.devices]


def test_a_mesh_of_several_nodes_is_not_started_on_one():
    with pytest.raises(LaunchError, match=r"describes 2 nodes.*srun or mpirun"):
        _run.describe("whale-4v100-4p100", None)
    assert len(_run.describe("workstation-2x3090-4090", None)) == 3


def test_a_bad_mesh_file_names_every_fault(tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_text('name = "x"\n[[device]]\nkind = "cpu"\ncore_shar = 1\ncount = 0\n')
    with pytest.raises(MeshError, match=r"(?s)count.*found 0.*did you mean 'core_share'"):
        load_cluster(str(path))
    path.write_text('name = "x"\n[[device]]\nkind = "cpu"\ncore_share = 0.0001\n')
    with pytest.raises(MeshError, match=r"core_share.*0\.001.*found 0\.0001"):
        load_cluster(str(path))
    path.write_text("name = ")
    with pytest.raises(MeshError, match="is not TOML"):
        load_cluster(str(path))
    with pytest.raises(MeshError, match=r"did you mean 'cpu-1\.0-0\.33'"):
        load_cluster("cpu-1.0-0.3")


def test_a_full_output_loses_lines_and_no_job(tmp_path):
    code = "print('x' * 100_000, flush=True)\nopen('done', 'w').close()"
    script = tmp_path / "script.py"
    script.write_text(code)
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "hxla", "run", "-n", "1", str(script)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
            check=False,
            timeout=PATIENCE_SECONDS,
        )
    assert ran.returncode == 0
    assert "hxla: the output is lost from here on: [Errno 28] No space left" in ran.stderr
    assert (tmp_path / "done").exists()


def test_a_command_that_is_interrupted_says_so_in_a_line(tmp_path, capsys):
    script = tmp_path / "job.py"
    script.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    # Whoever starts the tests in the background has them ignore it.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["plan", "--mesh", "cpu-1.0-0.5", str(script)]) == 130
    finally:
        signal.signal(signal.SIGINT, ignored)
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "hxla: interrupted"
    assert "Traceback" not in said


def test_an_accelerator_that_was_asked_for_is_no_processor(tmp_path):
    job = start(tmp_path, "print('trained')", env={"JAX_PLATFORMS": "cuda"})
    out, err = end_of(job)
    assert job.returncode != 0
    assert "JAX_PLATFORMS=cuda asks for an accelerator" in err
    assert "trained" not in out
    assert "Traceback" not in err


def test_of_the_folders_of_jobs_that_are_over_the_last_ten_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    folders = [tmp_path / f"hxla-run-{over.pid}-{k:06x}" for k in range(12)]
    others = [tmp_path / f"hxla-run-{os.getpid()}-lives", tmp_path / "hxla-run-mine"]
    for k, folder in enumerate([*others, *folders]):
        folder.mkdir()
        (folder / "rank-0.log").touch()
        os.utime(folder, (k, k))
    (tmp_path / f"hxla-run-{over.pid}-link").symlink_to(others[1])
    Logs().folder.mkdir()
    assert sorted(folder for folder in folders if folder.exists()) == folders[-9:]
    assert all((folder / "rank-0.log").exists() for folder in others)


def planned(mesh, file):
    """A plan for a mesh, also in a file."""
    graph = hxla.trace(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        lambda model, batch: model(batch["x"]).mean(-1),
        {"x": np.ones((4, 4), np.float32)},
    )
    plan = hxla.make_plan(graph, load_cluster(str(mesh)), batch_size=8)
    plan.write(file)
    return plan


def test_a_plan_runs_on_its_mesh_which_it_carries(tmp_path):
    mesh, file, script = (tmp_path / name for name in ("mine.toml", "plan.json", "script.py"))
    mesh.write_text('name = "mine"\n[[device]]\nkind = "cpu"\ncore_share = 0.5\n')
    plan = planned(mesh, file)
    assert (plan.cluster, plan.mesh_file) == ("mine", str(mesh))
    mesh.unlink()
    script.write_text("import os, shutil; shutil.copy(os.environ['HXLA_MESH'], 'seen.toml')")
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", "run", "--plan", str(file), str(script)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert ran.returncode == 0, ran.stderr
    assert "has changed" not in ran.stderr
    assert load_cluster(str(tmp_path / "seen.toml")).devices[0].core_share == 0.5


def test_a_changed_mesh_file_is_told_and_the_mesh_of_the_plan_is_used(tmp_path, capsys):
    mesh, file = tmp_path / "mine.toml", tmp_path / "plan.json"
    mesh.write_text('name = "mine"\n[[device]]\nkind = "cpu"\n')
    plan = planned(mesh, file)
    with planned_mesh(plan, str(file)) as used:
        assert used == str(mesh)
    mesh.write_text('# A comment changes nothing.\nname = "mine"\n[[device]]\nkind = "cpu"\n')
    with planned_mesh(plan, str(file)) as used:
        assert used == str(mesh)
    assert not capsys.readouterr().err
    for changed in ('name = "mine"\n[[device]]\nkind = "cpu"\ncount = 2\n', "damaged"):
        mesh.write_text(changed)
        with planned_mesh(plan, str(file)) as used:
            assert used != str(mesh)
            assert len(load_cluster(used).devices) == 1
        assert not os.path.exists(used)
        said = capsys.readouterr().err
        assert said.startswith(f"hxla: mesh {mesh} has changed since {file} was made, and the mesh")


def test_a_built_in_mesh_and_one_made_in_python_are_in_their_plans_too(tmp_path, capsys):
    file = tmp_path / "plan.json"
    plan = planned("cpu-4-equal", file)
    with planned_mesh(plan, str(file)) as used:
        assert used == "cpu-4-equal"
    with planned_mesh(plan.replaced(cluster="of-python"), str(file)) as used:
        assert load_cluster(used).devices == load_cluster("cpu-4-equal").devices
    assert not capsys.readouterr().err
    assert plan.decisions.mesh == ""
