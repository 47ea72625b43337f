"""Shard GPT and BERT by a mesh and a rule set, without a line of annotation.

    python examples/04_rules.py

Trains small models on the sources of Python's library over eight devices (fake ones, on the CPU):
four replicas of two devices. Then plans GPT-3 and BERT-Large for sixteen devices, without computing
anything.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bert
import gpt
import jax
import numpy as np
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

for model, loss, rules in (
    (gpt.GPT(nnx.Rngs(0), width=64, layers=2), gpt.loss, "decoder"),
    (bert.Bert(nnx.Rngs(0), width=64, layers=2), bert.loss, "encoder"),
):
    job = hxla.Job(model, gpt.library(), loss, optax.adam(3e-3), batch_size=32)
    result = hxla.train(
        job, microbatch_size=8, steps=args.steps, mesh={"data": 4, "tensor": 2}, rules=rules
    )
    history = result.history.steps
    print(f"{type(model).__name__}: loss {history[0].loss:.2f} -> {history[-1].loss:.2f}\n")


def lay_out(make, loss, length, rules):
    model = nnx.eval_shape(make)
    graph = hxla.trace(model, loss, {"text": jax.ShapeDtypeStruct((8, length + 1), np.int32)})
    plan = hxla.make_plan(graph, mesh={"data": 1, "tensor": 16}, rules=rules)
    print(graph, *plan.explain().splitlines()[:4], "", sep="\n")


# Brown et al., "GPT-3", 2020, table 2.1; Devlin et al., "BERT", 2019, section 3.
gpt3 = dict(vocabulary=50_304, length=2048, width=12_288, heads=96, layers=96)
lay_out(lambda: gpt.GPT(nnx.Rngs(0), **gpt3), gpt.loss, 2048, "decoder")
large = dict(vocabulary=30_528, length=512, width=1024, heads=16, layers=24)
lay_out(lambda: bert.Bert(nnx.Rngs(0), **large), bert.loss, 511, "encoder")
