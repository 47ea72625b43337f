"""PyTorch's DistributedDataParallel in turns of a step: what benchmarks/torch_ddp.py starts.

Counts are set by hand, as one who knows would: each process takes its own number of examples, and
its losses are weighted so that DDP's mean over processes is the mean over the global batch. Without
`--shares` all have the same number; with them what suits these shares of a core, or the times that
the processes measured. Gradients of all but the last microbatch stay local. The fastest of these
counts and of `--microbatch-sizes` is taken, by two steps of each after a first one.
"""

import argparse
import contextlib
import json

import torch
import torch.distributed as dist
import torch_counts
from torch.nn.parallel import DistributedDataParallel
from torch_counts import everyones, suited
from torch_gpt import RANK, SIZE, adamw, join, library
from turns import take_turn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--microbatch-sizes", type=int, nargs="+", required=True)
parser.add_argument("--shares", type=float, nargs="+", help="of a core, of each process")
args = parser.parse_args()

windows = library()
model = DistributedDataParallel(join(), gradient_as_bucket_view=True)
optimizer = adamw(model.parameters())
num_steps = 0


def microbatch(is_last):
    return contextlib.nullcontext() if is_last else model.no_sync()


def step(counts, size):
    """One step; returns this process's share of the loss."""
    global num_steps
    parts = torch_counts.own_examples(counts, num_steps).split(size)
    texts = [windows(part) for part in parts]
    num_steps += 1
    return torch_counts.step(model, optimizer, texts, args.batch_size, microbatch)


settings = []
for size in args.microbatch_sizes:
    if args.shares:
        with model.no_sync():
            times = torch_counts.measured(model, windows(torch.arange(size)))
        by_time = suited(times, args.batch_size)
        by_share = suited([1 / share for share in args.shares], args.batch_size)
        settings += [(counts, size) for counts in dict.fromkeys((by_time, by_share))]
    else:
        settings.append((suited([1.0] * SIZE, args.batch_size), size))
seconds = {setting: torch_counts.tried(lambda s=setting: step(*s)) for setting in settings}
best = min(seconds, key=seconds.get)
losses = []
for _ in range(args.turns + 1):
    losses.append(step(*best))
    take_turn(args.folder, RANK)
told = {
    "counts": best[0],
    "microbatch_size": best[1],
    "tried": [
        {"counts": counts, "microbatch_size": size, "seconds": round(s, 4)}
        for (counts, size), s in seconds.items()
    ],
    "losses": [round(sum(each), 4) for each in zip(*everyones(losses), strict=True)],
    "torch": torch.__version__,
}
if RANK == 0:
    print("RESULT " + json.dumps(told), flush=True)
dist.destroy_process_group()
