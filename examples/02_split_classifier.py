"""Replicate the features of a ResNet and shard its large classifier, as in Whale's Example 2.

    python examples/02_split_classifier.py

Trains a small ResNet on scikit-learn's digits over eight devices (fake ones, on the CPU). Then
plans ResNet-50 with 100,000 classes for eight devices, without computing anything.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from flax import nnx
from resnet import ResNet, loss
from sklearn.datasets import load_digits

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

digits = load_digits()
data = {
    "image": (digits.images[..., None] / 16).astype(np.float32),
    "label": digits.target.astype(np.int32),
}
job = hxla.Job(ResNet((1, 1), 8, 1, 16, nnx.Rngs(0)), data, loss, optax.adam(3e-3), batch_size=64)
result = hxla.train(job, microbatch_size=64, steps=args.steps)
history = result.history.steps
print(f"accuracy {history[0].metrics['accuracy']:.2f} -> {history[-1].metrics['accuracy']:.2f}\n")

model = nnx.eval_shape(lambda: ResNet((3, 4, 6, 3), 64, 3, 100_000, nnx.Rngs(0)))
batch = {
    "image": jax.ShapeDtypeStruct((256, 224, 224, 3), np.float32),
    "label": jax.ShapeDtypeStruct((256,), np.int32),
}
graph = hxla.trace(model, loss, batch)
print(graph, hxla.make_plan(graph, 8).explain(), sep="\n\n")
graph.draw("runs/split_classifier.png")
