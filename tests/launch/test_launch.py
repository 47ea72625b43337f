"""`hxla run` with real processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hxla import LaunchError, MeshError, load_cluster
from hxla.__main__ import main
from support import left_behind
from support.inside.core import names
from support.inside.launch import _launcher as _run
from support.inside.launch import _throttle
from support.launched import start
from support.paths import PYTHONPATH


def test_two_processes_join_and_their_lines_are_prefixed(tmp_path):
    code = (
        "import jax\n"
        "from jax.experimental import multihost_utils as m\n"
        "import numpy as np\n"
        "print(jax.process_index(), m.process_allgather(np.int32(jax.process_index() + 5)))\n"
        "raise SystemExit(0)"
    )
    out, err = start(tmp_path, code, "-n", "2").communicate(timeout=120)
    assert "[0] 0 [5 6]" in out, err
    assert "[1] 1 [5 6]" in out


def test_a_failing_rank_ends_the_others_and_gives_the_exit_code(tmp_path):
    code = (
        "import os, sys, time\n"
        "if os.environ['HXLA_PROCESS_ID'] == '1':\n"
        "    print('last words', end='')\n    sys.exit(7)\n"
        "time.sleep(100)"
    )
    begun = time.monotonic()
    job = start(tmp_path, code, "-n", "2")
    out, err = job.communicate(timeout=120)
    assert job.returncode == 7
    assert "hxla: rank 1 failed (sys.exit(7)) before its first step, in phase 'script'" in err
    assert "[1] last words" in out
    assert time.monotonic() - begun < 60


def test_a_killed_launcher_leaves_no_orphan_and_no_cgroup(tmp_path):
    code = "import time\nprint('up', flush=True)\ntime.sleep(100)"
    job = start(tmp_path, code, "--mesh", "cpu-1.0-0.5")
    ups = 0
    while ups < 2:
        ups += "up" in job.stdout.readline()
    children = [p for p in psutil.Process(job.pid).children() if "script.py" in str(p.cmdline())]
    assert len(children) == 2
    job.send_signal(signal.SIGKILL)
    job.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    place = _throttle.cgroup_parent()
    if place is not None:
        left_behind.wait_until_none(lambda: list(place[1].glob(f"hxla-{job.pid}-*")))


NAMES = """
import multiprocessing, time
from multiprocessing import shared_memory
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=8)
print("names", lock._semlock.name, memory.name, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_kill_leaves_no_name_in_shared_memory(tmp_path, victim):
    """As a data loader's: Python unlinks them where its resource tracker lives on for a moment."""
    job = start(tmp_path, NAMES, "--mesh", "cpu-1.0-0.5")
    found = []
    while len(found) < 4:
        _, is_named, names = job.stdout.readline().partition("names ")
        if is_named:
            lock, memory = names.split()
            found += [pathlib.Path(f"/dev/shm/sem.{lock[1:]}"), pathlib.Path(f"/dev/shm/{memory}")]
    assert all(path.exists() for path in found)
    children = [p for p in psutil.Process(job.pid).children() if "script.py" in str(p.cmdline())]
    (job if victim == "launcher" else children[0]).send_signal(signal.SIGKILL)
    job.communicate(timeout=30)
    left_behind.wait_until_none(lambda: [path for path in found if path.exists()])


RECEIVES = """
import os, pathlib, sys, time
from hxla._launch._host import LocalHost
host = LocalHost(["script.py"], None, None)
print(host.memory, flush=True)
others = [os.fork() for _ in range(3)]  # of a host other threads, which wait for one another
if 0 in others:
    until = time.monotonic() + 3
    while time.monotonic() < until:
        folder = pathlib.Path(host.memory, f"0-0-{len(others)}-received.part")
        try:
            folder.mkdir(exist_ok=True)
            for name in range(20):
                (folder / str(name)).write_bytes(bytes(100))
        except FileNotFoundError:
            pass  # it goes
    os._exit(0)
time.sleep(0.2)
host.close()
for pid in others:
    os.waitpid(pid, 0)
"""


def test_what_a_host_still_receives_as_it_closes_goes_too():
    """A file that comes while the folder's others go keeps the folder."""
    script = [sys.executable, "-c", RECEIVES]
    done = subprocess.run(script, check=True, capture_output=True, text=True)
    folder = pathlib.Path(done.stdout.strip())
    left_behind.wait_until_none(lambda: [p for p in [folder] if p.exists()])


def test_sigterm_is_passed_on(tmp_path):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))\n"
        "print('up', flush=True)\ntime.sleep(100)"
    )
    job = start(tmp_path, code, "-n", "2")
    ups = 0
    while ups < 2:
        ups += "up" in job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 75


UP = "print('up', flush=True)\n"


def until_up(job, num):
    ups = 0
    while ups < num:
        ups += "up" in job.stdout.readline()


