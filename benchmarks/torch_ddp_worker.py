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
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_gpt import RANK, SIZE, adamw, cross_entropy, join, library
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


def everyones(number):
    """A number of every process."""
    found = [None] * SIZE
    dist.all_gather_object(found, number)
    return found


def backward(text, weight):
    loss = cross_entropy(model(text[:, :-1]), text[:, 1:]) * weight
    loss.backward()
    return loss.item()


def suited(seconds):
    """Examples of each process with which all end together, by the seconds of an example."""
    counts = [1] * SIZE
    for _ in range(args.batch_size - SIZE):
        counts[min(range(SIZE), key=lambda r: (counts[r] + 1) * seconds[r])] += 1
    return tuple(counts)


def measured(size):
    """Seconds of an example on each process, while all of them work."""
    text, times = windows(torch.arange(size)), []
    dist.barrier()
    for _ in range(6):
        began = time.perf_counter()
        with model.no_sync():
            backward(text, 1.0)
        times.append((time.perf_counter() - began) / size)
    optimizer.zero_grad()
    return everyones(statistics.mean(times[1:]))


def step(counts, size):
    """One step; returns the loss of the global batch."""
    global num_steps
    start = num_steps * args.batch_size + sum(counts[:RANK])
    parts = torch.arange(start, start + counts[RANK]).split(size)
    loss = 0.0
    for part in parts:
        # DDP divides by the number of processes.
        weight = len(part) / args.batch_size * SIZE
        with contextlib.nullcontext() if part is parts[-1] else model.no_sync():
            loss += backward(windows(part), weight) / SIZE
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    num_steps += 1
    return loss


def tried(counts, size):
    """Seconds of a step, the slowest process's, by two after a first one."""
    times = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        step(counts, size)
        times.append(time.perf_counter() - began)
    return max(everyones(statistics.mean(times[1:])))


settings = []
for size in args.microbatch_sizes:
    if args.shares:
        by_time, by_share = suited(measured(size)), suited([1 / share for share in args.shares])
        settings += [(counts, size) for counts in dict.fromkeys((by_time, by_share))]
    else:
        settings.append((suited([1.0] * SIZE), size))
seconds = {setting: tried(*setting) for setting in settings}
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
