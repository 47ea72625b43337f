"""The command line; each command imports its modules when it runs, as a launcher needs no jax."""

import argparse
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from ._src.core.errors import HxlaError, InspectError, LaunchError, ScheduleError
from ._src.launch import launcher
from ._src.launch.batch_tasks import cluster_in_sight

if TYPE_CHECKING:
    from ._src.inspect.inspection import Inspection


_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        return _run(args)
    except HxlaError as error:
        print(f"hxla: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hxla: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hxla", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="start a script on every accelerator")
    where = run.add_mutually_exclusive_group()
    where.add_argument("--mesh", help="mesh file, or the name of a built-in one")
    where.add_argument("-n", type=int, help="number of processes")
    where.add_argument("--ray", metavar="ADDRESS", help="of --elastic: a Ray cluster, or auto")
    run.add_argument("--nodes", metavar="FILE", help="of --ray: IDs of those that may be used")
    run.add_argument("--plan", metavar="FILE", help="of hxla plan --write: what is to run")
    run.add_argument("--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL")
    run.add_argument("--dump", metavar="DIR", help="write what XLA makes of it, for hxla inspect")
    run.add_argument("--elastic", action="store_true", help="go on as devices come and go")
    run.add_argument("--min", type=int, metavar="N", help="of --elastic: fewest devices (1)")
    run.add_argument("--max", type=int, metavar="N", help="of --elastic: most devices")
    run.add_argument("--heartbeat", type=float, metavar="S", help="of --elastic: longest silence")
    run.add_argument("--events", metavar="FILE", help="of --elastic: write what happened")
    devices = commands.add_parser("devices", help="what is here, how fast it is, and how joined")
    devices.add_argument("--measure", action="store_true", help="time products, copies and links")
    devices.add_argument("--write", metavar="FILE", help="write a mesh file of it")
    profile = commands.add_parser("profile", help="measure a script's model on these devices")
    profile.add_argument("--mesh", help="mesh file, or the name of a built-in one")
    profile.add_argument("--write", metavar="FILE", default="profile.json", help="where to")
    profile.add_argument("--microbatch-sizes", type=_sizes, default=(), metavar="1,2,4")
    profile.add_argument("--segments", type=int, default=8, help="most parts of the model")
    profile.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)
    plan = commands.add_parser("plan", help="plan a script's training for any cluster")
    plan.add_argument("--mesh", required=True, help="mesh file, or the name of a built-in one")
    plan.add_argument("--compare", metavar="MESH", help="another mesh to set beside it")
    plan.add_argument("--profile", metavar="FILE", help="from hxla profile; default: estimates")
    plan.add_argument("--write", metavar="FILE", help="the plan, for hxla run --plan")
    plan.add_argument("--draw", metavar="FOLDER", help="pictures and Perfetto traces")
    plan.add_argument("--microbatch-sizes", type=_sizes, default=(), metavar="1,2,4")
    plan.add_argument(
        "--segments", type=int, help="most parts of the model (8 to 96, as the devices suggest)"
    )
    plan.add_argument("--stages", type=int, help="most stages")
    plan.add_argument(
        "--tensor", type=_sizes, default=(), metavar="2,4", help="default: all, over known links"
    )
    plan.add_argument("--no-recompute", action="store_true", help="keep activations always")
    plan.add_argument(
        "--seconds",
        type=float,
        help="processor seconds of the search (15, or half a step of the plan, 40 at most)",
    )
    schedule = commands.add_parser("schedule", help="which of several jobs holds which devices")
    schedule.add_argument("what", choices=("simulate", "explain", "run", "replay"))
    schedule.add_argument(
        "trace", help="CSV of jobs: ours, EasyScale's or Pollux's; of run TOML; of replay a record"
    )
    schedule.add_argument("--devices", type=_axes, default={}, metavar="V100=32,T4=16")
    schedule.add_argument("--policy", nargs="+", default=(), help="names (default: all)")
    schedule.add_argument("--move-seconds", type=float, default=20.0, help="pause of a move")
    schedule.add_argument("--interval", type=float, default=60.0, help="seconds between decisions")
    schedule.add_argument(
        "--learn-speeds", action="store_true", help="of run: the jobs' own, not those of the file"
    )
    schedule.add_argument(
        "--only-at-intervals", action="store_true", help="decide at no other time"
    )
    schedule.add_argument("--gangs", choices=("asked", "most"), default="asked", help="their size")
    schedule.add_argument("--uncut", action="store_true", help="Pollux's: no smaller microbatches")
    schedule.add_argument("--at", type=float, metavar="SECONDS", help="of the decision to explain")
    schedule.add_argument("--json", metavar="FILE", help="write the figures")
    schedule.add_argument("--draw", metavar="FILE", help="write a picture of who held what")
    schedule.add_argument("--mesh", help="of run: mesh file of the devices, read again")
    schedule.add_argument("--ray", metavar="ADDRESS", help="of run: a Ray cluster, or auto")
    schedule.add_argument("--out", metavar="DIR", help="of run: for the record and what jobs print")
    for command in (run, profile, plan):
        words = "Python script, followed by its own arguments"
        command.add_argument(
            "-m", dest="is_module", action="store_true", help="SCRIPT is a module's name"
        )
        command.add_argument("script", help=words)
        command.add_argument("arguments", nargs=argparse.REMAINDER)
    inspect = commands.add_parser("inspect", help="what XLA really did: reads a dump")
    inspect.add_argument(
        "dump", nargs="?", help="folder of hxla run --dump or of XLA, a file of it; or a script"
    )
    inspect.add_argument("--axes", type=_axes, default=None, metavar="data=2,tensor=4")
    inspect.add_argument("--mesh", help="mesh file, to predict the collectives' times on")
    inspect.add_argument("--rules", help="rule set that parameters should follow")
    inspect.add_argument("--diff", metavar="DUMP", help="a later dump: what changed")
    inspect.add_argument("--html", metavar="FILE", help="write one page, of --diff too")
    inspect.add_argument("--profile", metavar="DIR", help="of jax.profiler.trace: who waited")
    inspect.add_argument("--plan", metavar="FILE", help="that ran: sizes of its parts")
    inspect.add_argument("--predicted", metavar="FILE", help="of hxla plan --write, for --html")
    inspect.add_argument(
        "--bits",
        nargs=2,
        metavar=("A", "B"),
        help="first equation whose bits differ: records, scripts, or devices that run a script",
    )
    inspect.add_argument("--bits-record", metavar="FILE", help="write a script's record for --bits")
    inspect.add_argument("--device", metavar="gpu:0", help="for --bits-record")
    inspect.add_argument("--microbatch-size", type=int, help="for --bits and --bits-record")
    inspect.add_argument("--json", action="store_true", help="for machines")
    inspect.add_argument("--limit", type=int, default=20, help="most rows of a table")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.command == "devices":
        from ._src.cluster import detect

        detect.command(measured=args.measure, write=args.write)
        return 0
    if args.command == "inspect":
        return _inspect(args)
    if args.command == "schedule":
        if args.what in ("run", "replay"):
            return _schedule_live(args)
        print(_schedule(args), end="")
        return 0
    script = [*(["-m"] * args.is_module), args.script, *args.arguments]
    if not args.is_module and not os.path.isfile(args.script):
        raise LaunchError(f"no script {args.script!r} in {os.getcwd()}")
    if args.command == "profile":
        return _profile(args, script)
    if args.command == "plan":
        return _plan(args, script)
    tasks = cluster_in_sight()
    if args.elastic and tasks:
        raise LaunchError(
            f"--elastic starts the processes of one machine itself, and this is one of {tasks}"
            ": start one task, or leave it out"
        )
    if tasks and args.mesh is None and args.n is None:
        if args.dump is not None:  # other tasks write into it too
            rank = next((os.environ[n] for n in _RANKS if n in os.environ), "0")
            os.environ |= launcher.dumping(os.environ, os.path.abspath(args.dump), rank)
        if args.plan is not None:
            os.environ["HXLA_PLAN"] = os.path.abspath(args.plan)
        from ._src.launch.join import run_script

        run_script(script)  # one task per accelerator is running already
        return 0
    if args.elastic:
        return _run_elastic(args, script)
    elastic_flags = [
        name
        for name in ("ray", "nodes", "min", "max", "heartbeat", "events")
        if getattr(args, name) is not None
    ]
    if elastic_flags:
        raise LaunchError(f"--{elastic_flags[0]} is of --elastic: give that too")
    return launcher.run(
        script,
        mesh=args.mesh,
        number=args.n,
        plan=args.plan,
        grace_seconds=args.grace,
        dump=args.dump,
    )