@pytest.mark.parametrize("number", ["1", "2"])
def test_sigterm_ends_what_does_not_handle_it(number, tmp_path):
    """jax's preemption service, where it is on, only takes note of the signal."""
    job = start(tmp_path, "import time\n" + UP + "time.sleep(100)", "-n", number)
    until_up(job, int(number))
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    said, *besides = err.splitlines()
    assert said == "hxla: SIGTERM: ended before the first step"
    # XLA may have complained in the one that ended last; where that is, is one line.
    assert [line.split(" is in ")[0] for line in besides] in (
        [],
        ["hxla: what the processes said besides"],
    )


def test_what_does_not_end_by_sigterm_is_killed_and_named(tmp_path):
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + UP
    job = start(tmp_path, code + "time.sleep(100)", "-n", "2", "--grace", "0.5")
    until_up(job, 2)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    for rank in (0, 1):
        assert f"hxla: rank {rank} did not end within 0.5 s" in err
    assert all(line.startswith("hxla: ") for line in err.splitlines())


def test_ctrl_c_ends_with_130_and_one_line(tmp_path):
    job = start(tmp_path, "import time\n" + UP + "time.sleep(100)", "-n", "2")
    until_up(job, 2)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (130, "hxla: interrupted before the first step\n")


def test_a_job_whose_output_nobody_reads_ends(tmp_path):
    code = UP + "import time\nwhile True:\n    print('x' * 1000, flush=True)\n    time.sleep(0.01)"
    job = start(tmp_path, code, "-n", "2")
    until_up(job, 2)
    job.stdout.close()
    assert job.wait(timeout=60) == 128 + signal.SIGPIPE
    # A rank that outlives the first by a moment may lose the coordination service, which it logs.
    said, *rest = job.stderr.read().splitlines()
    assert said == "hxla: nobody reads the output any more: ended before the first step"
    assert all("what the processes said besides is in" in line for line in rest)
    assert len(rest) <= 1


def test_the_users_own_lines_are_shown_and_the_rest_is_in_a_log(tmp_path):
    code = "import os\nif os.environ['HXLA_PROCESS_ID'] == '1':\n    raise ValueError('mine')\n"
    job = start(tmp_path, code + "import time\ntime.sleep(100)", "-n", "2")
    _, err = job.communicate(timeout=60)
    *traceback, blame, rest = err.splitlines()
    assert traceback == [
        "[1] Traceback (most recent call last):",
        f'[1]   File "{tmp_path / "script.py"}", line 3, in <module>',
        "[1]     raise ValueError('mine')",
        "[1] ValueError: mine",
    ]
    assert blame == (
        "hxla: rank 1 failed (ValueError: mine) before its first step, in phase 'script'; "
        "ending the job"
    )
    log = pathlib.Path(rest.removeprefix("hxla: what the processes said besides is in "))
    assert "run_joined" in (log / "rank-1.log").read_text()
    assert job.returncode == 1


def test_no_process_of_a_local_job_listens_to_other_machines(tmp_path):
    code = (
        "import ipaddress, psutil\n"
        "from jax.experimental import multihost_utils as m\n"
        "m.sync_global_devices('all are up')\n"
        "for c in psutil.Process().net_connections():\n"
        "    if c.status == 'LISTEN':\n"
        "        ip = ipaddress.ip_address(c.laddr.ip.removeprefix('::ffff:'))\n"
        "        print('listens to', 'itself' if ip.is_loopback else ip)\n"
        "m.sync_global_devices('all have looked')"
    )
    out, err = start(tmp_path, code, "-n", "2").communicate(timeout=120)
    told = [line for line in out.splitlines() if "listens to" in line]
    assert set(told) == {"[0] listens to itself", "[1] listens to itself"}, err


@pytest.mark.parametrize("command", [["run"], ["plan", "--mesh", "cpu-1.0-0.5"], ["profile"]])
def test_a_script_that_is_not_there_is_one_line(command, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", *command, "nothing.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1] == f"hxla: no script 'nothing.py' in {tmp_path}"
    assert "Traceback" not in ran.stderr


SLURM = {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "JAX_PLATFORMS": "cpu",
}


def test_slurm_tasks_join_in_place(tmp_path):
    code = "import jax\nprint('processes', jax.process_count(), jax.process_index())"
    jobs = [start(tmp_path, code, env=SLURM | {"SLURM_PROCID": str(rank)}) for rank in range(2)]
    outputs = [job.communicate(timeout=120) for job in jobs]
    for rank, (out, err) in enumerate(outputs):
        assert f"processes 2 {rank}" in out, err


