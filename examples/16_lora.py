"""Train LoRA: two small matrices for each layer, and a frozen base model from safetensors.

    python examples/16_lora.py

The base learns the digits 0 to 4. Its weights are saved and read back into a model with LoRA, which
learns the digits 5 to 9. Afterwards the base's arrays are those of the file, to the last bit.
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--file", type=pathlib.Path, default=pathlib.Path("base.safetensors"))
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
first = {"image": images[labels < 5], "label": labels[labels < 5]}
second = {"image": images[labels >= 5], "label": labels[labels >= 5]}


def network(rngs: nnx.Rngs, **lora: int) -> nnx.Sequential:
    """Three layers, plain or with LoRA of a rank."""
    layer = nnx.LoRALinear if lora else nnx.Linear
    sizes = [(64, 64), (64, 64), (64, 10)]
    made = [layer(i, o, rngs=rngs, **lora) for i, o in sizes]
    return nnx.Sequential(made[0], nnx.relu, made[1], nnx.relu, made[2])


def loss(model: nnx.Sequential, batch: dict) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One loss for each example, and the accuracy."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


base = hxla.Job(network(nnx.Rngs(0)), first, loss, optax.adam(3e-3), batch_size=64)
hxla.save_weights(args.file, hxla.train(base, steps=args.steps, microbatch_size=16).state)

weights = hxla.Weights(args.file, fresh=["{path*}/lora_a", "{path*}/lora_b"])
adapted = hxla.Job(
    network(nnx.Rngs(1), lora_rank=8),
    second,
    loss,
    optax.adam(3e-2),
    batch_size=64,
    weights=weights,
    trainable=nnx.LoRAParam,
)
result = hxla.train(adapted, steps=args.steps, microbatch_size=16, eval_data=second)

kept = load_file(args.file)
kernel = np.asarray(result.model.layers[0].kernel[...])
print("base unchanged:", np.array_equal(kernel, kept["layers.0.kernel"]))