def _run_elastic(args: argparse.Namespace, script: list[str]) -> int:
    if args.plan is not None or args.dump is not None:
        raise LaunchError("--elastic makes plans as devices come and go: leave out --plan, --dump")
    if args.grace < 0:
        raise LaunchError(f"--grace {args.grace:g}: use no less than zero seconds")
    if args.nodes is not None and args.ray is None:
        raise LaunchError("--nodes are those of a Ray cluster: give --ray too")
    return launcher.run_elastic(
        script,
        rules=launcher.elastic_rules(args.min, args.max, args.heartbeat),
        mesh=args.mesh,
        number=args.n,
        ray=args.ray,
        nodes=args.nodes,
        grace_seconds=args.grace,
        events=args.events,
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _axes(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(","))
    return {name: int(size) for name, size in pairs}


def _inspect_bits(args: argparse.Namespace) -> int:
    from ._src.session.bits import compare_sides, record_script

    if args.bits is None:
        if args.dump is None:
            raise InspectError("--bits-record writes what a script computes: say which script")
        record_script(args.dump, args.bits_record, device=args.device, size=args.microbatch_size)
        return 0
    if args.bits_record is not None or args.device is not None:
        raise InspectError("--bits compares: leave out --bits-record and --device")
    comparison = compare_sides(args.dump, args.bits, args.microbatch_size)
    print(comparison.to_json() if args.json else comparison.text(args.limit))
    return 0 if comparison.is_equal else 1


def _inspect(args: argparse.Namespace) -> int:
    if args.bits is not None or args.bits_record is not None:
        return _inspect_bits(args)
    if args.dump is None:
        raise InspectError("say what to inspect: a dump, or --bits A B")
    if args.device is not None or args.microbatch_size is not None:
        raise InspectError("--device and --microbatch-size are for --bits and --bits-record")
    _inspect_dump(args)
    return 0


def _inspect_dump(args: argparse.Namespace) -> None:
    from ._src.inspect.inspect import inspect

    def read(dump: str) -> "Inspection":
        return inspect(dump, mesh=args.axes, cluster=args.mesh, rules=args.rules)

    if args.html is None and args.predicted:
        raise InspectError("--predicted is drawn on a page: give --html FILE")
    if args.diff is not None and (args.profile or args.predicted or args.plan):
        raise InspectError("--diff has no timeline: leave out --profile, --predicted and --plan")
    if args.json and args.html is None and (args.profile or args.plan):
        raise InspectError("--json is of the programs: leave out --profile and --plan")
    inspection = read(args.dump)
    if args.diff is None:
        if args.html is not None:
            inspection.write_html(args.html, profile=args.profile, predicted=args.predicted)
        print(inspection.to_json() if args.json else _text(inspection, args))
        return
    later = read(args.diff)
    if args.html is not None:
        inspection.write_diff_html(later, args.html)
    lines = inspection.diff(later)
    print(json.dumps(lines, indent=1) if args.json else "\n".join(lines) or "nothing changed")


def _text(inspection: "Inspection", args: argparse.Namespace) -> str:
    return inspection.text(limit=args.limit, plan=args.plan, profile=args.profile)


def _schedule(args: argparse.Namespace) -> str:
    from ._src.scheduler import schedule_commands as commands

    if args.learn_speeds:
        raise ScheduleError("--learn-speeds is of run: a trace says how fast its jobs are")
    options = commands.ScheduleOptions(
        trace=args.trace,
        devices=args.devices,
        policies=tuple(args.policy),
        move_seconds=args.move_seconds,
        interval_seconds=args.interval,
        is_eager=not args.only_at_intervals,
        gangs=args.gangs,
        is_cut=not args.uncut,
    )
    if args.what == "simulate":
        if args.at is not None:
            raise ScheduleError("simulate tells a whole trace: leave out --at, or explain")
        return commands.simulate_command(options, write_json=args.json, draw=args.draw)
    if args.at is None or args.json or args.draw:
        raise ScheduleError(
            "explain tells one decision: give --at SECONDS, no --json and no --draw"
        )
    return commands.explain_command(options, args.at)


def _schedule_live(args: argparse.Namespace) -> int:
    from ._src.scheduler import live_commands as commands

    trace_flags = [
        name
        for name in ("devices", "at", "json", "uncut", "only_at_intervals")
        if getattr(args, name) not in (None, False, {})
    ]
    if trace_flags:
        raise ScheduleError(f"--{trace_flags[0].replace('_', '-')} is of simulate and explain")
    if args.what == "replay":
        if args.learn_speeds:
            raise ScheduleError("--learn-speeds is of run: a record says how fast its jobs were")
        text, code = commands.replay_command(args.trace, draw=args.draw)
        print(text, end="")
        return code
    if args.draw is not None:
        raise ScheduleError("run writes a record: hxla schedule replay draws it")
    return commands.run_command(
        commands.LiveOptions(
            jobs=args.trace,
            mesh=args.mesh,
            ray=args.ray,
            policies=tuple(args.policy),
            move_seconds=args.move_seconds,
            interval_seconds=args.interval,
            learns_speeds=args.learn_speeds,
            folder=args.out or "schedule",
        )
    )


def _profile(args: argparse.Namespace, command: list[str]) -> int:
    if args.mesh is not None and not args.joined:
        flags = ["--joined", "--write", os.path.abspath(args.write)]
        flags += ["--segments", str(args.segments)]
        if args.microbatch_sizes:
            flags += ["--microbatch-sizes", ",".join(map(str, args.microbatch_sizes))]
        return launcher.run(command, mesh=args.mesh, program=("hxla", "profile", *flags))
    from ._src.launch.join import run_joined
    from ._src.session.capture import job_of
    from ._src.session.profiling import profile

    def work() -> None:
        try:
            job, request = job_of(command)
            profile(
                job,
                request,
                file=os.path.abspath(args.write),
                microbatch_sizes=args.microbatch_sizes,
                num_segments=args.segments,
            )
        except HxlaError as error:
            sys.exit(f"hxla: {error}")

    run_joined(work)
    return 0


def _plan(args: argparse.Namespace, command: list[str]) -> int:
    import jax

    from ._src.choose.search_options import SearchOptions
    from ._src.session.commands import plan_script

    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator
    budget = {"seconds": 15.0}
    if args.seconds is not None:
        budget = {"seconds": args.seconds, "most_seconds": args.seconds}
    plan_script(
        command,
        meshes=(args.mesh,) if args.compare is None else (args.mesh, args.compare),
        profile=args.profile,
        write=args.write,
        draw=args.draw,
        search=SearchOptions(
            microbatch_sizes=args.microbatch_sizes,
            num_segments=args.segments,
            **budget,
            max_stages=args.stages,
            tensors=args.tensor,
            recompute=not args.no_recompute,
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
