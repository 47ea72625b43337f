"""`hxla inspect`."""

import json
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import InspectError
from .arguments import (
    AXES,
    INPUT_FILE,
    OUTPUT_FILE,
    SETTINGS,
    CommandWithExamples,
    mesh_option,
    option,
)

if TYPE_CHECKING:
    from ..inspect.inspect import Inspection

_DUMP, _OUTPUT, _BITS = "Reading a dump", "Output", "Bit by bit"


@click.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Show collectives and memory of a program, or where the bits of two runs differ.",
    examples=(
        ("inspect dump", "Collectives, memory and warnings of the programs of hxla run --dump."),
        ("inspect before --diff after --html change.html", "What changed between two dumps."),
        ("inspect train.py --bits cpu:0 gpu:0", "The first equation whose bits differ."),
    ),
)
@click.argument("dump", required=False, type=click.Path())
@option(
    _DUMP,
    "--axes",
    type=AXES,
    metavar="AXIS=SIZE,...",
    help="Names and sizes of the mesh axes, if the dump lacks them.",
)
@mesh_option(_DUMP, "Predict the times of collectives on this mesh: a built-in name or a file.")
@option(
    _DUMP,
    "--rules",
    metavar="NAME_OR_FILE",
    help="Warn of parameters that are not sharded as this rule set says.",
)
@option(_DUMP, "--diff", type=click.Path(), metavar="DUMP", help="Show the changes to this dump.")
@option(
    _DUMP,
    "--profile",
    type=click.Path(),
    metavar="FOLDER",
    help="Show which device waited for which, in the last step of a jax.profiler.trace.",
)
@option(
    _DUMP,
    "--plan",
    type=INPUT_FILE,
    metavar="PLAN.JSON",
    help="Show the uneven shards and their padding, from the plan that ran.",
)
@option(
    _DUMP,
    "--predicted",
    type=INPUT_FILE,
    metavar="FILE",
    help="Draw this plan of hxla plan --write, or trace of hxla plan --draw, on the page.",
)
@option(
    _OUTPUT,
    "--html",
    type=OUTPUT_FILE,
    metavar="PAGE.HTML",
    help="Write the result as one page.",
)
@option(_OUTPUT, "--json", "as_json", is_flag=True, help="Print JSON.")
@option(
    _OUTPUT,
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="ROWS",
    help="Print at most this many rows of a table.",
)
@option(
    _BITS,
    "--bits",
    nargs=2,
    metavar="A B",
    help="Name the first equation whose bits differ. A and B are records, scripts with their "
    "arguments in quotes, or two devices that both run the script DUMP.",
)
@option(
    _BITS,
    "--bits-record",
    type=OUTPUT_FILE,
    metavar="RECORD.JSON",
    help="Write the bits that the script DUMP computes, for --bits on another machine.",
)
@option(
    _BITS,
    "--device",
    metavar="PLATFORM:NUMBER",
    show_default="the first",
    help="The device of --bits-record, such as gpu:0.",
)
@option(
    _BITS,
    "--microbatch-size",
    type=click.IntRange(min=1),
    metavar="EXAMPLES",
    show_default="that of the script",
    help="The microbatch size for --bits and --bits-record.",
)
def inspect(dump: str | None, **options: Any) -> int:
    """Show collectives, memory and warnings of compiled programs, with the lines of your code.

    DUMP is a folder of hxla run --dump or of XLA, or a file in one. With --bits it is a script,
    and the exit code is 1 if a bit differs.
    """
    if options["bits"] is not None or options["bits_record"] is not None:
        return _bits(
            dump,
            sides=options["bits"],
            record=options["bits_record"],
            device=options["device"],
            microbatch_size=options["microbatch_size"],
            as_json=options["as_json"],
            limit=options["limit"],
        )
    if dump is None:
        raise InspectError("say what to inspect: a dump, or --bits A B")
    if options["device"] is not None or options["microbatch_size"] is not None:
        raise InspectError("--device and --microbatch-size are for --bits and --bits-record")
    for name in ("bits", "bits_record", "device", "microbatch_size"):
        del options[name]
    _dump(dump, **options)
    return 0


def _bits(
    script: str | None,
    *,
    sides: tuple[str, str] | None,
    record: str | None,
    device: str | None,
    microbatch_size: int | None,
    as_json: bool,
    limit: int,
) -> int:
    from ..session.bits import compare_sides, record_script

    if sides is None:
        if script is None or record is None:
            raise InspectError("--bits-record writes what a script computes: say which script")
        record_script(script, record, device=device, size=microbatch_size)
        return 0
    if record is not None or device is not None:
        raise InspectError("--bits compares: leave out --bits-record and --device")
    comparison = compare_sides(script, list(sides), microbatch_size)
    click.echo(comparison.to_json() if as_json else comparison.text(limit))
    return 0 if comparison.is_equal else 1


def _dump(
    dump: str,
    *,
    axes: dict[str, int] | None,
    mesh: str | None,
    rules: str | None,
    diff: str | None,
    profile: str | None,
    plan: str | None,
    predicted: str | None,
    html: str | None,
    as_json: bool,
    limit: int,
) -> None:
    from ..inspect.inspect import inspect

    def read(path: str) -> "Inspection":
        return inspect(path, mesh=axes, cluster=mesh, rules=rules)

    if html is None and predicted:
        raise InspectError("--predicted is drawn on a page: give --html FILE")
    if diff is not None and (profile or predicted or plan):
        raise InspectError("--diff has no timeline: leave out --profile, --predicted and --plan")
    if as_json and html is None and (profile or plan):
        raise InspectError("--json is of the programs: leave out --profile and --plan")
    inspection = read(dump)
    if diff is None:
        if html is not None:
            inspection.write_html(html, profile=profile, predicted=predicted)
        text = inspection.text(limit=limit, plan=plan, profile=profile)
        click.echo(inspection.to_json() if as_json else text)
        return
    later = read(diff)
    if html is not None:
        inspection.write_diff_html(later, html)
    lines = inspection.diff(later)
    click.echo(json.dumps(lines, indent=1) if as_json else "\n".join(lines) or "nothing changed")
