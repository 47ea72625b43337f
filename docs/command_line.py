"""Write the reference of the command line, `reference/command-line.md`, from the commands.

    python docs/command_line.py

A test compares the page with the commands.
"""

import pathlib
from collections.abc import Iterator

import click

from hxla._src.cli.main import cli

PAGE = pathlib.Path(__file__).parent / "reference/command-line.md"
TOP = """# Command line

All commands and their options. `hxla COMMAND --help` prints the same in a terminal.
Exit codes are on the page [Launching](../how-to/launching.md#how-a-job-ends)."""


def page() -> str:
    """The page: every command with its options under their headings, and its examples."""
    parts = [TOP]
    for command, ctx in _commands(
        cli, click.Context(cli, info_name="hxla", **cli.context_settings)
    ):
        parts += [f"## {ctx.command_path}", *_command(command, ctx)]
    return "\n\n".join(parts) + "\n"


def _commands(
    command: click.Command, ctx: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    """A command and those below it, in their order."""
    yield command, ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.commands[name]
            yield from _commands(
                below, click.Context(below, info_name=name, parent=ctx, **below.context_settings)
            )


def _command(command: click.Command, ctx: click.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield f"```text\n{ctx.command_path} {usage}\n```"
    yield "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is None or isinstance(param, click.Argument) or "--help" in param.opts:
            continue
        sections.setdefault(getattr(param, "heading", "Options"), []).append(record)
    for heading, records in sections.items():
        yield _table(heading, [(f"`{names}`", text) for names, text in records])
    if isinstance(command, click.Group):
        below = [(name, command.commands[name]) for name in command.list_commands(ctx)]
        rows = [
            (f"[`{name}`](#{ctx.command_path.replace(' ', '-')}-{name})", c.get_short_help_str(200))
            for name, c in below
        ]
        yield _table("Command", rows)
    if examples := getattr(command, "examples", ()):
        yield _table("Example", [(f"`hxla {words}`", meaning) for words, meaning in examples])


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {title} | |", "|---|---|"]
    for left, right in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in (left, right))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
