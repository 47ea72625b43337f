"""How help is laid out: options under headings, then examples."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.types import OptionHelpExtra

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
_WIDTH = 96
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": _WIDTH}
#: An example: the words after `hxla`, and what they do.
Example = tuple[str, str]


class HeadedOption(click.Option):
    """An option that stands under a heading.

    Args:
        heading: The heading in the help of its command.
    """

    def __init__(self, *args: Any, heading: str, **settings: Any):
        super().__init__(*args, **settings)
        self.heading = heading

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Show a default in words without parentheses, and no limits, which errors name."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra


def option(heading: str, *names: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    """A `click.option` under a heading."""
    return click.option(*names, cls=HeadedOption, heading=heading, **settings)


class CommandWithExamples(click.Command):
    """A command whose options stand under headings, and whose help ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[Example] = (), **settings: Any):
        super().__init__(*args, **settings)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each heading, in the order of the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                sections.setdefault(getattr(param, "heading", "Help"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        write_examples(self.examples, formatter)


class GroupWithExamples(click.Group):
    """A group of commands whose help ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[Example] = (), **settings: Any):
        super().__init__(*args, **settings)
        self.examples = tuple(examples)

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """The commands in their order, not in the alphabet's."""
        return list(self.commands)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        write_examples(self.examples, formatter)


def write_examples(examples: Sequence[Example], formatter: click.HelpFormatter) -> None:
    """A line for each command, and below it what it does."""
    if not examples:
        return
    with formatter.section("Examples"):
        for words, meaning in examples:
            formatter.write(f"{'':{formatter.current_indent}}hxla {words}\n")
            with formatter.indentation(), formatter.indentation():
                formatter.write_text(meaning)


def show_help_alone(ctx: click.Context) -> None:
    """Show the help of a group that is called without a command."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(0)


def refusal(error: click.UsageError) -> str:
    """What is wrong with a command line, below the usage if the form is wrong and no value."""
    path = "hxla" if error.ctx is None else error.ctx.command_path
    message = _message(error)
    stop = "" if message.endswith((".", "?")) else "."
    line = f"{path}: {message}{stop} See {path} --help."
    is_missing = isinstance(error, click.MissingParameter)
    if error.ctx is None or (isinstance(error, click.BadParameter) and not is_missing):
        return line
    return f"{error.ctx.get_usage()}\n{line}"


def _message(error: click.UsageError) -> str:
    if not isinstance(error, click.NoSuchOption | click.NoSuchCommand):
        return " ".join(error.format_message().split())
    if isinstance(error, click.NoSuchCommand) and os.path.isfile(error.command_name):
        return f"{error.message} Did you mean hxla run {error.command_name}?"
    near = (error.possibilities or ())[:1]  # click names all that are alike
    return " ".join([error.message, *(f"Did you mean {name!r}?" for name in near)])
