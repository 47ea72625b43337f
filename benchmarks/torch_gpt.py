"""The model and text of examples/gpt.py in PyTorch, for interpreters that have it.

Processes join as `torchrun` or benchmarks/run_torch.py starts them, each with one thread.
"""

import os
import pathlib
import sysconfig

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BYTES, LENGTH, WIDTH, HEADS, LAYERS = 256, 128, 256, 4, 4


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (3, 1))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(B, T, 3 * HEADS, WIDTH // HEADS)
        q, k, v = qkv.transpose(1, 2).chunk(3, 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Bytes in, logits over the next byte out; the embedding is tied."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        for part in self.modules():  # as Flax does
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=WIDTH**-0.5)
            elif isinstance(part, nn.Linear):
                std = part.in_features**-0.5 / 0.87962566  # its own, once cut at two of them
                nn.init.trunc_normal_(part.weight, std=std, a=-2 * std, b=2 * std)
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, text):
        x = self.tok(text) + self.pos(torch.arange(text.shape[1]))
        return self.norm(self.blocks(x)) @ self.tok.weight.T


def adamw(params):
    """The optimizer of examples/train_gpt.py; all tensors in one call, which is fastest."""
    return torch.optim.AdamW(params, 2e-3, weight_decay=1e-4, fused=True)


def cross_entropy(logits, labels):
    """Mean nats per byte."""
    return functional.cross_entropy(logits.reshape(-1, BYTES), labels.reshape(-1))


def library():
    """From numbers of windows of the standard library's text to the windows, in random order."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, LENGTH + 1, LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return lambda numbers: windows[order[numbers % len(order)]].long()


def join():
    """Join the other processes, and make the same model in each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return GPT()
