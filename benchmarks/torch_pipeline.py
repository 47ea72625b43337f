"""PyTorch's 1F1B (Gloo, CPU) on the GPT of examples/gpt.py, in processes throttled like hxla's.

    python benchmarks/torch_pipeline.py --torch PYTHON --mesh cpu-1.0-0.33 --cut 2,2

PYTHON is an interpreter that has torch; hxla does not depend on it. The cut is how many layers
each stage has; stage s runs on the mesh's device s, the first has the embeddings too and the last
the norm and the logits. The tied embedding is on both, as in Megatron: its gradients are summed
between them. Optimizer and clipping are those of examples/train_gpt.py. Prints tokens per second,
the median over steps but the first, as JSON.
"""

import argparse
import json
import pathlib
import statistics

from torch_ddp import hxla_speed, run_workers

from hxla import load_cluster

WORKER = r"""
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
num, micro, steps = map(int, sys.argv[3:6])
cut = list(map(int, sys.argv[6].split(",")))
class Stage(nn.Module):
    def __init__(s, gpt):
        super().__init__()
        s.first, s.last, start = rank == 0, rank == size - 1, sum(cut[:rank])
        s.blocks = gpt.blocks[start:start + cut[rank]]
        s.tok = gpt.tok if s.first or s.last else None
        s.pos = gpt.pos if s.first else None
        s.norm = gpt.norm if s.last else None
    def forward(s, x):
        if s.first:
            x = s.tok(x) + s.pos(torch.arange(x.shape[1]))
        x = s.blocks(x)
        return s.norm(x) @ s.tok.weight.T if s.last else x
gpt = GPT(sum(cut))
for embedding in (gpt.tok, gpt.pos):
    nn.init.normal_(embedding.weight, std=D**-0.5)  # Flax's
model = Stage(gpt)
tied = model.tok.weight if size > 1 and (model.first or model.last) else None
ends = dist.new_group([0, size - 1]) if size > 1 else None
# The last stage's copy of the embedding is the first one's.
own = [p for p in model.parameters() if model.first or p is not tied]
optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=1e-4)
cross_entropy = lambda out, labels: F.cross_entropy(out.reshape(-1, V), labels.reshape(-1))
stage = PipelineStage(model, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, num, loss_fn=cross_entropy)
parameters = torch.tensor([sum(p.numel() for p in own)])
dist.all_reduce(parameters)
begun = None
for step in range(steps):
    rows = [(step * num * micro + i) * T for i in range(num * micro)]
    t = torch.stack([text[r:r + T + 1] for r in rows]).long()
    losses = []
    if rank == 0:
        schedule.step(t[:, :-1], **(dict(target=t[:, 1:], losses=losses) if size == 1 else {}))
    else:
        schedule.step(**(dict(target=t[:, 1:], losses=losses) if model.last else {}))
    if tied is not None:
        dist.all_reduce(tied.grad, group=ends)
    norm = torch.stack([p.grad.square().sum() for p in own]).sum()
    dist.all_reduce(norm)
    scale = (1.0 / norm.sqrt()).clamp(max=1.0)
    for p in model.parameters():
        p.grad *= scale
    optimizer.step(); optimizer.zero_grad()
    now = time.perf_counter()
    if rank == 0 and begun:
        print("seconds", now - begun, flush=True)
    if model.last:
        print("loss", torch.stack(losses).mean().item(), flush=True)
    begun = now
if rank == 0:
    print("parameters", parameters.item())
dist.destroy_process_group()
"""


def said(text, word):
    return [float(line.split()[1]) for line in text.splitlines() if line.split()[0] == word]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", required=True)
    parser.add_argument("--mesh", default="cpu-1.0-0.33")
    parser.add_argument("--cut", default="2,2", help="layers of each stage")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--beside-hxla", action="store_true", help="hxla on the same, afterwards")
    parser.add_argument("--out", type=pathlib.Path, help="write the result, too")
    args = parser.parse_args()
    shares = [d.core_share for d in load_cluster(args.mesh).devices]
    num_stages = len(args.cut.split(","))
    if num_stages > min(len(shares), args.microbatches):
        parser.error(
            f"{num_stages} stages need as many devices and microbatches, there are "
            f"{len(shares)} and {args.microbatches}"
        )
    numbers = args.microbatches, args.microbatch_size, args.steps, args.cut
    printed = run_workers(args.torch, WORKER, shares[:num_stages], numbers)
    seconds = statistics.median(said(printed[0], "seconds"))
    tokens = args.microbatches * args.microbatch_size * 128
    result = {
        "mesh": args.mesh,
        "stages": num_stages,
        "cut": [int(c) for c in args.cut.split(",")],
        "microbatches": args.microbatches,
        "microbatch_size": args.microbatch_size,
        "parameters": int(said(printed[0], "parameters")[0]),
        "losses": [round(x, 5) for x in said(printed[-1], "loss")],
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
    }
    if args.beside_hxla:
        # hxla measures the layers and cuts them itself.
        options = ("--microbatch-size", str(args.microbatch_size), "--stages", str(num_stages))
        batch_size = args.microbatches * args.microbatch_size
        own = hxla_speed(args.mesh, batch_size, args.steps, *options)
        result["hxla_tokens_per_second"] = own
        result["hxla over torch"] = round(own / result["tokens_per_second"], 2)
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
