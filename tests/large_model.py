"""A process of a job whose model fits no device: it joins a cgroup before it loads anything large.

    hxla run --mesh FILE tests/large_model.py --limit BYTES --checkpoints FOLDER ...

Prints what its memory came to beside the plan's figure.
"""

import argparse
import json
import os
import pathlib

parser = argparse.ArgumentParser()
parser.add_argument("--limit", type=int, required=True, help="bytes of memory of this process")
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--layers", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--save_at", type=int, required=True)
parser.add_argument("--devices", type=int, required=True)
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--axis", default="tensor", help="over which the devices are")
args = parser.parse_args()


def controller():
    """Folder of this process's memory cgroup, and the file that limits it."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return pathlib.Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
        if not controllers and pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return pathlib.Path("/sys/fs/cgroup", path.lstrip("/")), "memory.max"
    raise SystemExit("there is no memory controller")


parent, knob = controller()
cgroup = parent / f"large-model-{os.getpid()}"
cgroup.mkdir()
(cgroup / knob).write_text(str(args.limit))
(cgroup / "cgroup.procs").write_text(str(os.getpid()))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import hxla  # noqa: E402


def peak_bytes():
    """The most memory that this process had at a time."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x))) / args.layers


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(args.width, rngs) for _ in range(args.layers)])
        self.head = nnx.Linear(args.width, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean(-1)


CUT = hxla.RuleSet(
    name="mlp",
    rules=(
        hxla.Rule(path=".*/up/kernel", axes=((), ("tensor",))),
        hxla.Rule(path=".*/up/bias", axes=(("tensor",),)),
        hxla.Rule(path=".*/down/kernel", axes=(("tensor",), ())),
        hxla.Rule(path="embed/embedding", axes=((), ("tensor",))),
        hxla.Rule(path="head/kernel", axes=(("tensor",), ())),
    ),
)
text = np.arange(32 * 9).reshape(32, 9) * 7 % 64
data = {"tokens": text[:, :-1].astype(np.int32), "next": text[:, 1:].astype(np.int32)}
job = hxla.Job(lambda: Net(nnx.Rngs(0)), data, loss, optax.adam(1e-4), batch_size=4)

jnp.zeros(1).block_until_ready()
interpreter = peak_bytes()
if args.axis == "tensor":
    plan = job.plan(mesh={"data": 1, "tensor": args.devices}, rules=CUT, microbatch_size=2)
else:  # nothing says how it is to fit
    plan = job.plan(mesh={"data": args.devices}, microbatch_size=1, counts="even")
    print(f"stage {plan.placement.zero}", flush=True)
with job.open(plan, steps=args.steps, checkpoint_dir=args.checkpoints) as session:
    some = jax.tree.map(lambda x: x[:8], data)
    if session.state.step:
        print(f"resumed {session.state.step} {session.evaluate(some).loss}", flush=True)
    for record in session:
        print(f"loss {record.step} {record.loss:.6f}", flush=True)
        if session.state.step == args.save_at:
            if args.axis == "tensor":  # else it would have the parameters whole meanwhile
                evaluation = session.evaluate(some).loss
                session.save()
                print(f"saved {session.state.step} {evaluation}", flush=True)
            break
    [predicted] = {d.memory_bytes for d in session.plan.prediction.devices}
    told = {
        "peak": peak_bytes(),
        "predicted": predicted + interpreter,
        "interpreter": interpreter,
        "sums": plan.placement.sums,
    }
    print("told", json.dumps(told), flush=True)
    for record in session:
        print(f"loss {record.step} {record.loss:.6f}", flush=True)
print("ended", flush=True)
