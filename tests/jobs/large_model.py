"""A process of a job whose model fits no device: it joins a cgroup before it loads anything large.

    hxla run --mesh FILE tests/jobs/large_model.py --limit BYTES --checkpoints FOLDER ...

Prints what its memory came to beside the plan's figure.
"""

import argparse
import json
import os
import pathlib

parser = argparse.ArgumentParser()
parser.add_argument("--limit", type=int, nargs="+", required=True, help="bytes of each process")
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--layers", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--save_at", type=int, required=True)
parser.add_argument("--devices", type=int, required=True)
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--axis", default="tensor", help="over which the devices are")
parser.add_argument("--shares", default="auto", help="of the state")
parser.add_argument("--counts", type=int, nargs="+", help="microbatches of each device")
args = parser.parse_args()


def controller():
    """Folder of this process's memory cgroup, the file that limits it, and that of its peak."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = pathlib.Path("/sys/fs/cgroup/memory", path.lstrip("/"))
            return base, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
        if not controllers and pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists():
            base = pathlib.Path("/sys/fs/cgroup", path.lstrip("/"))
            return base, "memory.max", "memory.peak"
    raise SystemExit("there is no memory controller")


parent, knob, most = controller()
cgroup = parent / f"large-model-{os.getpid()}"
cgroup.mkdir()
rank = int(os.environ["HXLA_PROCESS_ID"])
(cgroup / knob).write_text(str(args.limit[rank % len(args.limit)]))
(cgroup / "cgroup.procs").write_text(str(os.getpid()))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import hxla  # noqa: E402
from support.inside.lower import Programs  # noqa: E402
from support.large_net import Net, loss  # noqa: E402


def bytes_of_process(what):
    """Memory of this process: `VmHWM` is the most that it had at a time, `VmRSS` what it has."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{what}:")[1].split()[0])


def store_when_measured(programs):
    """The place for the state; before there is any, the process has itself and its programs."""
    own_bytes.append(bytes_of_process("VmRSS"))
    return make_store(programs)


own_bytes = []
make_store, Programs.store = Programs.store, store_when_measured


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
job = hxla.Job(
    lambda: Net(args.width, args.layers, nnx.Rngs(0)),
    data,
    loss,
    optax.adam(1e-4),
    batch_size=4,
    config={"memory": {"shares": args.shares}} if args.shares != "auto" else None,
)

if args.axis == "tensor":
    plan = job.plan(mesh={"data": 1, "tensor": args.devices}, rules=CUT, microbatch_size=2)
else:  # nothing says how it is to fit
    counts = args.counts or "even"
    plan = job.plan(mesh={"data": args.devices}, microbatch_size=1, counts=counts)
    print(f"stage {plan.placement.zero}", flush=True)
with job.open(plan, steps=args.steps, checkpoint_dir=args.checkpoints) as session:
    some = jax.tree.map(lambda x: x[:8], data)
    if session.step_number:  # `session.state` would bring all of it into another form
        print(f"resumed {session.step_number} {session.evaluate(some).loss}", flush=True)
    for record in session:
        print(f"loss {record.step} {record.loss:.6f}", flush=True)
        if session.step_number == args.save_at:
            if args.axis == "tensor":  # else it would have the parameters whole meanwhile
                evaluation = session.evaluate(some).loss
                session.save()
                print(f"saved {session.step_number} {evaluation}", flush=True)
            break
    predicted = session.plan.prediction.devices[rank].memory_bytes
    told = {
        "rank": rank,
        "peak": bytes_of_process("VmHWM"),
        "of limit": int((cgroup / most).read_text()),
        "predicted": predicted + own_bytes[-1],
        "of process": own_bytes[-1],
        "sums": plan.placement.sums,
    }
    print("told", json.dumps(told), flush=True)
    for record in session:
        print(f"loss {record.step} {record.loss:.6f}", flush=True)
print(f"ended with {bytes_of_process('VmHWM')}", flush=True)
