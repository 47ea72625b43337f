"""The command line."""

import argparse
import json
import os
import sys

from ._cluster import _detect
from ._core._errors import HxlaError, InspectError, LaunchError
from ._inspect._inspection import Inspection
from ._launch import _launcher
from ._launch._join import cluster_in_sight, run_joined, run_script

_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="hxla", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="start a script on every accelerator")
    where = run.add_mutually_exclusive_group()
    where.add_argument("--mesh", help="mesh file, or the name of a built-in one")
    where.add_argument("-n", type=int, help="number of processes")
    run.add_argument("--plan", metavar="FILE", help="of hxla plan --write: what is to run")
    run.add_argument("--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL")
    run.add_argument("--dump", metavar="DIR", help="write what XLA makes of it, for hxla inspect")
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
    plan.add_argument("--seconds", type=float, default=10.0, help="time budget of the search")
    for command in (run, profile, plan):
        command.add_argument("script", help="Python script, followed by its own arguments")
        command.add_argument("arguments", nargs=argparse.REMAINDER)
    inspect = commands.add_parser("inspect", help="what XLA really did: reads a dump")
    inspect.add_argument("dump", help="folder of hxla run --dump or of XLA, or a file of it")
    inspect.add_argument("--axes", type=_axes, default=None, metavar="data=2,tensor=4")
    inspect.add_argument("--mesh", help="mesh file, to predict the collectives' times on")
    inspect.add_argument("--rules", help="rule set that parameters should follow")
    inspect.add_argument("--diff", metavar="DUMP", help="a later dump: what changed")
    inspect.add_argument("--html", metavar="FILE", help="write one page, of --diff too")
    inspect.add_argument("--profile", metavar="DIR", help="of jax.profiler.trace: who waited")
    inspect.add_argument("--plan", metavar="FILE", help="that ran: sizes of its parts")
    inspect.add_argument("--predicted", metavar="FILE", help="of hxla plan --write, for --html")
    inspect.add_argument("--json", action="store_true", help="for machines")
    inspect.add_argument("--limit", type=int, default=20, help="most rows of a table")
    args = parser.parse_args(arguments)
    try:
        if args.command == "devices":
            _detect.command(measured=args.measure, write=args.write)
            return 0
        if args.command == "inspect":
            _inspect(args)
            return 0
        script = [args.script, *args.arguments]
        if not os.path.isfile(args.script):
            raise LaunchError(f"no script {args.script!r} in {os.getcwd()}")
        if args.command == "profile":
            return _profile(args, script)
        if args.command == "plan":
            return _plan(args, script)
        if cluster_in_sight() and args.mesh is None and args.n is None:
            if args.dump is not None:  # other tasks write into it too
                rank = next((os.environ[n] for n in _RANKS if n in os.environ), "0")
                os.environ |= _launcher.dumping(os.environ, os.path.abspath(args.dump), rank)
            if args.plan is not None:
                os.environ["HXLA_PLAN"] = os.path.abspath(args.plan)
            run_script(script)  # one task per accelerator is running already
            return 0
        return _launcher.run(
            script,
            mesh=args.mesh,
            number=args.n,
            plan=args.plan,
            grace_seconds=args.grace,
            dump=args.dump,
        )
    except HxlaError as error:
        print(f"hxla: {error}", file=sys.stderr)
        return 2


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _axes(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(","))
    return {name: int(size) for name, size in pairs}


def _inspect(args: argparse.Namespace) -> None:
    from ._inspect._inspect import inspect

    def read(dump: str) -> Inspection:
        return inspect(dump, mesh=args.axes, cluster=args.mesh, rules=args.rules)

    if args.html is None and args.predicted:
        raise InspectError("--predicted is drawn on a page: give --html FILE")
    if args.diff is not None and (args.profile or args.predicted or args.plan):
        raise InspectError("--diff has no timeline: leave out --profile, --predicted and --plan")
    if args.json and args.html is None and (args.profile or args.plan):
        raise InspectError("--json is of the programs: leave out --profile and --plan")
    found = read(args.dump)
    if args.diff is None:
        if args.html is not None:
            found.write_html(args.html, profile=args.profile, predicted=args.predicted)
        print(found.to_json() if args.json else _text(found, args))
        return
    later = read(args.diff)
    if args.html is not None:
        found.write_diff_html(later, args.html)
    lines = found.diff(later)
    print(json.dumps(lines, indent=1) if args.json else "\n".join(lines) or "nothing changed")


def _text(found: Inspection, args: argparse.Namespace) -> str:
    return found.text(limit=args.limit, plan=args.plan, profile=args.profile)


def _profile(args: argparse.Namespace, command: list[str]) -> int:
    if args.mesh is not None and not args.joined:
        own = ["--joined", "--write", os.path.abspath(args.write)]
        own += ["--segments", str(args.segments)]
        if args.microbatch_sizes:
            own += ["--microbatch-sizes", ",".join(map(str, args.microbatch_sizes))]
        return _launcher.run(command, mesh=args.mesh, program=("hxla", "profile", *own))
    from ._run._capture import job_of
    from ._run._profiling import profile

    def work() -> None:
        try:
            job, wishes = job_of(command)
            profile(
                job,
                wishes.microbatch_size,
                wishes.reduction,
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

    from ._run._commands import plan_script
    from ._run._search_plan import SearchWishes

    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator
    plan_script(
        command,
        meshes=(args.mesh,) if args.compare is None else (args.mesh, args.compare),
        profile=args.profile,
        write=args.write,
        draw=args.draw,
        search=SearchWishes(
            microbatch_sizes=args.microbatch_sizes,
            num_segments=args.segments,
            seconds=args.seconds,
            max_stages=args.stages,
            tensors=args.tensor,
            recompute=not args.no_recompute,
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
