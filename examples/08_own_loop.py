"""Write the training loop yourself, and get the same bits as from `hxla.train`.

    python examples/08_own_loop.py
    hxla run --mesh cpu-1.0-0.33 examples/08_own_loop.py

`hxla.train(job, ...)` with the same arguments ends with the SHA-256 that this prints, on any
devices. Run it again with more steps and it resumes from its checkpoint.
"""

import argparse

import gpt
import jax
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--checkpoint-dir", default="runs/own_loop")
args = parser.parse_args()

text = gpt.library()["text"]
model = gpt.GPT(nnx.Rngs(0), width=64, layers=2)
job = hxla.Job(model, {"text": text[64:]}, gpt.loss, optax.adamw(3e-3), batch_size=32)
plan = job.plan(microbatch_size=4)
with job.open(plan, steps=args.steps, balance=True, checkpoint_dir=args.checkpoint_dir) as session:
    for record in session:
        if record.step % 10 == 0:
            session.evaluate({"text": text[:64]})  # prints the mean loss over these
            session.save()
    largest = max(abs(x).max() for x in jax.tree.leaves(session.gather(session.state.params)))
    result = session.result()
if jax.process_index() == 0:
    print(f"loss {record.loss:.3f}, largest parameter {largest:.3f}")
    print("sha256", result.sha256)
