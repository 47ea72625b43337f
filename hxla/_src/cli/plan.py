"""`hxla profile` and `hxla plan`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from ..core.errors import HxlaError
from .arguments import (
    INPUT_FILE,
    OUTPUT_FILE,
    SCRIPT_SETTINGS,
    SETTINGS,
    SIZES,
    CommandWithExamples,
    Decorated,
    mesh_option,
    note_misplaced,
    option,
    script_arguments,
    script_command,
)

_MEASURED, _INPUT, _OUTPUT, _SEARCH = "What is measured", "Input", "Output", "Search"
_SEARCHED = "microbatch_sizes", "segments", "stages", "tensor", "no_recompute"


def _microbatch_sizes(heading: str, help: str, default: str) -> Callable[[Decorated], Decorated]:
    return option(
        heading,
        "--microbatch-sizes",
        type=SIZES,
        default=(),
        metavar="SIZES",
        show_default=default,
        help=help,
    )


@click.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS | SCRIPT_SETTINGS,
    short_help="Measure a script's model and the links between devices, for hxla plan.",
    examples=(
        ("profile --write times.json train.py", "Measure on one process."),
        ("profile --mesh cpu-1.0-0.33 train.py", "Measure each device of a mesh."),
    ),
)
@mesh_option(_MEASURED, "Measure on each device of this mesh: a built-in name or a mesh file.")
@_microbatch_sizes(
    _MEASURED, "Measure microbatches of these sizes, such as 1,2,4.", "those that may be planned"
)
@option(
    _MEASURED,
    "--segments",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="NUMBER",
    help="Measure the model in at most this many segments.",
)
@option(
    _OUTPUT,
    "--write",
    type=OUTPUT_FILE,
    default="profile.json",
    show_default=True,
    metavar="PROFILE.JSON",
    help="Write the measured times to this file.",
)
@click.option("--joined", is_flag=True, hidden=True)
@script_arguments
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    script: str,
    arguments: tuple[str, ...],
    is_module: bool,
    joined: bool,
    mesh: str | None,
    microbatch_sizes: tuple[int, ...],
    segments: int,
    write: str,
) -> int:
    """Measure the model of a training script, and the links between devices, for hxla plan.

    The script runs up to its training, and stops there. Measuring takes minutes.
    """
    command = script_command(script, arguments, is_module=is_module)
    if mesh is not None and not joined:
        from ..launch import launcher

        note_misplaced(ctx, script, arguments)
        flags = ["--joined", "--write", os.path.abspath(write), "--segments", str(segments)]
        if microbatch_sizes:
            flags += ["--microbatch-sizes", ",".join(map(str, microbatch_sizes))]
        return launcher.run(command, mesh=mesh, program=("hxla", "profile", *flags))
    from ..launch.join import run_joined
    from ..session.commands import profile
    from ..session.job import job_of

    def work() -> None:
        try:
            job, request = job_of(command)
            profile(
                job,
                request,
                file=os.path.abspath(write),
                microbatch_sizes=microbatch_sizes,
                num_segments=segments,
            )
        except HxlaError as error:
            sys.exit(f"hxla: {error}")

    if not joined:
        note_misplaced(ctx, script, arguments)
    run_joined(work)
    return 0


@click.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS | SCRIPT_SETTINGS,
    short_help="Plan a script's training for this machine or any mesh.",
    examples=(
        ("plan train.py", "Plan for the devices of this machine."),
        ("plan --mesh whale-8v100-8p100 train.py", "Plan for a built-in cluster."),
        (
            "plan --mesh mine.toml --profile times.json --write plan.json train.py",
            "Plan with measured times, and write the plan for hxla run --plan.",
        ),
        (
            "plan --mesh whale-8v100-8p100 --compare whale-4v100-4p100 train.py",
            "Compare the plans for two meshes.",
        ),
    ),
)
@mesh_option(
    _INPUT,
    "Plan for this mesh: a built-in name or a mesh file.",
    show_default="the devices of this machine",
)
@mesh_option(_INPUT, "Plan for this mesh too, and compare the two plans.", "--compare")
@option(
    _INPUT,
    "--profile",
    type=INPUT_FILE,
    metavar="PROFILE.JSON",
    show_default="estimates",
    help="Plan with the times that hxla profile measured, of model and links.",
)
@option(
    _OUTPUT,
    "--write",
    type=OUTPUT_FILE,
    metavar="PLAN.JSON",
    help="Write the plan, with its mesh, for hxla run --plan.",
)
@option(
    _OUTPUT,
    "--draw",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Write pictures of the plan, and traces for Perfetto.",
)
@_microbatch_sizes(
    _SEARCH, "Choose among these microbatch sizes, such as 1,2,4.", "those of the script"
)
@option(
    _SEARCH,
    "--segments",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    show_default="8 to 96, by the number of devices",
    help="Divide the model into at most this many segments.",
)
@option(
    _SEARCH,
    "--stages",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    show_default="no limit",
    help="Use at most this many pipeline stages.",
)
@option(
    _SEARCH,
    "--tensor",
    type=SIZES,
    default=(),
    metavar="SIZES",
    show_default="all that the links allow",
    help="Choose among these sizes of the tensor axis, such as 2,4.",
)
@option(
    _SEARCH,
    "--no-recompute",
    is_flag=True,
    help="Save all activations; recompute none.",
)
@script_arguments
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    script: str,
    arguments: tuple[str, ...],
    is_module: bool,
    mesh: str | None,
    **options: Any,
) -> int:
    """Plan the training of a script for this machine, or for a mesh without its devices.

    The script runs up to its training, and stops there. Without --mesh and --profile nothing is
    searched: the plan is the one with which hxla.train begins.
    """
    given = [f"--{name.replace('_', '-')}" for name in _SEARCHED if options[name]]
    if mesh is None and options["profile"] is None and given:
        raise click.UsageError(
            f"{given[0]} is for a search, which needs the times of --profile or a --mesh.", ctx
        )
    command = script_command(script, arguments, is_module=is_module)
    note_misplaced(ctx, script, arguments)
    return _plan(command, mesh=mesh, **options)


def _plan(
    command: list[str],
    *,
    mesh: str | None,
    compare: str | None,
    profile: str | None,
    write: str | None,
    draw: str | None,
    microbatch_sizes: tuple[int, ...],
    segments: int | None,
    stages: int | None,
    tensor: tuple[int, ...],
    no_recompute: bool,
) -> int:
    import jax

    from ..choose.workload import SearchOptions
    from ..session.commands import plan_script

    if mesh is not None:
        jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # and no memory
    plan_script(
        command,
        meshes=(mesh,) if compare is None else (mesh, compare),
        profile=profile,
        write=write,
        draw=draw,
        search=SearchOptions(
            microbatch_sizes=microbatch_sizes,
            num_segments=segments,
            max_stages=stages,
            tensors=tensor,
            recompute=not no_recompute,
        ),
    )
    return 0
