"""PyTorch's contender of gpt_speed.py: the GPT of examples/gpt.py under `torch.compile`.

Attention is `scaled_dot_product_attention`, the optimizer fused AdamW, mixed precision autocast:
what a good user of PyTorch writes. Unfused attention is there to compare alike.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from turns import turns_of_steps

# As in gpu_jobs.py: vocabulary, length, width, heads, layers, microbatches.
SIZES = {"124m": (50304, 1024, 768, 12, 12, 8), "tiny": (64, 16, 32, 2, 1, 2)}
parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
parser.add_argument("--size", choices=SIZES, required=True)
parser.add_argument("--attention", choices=["fused", "unfused"], default="unfused")
parser.add_argument("--micro", type=int, required=True)
parser.add_argument("--turns", required=True)
parser.add_argument("--rounds", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--out", type=pathlib.Path, required=True)
args = parser.parse_args()
V, T, D, H, L, M = SIZES[args.size]
MICRO, device = args.micro, args.device
torch.set_float32_matmul_precision("high")


def attend(q, k, v):
    if args.attention == "fused":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~mask, -1e9)
    return scores.softmax(-1).to(v.dtype) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(*[Block() for _ in range(L)])
        self.norm = nn.LayerNorm(D, bias=False)
        for own in (self.tok, self.pos):
            nn.init.normal_(own.weight, std=D**-0.5)

    def forward(self, text):
        x = self.tok(text) + self.pos(torch.arange(text.shape[1], device=text.device))
        return F.linear(self.norm(self.blocks(x)), self.tok.weight)


torch.manual_seed(0)
text = np.random.default_rng(0).zipf(1.1, (512, T + 1)) % min(V, 50257)
text = torch.from_numpy(text.astype(np.int64))
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=device == "cuda")


def value(part):
    logits = model(part[:, :-1])
    return F.cross_entropy(logits.view(-1, V).float(), part[:, 1:].reshape(-1))


compiled = torch.compile(value) if device == "cuda" else value


def step(n):
    rows = torch.arange(n * M * MICRO, (n + 1) * M * MICRO) % len(text)
    batch, total = text[rows].to(device, non_blocking=True), 0.0
    for part in batch.split(MICRO):
        with torch.autocast(device, torch.bfloat16):
            found = compiled(part) / M
        found.backward()
        total = total + found.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


taken = turns_of_steps(
    lambda: (step, wait), args.turns, num_turns=args.rounds, num_steps=args.steps
)
told = taken | {
    "tokens_per_step": M * MICRO * T,
    "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
}
args.out.write_text(json.dumps(told))
