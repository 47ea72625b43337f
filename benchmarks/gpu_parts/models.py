"""A ResNet-50 and a model that is mostly embeddings, beside plain Flax under `jax.jit`.

Both have gradients that additions in any order would make: max-pools, and lookups of equal rows.
"""

import statistics
import sys

import gpu_jobs
import jax
import numpy as np
import optax
from flax import nnx
from report import ROOT, Report, arguments

sys.path.insert(0, str(ROOT / "benchmarks"))

import resnet
from turns import seconds_in_turns

import hxla

args = arguments()
report = Report(args.out)
ROUNDS, NUM = (1, 2) if args.tiny else (8, 4)


class Tables(nnx.Module):
    """Two tables of rows, an example a bag of rows of each."""

    def __init__(self, rows: int, width: int):
        rngs = nnx.Rngs(0)
        self.users = nnx.Embed(rows, width, rngs=rngs)
        self.items = nnx.Embed(rows, width, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, users: jax.Array, items: jax.Array) -> jax.Array:
        user = self.down(nnx.relu(self.up(self.users(users).mean(1))))
        return (user * self.items(items).mean(1)).sum(-1)


def clicks(model: Tables, batch: dict) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(model(batch["user"], batch["item"]), batch["click"])


def images(model: resnet.ResNet, batch: dict) -> jax.Array:
    return resnet.loss(model, batch)[0]


def of_images(size: int, edge: int, stages: tuple, width: int) -> tuple:
    draw = np.random.default_rng(0)
    data = {
        "image": draw.normal(size=(NUM * size, edge, edge, 3)).astype(np.float32),
        "label": draw.integers(1000, size=NUM * size, dtype=np.int32),
    }
    return lambda: resnet.ResNet(stages, width, 3, 1000, nnx.Rngs(0)), images, data, size


def of_tables(size: int, rows: int, width: int) -> tuple:
    draw = np.random.default_rng(0)
    ids = {name: draw.zipf(1.1, (NUM * size, 32)) % rows for name in ("user", "item")}
    data = {name: x.astype(np.int32) for name, x in ids.items()}
    data["click"] = draw.integers(2, size=NUM * size).astype(np.float32)
    return lambda: Tables(rows, width), clicks, data, size


def ours(make, loss, data, size, reduction):
    job = hxla.Job(
        make,
        data,
        loss,
        optax.adam(1e-3),
        batch_size=NUM * size,
        mixes_examples=True,
        shuffle=False,
    )
    session = job.open(job.plan(microbatch_size=size, reduction=reduction), quiet=True)

    def step():
        loss = session.step(data).loss
        jax.block_until_ready(jax.tree.leaves(session.state.params))
        return loss

    return step


def plain(make, loss, data):
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)
    optimizer = optax.adam(1e-3)
    state = [params, optimizer.init(params)]
    run = gpu_jobs.scanned(graphdef, rest, loss, optimizer)

    def step():
        found, *state[:] = run(*state, gpu_jobs.stacked(data, NUM))
        jax.block_until_ready(state)
        return float(found)

    return step


def compare(name, make, loss, data, size):
    """Rows of milliseconds a step."""
    runs = {f"hxla {kind}": ours(make, loss, data, size, kind) for kind in ("exact", "float")}
    runs["plain"] = plain(make, loss, data)
    seconds = {k: statistics.median(s) for k, s in seconds_in_turns(runs, ROUNDS).items()}
    report.detail(name, seconds)
    for own, other in (
        ("hxla exact", "plain"),
        ("hxla exact", "hxla float"),
        ("hxla float", "plain"),
    ):
        a, b = seconds[own], seconds[other]
        cells = f"{1e3 * a:.2f} ms", f"{1e3 * b:.2f} ms", f"{b / a:.3f}x"
        report.row(f"{name}: a step of {own}, beside {other}", *cells)


JOBS = {
    "ResNet-50, 64 images": (
        of_images(2, 32, (1, 1), 8) if args.tiny else of_images(64, 224, (3, 4, 6, 3), 64)
    ),
    "two tables of embeddings": of_tables(4, 64, 8) if args.tiny else of_tables(4096, 500_000, 64),
}
for name, job in JOBS.items():
    report.attempt(name, lambda name=name, job=job: compare(name, *job))
