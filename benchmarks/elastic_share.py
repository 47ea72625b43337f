"""What of its time an elastic job spends on being elastic, while nothing disturbs it.

    python benchmarks/elastic_share.py

Two runs of the same job differ by a tenth in speed, however many steps are timed, so a difference
of less is not seen beside `hxla run` (`benchmarks/elastic_overhead.py`). This adds up instead what
an elastic job does and another does not: processor time of the launcher, processor time of each
member's thread that listens and reports, and what the main thread does of it before and after an
update, by a profiler, which makes it more.
The model is that of examples/gpt.py on two processes with a core each.
Writes benchmarks/results/elastic_share.json.
"""

import cProfile
import json
import os
import pathlib
import pstats
import subprocess
import sys
import tempfile
import threading
import time

import results

ROOT = pathlib.Path(__file__).parent.parent
SETTLED = 20  # steps after which it is counted


def processor_seconds(pid, thread=None):
    """Of a process, or of one of its threads."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    fields = pathlib.Path(path).read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def launcher_seconds(server):
    """Processor time of the launcher, the server that forks members, and what else it started."""
    text = pathlib.Path(f"/proc/{server}/stat").read_text().rsplit(")", 1)[1]
    launcher = int(text.split()[1])
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sum(map(processor_seconds, [launcher, *children]))


def work(steps):
    """What each process of the job does."""
    sys.path[:0] = [str(ROOT / "examples")]
    import jax
    import optax
    from flax import nnx
    from gpt import GPT, library, loss

    import hxla

    profiler, server = cProfile.Profile(), int(os.environ["HXLA_LAUNCHER_PID"])
    began = {}

    def seen(record, session):
        if record.step in (SETTLED, steps):
            [thread] = [t.native_id for t in threading.enumerate() if t.name == "hxla-member"]
            began[record.step] = {
                "wall": time.perf_counter(),
                "launcher": launcher_seconds(server),
                "member": processor_seconds(os.getpid(), thread),
            }
            if record.step == SETTLED:
                profiler.enable()
            else:
                profiler.disable()

    hxla.train(
        hxla.Job(
            GPT(nnx.Rngs(0)),
            library(),
            loss,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3)),
            batch_size=16,
        ),
        microbatch_size=2,
        steps=steps,
        counts="even",
        callbacks=[seen],
    )
    found = {key: began[steps][key] - began[SETTLED][key] for key in began[steps]}
    # A generator's time is that until it yields and after, not of the update in between.
    profiled = pstats.Stats(profiler).stats.items()
    [found["main"]] = [
        cumulative
        for (file, _, name), (_, _, _, cumulative, _) in profiled
        if file.endswith("session/member.py") and name == "updating"
    ]
    print("RESULT", json.dumps(found | {"rank": jax.process_index()}), flush=True)


def main():
    """Run the job and add up."""
    parser = results.parser(__doc__, "elastic_share")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--work", action="store_true", help="be a process of the job")
    args = parser.parse_args()
    if args.work:
        work(args.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        mesh = pathlib.Path(folder, "mesh.toml")
        mesh.write_text('name = "two"\n' + '[[device]]\nkind = "cpu"\ncore_share = 1.0\n' * 2)
        command = [sys.executable, "-m", "hxla", "run", "--elastic", "--mesh", str(mesh)]
        command += [__file__, "--work", "--steps", str(args.steps)]
        told = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ).stdout
    rows = [
        json.loads(line.split("RESULT", 1)[1]) for line in told.splitlines() if "RESULT" in line
    ]
    num, wall = len(rows), sum(row["wall"] for row in rows) / len(rows)
    each = {
        "launcher": sum(row["launcher"] for row in rows) / num / num,
        "members' threads": sum(row["member"] for row in rows) / num,
        "main threads": sum(row["main"] for row in rows) / num,
    }
    shares = {name: round(seconds / wall, 5) for name, seconds in each.items()}
    results.write(
        args.out,
        {
            "seconds a step": round(wall / (args.steps - SETTLED), 4),
            "share of the time of a core of each": shares | {"all": round(sum(shares.values()), 5)},
        },
    )


main()
