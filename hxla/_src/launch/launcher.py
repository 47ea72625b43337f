"""`hxla run`: one process per accelerator, or per described device.

Without `--mesh`, `hxla run --plan` takes the mesh of the plan.
"""

import contextlib
import functools
import math
import os
import pathlib
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..cluster.cluster import Device
from ..cluster.kinds import are_unlike, in_words
from ..cluster.mesh_file import dump_cluster, load_cluster
from ..core.errors import LaunchError, MeshError
from ..core.files import names
from .again import Again
from .environment import describe, elastic_environment, place_of, process_environment
from .host import Hosts, LocalHost
from .membership import MembershipRules
from .output import Streams
from .ranks import ColdProcess, WarmProcess
from .run import EventLog, Run

if TYPE_CHECKING:
    from ..plan.plan import Plan


@contextlib.contextmanager
def planned_mesh(plan: "Plan", file: str) -> Iterator[str | None]:
    """The name or the path of a plan's mesh; None if the plan has none.

    An unchanged mesh file is used itself, as messages name it. Otherwise the contents in the plan
    are written to a temporary file.

    Raises:
        LaunchError: If the contents in the plan are no mesh file.
    """
    if not plan.mesh:
        yield plan.mesh_file or plan.cluster or None
        return
    with tempfile.TemporaryDirectory(prefix="hxla-mesh-") as folder:
        path = pathlib.Path(folder) / "mesh.toml"
        path.write_text(plan.mesh)
        try:
            planned = _mesh_contents(str(path))
        except MeshError as error:
            words = str(error).replace("mesh file ", "").replace(str(path), "key 'mesh'")
            raise LaunchError(f"plan {file}: {words}") from None
        source = plan.mesh_file or plan.cluster
        is_known = os.path.exists(plan.mesh_file) or source in names("meshes")
        try:
            is_same = _mesh_contents(source) == planned
        except MeshError:  # the file is gone, or damaged
            is_same = False
        if is_known and not is_same:
            print(
                f"hxla: mesh {source} has changed since {file} was made, and the mesh in the plan "
                f"is used; hxla plan --mesh {source} plans for the new one",
                file=sys.stderr,
            )
        yield source if is_same else str(path)


def _mesh_contents(mesh: str) -> str:
    """A mesh file without its comments, with figures as plans have them."""
    return dump_cluster(load_cluster(mesh))


def _check_mesh(plan: "Plan", file: str, mesh: str, devices: Sequence[Device]) -> None:
    """Refuse a mesh that is not the one of a plan, before a process is started.

    Raises:
        LaunchError: With the first device that differs.
    """
    for device in plan.devices:
        kind = devices[device.rank].label if device.rank < len(devices) else "missing"
        if kind != device.kind:
            raise LaunchError(
                f"plan {file} is for another mesh: device {device.rank} is {device.kind} in the "
                f"plan and {kind} in {mesh}; leave out --mesh, or plan with hxla plan --mesh {mesh}"
            )


_MOST_PROCESSES = 65536
_HAND_OVER_SECONDS = 30.0  # for members to finish their step and write their state
_PREPARE_SECONDS = 600.0  # for members to trace and compile


