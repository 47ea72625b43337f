"""The order of each stage's actions in PyTorch's pipelines, against our tables.

    python benchmarks/torch_schedules.py --torch PYTHON

PYTHON is an interpreter that has torch; hxla does not depend on it. PyTorch's GPipe and 1F1B are
run with stages that only write down what they are asked to do: their order is in the code that runs
them, and the table that 1F1B draws is one microbatch off in its last stage (PyTorch 2.13). The
others run their tables. Writes benchmarks/results/torch_schedules.json.
"""

import argparse
import json
import pathlib
import subprocess

from hxla import make_schedule
from hxla._schedule._schedules import Action, from_rows

ROOT = pathlib.Path(__file__).parent.parent
WORKER = r"""
import json, sys
import torch, torch.distributed as dist
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

class Stage(pipelining.PipelineStage):
    def forward_one_chunk(self, i, *_, **__): self.done.append(("forward", i, 0))
    def backward_one_chunk(self, i, *_, **__): self.done.append(("backward", i, 0))
    def nothing(self, *_, **__): return []
    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    perform_reduce_grad = nothing

def stage(number, of):
    made = Stage(torch.nn.Identity(), number, of, torch.device("cpu"))
    made.done = []
    return made

def join(rank, size):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

def ran(kind, p, m):
    rows = []
    for rank in range(p):
        join(rank, p)
        own = stage(rank, p)
        schedule = kind(own, m)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches([()] * m, [{}] * m)
        rows.append(own.done)
        dist.destroy_process_group()
    return rows

def table(kind, p, m, v):
    join(0, p)
    order = kind([stage(c * p, p * v) for c in range(v)], m).pipeline_order
    dist.destroy_process_group()
    kinds = {"F": "forward", "I": "backward", "B": "backward", "W": "weight"}
    return [
        [(kinds[a.computation_type.value], a.microbatch_index, a.stage_index // p)
         for a in row if a]
        for _, row in sorted(order.items())
    ]

found = []
for name, p, m, v in json.load(sys.stdin):
    if name == "gpipe":
        found.append(ran(pipelining.ScheduleGPipe, p, m))
    elif name == "1f1b":
        found.append(ran(pipelining.Schedule1F1B, p, m))
    elif name == "interleaved":
        found.append(table(pipelining.ScheduleInterleaved1F1B, p, m, v))
    else:
        found.append(table(pipelining.ScheduleInterleavedZeroBubble, p, m, v))
print(json.dumps([torch.__version__, found]))
"""

#: What both make: PyTorch's 1F1B and ours of several chunks need as many microbatches as stages.
SIZES = {
    "gpipe": [(p, m, 1) for p in range(1, 9) for m in range(1, 33)],
    "1f1b": [(p, m, 1) for p in range(1, 9) for m in range(p, 33)],
    "interleaved": [(p, p * k, v) for p in range(1, 9) for k in range(1, 6) for v in range(1, 7)],
    "zb-h1": [(p, m, 1) for p in range(1, 9) for m in range(p, 33) if m % (m // p) == 0],
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", required=True)
    args = parser.parse_args()
    asked = [(name, *size) for name, sizes in SIZES.items() for size in sizes]
    worker = subprocess.run(
        [args.torch, "-W", "ignore", "-c", WORKER],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    version, found = json.loads(worker.stdout)
    rows = {"torch": version}
    for (name, *size), theirs in zip(asked, found, strict=True):
        ours = make_schedule(name, *size)
        other = from_rows("theirs", [[Action(*op) for op in row] for row in theirs], size[2])
        kept, others = max(ours.peak_stash), max(other.peak_stash)
        facts = {
            "sizes": True,
            "same order": ours.rows == other.rows,
            "ours is longer": ours.num_ticks > other.num_ticks,
            "ours is shorter": ours.num_ticks < other.num_ticks,
            "ours keeps more": kept > others,
            "ours keeps less": kept < others,
        }
        degenerate = name == "interleaved" and size[2] == 1
        row = rows.setdefault(f"{name}, one chunk" if degenerate else name, {})
        for fact, holds in facts.items():
            row[fact] = row.get(fact, 0) + holds
    print(json.dumps(rows, indent=2))
    out = ROOT / "benchmarks" / "results" / "torch_schedules.json"
    out.write_text(json.dumps(rows, indent=2) + "\n")
