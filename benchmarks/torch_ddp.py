"""PyTorch DDP (Gloo, CPU) with its even split, on the model, throttles and batch of mixed_speed.py.

    python benchmarks/torch_ddp.py --torch PYTHON [--mesh cpu-1.0-0.33]

PYTHON is an interpreter that has torch; hxla does not depend on it. DDP and hxla run one after the
other, in one go, on the same mesh. Writes benchmarks/results/torch_ddp.json.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from hxla import load_cluster
from hxla._launch._launcher import _KEEP_MEMORY, _free_port
from hxla._launch._throttle import make_throttle, pack

ROOT = pathlib.Path(__file__).parent.parent
#: The model and text of examples/gpt.py, in a process of rank argv[1] among argv[2].
MODEL = r"""
import os, sys, time, pathlib, sysconfig
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
torch.set_num_threads(1)
rank, size = map(int, sys.argv[1:3])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[-1])
dist.init_process_group("gloo", rank=rank, world_size=size)
V, T, D, H = 256, 128, 256, 4
class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.n1, s.n2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        s.qkv, s.out = nn.Linear(D, 3*D, bias=False), nn.Linear(D, D, bias=False)
        s.up, s.down = nn.Linear(D, 4*D, bias=False), nn.Linear(4*D, D, bias=False)
    def forward(s, x):
        B, T, _ = x.shape
        q, k, v = s.qkv(s.n1(x)).reshape(B, T, 3*H, D//H).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + s.out(y.transpose(1, 2).reshape(B, T, D))
        return x + s.down(F.gelu(s.up(s.n2(x)), approximate="tanh"))
class GPT(nn.Module):
    def __init__(s, layers):
        super().__init__()
        s.tok, s.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        s.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        s.norm = nn.LayerNorm(D, bias=False)
    def forward(s, t):
        x = s.tok(t) + s.pos(torch.arange(t.shape[1]))
        return s.norm(s.blocks(x)) @ s.tok.weight.T
folder = pathlib.Path(sysconfig.get_path("stdlib"))
text = b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))
text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
torch.manual_seed(0)
"""
WORKER = r"""
from torch.nn.parallel import DistributedDataParallel as DDP
batch, micro, steps = map(int, sys.argv[3:6])
model = DDP(GPT(4))
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
own = batch // size
for step in range(steps):
    begun = time.perf_counter()
    rows = [(step * batch + rank * own + i) * T for i in range(own)]
    for i in range(0, own, micro):
        t = torch.stack([text[r:r + T + 1] for r in rows[i:i + micro]]).long()
        def backward():
            out = model(t[:, :-1]).reshape(-1, V)
            (F.cross_entropy(out, t[:, 1:].reshape(-1)) * micro / own).backward()
        if i + micro < own:
            with model.no_sync():
                backward()
        else:
            backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad()
    if rank == 0:
        print(time.perf_counter() - begun, flush=True)
"""


@contextlib.contextmanager
def started(python, code, shares, numbers):
    """The processes of a job, each held to its share of a core like a process of hxla."""
    cores = pack(shares, sorted(os.sched_getaffinity(0)))
    port = str(_free_port())
    with contextlib.ExitStack() as stack:
        workers = []
        for rank, share in enumerate(shares):
            arguments = map(str, (rank, len(shares), *numbers))
            worker = subprocess.Popen(
                [python, "-c", MODEL + code, *arguments, port],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=os.environ | _KEEP_MEMORY | {"OMP_NUM_THREADS": "1"},
            )
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)  # nothing to one that has ended
            os.sched_setaffinity(worker.pid, {cores[rank]})
            stack.callback(make_throttle(worker.pid, rank, share)[0].close)
        yield workers


def finished(workers):
    """What each of the processes printed."""
    printed = [worker.communicate()[0] for worker in workers]
    failed = [rank for rank, worker in enumerate(workers) if worker.returncode]
    if failed:
        raise SystemExit(f"processes {failed} failed, see above")
    return printed


def run_workers(python, code, shares, numbers):
    """What each of the processes of a job prints."""
    with started(python, code, shares, numbers) as workers:
        return finished(workers)


def hxla_speed(mesh, batch_size, steps):
    """Tokens per second of examples/train_gpt.py, the median over the last steps of a few more."""
    with tempfile.TemporaryDirectory() as folder:
        summary = pathlib.Path(folder, "summary.json")
        command = [sys.executable, "-m", "hxla", "run", "--mesh", mesh]
        command += [str(ROOT / "examples/train_gpt.py"), "--summary", str(summary)]
        command += ["--dropout", "0", "--batch-size", str(batch_size)]
        command += ["--steps", str(steps + 5)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ran.stderr[-4000:]}")
        seconds = json.loads(summary.read_text())["seconds"]
    return round(batch_size * 128 / statistics.median(seconds[-steps - 1 :]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", required=True)
    parser.add_argument("--mesh", default="cpu-1.0-0.33")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "benchmarks/results/torch_ddp.json"
    )
    args = parser.parse_args()
    shares = [d.core_share for d in load_cluster(args.mesh).devices]
    tokens = args.batch_size * 128
    rows = {"mesh": args.mesh, "batch_size": args.batch_size, "ddp_tokens_per_second": {}}
    for micro in (2, 8, args.batch_size // len(shares)):
        out = run_workers(args.torch, WORKER, shares, (args.batch_size, micro, args.steps))[0]
        seconds = statistics.median(map(float, out.split()[1:]))
        rows["ddp_tokens_per_second"][f"microbatch {micro}"] = round(tokens / seconds)
    rows["hxla_tokens_per_second"] = hxla_speed(args.mesh, args.batch_size, args.steps)
    best = max(rows["ddp_tokens_per_second"].values())
    rows["hxla over the best ddp"] = round(rows["hxla_tokens_per_second"] / best, 2)
    print(json.dumps(rows, indent=2))
    args.out.write_text(json.dumps(rows, indent=2) + "\n")
