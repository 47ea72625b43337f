"""`hxla devices`."""

import click

from .arguments import OUTPUT_FILE
from .help import SETTINGS, CommandWithExamples, option


@click.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Show the devices of this machine, measure them, and describe them in a mesh file.",
    examples=(
        ("devices", "Show devices, memory and links, and cards that this jax does not support."),
        ("devices --measure --write mine.toml", "Measure speeds, and write them to a mesh file."),
    ),
)
@option(
    "Devices",
    "--measure",
    is_flag=True,
    help="Time matrix products, copies and links. Nothing else should run meanwhile.",
)
@option(
    "Devices",
    "--write",
    type=OUTPUT_FILE,
    metavar="MESH.TOML",
    help="Write a mesh file that describes this machine. The file must not exist.",
)
def devices(measure: bool, write: str | None) -> int:
    """Show the devices of this machine: memory, links, and speeds if measured."""
    from ..cluster import detect

    detect.command(measured=measure, write=write)
    return 0
