"""The order of each stage's operations in PyTorch's pipelines, against our tables.

    python benchmarks/torch_schedules.py --torch PYTHON

PYTHON is an interpreter that has torch; hxla does not depend on it. PyTorch's GPipe and 1F1B are
run with stages that only write down what they are asked to do: their order is in the code that runs
them, and the table that 1F1B draws is one microbatch off in its last stage (PyTorch 2.13). The
others run their tables. Writes benchmarks/results/torch_schedules.json.
"""

import json
import subprocess
from collections.abc import Sequence

import results

import hxla

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

Operation = tuple[str, int, int]  # kind, microbatch, chunk


def ticks(rows: Sequence[Sequence[Operation]], num_chunks: int) -> hxla.Schedule:
    """The table in which each operation takes one tick and starts as early as it can."""
    num = len(rows)

    def needed(stage: int, op: Operation) -> tuple[int, Operation] | None:
        kind, microbatch, chunk = op
        part = chunk * num + stage
        if kind == "weight":
            return stage, ("backward", microbatch, chunk)
        if kind == "backward" and part == num * num_chunks - 1:
            return stage, ("forward", microbatch, chunk)
        part += 1 if kind == "backward" else -1
        return (part % num, (kind, microbatch, part // num)) if part >= 0 else None

    waiting, done, table = [list(row) for row in rows], set(), []
    while any(waiting):
        now = [bool(row) and needed(s, row[0]) in {None, *done} for s, row in enumerate(waiting)]
        if not any(now):
            raise SystemExit(f"PyTorch's stages wait for one another: {[r[:1] for r in waiting]}")
        ran = [row.pop(0) if can else None for row, can in zip(waiting, now, strict=True)]
        done |= {(s, op) for s, op in enumerate(ran) if op is not None}
        table.append(["" if op is None else f"{op[0][0].upper()}{op[1]}.{op[2]}" for op in ran])
    return hxla.schedule_from_table(table, name="PyTorch's")


def main() -> None:
    """Every size."""
    parser = results.parser(__doc__, "torch_schedules")
    parser.add_argument("--torch", required=True)
    parser.add_argument("--most", type=int, default=8, help="stages")
    args = parser.parse_args()
    asked = [(name, *size) for name, own in SIZES.items() for size in own if size[0] <= args.most]
    worker = subprocess.run(
        [args.torch, "-W", "ignore", "-c", WORKER],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    version, found = json.loads(worker.stdout)
    rows: dict[str, dict[str, int]] = {}
    for (name, *size), theirs in zip(asked, found, strict=True):
        ours = hxla.make_schedule(name, *size)
        other = ticks([[tuple(op) for op in row] for row in theirs], size[2])
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
    results.write(args.out, {"torch": version, **rows})


if __name__ == "__main__":
    main()
