"""Many equal layers: what tests/jobs/large_model.py trains, and others only plan."""

import optax
from flax import nnx


class Block(nnx.Module):
    """Eight times its width squared parameters; as many of them add as much as one would."""

    def __init__(self, width, num, rngs):
        quick = {"kernel_init": nnx.initializers.lecun_uniform(), "rngs": rngs}
        self.up = nnx.Linear(width, 4 * width, **quick)
        self.down = nnx.Linear(4 * width, width, **quick)
        self.num = num

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x))) / self.num


class Net(nnx.Module):
    """So many of them between an embedding and a head."""

    def __init__(self, width, num, rngs):
        self.embed = nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, num, rngs) for _ in range(num)])
        self.head = nnx.Linear(width, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    """Cross entropy of the next token."""
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean(-1)