@pytest.mark.slow
def test_tasks_of_a_batch_system_see_that_one_of_them_is_frozen(tmp_path):
    """Without a launcher they tell each other where they are through the coordination service."""
    code = (
        "import os, signal, time\n"
        "import hxla, numpy as np, optax\n"
        "from flax import nnx\n"
        "def callback(record, session):\n"
        "    if record.step == 3 and os.environ['SLURM_PROCID'] == '1':\n"
        "        time.sleep(1.2)\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "hxla.train(\n"
        "    nnx.Linear(4, 1, rngs=nnx.Rngs(0)), {'x': np.ones((8, 4), np.float32)},\n"
        "    lambda m, b: m(b['x'])[:, 0] ** 2, optax.sgd(0.1), batch_size=4, microbatch_size=2,\n"
        "    steps=9, counts='even', callbacks=[callback],\n"
        "    config={'watchdog': {'heartbeat_timeout_seconds': 4}},\n"
        ")\n"
    )
    jobs = [start(tmp_path, code, env=SLURM | {"SLURM_PROCID": str(rank)}) for rank in range(2)]
    try:
        _, err = jobs[0].communicate(timeout=120)
        assert jobs[0].returncode == 76, err
        assert "hxla watchdog: rank 1 has not answered for " in err
        assert "; it was at step 3 in phase 'callback'; ending the job" in err
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def test_a_task_that_has_not_joined_is_refused(tmp_path):
    code = (
        "import hxla\n"
        "import optax\nfrom flax import nnx\n"
        "try:\n    hxla.train(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), {'x': [0.0]}, lambda m, b: 0.0,"
        " optax.sgd(1.0), batch_size=1, steps=1)\n"
        "except hxla.LaunchError as e:\n    print(e)"
    )
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "JAX_PLATFORMS": "cpu"}
    out, _ = start(tmp_path, code, env=env, module=()).communicate(timeout=60)
    assert "Slurm with 4 tasks" in out


def busy_child():
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)


def cpu_share(pid, seconds=2.0):
    process = psutil.Process(pid)
    before, begun = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)


@pytest.mark.parametrize("kind", ["cgroup", "cycle"])
def test_a_throttled_process_gets_its_share(kind):
    child = busy_child()
    try:
        if kind == "cycle":
            throttle = _throttle.DutyCycle(child.pid)
            throttle.set_share(0.3)
        else:
            if _throttle.cgroup_parent() is None:
                pytest.skip("no cgroup may be written here")
            throttle, _ = _throttle.make_throttle(child.pid, 0, 0.3)
        assert cpu_share(child.pid) < 0.45  # others may take it lower, never higher
    finally:
        child.kill()
        child.wait()
        throttle.close()


def test_jobs_beside_each_other_hold_cores_of_their_own(monkeypatch):
    place = _throttle.cgroup_parent()
    if place is None:
        pytest.skip("no cgroup may be written here")
    version, parent = place
    alone = parent / f"alone-{os.getpid()}"  # where no job of another test is
    alone.mkdir()
    if not (alone / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).exists():
        alone.rmdir()
        pytest.skip("cgroups in cgroups have no quota here")
    child = busy_child()
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
def test_every_share_of_a_mesh_file_is_a_quota_that_linux_takes(share):
    quota, period = _throttle.quota_and_period(share)
    assert 20_000 <= period <= 1_000_000
    assert quota == -1 if share == 1 else quota >= 1000
    if share < 1:
        assert quota / period == pytest.approx(share, rel=0.01)
    child = busy_child()
    try:
        throttle, _ = _throttle.make_throttle(child.pid, 99, share)
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


@pytest.mark.parametrize("name", names("meshes"))
def test_shipped_meshes_are_valid(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.devices


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
        )
    assert ran.returncode == 0
    assert "hxla: the output is lost from here on: [Errno 28] No space left" in ran.stderr
    assert (tmp_path / "done").exists()


DETACHED = {
    "no script": ([], "run needs a script"),
    "no cluster": (["--attach", "job"], "--attach job: say on which Ray cluster"),
    "its own script": (["--ray", "auto", "--stop", "job", "x.py"], "leave out x.py"),
    "there already": (["--ray", "auto", "--stop", "job", "--min", "2"], "leave out --min"),
}


@pytest.mark.parametrize("name", DETACHED)
def test_wrong_options_of_a_run_that_is_there_are_refused(name, capsys):
    options, words = DETACHED[name]
    assert main(["run", *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_command_that_is_interrupted_says_so_in_a_line(tmp_path):
    script, begun = tmp_path / "job.py", tmp_path / "begun"
    lines = "import pathlib, time", f"pathlib.Path({str(begun)!r}).touch()", "time.sleep(99)"
    script.write_text("\n".join(lines))
    command = [sys.executable, "-m", "hxla", "plan", "--mesh", "cpu-1.0-0.5", str(script)]
    # Whoever starts the tests in the background has them ignore it.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, ignored)
    try:
        until = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "hxla: interrupted"
    assert "Traceback" not in said