def elastic_rules(
    least: int | None, most: int | None, heartbeat_seconds: float | None
) -> MembershipRules:
    """The rules of an elastic run, with free ports of this machine.

    Args:
        least: The fewest devices to train on, minP; None for one.
        most: The most devices, maxP; None for one for each microbatch.
        heartbeat_seconds: The longest silence of a process; None for ten seconds.

    Raises:
        LaunchError: If the numbers contradict each other, or are too small.
    """
    least = 1 if least is None else least
    most = _MOST_PROCESSES if most is None else most
    heartbeat_seconds = 10.0 if heartbeat_seconds is None else heartbeat_seconds
    if not 1 <= least <= most:
        raise LaunchError(f"--min {least} --max {most}: use 1 <= min <= max")
    if heartbeat_seconds <= 1:
        raise LaunchError(f"--heartbeat {heartbeat_seconds:g}: use more than one second")
    return MembershipRules(
        min_devices=least,
        max_devices=most,
        num_steps=sys.maxsize,
        num_microbatches=1,
        heartbeat_seconds=heartbeat_seconds,
        hand_over_seconds=_HAND_OVER_SECONDS,
        prepare_seconds=_PREPARE_SECONDS,
        form_seconds=_PREPARE_SECONDS,
        ports=tuple(free_port() for _ in range(4)),
    )


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    command: Sequence[str],
    *,
    mesh: str | None = None,
    number: int | None = None,
    plan: str | None = None,
    grace_seconds: float = 5.0,
    dump: str | None = None,
    program: Sequence[str] = ("hxla._src.launch",),
) -> int:
    """Start the processes, forward their output and signals, and wait for them.

    Args:
        number: Number of processes, instead of a mesh.
        plan: Plan file; only the devices of the plan get a process, by default on its mesh.
        grace_seconds: From SIGTERM to SIGKILL; longer for a process that finishes and saves a step.
        dump: New folder for XLA's dumps, with a folder `process-0` and so on for each process.
        program: Module that runs the command in each process, and its arguments.

    Returns:
        0 if all returned 0, else the exit code of the process that failed first (128 plus the
        signal's number if it was killed), or of the user's signal: see docs/how-to/launching.md.

    Raises:
        LaunchError: As `describe`, or if the mesh is not the plan's.
    """
    folder = new_dump(dump)
    start = functools.partial(
        _run, command, folder=folder, grace_seconds=grace_seconds, program=program
    )
    if plan is None:
        devices = describe(mesh, None if mesh is not None else number)
        return _run_until_settled(start, devices, mesh, folder)
    from ..plan.plan import Plan  # imports jax, which other launchers do not need

    asked = Plan.read(plan)
    with contextlib.ExitStack() as stack:
        if mesh is None and number is None:
            mesh, number = stack.enter_context(planned_mesh(asked, plan)), len(asked.devices)
        devices = describe(mesh, None if mesh is not None else number)
        if mesh is not None:
            _check_mesh(asked, plan, mesh, devices)
        ranks = _planned_ranks(asked, len(devices))
        settings = {"HXLA_PLAN": os.path.abspath(plan)}
        if len(ranks) < len(devices):
            settings["HXLA_DEVICES"] = ",".join(map(str, ranks))
        return start(devices, ranks, mesh=mesh, settings=settings)


def _run_until_settled(
    start: Callable[..., int], devices: Sequence[Device], mesh: str | None, dumps: str | None
) -> int:
    """Run a job, and again on fewer devices where it asks for that; the last dumps stay."""
    places = list(range(len(devices)))
    with tempfile.TemporaryDirectory(prefix="hxla-again-") as folder:
        again = Again(folder)
        while True:
            settings = again.environment(places, len(devices))
            code = start(devices, places, mesh=mesh, settings=settings)
            asked = again.asked(places)
            if code or asked is None:
                return code
            places, why = asked
            print(f"hxla: {why}", file=sys.stderr, flush=True)
            if dumps is not None:
                for dumped in pathlib.Path(dumps).glob("process-*"):
                    shutil.rmtree(dumped)


