"""Error of exact sums, of one-limb sums and of float32 sums against float64.

    python benchmarks/exact_error.py

Sums the real gradients of 8 microbatches of the byte-level GPT and prints the relative L2 error of
each tensor's sum, worst and median over tensors.
"""

import json
import pathlib
import sys

import jax
import numpy as np
from flax import nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT, library, loss  # noqa: E402

from hxla._lower import _exact  # noqa: E402

M = 8
graphdef, params, rest = nnx.split(GPT(nnx.Rngs(0)), nnx.Param, ...)
text = library()["text"]
grad = jax.jit(jax.grad(lambda p, b: loss(nnx.merge(graphdef, p, rest), b)))
grads = [
    [np.asarray(g) for g in jax.tree.leaves(grad(params, {"text": text[2 * i : 2 * i + 2]}))]
    for i in range(M)
]
bits = _exact.num_bits(M)
encode = jax.jit(_exact.encode, static_argnums=2)
combine = jax.jit(_exact.combine, static_argnums=2)
errors = {"two limbs": [], "one limb": [], "float32": []}
for terms in zip(*grads, strict=True):
    reference = np.sum([t.astype(np.float64) for t in terms], axis=0)
    maximum = np.array([max(np.abs(t).max() for t in terms)], np.float32)
    exponent = _exact.next_exponents(np.zeros(1, np.int32), maximum, bits)[0]
    limbs = [encode(t, exponent, bits) for t in terms]
    hi = sum(np.asarray(h) for h, _ in limbs)
    lo = sum(np.asarray(r) for _, r in limbs)
    one_exponent = exponent + 5  # a single limb can be given all but one bit of headroom
    one = sum(np.rint(t * np.float64(2.0) ** one_exponent).astype(np.int64) for t in terms)
    total = terms[0]
    for t in terms[1:]:
        total = total + t
    sums = {
        "two limbs": np.asarray(_exact.rescale(combine(hi, lo, bits), exponent)),
        "one limb": (one * 2.0 ** -float(one_exponent)).astype(np.float32),
        "float32": total,
    }
    for name, value in sums.items():
        errors[name].append(np.linalg.norm(value - reference) / np.linalg.norm(reference))

rows = {k: {"worst": float(np.max(v)), "median": float(np.median(v))} for k, v in errors.items()}
rows["tensors where two limbs are no worse than float32"] = (
    f"{sum(a <= b for a, b in zip(errors['two limbs'], errors['float32'], strict=True))} of "
    f"{len(errors['float32'])}"
)
print(json.dumps(rows, indent=2))
out = ROOT / "benchmarks" / "results" / "exact_error.json"
out.write_text(json.dumps(rows, indent=2) + "\n")
