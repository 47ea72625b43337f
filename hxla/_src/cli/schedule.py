"""`hxla schedule`: simulate, explain, run and replay."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from .arguments import (
    DEVICES,
    NAMES,
    OUTPUT_FILE,
    SECONDS,
    SETTINGS,
    CommandWithExamples,
    Decorated,
    GroupWithExamples,
    mesh_option,
    option,
    show_help_alone,
)

_JOBS, _RULES, _OUTPUT = "Jobs and devices", "Rules", "Output"


@click.group(
    cls=GroupWithExamples,
    context_settings=SETTINGS,
    invoke_without_command=True,
    short_help="Decide which of several jobs gets which devices.",
    examples=(
        ("schedule simulate jobs.csv --devices V100=4,T4=4", "Compare all policies on a trace."),
        ("schedule run jobs.toml --mesh mine.toml --policy weighing", "Run jobs."),
    ),
)
@click.pass_context
def schedule(ctx: click.Context) -> None:
    """Decide which of several jobs gets which devices: on a trace, or live."""
    show_help_alone(ctx)


def _policy(
    help: str, *, metavar: str = "NAME", default: str | None = None
) -> Callable[[Decorated], Decorated]:
    return option(
        _RULES,
        "--policy",
        type=NAMES,
        default=(),
        metavar=metavar,
        show_default=default,
        help=help,
    )


def _times(function: Decorated) -> Decorated:
    for decorate in (
        option(
            _RULES,
            "--interval",
            type=SECONDS,
            default=60.0,
            show_default=True,
            metavar="SECONDS",
            help="Decide again at least this often.",
        ),
        option(
            _RULES,
            "--move-seconds",
            type=SECONDS,
            default=20.0,
            show_default=True,
            metavar="SECONDS",
            help="How long a job pauses when its devices change.",
        ),
    ):
        function = decorate(function)
    return function


def _trace(function: Decorated) -> Decorated:
    """The arguments of modes that decide on a trace."""
    options: Sequence[Callable[[Decorated], Decorated]] = (
        option(
            _RULES,
            "--uncut",
            is_flag=True,
            help="Keep the microbatches of a Pollux trace as large as its batches.",
        ),
        option(
            _RULES,
            "--gangs",
            type=click.Choice(("asked", "most")),
            default="asked",
            show_default=True,
            help="The number of devices of jobs with a fixed set: as asked, or the most they use.",
        ),
        option(
            _RULES,
            "--only-at-intervals",
            is_flag=True,
            help="Decide only at each interval, not when a job comes or ends.",
        ),
        _times,
        option(
            _JOBS,
            "--devices",
            type=DEVICES,
            default={},
            metavar="KIND=NUMBER,...",
            show_default="those of the trace",
            help="The devices that there are.",
        ),
        click.argument("trace", type=click.Path()),
    )
    for decorate in options:
        function = decorate(function)
    return function


def _options(
    trace: str,
    *,
    devices: dict[str, int],
    policy: tuple[str, ...],
    move_seconds: float,
    interval: float,
    only_at_intervals: bool,
    gangs: str,
    uncut: bool,
) -> Any:
    from ..scheduler.commands import ScheduleOptions

    return ScheduleOptions(
        trace=trace,
        devices=devices,
        policies=policy,
        move_seconds=move_seconds,
        interval_seconds=interval,
        is_eager=not only_at_intervals,
        gangs=gangs,
        is_cut=not uncut,
    )


@schedule.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Simulate policies on a trace of jobs.",
    examples=(
        (
            "schedule simulate jobs.csv --devices V100=4,T4=4 --policy easyscale,weighing",
            "Compare two policies.",
        ),
    ),
)
@_trace
@_policy("Simulate these policies, such as easyscale,weighing.", metavar="NAMES", default="all")
@option(_OUTPUT, "--json", type=OUTPUT_FILE, metavar="FILE", help="Write the figures.")
@option(
    _OUTPUT,
    "--draw",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write a picture of which job had which devices.",
)
def simulate(trace: str, json: str | None, draw: str | None, **options: Any) -> int:
    """Simulate policies on a trace of jobs, and print a table of their completion times.

    TRACE is a CSV file of jobs: hxla's form, EasyScale's or Pollux's. The policies are
    one-at-a-time, backfill, shortest-remaining, easyscale-alike, easyscale and weighing.
    """
    from ..scheduler.commands import simulate_command

    click.echo(simulate_command(_options(trace, **options), write_json=json, draw=draw), nl=False)
    return 0


@schedule.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Explain one decision of a simulation.",
    examples=(
        (
            "schedule explain jobs.csv --devices V100=4,T4=4 --policy weighing --at 600",
            "Say why each job has its devices 600 seconds after the start.",
        ),
    ),
)
@_trace
@_policy("The policy that decides. Required.")
@option(
    _RULES,
    "--at",
    type=SECONDS,
    required=True,
    metavar="SECONDS",
    help="Explain the newest decision at this time of the trace.",
)
def explain(trace: str, at: float, **options: Any) -> int:
    """Explain one decision of a policy on a trace: the devices of each job before, after, and why.

    TRACE is a CSV file of jobs: hxla's form, EasyScale's or Pollux's. The policies are
    one-at-a-time, backfill, shortest-remaining, easyscale-alike, easyscale and weighing.
    """
    from ..scheduler.commands import explain_command

    click.echo(explain_command(_options(trace, **options), at), nl=False)
    return 0


@schedule.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Run several jobs on shared devices.",
    examples=(
        (
            "schedule run jobs.toml --mesh mine.toml --policy weighing --out week",
            "Run jobs on the devices of a mesh file, and record each decision.",
        ),
        ("schedule run jobs.toml --ray auto --policy weighing", "Run jobs on a Ray cluster."),
    ),
)
@click.argument("jobs", type=click.Path())
@mesh_option(_JOBS, "The devices of this machine, as a mesh file that is read again when changed.")
@option(
    _JOBS,
    "--ray",
    metavar="ADDRESS",
    help="Use the nodes of the Ray cluster at this address; auto: of the running one.",
)
@_policy("The policy that decides. Required.")
@_times
@option(
    _RULES,
    "--learn-speeds",
    is_flag=True,
    help="Use the measured speeds of the jobs, not those of the file.",
)
@option(
    _OUTPUT,
    "--out",
    type=click.Path(file_okay=False),
    metavar="NEW_FOLDER",
    default="schedule",
    show_default=True,
    help="Write the record and the output of the jobs to this folder.",
)
def run(
    jobs: str,
    mesh: str | None,
    ray: str | None,
    policy: tuple[str, ...],
    move_seconds: float,
    interval: float,
    learn_speeds: bool,
    out: str,
) -> int:
    """Run several elastic jobs on shared devices, as a policy decides.

    JOBS is a TOML file of the jobs. The policies are easyscale-alike, easyscale and weighing.
    """
    from ..scheduler.commands import LiveOptions, run_command

    return run_command(
        LiveOptions(
            jobs=jobs,
            mesh=mesh,
            ray=ray,
            policies=policy,
            move_seconds=move_seconds,
            interval_seconds=interval,
            learns_speeds=learn_speeds,
            folder=out,
        )
    )


@schedule.command(
    cls=CommandWithExamples,
    context_settings=SETTINGS,
    short_help="Decide a recorded run again, and compare.",
    examples=(("schedule replay week/record.jsonl --draw week.png", "Check and draw a record."),),
)
@click.argument("record", type=click.Path())
@option(
    _OUTPUT,
    "--draw",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write a picture of which job had which devices.",
)
def replay(record: str, draw: str | None) -> int:
    """Decide a recorded run again, and say whether each decision is the recorded one.

    RECORD is the record.jsonl of hxla schedule run. The exit code is 1 if a decision differs.
    """
    from ..scheduler.commands import replay_command

    text, code = replay_command(record, draw=draw)
    click.echo(text, nl=False)
    return code