def _run(
    command: Sequence[str],
    devices: Sequence[Device],
    ranks: Sequence[int],
    *,
    mesh: str | None,
    settings: Mapping[str, str],
    folder: str | None,
    grace_seconds: float,
    program: Sequence[str],
) -> int:
    """Run a process for each of some ranks.

    Args:
        settings: Environment variables of all processes.
        folder: Absolute path for dumps.
    """
    chosen = [devices[rank] for rank in ranks]
    kinds = [device.kind for device in chosen]
    if are_unlike(kinds):
        note = f"{in_words(kinds)} share no library for collectives: they meet in their hosts"
        print(f"hxla: {note}", file=sys.stderr)
    envs = list[dict[str, str]]()
    for rank, device in zip(ranks, chosen, strict=True):
        env = process_environment(place_of(rank, devices), device, chosen, mesh) | dict(settings)
        envs.append(env if folder is None else env | dumping(env, folder, str(len(envs))))

    def read_devices() -> list[Device]:
        now: Sequence[Device] = devices if mesh is None else describe(mesh, None)
        if len(now) <= max(ranks):
            raise LaunchError(f"{mesh} now has {len(now)} devices")
        return [now[rank] for rank in ranks]

    streams = Streams.over(sys.stdout.buffer, sys.stderr.buffer)
    host = LocalHost(
        functools.partial(ColdProcess, ["-m", *program, *command]),
        lambda rank, *_: envs[rank],
        streams,
        keeps_state=False,
        read_devices=read_devices,
    )
    rules = MembershipRules(
        min_devices=len(chosen),
        max_devices=len(chosen),
        num_steps=sys.maxsize,
        num_microbatches=1,
        heartbeat_seconds=math.inf,
        form_seconds=math.inf,
        ports=(free_port(),),
    )
    return Run(host, streams, rules, grace_seconds=grace_seconds, events=None).wait()


def run_elastic(
    command: Sequence[str],
    *,
    rules: MembershipRules,
    mesh: str | None = None,
    number: int | None = None,
    ray: str | None = None,
    nodes: str | None = None,
    grace_seconds: float = 5.0,
    events: str | None = None,
) -> int:
    """Train a script on devices that come and go.

    Args:
        mesh: Built-in name or path of a mesh file, which is read again when it changes.
        number: Number of processes, instead of a mesh.
        ray: Address of a Ray cluster with the devices, instead of a mesh.
        nodes: File with the IDs of the Ray nodes that may be used; None for all.
        grace_seconds: The notice of a SIGTERM.
        events: File for events and decisions, one line of JSON each.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: As `describe`, or if there is no such cluster.
    """
    streams, log = Streams.over(sys.stdout.buffer, sys.stderr.buffer), EventLog(events)
    if ray is not None:
        with _needing_ray():
            from .ray_cluster import RayHosts
        hosts: Hosts = RayHosts(ray, command, streams, nodes)
    else:
        devices = describe(mesh, None if mesh is not None else number)
        hosts = LocalHost(
            functools.partial(WarmProcess, command),
            elastic_environment(devices, mesh),
            streams,
            keeps_state=True,
            read_devices=lambda: devices if mesh is None else describe(mesh, None),
        )
    return Run(hosts, streams, rules, grace_seconds=grace_seconds, events=log).wait()


@contextlib.contextmanager
def _needing_ray() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError:
        raise LaunchError("--ray needs Ray: pip install 'hxla[ray]', on every node") from None


def _planned_ranks(plan: "Plan", num_devices: int) -> Sequence[int]:
    """The ranks of a plan's devices in the cluster.

    If the cluster has fewer devices, every process is started: a process may have several devices,
    and otherwise the job reports this with all other differences from the plan.
    """
    ranks = sorted(device.rank for device in plan.devices)
    return range(num_devices) if ranks[-1] >= num_devices else ranks


def new_dump(folder: str | None) -> str | None:
    """The absolute path of an empty or new folder.

    Raises:
        LaunchError: If the folder is not empty.
    """
    if folder is None:
        return None
    path = pathlib.Path(folder).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise LaunchError(f"--dump {folder}: it is not empty; name a new folder for each run")
    return str(path)


def dumping(env: Mapping[str, str], folder: str, process: str) -> dict[str, str]:
    """Environment variables with which a process dumps its programs."""
    wanted = (
        f"--xla_dump_to={folder}/process-{process}",
        "--xla_dump_hlo_as_text",
        "--xla_dump_hlo_as_proto",  # has the complete buffer assignment
    )
    return {
        "XLA_FLAGS": " ".join([env.get("XLA_FLAGS", ""), *wanted]).strip(),
        # A cached program is not compiled, hence not dumped.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
