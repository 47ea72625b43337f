"""Values of the command line, the scripts that it names, and the layout of help.

Help has options under headings, then examples.
"""

import ast
import contextlib
import importlib.machinery
import math
import os
import sys
import tokenize
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem
from click.types import OptionHelpExtra

from ..core.errors import LaunchError

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


#: Of commands that run a script: options of hxla end where the script's name stands.
SCRIPT_SETTINGS = {"allow_interspersed_args": False}


class ListType(click.ParamType):
    """A list with commas, parsed by a function that raises ValueError.

    Args:
        what: What it lists, for the error.
        example: A right value, for the error.
    """

    def __init__(self, what: str, example: str, parse: Callable[[str], Any]):
        self.name, self._example, self._parse = what, example, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text; a default is not parsed again."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError:
            self.fail(
                f"{value!r} is not a list of {self.name}, such as {self._example}.", param, ctx
            )


class Seconds(click.ParamType):
    """A finite number of seconds."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text."""
        with contextlib.suppress(ValueError):
            if math.isfinite(seconds := float(value)):
                return seconds
        self.fail(f"{value!r} is not a number of seconds.", param, ctx)


class OutputFile(click.Path):
    """A file to write, whose folder must exist: it is asked before work that takes long."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a folder, and a file in no folder."""
        path = super().convert(value, param, ctx)
        folder = os.path.dirname(os.path.expanduser(path)) or "."
        if not os.path.isdir(folder):
            self.fail(f"there is no folder {folder!r} to write {path!r} into.", param, ctx)
        return path


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _named_sizes(text: str) -> dict[str, int]:
    pairs = [part.split("=") for part in text.split(",")]
    if not all(len(pair) == 2 and pair[0] for pair in pairs):
        raise ValueError
    return {name: _positive(size) for name, size in pairs}


SECONDS = Seconds()
INPUT_FILE = click.Path(exists=True, dir_okay=False)
OUTPUT_FILE = OutputFile(dir_okay=False)
SIZES = ListType("whole numbers from 1", "1,2,4", _sizes)
AXES = ListType("axes and their sizes", "data=2,tensor=4", _named_sizes)
DEVICES = ListType("kinds of devices and their numbers", "V100=32,T4=16", _named_sizes)
NAMES = ListType("names", "easyscale,weighing", lambda text: tuple(text.split(",")))


def _meshes(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    from ..core.files import names

    known = [CompletionItem(name) for name in names("meshes") if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file"), *known]


def mesh_option(
    heading: str, help: str, name: str = "--mesh", *, show_default: str | None = None
) -> Callable[[Decorated], Decorated]:
    """An option that takes a mesh."""
    known = {"shell_complete": _meshes, "help": help, "show_default": show_default}
    return option(heading, name, metavar="NAME_OR_FILE", **known)


def script_arguments(function: Decorated) -> Decorated:
    """The script of a command, and the script's arguments."""
    heading = "Script"
    for decorate in (
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
        click.argument("script", type=click.Path()),
        option(
            heading,
            "-m",
            "is_module",
            is_flag=True,
            help="SCRIPT is the name of a module, as in python -m.",
        ),
    ):
        function = decorate(function)
    return function


def script_command(script: str, arguments: Sequence[str], *, is_module: bool) -> list[str]:
    """The words that run a script like Python.

    Raises:
        LaunchError: If there is no such script or module, or it is not Python.
    """
    if is_module:
        _check_module(script)
    else:
        _check_script(script)
    return [*(["-m"] * is_module), script, *arguments]


def _check_module(name: str) -> None:
    if os.path.isfile(name):
        raise LaunchError(f"-m {name}: that is a file, and -m takes a module: leave out -m")
    top = name.partition(".")[0]
    path = [os.getcwd(), *sys.path]
    if top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top, path):
        return
    raise LaunchError(f"-m {name}: there is no module {top!r} in {os.getcwd()} or sys.path")


def _check_script(script: str) -> None:
    if os.path.isdir(script):
        raise LaunchError(f"{script} is a folder: name a Python script in it")
    import zipfile  # as slow to import as all of the above

    if not os.path.isfile(script):
        raise LaunchError(f"no script {script!r} in {os.getcwd()}")
    if script.endswith(".pyc") or zipfile.is_zipfile(script):  # Python runs these too
        return
    try:
        with tokenize.open(script) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python shows them when the script runs
            compile(file.read(), script, "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        where = "" if error.lineno is None else f"line {error.lineno}: "
        raise LaunchError(f"{script} is not a Python script: {where}{error.msg}") from None
    except ValueError as error:  # null bytes, or no text in the declared encoding
        raise LaunchError(f"{script} is not a Python script: {error}") from None
    except OSError as error:
        raise LaunchError(f"{script} cannot be read: {error.strerror}") from None


def misplaced(ctx: click.Context, arguments: Sequence[str]) -> list[str]:
    """Long options of this command among the arguments of the script."""
    known = {name for param in ctx.command.params for name in param.opts if name[:2] == "--"}
    return [word for word in arguments if word.partition("=")[0] in known]


def note_misplaced(ctx: click.Context, script: str, arguments: Sequence[str]) -> None:
    """Say that the script gets what looks like an option of hxla."""
    for word in misplaced(ctx, arguments):
        name = word.partition("=")[0]
        click.echo(
            f"hxla: {name} stands after {script}, so the script gets it; options of "
            f"{ctx.command_path} stand before the script",
            err=True,
        )
