"""Classify handwritten digits, evaluate after each epoch, keep the best weights, and resume.

    python examples/15_digits.py
    hxla run -n 2 examples/15_digits.py --folder runs/two        # the same SHA-256

A network with batch normalisation learns scikit-learn's digits. Run it again with more epochs, and
it resumes from its last checkpoint. The weights of the best evaluation are in
`runs/digits/best/model.safetensors`.
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/digits"))
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
train = {"image": images[:1536], "label": labels[:1536]}
test = {"image": images[1536:], "label": labels[1536:]}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(image)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.out(x.reshape(len(x), -1))


def loss(model: Net, batch: dict) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One loss for each example, and the accuracy."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


job = hxla.Job(Net(nnx.Rngs(0)), train, loss, optax.adam(3e-3), batch_size=128)
result = hxla.train(
    job,
    epochs=args.epochs,
    microbatch_size=16,
    eval_data=test,
    eval_every="epoch",
    checkpoint_dir=args.folder / "checkpoints",
    checkpoint_every="epoch",
    run_dir=args.folder,
    callbacks=[hxla.keep_best("accuracy", mode="max"), hxla.stop_early("loss", patience=3)],
)
if jax.process_index() == 0:
    print("sha256", result.sha256)
