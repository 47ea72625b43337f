"""A byte-level GPT as an ordinary Flax NNX model, and Python's own library as its text.

Nothing here knows of hxla: it is what you would write for one device.
"""

import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LENGTH, WIDTH, HEADS, LAYERS, BYTES = 128, 256, 4, 4, 256  # 3.2 million parameters


class Block(nnx.Module):
    """Pre-norm attention and MLP; B batch, T positions, N heads, H head width, D model width."""

    def __init__(self, rngs: nnx.Rngs, dropout: float, width: int, heads: int):
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm1 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.attn = nnx.Dict(qkv=dense(width, 3 * width), out=dense(width, width))
        self.norm2 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.up, self.down = dense(width, 4 * width), dense(4 * width, width)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.heads = heads

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        qkv_BTN3H = self.attn["qkv"](self.norm1(x_BTD)).reshape(B, T, self.heads, 3, -1)
        mixed_BTD = self.attention(qkv_BTN3H).reshape(B, T, D)
        x_BTD = x_BTD + self.dropout(self.attn["out"](mixed_BTD))
        return x_BTD + self.dropout(self.down(jax.nn.gelu(self.up(self.norm2(x_BTD)))))

    def attention(self, qkv_BTN3H: jax.Array) -> jax.Array:
        """Causal attention, [B, T, N, H]."""
        _, T, _, _, H = qkv_BTN3H.shape
        q_BNTH, k_BNTH, v_BNTH = qkv_BTN3H.transpose(3, 0, 2, 1, 4)
        scores_BNTT = q_BNTH @ k_BNTH.swapaxes(2, 3) * H**-0.5
        mask_TT = jnp.tril(jnp.ones((T, T), bool))
        weights_BNTT = jax.nn.softmax(jnp.where(mask_TT, scores_BNTT, -1e9))
        return (weights_BNTT @ v_BNTH).transpose(0, 2, 1, 3)


class GPT(nnx.Module):
    """Bytes in, logits over the next byte out; the embedding is tied."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        dropout: float = 0.0,
        *,
        vocabulary: int = BYTES,
        length: int = LENGTH,
        width: int = WIDTH,
        heads: int = HEADS,
        layers: int = LAYERS,
        block: type[Block] = Block,
    ):
        self.tok = nnx.Embed(vocabulary, width, rngs=rngs)
        self.pos = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([block(rngs, dropout, width, heads) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)

    def __call__(self, text_BT: jax.Array) -> jax.Array:
        x_BTD = self.tok(text_BT) + self.pos(jnp.arange(text_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.tok.attend(self.norm(x_BTD))


def loss(model: GPT, batch: dict) -> jax.Array:
    """Mean nats per byte."""
    text_BT = batch["text"].astype(jnp.int32)
    logits_BTV = model(text_BT[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, text_BT[:, 1:]).mean()


def library(length: int = LENGTH) -> dict[str, np.ndarray]:
    """The sources of Python's standard library, cut into windows of `length + 1` bytes."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), length + 1)
    return {"text": windows[::length]}


def write(model: GPT, prompt: str, length: int, seed: int = 0, temperature: float = 0.7) -> str:
    """Sample `length` bytes after `prompt`."""
    model.eval()
    most = model.pos.num_embeddings

    @nnx.jit
    def next_byte(model: GPT, text_T: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits_V = model(text_T[None])[0, last]
        return jax.random.categorical(key, logits_V / temperature)

    text = bytearray(prompt.encode())
    for i in range(length):
        window = text[-most:]
        padded = np.zeros(most, np.int32)
        padded[: len(window)] = window
        key = jax.random.fold_in(jax.random.key(seed), i)
        text.append(int(next_byte(model, jnp.asarray(padded), len(window) - 1, key)))
    return text.decode(errors="replace")
