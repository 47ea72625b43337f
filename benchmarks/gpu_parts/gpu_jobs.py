"""What the parts of benchmarks/gpu.py train, and a plain Flax loop of each under `jax.jit`."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "examples"))

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class FusedBlock(gpt.Block):
    """A block with fused attention: cuDNN's on a GPU, jax's own elsewhere."""

    def attention(self, qkv_BTN3H: jax.Array) -> jax.Array:
        q_BTNH, k_BTNH, v_BTNH = jnp.moveaxis(qkv_BTN3H, 3, 0)
        implementation: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return jax.nn.dot_product_attention(
            q_BTNH, k_BTNH, v_BTNH, is_causal=True, implementation=implementation
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Of a GPT and its batches.

    Attributes:
        vocabulary: Entries.
        length: Positions.
        width: Of the model.
        heads: Of attention.
        layers: Blocks.
        num_microbatches: Of a step.
        dtype: That parameters are cast to for the model; they are kept as float32.
        block: The class of its blocks.
    """

    vocabulary: int
    length: int
    width: int
    heads: int
    layers: int
    num_microbatches: int
    dtype: str
    block: type[gpt.Block] = gpt.Block

    def make(self) -> gpt.GPT:
        names = ("vocabulary", "length", "width", "heads", "layers")
        sizes = {name: getattr(self, name) for name in names}
        return gpt.GPT(nnx.Rngs(0), **sizes, block=self.block)

    def text(self) -> np.ndarray:
        """512 sequences of words as they are: few of them often."""
        ranks = np.random.default_rng(0).zipf(1.1, (512, self.length + 1))
        return (ranks % min(self.vocabulary, 50257)).astype(np.int32)

    def loss(self, model: gpt.GPT, batch: dict) -> jax.Array:
        """The model in `dtype`, its logits in float32."""
        graphdef, state = nnx.split(model)
        cast = lambda x: x.astype(self.dtype) if x.dtype == jnp.float32 else x  # noqa: E731
        low = nnx.merge(graphdef, jax.tree.map(cast, state))
        for _, module in nnx.iter_modules(low):
            if isinstance(module, nnx.Embed):
                # It keeps that of its table at first, to which all after it would be promoted.
                module.dtype = self.dtype
        text_BT = batch["text"]
        logits_BTV = low(text_BT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_BTV.astype(jnp.float32), text_BT[:, 1:]
        ).mean()


SIZES = {
    # GPT-2 small, 124 million parameters, its vocabulary padded to a multiple of 128.
    "124m": Size(
        vocabulary=50304,
        length=1024,
        width=768,
        heads=12,
        layers=12,
        num_microbatches=8,
        dtype="bfloat16",
    ),
    "tiny": Size(
        vocabulary=64,
        length=16,
        width=32,
        heads=2,
        layers=1,
        num_microbatches=2,
        dtype="float32",
    ),
}


def gpt_optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def perceptron() -> nnx.Module:
    """2,762 parameters."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))


def squares(model: nnx.Module, batch: dict) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)


def scanned(
    graphdef: Any,
    rest: Any,
    loss: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
) -> Callable[..., Any]:
    """A step as a good user writes it: one program, donated state, microbatches in a scan.

    Returns:
        `(params, opt_state, parts) -> (loss, params, opt_state)`; the microbatches are stacked.
    """

    def value(params: Any, part: Any) -> jax.Array:
        own = jax.tree.map(lambda x: x, rest)  # variables that this trace may write, and drops
        return loss(nnx.merge(graphdef, params, own), part).mean()

    def step(params: Any, opt_state: Any, parts: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(value)(params, part)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, parts)
        num = jax.tree.leaves(parts)[0].shape[0]
        found, grads = jax.tree.map(lambda x: x / num, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return found, optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=(0, 1))


def stacked(batch: dict, num: int) -> dict:
    """A global batch as `num` microbatches."""
    return jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch)
