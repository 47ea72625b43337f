"""One of the processes of islands.py: two sessions in turns, with and without islands."""

import argparse
import contextlib
import json
import pathlib
import sys
import time

import jax

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("coordinator")
parser.add_argument("processes", type=int)
parser.add_argument("options", type=json.loads)
parser.add_argument("rank", type=int)
args = parser.parse_args()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(args.coordinator, args.processes, args.rank)

import optax  # noqa: E402
from flax import nnx  # noqa: E402
from gpt import GPT, library, loss  # noqa: E402

import hxla  # noqa: E402

EVALUATED = 256  # examples
asked, steps = args.options, args.options["steps"]
text = library()["text"][:, : asked["length"] + 1]
held_back, data = {"text": text[:EVALUATED]}, {"text": text[EVALUATED:]}


def sent_bytes() -> int:
    """Bytes that left this process' network."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    [line] = [line for line in lines if line.split(":")[0].strip().startswith("far")]
    return int(line.split(":")[1].split()[8])


def job_of(islands: dict) -> hxla.Job:
    """The same job, perhaps with islands."""
    model = GPT(
        nnx.Rngs(0),
        length=asked["length"],
        width=asked["width"],
        heads=4,
        layers=asked["layers"],
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, asked["rate"], steps // 20, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return hxla.Job(
        model, data, loss, optimizer, batch_size=asked["batch"], config={"islands": islands}
    )


def settle() -> None:
    """Wait until this process has nothing left to compute or send."""
    jax.block_until_ready(jax.live_arrays())


islands = {"every": asked["every"], "replicas": [1] * args.processes}
with contextlib.ExitStack() as stack:
    sessions = {}
    for name, own in (("together", {}), ("islands", islands)):
        job = job_of(own)
        plan = job.plan(microbatch_size=asked["microbatch"], counts="even")
        opened = job.open(plan, steps=steps, balance=False, quiet=True)
        sessions[name] = stack.enter_context(opened)
    found = {name: {"seconds": [], "bytes": []} for name in sessions}
    losses = {name: [] for name in sessions}
    for n in range(steps // asked["every"]):
        for name in list(sessions)[:: -1 if n % 2 else 1]:
            settle()
            began, before = time.perf_counter(), sent_bytes()
            for _ in range(asked["every"]):
                losses[name].append(sessions[name].step().loss)
            settle()
            found[name]["seconds"].append(time.perf_counter() - began)
            found[name]["bytes"].append(sent_bytes() - before)
    for name, session in sessions.items():
        result = session.result()
        found[name] |= {
            "loss": session.evaluate(held_back).loss,
            "trained_losses": losses[name],
            "sha256": result.sha256,
            "numerics": result.plan.numerics,
            "parameters": sum(x.size for x in jax.tree.leaves(result.state)),
        }
print("RESULT " + json.dumps(found), flush=True)
