"""PyTorch's FSDP2 in turns of a step: what benchmarks/torch_fsdp.py starts.

Each block and the rest of the model is one group of `fully_shard`. All combinations of its three
switches are tried: whether parameters are dropped after a group's forward, and, but for the last
microbatch, whether they are dropped after its backward and gradients summed over processes. Each
process takes its own number of examples, by hand, and its losses are weighted so that FSDP's mean
over processes is the mean over the global batch: the same without `--shares`, with them what suits
these shares of a core, or the times that the processes measured.

Every process has to enter every collective. So the processes may take unequal numbers of
microbatches only if all switches are off, for then the first microbatch gathers and the last one
sums. Else one would wait for a collective that another never enters, so there they take equal
numbers of microbatches of unequal sizes. The fastest is taken, by two steps of each after a first
one: of the switches, and then with these of the counts and of `--microbatch-sizes`.
"""

import argparse
import contextlib
import itertools
import json
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch_counts
from torch.autograd.profiler import profile
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_counts import everyones, suited
from torch_gpt import GPT, RANK, SIZE, adamw, join, library
from turns import forget_peak, peak_resident_bytes, take_turn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--microbatch-sizes", type=int, nargs="+", required=True)
parser.add_argument("--shares", type=float, nargs="+", help="of a core, of each process")
parser.add_argument(
    "--least-memory", action="store_true", help="all switches on, and blocks that are recomputed"
)
args = parser.parse_args()


class Switches(NamedTuple):
    """FSDP2's own names; the last two do not hold for the last microbatch, where they are on."""

    reshard_after_forward: bool
    reshard_after_backward: bool
    gradient_sync: bool


windows = library()
join()
mesh = init_device_mesh("cpu", (SIZE,))


def microbatches(counts, size, switches, num_steps):
    """Texts of this process's microbatches in a step."""
    own = torch_counts.own_examples(counts, num_steps)
    if not any(switches):
        return [windows(part) for part in own.split(size)]
    num = min(math.ceil(max(counts) / size), min(counts))
    return [windows(part) for part in own.tensor_split(num)]


def stepper(counts, size, switches):
    """A new model, its optimizer, and a function that does a step and returns its loss here."""
    torch.manual_seed(0)
    model = GPT()
    for n, block in enumerate(model.blocks):
        model.blocks[n] = checkpoint_wrapper(block) if args.least_memory else block
        fully_shard(
            model.blocks[n], mesh=mesh, reshard_after_forward=switches.reshard_after_forward
        )
    fully_shard(model, mesh=mesh)  # itself, it keeps its parameters from forward to backward
    optimizer = adamw(model.parameters())

    @contextlib.contextmanager
    def microbatch(is_last):
        model.set_reshard_after_backward(is_last or switches.reshard_after_backward)
        model.set_requires_gradient_sync(is_last or switches.gradient_sync)
        yield

    def step(num_steps):
        texts = microbatches(counts, size, switches, num_steps)
        return torch_counts.step(model, optimizer, texts, args.batch_size, microbatch)

    numbers = itertools.count()
    return model, optimizer, lambda: step(next(numbers))


def most_bytes(model, optimizer, step):
    """The most that this process holds of tensors in a step, the shards that stay included."""
    states = [x for state in optimizer.state.values() for x in state.values()]
    stay = [*model.parameters(), *states]
    held = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in stay)
    with profile(profile_memory=True) as profiled:
        step()
    events = (e for e in profiled.kineto_results.events() if e.name() == "[memory]")
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return held + max(itertools.accumulate(changes))


def all_counts(size):
    """That may suit microbatches of a size, the likeliest first."""
    if not args.shares:
        return [suited([1.0] * SIZE, args.batch_size)]
    by_share = suited([1 / share for share in args.shares], args.batch_size)
    by_time = suited(torch_counts.measured(GPT(), windows(torch.arange(size))), args.batch_size)
    return list(dict.fromkeys((by_share, by_time)))


def tried(setting):
    """Seconds of its step."""
    *_, step = stepper(*setting)
    return torch_counts.tried(step)


settings = [(counts, size) for size in args.microbatch_sizes for counts in all_counts(size)]
if args.least_memory:
    forms = [Switches(True, True, True)]
else:
    forms = [Switches(*on) for on in itertools.product([True, False], repeat=3)]
asked = [(*settings[0], switches) for switches in forms]
seconds = {setting: tried(setting) for setting in asked}
switches = min(seconds, key=seconds.get)[2]
for setting in settings[1:]:
    seconds[*setting, switches] = tried((*setting, switches))
best = min(seconds, key=seconds.get)
*trained, step = stepper(*best)
losses = []
for n in range(args.turns + 1):
    losses.append(step())
    if n == 0:
        forget_peak()
    take_turn(args.folder, RANK)
resident_bytes = peak_resident_bytes()


def named(counts, size, switches):
    return {"counts": counts, "microbatch_size": size, **switches._asdict()}


told = {
    **named(*best),
    "tried": [{**named(*setting), "seconds": round(s, 4)} for setting, s in seconds.items()],
    "resident_bytes": resident_bytes,
    "memory_bytes": most_bytes(*trained, step),
    "losses": [round(sum(each), 4) for each in zip(*everyones(losses), strict=True)],
    "torch": torch.__version__,
}
if RANK == 0:
    print("RESULT " + json.dumps(told), flush=True)
dist.destroy_process_group()
