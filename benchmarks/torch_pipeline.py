"""PyTorch's 1F1B (Gloo, CPU) on the GPT of examples/gpt.py: what benchmarks/pipeline.py runs.

The cut is how many layers each stage has; the first has the embeddings too and the last the norm
and the logits. The tied embedding is on both, as in Megatron: its gradients are summed between
them. Optimizer and clipping are those of examples/train_gpt.py.
"""

WORKER = r"""
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
num, micro, steps = map(int, sys.argv[3:6])
cut = list(map(int, sys.argv[6].split(",")))
sys.path.insert(0, sys.argv[7])
from turns import take_turn
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
    if model.last:
        print("loss", torch.stack(losses).mean().item(), flush=True)
    take_turn(sys.argv[8], rank)
dist.destroy_process_group()
"""
