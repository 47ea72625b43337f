"""The command line. A command imports what it needs when it runs: a launcher needs no jax.

The commands `completion` and `devices` are here.
"""

import os
import signal
import sys
from collections.abc import Sequence

import click
from click.exceptions import Exit
from click.shell_completion import get_completion_class, shell_complete

from ..core.errors import HxlaError
from ..core.version import __version__
from .arguments import (
    OUTPUT_FILE,
    SETTINGS,
    CommandWithExamples,
    GroupWithExamples,
    option,
    refusal,
    show_help_alone,
)
from .inspect import inspect
from .plan import plan, profile
from .run import run
from .schedule import schedule


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


_COMPLETE = "_HXLA_COMPLETE"  # set by the shell's script when a word is to be completed
_SHELLS = ("bash", "zsh", "fish")


@click.group(
    cls=GroupWithExamples,
    context_settings=SETTINGS,
    invoke_without_command=True,
    examples=(
        ("devices", "Show the devices of this machine."),
        ("run train.py", "Train with one process per GPU."),
        ("plan --mesh whale-8v100-8p100 train.py", "Plan the training for another cluster."),
    ),
)
@click.version_option(__version__, prog_name="hxla", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train a Flax model on whatever accelerators you have, at the speed of all of them together.

    hxla help COMMAND says what a command does, with its options and examples.
    """
    show_help_alone(ctx)


@click.command(
    name="help",
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Show the help of a command.",
    examples=(("help schedule simulate", "The same as hxla schedule simulate --help."),),
)
@click.argument("commands", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def show_help(ctx: click.Context, commands: tuple[str, ...]) -> None:
    """Show the help of hxla, or of one of its commands."""
    above = ctx.find_root()
    for name in commands:
        if not isinstance(above.command, click.Group):
            raise click.UsageError("It has no commands.", above)
        resolved, command, _ = above.command.resolve_command(above, [name])
        if command is not None:
            above = click.Context(command, info_name=resolved, parent=above)
    click.echo(above.get_help())


@click.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Print a script that completes hxla's words in a shell.",
    examples=(
        ("completion bash > ~/.local/share/bash-completion/completions/hxla", "For bash."),
        ("completion zsh > ~/.hxla.zsh", "For zsh; then add `. ~/.hxla.zsh` to ~/.zshrc."),
        ("completion fish > ~/.config/fish/completions/hxla.fish", "For fish."),
    ),
)
@click.argument("shell", type=click.Choice(_SHELLS), metavar="SHELL")
def completion(shell: str) -> None:
    """Print the script with which a shell completes hxla's commands, options, meshes and files.

    SHELL is bash, zsh or fish.
    """
    known = get_completion_class(shell)
    assert known is not None
    click.echo(known(cli, {}, "hxla", _COMPLETE).source())


for _command in (run, plan, profile, devices, inspect, schedule, show_help, completion):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit code."""
    if _COMPLETE in os.environ:
        return shell_complete(cli, {}, "hxla", _COMPLETE, os.environ[_COMPLETE])
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        with cli.make_context("hxla", words) as ctx:
            code = cli.invoke(ctx)
        return code if isinstance(code, int) else 0
    except Exit as ending:
        return ending.exit_code
    except click.UsageError as error:
        print(refusal(error), file=sys.stderr)
        return 2
    except HxlaError as error:
        print(f"hxla: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("hxla: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
