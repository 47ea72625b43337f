"""Draws precision.svg: a loss scale over steps, and errors of gradients against bytes.

python docs/pictures/draw_precision.py

Both are of the GPT of examples/ with one layer and sequences of 64 bytes, on this machine's CPU.
"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))
import gpt  # noqa: E402

import hxla  # noqa: E402
from hxla._src.jax.jaxpr import as_function  # noqa: E402
from hxla._src.jax.min_cut import halve  # noqa: E402

LENGTH, STEPS, BATCH = 64, 60, 8
_EXPONENT = 6  # of the scale for one gradient
WORDS = {"fp32": "black", "bf16": "tab:blue", "fp16": "tab:orange"}
TEXT = np.frombuffer((HERE.parents[1] / "README.md").read_bytes(), np.uint8)
ROWS = {"text": np.stack([TEXT[i : i + LENGTH + 1] for i in range(256)]).astype(np.int32)}


def loss(model, batch):
    """Cross entropy of the next byte."""
    logits = model(batch["text"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"][:, 1:])


def job(precision):
    """What is trained in a precision."""
    return hxla.Job(
        lambda: gpt.GPT(nnx.Rngs(0), layers=1, length=LENGTH),
        ROWS,
        loss,
        optax.adam(1e-3),
        batch_size=BATCH,
        precision=precision,
        nonfinite=None if "fp16" in str(precision) else "skip",
    )


def gradient(made):
    """The gradient of one microbatch, and the bytes that wait for its backward."""
    graph = made.graph(BATCH)
    program = as_function(graph.program)
    model = gpt.GPT(nnx.Rngs(0), layers=1, length=LENGTH)
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    is_scaled = made.plan(microbatch_size=BATCH).precision.loss_scale is not None
    rest = [jnp.int32(_EXPONENT)] if is_scaled else []
    rest += [jax.random.key(0), ROWS["text"][:BATCH]]
    both = jax.value_and_grad(lambda own: program(*own, *rest)[0])
    _, found = jax.jit(both)(params)
    scale = 2.0**_EXPONENT if is_scaled else 1.0
    flat = np.concatenate([np.asarray(x, np.float64).reshape(-1) / scale for x in found])
    whole = jax.make_jaxpr(lambda *own: jax.tree.leaves(both(list(own))))(*params)
    return flat, sum(x.size * x.dtype.itemsize for x in halve(whole, 1).kept)


def main() -> None:
    """Run, print the figures, and write the picture."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    policy = {"preset": "fp16", "growth_steps": 10}
    made = job(policy)
    with made.open(made.plan(microbatch_size=BATCH, mesh={"data": 1}), steps=STEPS) as session:
        records = list(session)
    exponents = [np.log2(r.loss_scale) for r in records]
    left.step([r.step for r in records], exponents, where="post", color=WORDS["fp16"])
    over = [(r.step, e) for r, e in zip(records, exponents, strict=True) if r.skipped]
    left.plot(*zip(*over, strict=True), "x", color="black", label="overflow: step left out")
    left.set_xlabel("step")
    left.set_ylabel("loss scale, power of two")
    left.legend(fontsize=7)
    exact, _ = gradient(job("fp32"))
    for word, colour in WORDS.items():
        found, kept = gradient(job(word))
        error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        print(f"{word}: relative error {error:.2e}, {kept / 2**20:.2f} MiB wait for the backward")
        right.plot(kept / 2**20, max(error, 1e-7), "o", color=colour)
        right.annotate(
            word, (kept / 2**20, max(error, 1e-7)), xytext=(5, 4), textcoords="offset points"
        )
    right.set_yscale("log")
    right.set_xlim(left=0)
    right.set_ylim(3e-8, 1e-1)
    right.set_xlabel("MiB that wait for the backward")
    right.set_ylabel("error of the gradient, relative")
    for panel in (left, right):
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "precision.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
