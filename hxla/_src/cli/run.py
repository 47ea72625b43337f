"""`hxla run`."""

import os
from typing import Any

import click

from ..core.errors import LaunchError
from .arguments import (
    INPUT_FILE,
    OUTPUT_FILE,
    SCRIPT_SETTINGS,
    SECONDS,
    mesh_option,
    note_misplaced,
    script_arguments,
    script_command,
)
from .help import SETTINGS, CommandWithExamples, option

_WHERE, _WHAT, _ELASTIC = "Devices", "What runs", "Elastic training"
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@click.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS | SCRIPT_SETTINGS,
    short_help="Start a training script on all devices.",
    examples=(
        ("run train.py --steps 100", "One process per GPU; the script gets --steps 100."),
        ("run --mesh cpu-1.0-0.33 train.py", "A whole CPU core beside a third of another."),
        ("run --plan plan.json train.py", "The plan of hxla plan, on the mesh in that plan."),
        ("run --elastic --mesh mine.toml train.py", "The mesh file may change while it trains."),
    ),
)
@mesh_option(_WHERE, "Start one process per device of this mesh: a built-in name or a mesh file.")
@option(
    _WHERE,
    "-n",
    "num_processes",
    type=int,
    metavar="PROCESSES",
    show_default="one per GPU, or one on the CPU",
    help="Start this many processes.",
)
@option(
    _WHAT,
    "--plan",
    type=INPUT_FILE,
    metavar="PLAN.JSON",
    help="Run this plan, a file of hxla plan --write. It has its mesh: --mesh is not needed.",
)
@option(
    _WHAT,
    "--dump",
    type=click.Path(file_okay=False),
    metavar="NEW_FOLDER",
    help="Write the programs that XLA compiles, for hxla inspect.",
)
@option(
    _WHAT,
    "--grace",
    type=SECONDS,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between SIGTERM and SIGKILL.",
)
@option(
    _ELASTIC,
    "--elastic",
    is_flag=True,
    help="Go on training as devices come and go. The options below need this one.",
)
@option(
    _ELASTIC,
    "--min",
    type=int,
    metavar="DEVICES",
    show_default="1",
    help="Wait while there are fewer devices than this.",
)
@option(
    _ELASTIC,
    "--max",
    type=int,
    metavar="DEVICES",
    show_default="one per microbatch",
    help="Train on at most this many devices.",
)
@option(
    _ELASTIC,
    "--heartbeat",
    type=SECONDS,
    metavar="SECONDS",
    show_default="10",
    help="Replace a process that sends nothing for this long.",
)
@option(
    _ELASTIC,
    "--events",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write what happened, one line of JSON for each event.",
)
@option(
    _ELASTIC,
    "--ray",
    metavar="ADDRESS",
    help="Train on the nodes of the Ray cluster at this address; auto: on the running one.",
)
@option(
    _ELASTIC,
    "--nodes",
    type=INPUT_FILE,
    metavar="FILE",
    help="Use only the Ray nodes whose IDs are in this file.",
)
@script_arguments
@click.pass_context
def run(
    ctx: click.Context,
    /,
    script: str,
    arguments: tuple[str, ...],
    is_module: bool,
    **options: Any,
) -> int:
    """Start a training script on all devices, with one process per device.

    All words after SCRIPT are arguments of the script. Under srun and mpirun no process is
    started: the script joins the tasks.
    """
    exclusive = [n for n in ("mesh", "num_processes", "ray") if options[n] is not None]
    if len(exclusive) > 1:
        names = ["-n" if name == "num_processes" else f"--{name}" for name in exclusive]
        raise click.UsageError(f"{' and '.join(names)} exclude each other: give one.", ctx)
    command = script_command(script, arguments, is_module=is_module)
    note_misplaced(ctx, script, arguments)
    return _run(command, **options)


def _run(
    command: list[str],
    *,
    mesh: str | None,
    num_processes: int | None,
    plan: str | None,
    dump: str | None,
    grace: float,
    elastic: bool,
    **elastic_options: Any,
) -> int:
    from ..launch import launcher
    from ..launch.batch_tasks import cluster_in_sight

    tasks = cluster_in_sight()
    if elastic and tasks:
        raise LaunchError(
            f"--elastic starts the processes of one machine itself, and this is one of {tasks}"
            ": start one task, or leave it out"
        )
    if tasks and mesh is None and num_processes is None:
        if dump is not None:  # other tasks write into it too
            rank = next((os.environ[n] for n in _RANKS if n in os.environ), "0")
            os.environ |= launcher.dumping(os.environ, os.path.abspath(dump), rank)
        if plan is not None:
            os.environ["HXLA_PLAN"] = os.path.abspath(plan)
        from ..launch.join import run_script

        run_script(command)  # one task per accelerator is running already
        return 0
    if grace < 0:
        raise LaunchError(f"--grace {grace:g}: use no less than zero seconds")
    if elastic:
        if plan is not None or dump is not None:
            raise LaunchError(
                "--elastic makes plans as devices come and go: leave out --plan, --dump"
            )
        return _run_elastic(
            command, mesh=mesh, num_processes=num_processes, grace=grace, **elastic_options
        )
    asked = [name for name, value in elastic_options.items() if value is not None]
    if asked:
        raise LaunchError(f"--{asked[0]} needs --elastic: give that too")
    return launcher.run(
        command,
        mesh=mesh,
        number=num_processes,
        plan=plan,
        grace_seconds=grace,
        dump=dump,
    )


def _run_elastic(
    command: list[str],
    *,
    mesh: str | None,
    num_processes: int | None,
    grace: float,
    min: int | None,
    max: int | None,
    heartbeat: float | None,
    events: str | None,
    ray: str | None,
    nodes: str | None,
) -> int:
    from ..launch import launcher

    if nodes is not None and ray is None:
        raise LaunchError("--nodes are those of a Ray cluster: give --ray too")
    return launcher.run_elastic(
        command,
        rules=launcher.elastic_rules(min, max, heartbeat),
        mesh=mesh,
        number=num_processes,
        ray=ray,
        nodes=nodes,
        grace_seconds=grace,
        events=events,
    )
