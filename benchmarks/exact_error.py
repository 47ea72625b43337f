"""Error of exact sums, of one-limb sums and of float32 sums against float64.

    python benchmarks/exact_error.py

A session sums the gradients of 8 microbatches of the byte-level GPT; its optimizer keeps what it is
given and moves nothing, so that the sum can be read from its state. The terms are those that a
session of one microbatch a step hands over, with float sums: its sum has one term. Written is the
relative L2 error of each tensor's sum, worst and median over tensors; and the largest error of an
element, of the largest magnitude of its tensor's terms. Writes benchmarks/results/exact_error.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from gpt import GPT, library, loss

import hxla

M, SIZE = 8, 2


def kept_gradients() -> optax.GradientTransformation:
    """Moves nothing; its state is the last gradient."""

    def update(grads, state, params=None):
        return jax.tree.map(jnp.zeros_like, grads), grads

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def gradients(num: int, steps: int, reduction: str, limbs: int = 2) -> list[list[np.ndarray]]:
    """Mean gradients of steps of so many microbatches, all at the same parameters."""
    data = {"text": library()["text"][: num * SIZE * steps]}
    job = hxla.Job(
        GPT(nnx.Rngs(0)),
        data,
        loss,
        kept_gradients(),
        batch_size=num * SIZE,
        shuffle=False,
        config={"communication": {"limbs": limbs}},
    )
    plan = job.plan(mesh={"data": 1}, microbatch_size=SIZE, reduction=reduction)
    found = []
    with job.open(plan, steps=steps) as session:
        for _ in session:
            leaves = jax.tree.leaves(session.gather(session.state.opt_state))
            found.append([np.array(x) for x in leaves])
    return found


def main() -> None:
    """All three."""
    parser = results.parser(__doc__, "exact_error")
    args = parser.parse_args()
    terms_M = gradients(1, M, "float")
    # Of the mean: M is a power of two, so that it has the sum's error.
    sums = {
        "two limbs": gradients(M, 1, "exact")[0],
        "one limb": gradients(M, 1, "exact", limbs=1)[0],
        "float32": gradients(M, 1, "float")[0],
    }
    errors: dict[str, list[float]] = {name: [] for name in sums}
    of_peak: dict[str, float] = dict.fromkeys(sums, 0.0)
    for i, terms in enumerate(zip(*terms_M, strict=True)):
        reference = np.sum([t.astype(np.float64) for t in terms], axis=0)
        peak = max(np.abs(t).max() for t in terms)
        for name, each in sums.items():
            difference = M * each[i].astype(np.float64) - reference
            errors[name].append(np.linalg.norm(difference) / np.linalg.norm(reference))
            of_peak[name] = max(of_peak[name], float(np.abs(difference).max() / peak))
    if max(errors["float32"]) > 1e-4:
        raise SystemExit("the terms are not those of the sums")
    pairs = list(zip(errors["two limbs"], errors["float32"], strict=True))
    rows = {
        k: {
            "worst": float(np.max(v)),
            "median": float(np.median(v)),
            "worst element of peak": of_peak[k],
        }
        for k, v in errors.items()
    }
    better = f"{sum(a <= b for a, b in pairs)} of {len(pairs)}"
    results.write(args.out, {**rows, "tensors where two limbs are no worse than float32": better})


if __name__ == "__main__":
    main()
