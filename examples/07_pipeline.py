"""Train a GPT in two pipeline stages, by two annotations as in Whale's Example 1 or without any.

    hxla run --mesh cpu-1.0-0.5 examples/07_pipeline.py
    hxla run --mesh cpu-1.0-0.5 examples/07_pipeline.py --stages 2 --schedule zb-h1

Two consecutive `hxla.stage()` are the stages of a pipeline, with one device each. With `--stages`
nothing is annotated: the model is cut by the measured times of its parts on the devices, here about
2 to 1. `runs/pipeline/report.html` shows the planned and the
measured step, tick by tick.
"""

import argparse

import gpt
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import hxla


class TwoStages(gpt.GPT):
    """The same parameters; the first half of the blocks on one device, the rest on another."""

    def __call__(self, text_BT: jax.Array) -> jax.Array:
        half = len(self.blocks) // 2
        with hxla.stage():
            x_BTD = self.tok(text_BT) + self.pos(jnp.arange(text_BT.shape[1]))
            for block in self.blocks[:half]:
                x_BTD = block(x_BTD)
        with hxla.stage():
            for block in self.blocks[half:]:
                x_BTD = block(x_BTD)
            return self.tok.attend(self.norm(x_BTD))


parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int)
parser.add_argument("--schedule", default="1f1b")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

job = hxla.Job(
    (gpt.GPT if args.stages else TwoStages)(nnx.Rngs(0)),
    gpt.library(),
    gpt.loss,
    optax.adamw(1e-3),
    batch_size=32,
    config={"pipeline": {"schedule": args.schedule, "num_micro_batch": 16}},
)
result = hxla.train(job, stages=args.stages, steps=args.steps, run_dir="runs/pipeline")
losses = [step.loss for step in result.history.steps]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
