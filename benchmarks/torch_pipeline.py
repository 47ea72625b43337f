"""PyTorch's 1F1B in turns of a step: what benchmarks/pipeline.py starts.

The cut is how many layers each stage has; the first has the embeddings too and the last the norm
and the logits. The tied embedding is on both, as in Megatron: its gradients are summed between
them. Optimizer and clipping are those of examples/train_gpt.py.
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch_gpt import RANK, SIZE, adamw, cross_entropy, join, library
from turns import take_turn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--microbatch-size", type=int, required=True)
parser.add_argument("--cut", type=int, nargs="+", required=True, help="layers of each stage")
args = parser.parse_args()


class Stage(nn.Module):
    """What one process has of the model."""

    def __init__(self, gpt):
        super().__init__()
        self.first, self.last, start = RANK == 0, RANK == SIZE - 1, sum(args.cut[:RANK])
        self.blocks = gpt.blocks[start : start + args.cut[RANK]]
        self.tok = gpt.tok if self.first or self.last else None
        self.pos = gpt.pos if self.first else None
        self.norm = gpt.norm if self.last else None

    def forward(self, x):
        if self.first:
            x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        x = self.blocks(x)
        return self.norm(x) @ self.tok.weight.T if self.last else x


windows = library()
model = Stage(join())
tied = model.tok.weight if SIZE > 1 and (model.first or model.last) else None
ends = dist.new_group([0, SIZE - 1]) if SIZE > 1 else None
# The last stage's copy of the embedding is the first one's.
own = [p for p in model.parameters() if model.first or p is not tied]
optimizer = adamw(model.parameters())
num = args.batch_size // args.microbatch_size
stage = PipelineStage(model, RANK, SIZE, torch.device("cpu"))
schedule = Schedule1F1B(stage, num, loss_fn=cross_entropy)


def clip():
    """Gradients to a global norm of at most 1, the tied embedding counted once."""
    norm = torch.stack([p.grad.square().sum() for p in own]).sum()
    dist.all_reduce(norm)
    scale = (1.0 / norm.sqrt()).clamp(max=1.0)
    for p in model.parameters():
        p.grad *= scale


def step(number):
    """One step; returns the loss on the last stage."""
    text = windows(torch.arange(number * args.batch_size, (number + 1) * args.batch_size))
    inputs = (text[:, :-1],) if model.first else ()
    losses = []
    schedule.step(*inputs, **(dict(target=text[:, 1:], losses=losses) if model.last else {}))
    if tied is not None:
        dist.all_reduce(tied.grad, group=ends)
    clip()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean().item() if model.last else None


found = []
for number in range(args.turns + 1):
    found.append(step(number))
    take_turn(args.folder, RANK)
if model.last:
    told = {"losses": [round(x, 4) for x in found], "torch": torch.__version__}
    print("RESULT " + json.dumps(told), flush=True)
dist.destroy_process_group()
