"""What recomputation costs and saves: hxla's segments beside jax's own policies on each block.

    python benchmarks/recompute.py [--models gpt bert resnet] [--rounds 10]

Each contender is a job of hxla on one core, whose steps take turns in one process. Those called
`remat` are what a good user writes: `nnx.remat` around every block, with a policy of jax; the
microbatch is one program. Those called `segments` are the unmodified model with `memory.recompute`:
each layer has programs of its own. `auto` may have so many MiB.
Memory is what a microbatch needs beside parameters, sums and optimizer state, by the compiled
programs' own figures; all programs are compiled for little of it, see `--breadth-first`. Ratios are
to the seconds of the usual job, round by round.
Writes benchmarks/results/recompute.json.
"""

import json
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
# Before jax is imported: one core, and programs in an order in which few temporaries live at once,
# without which XLA on a CPU holds all of them, whatever is rematerialized.
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
if "--breadth-first" not in sys.argv:
    os.environ["XLA_FLAGS"] = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"

import bert  # noqa: E402
import gpt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import resnet  # noqa: E402
import results  # noqa: E402
from flax import nnx  # noqa: E402

import hxla  # noqa: E402

POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def remat(block, x, policy):
    """A block that keeps what a policy says."""
    return x if block is None else nnx.remat(lambda block, x: block(x), policy=policy)(block, x)


class Gpt(gpt.GPT):
    """Its blocks with a policy."""

    policy = None

    def __call__(self, text_BT):
        x_BTD = self.tok(text_BT) + self.pos(jnp.arange(text_BT.shape[1]))
        for block in self.blocks:
            x_BTD = remat(block, x_BTD, self.policy)
        return self.tok.attend(self.norm(x_BTD))


class Bert(bert.Bert):
    """Likewise."""

    policy = None

    def __call__(self, tokens):
        x = self.norm(self.tok(tokens) + self.pos(jnp.arange(tokens.shape[1])))
        for layer in self.layers:
            x = remat(layer, x, self.policy)
        return self.tok.attend(x)


class ResNet(resnet.ResNet):
    """Likewise."""

    policy = None

    def __call__(self, images):
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(images))), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = remat(block, x, self.policy)
        return self.head(x.mean((1, 2)))


def images():
    """Random ones with labels."""
    rng = np.random.default_rng(0)
    image = rng.normal(size=(64, 64, 64, 3)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, 100, 64).astype(np.int32)}


#: Limits for `auto`, between what the words `boundaries` and `none` take.
SHARES = (0.3, 0.6)

#: Name: the model with its usual blocks, with rematerialized ones, loss, data, microbatch size.
MODELS = {
    "gpt": (
        lambda: gpt.GPT(nnx.Rngs(0), layers=8),
        lambda: Gpt(nnx.Rngs(0), layers=8),
        (Gpt, gpt.loss, gpt.library, 4),
    ),
    "bert": (
        lambda: bert.Bert(nnx.Rngs(0), layers=8),
        lambda: Bert(nnx.Rngs(0), layers=8),
        (Bert, bert.loss, gpt.library, 4),
    ),
    "resnet": (
        lambda: resnet.ResNet((2, 2, 2, 2), 32, 3, 100, nnx.Rngs(0)),
        lambda: ResNet((2, 2, 2, 2), 32, 3, 100, nnx.Rngs(0)),
        (ResNet, resnet.loss, images, 8),
    ),
}


class Contender:
    """A job that is opened, and its times.

    Args:
        make: The model.
        others: See `MODELS`.
        config: Of the job.
        memory_bytes: That a microbatch may take, for `auto`.
        steps: It will do.
    """

    def __init__(self, make, others, config, memory_bytes=None, steps=0):
        _, loss, data, size = others
        job = hxla.Job(make, data(), loss, optax.adamw(1e-3), batch_size=4 * size, config=config)
        device = hxla.Device(kind="cpu")
        if memory_bytes is not None:
            state = 4 * sum(x.size for x in jax.tree.leaves(nnx.state(make(), nnx.Param)))
            device = hxla.Device(kind="cpu", memory_bytes=5 * state + memory_bytes)
        cluster = hxla.Cluster(name="", devices=(device,))
        plan = job.plan(cluster, auto=False, microbatch_size=size)
        # Little memory would also release the sums, and give pages back at once, in all jobs of
        # this process: what is compared here is recomputation alone.
        kept = plan.placement.model_copy(update={"sums": "kept"})
        plan = plan.replaced(placement=kept)
        began = time.perf_counter()
        session = job.open(plan, steps=steps)
        self.opened_seconds = time.perf_counter() - began
        self.session, self.steps = session, iter(session)
        self.memory_bytes = session._programs.runners[0].memory_bytes(0)
        self.again = 0 if plan.chain is None else _again(plan.chain)
        self.seconds = []

    def step(self):
        """One of its turns."""
        began = time.perf_counter()
        self.loss = next(self.steps).loss
        jax.block_until_ready(self.session.state.params)
        self.seconds.append(time.perf_counter() - began)


def _again(chain):
    forwards = sum(op.startswith("F") for op in chain.sequence)
    return forwards - (len(chain.segments) - 1)


def measured(name, rounds):
    """All contenders of one model."""
    usual, with_remat, others = MODELS[name]
    steps = rounds + 2
    found = {"usual": Contender(usual, others, {}, steps=steps)}
    for policy, rule in POLICIES.items():
        others[0].policy = staticmethod(rule)
        found[f"remat {policy}"] = Contender(with_remat, others, {}, steps=steps)
    for word in ("none", "boundaries"):
        config = {"memory": {"recompute": word}}
        found[f"segments {word}"] = Contender(usual, others, config, steps=steps)
    least, most = (found[f"segments {word}"].memory_bytes for word in ("boundaries", "none"))
    for share in SHARES:
        limit = int(least + share * (most - least))
        config = {"memory": {"recompute": "auto"}}
        label = f"segments auto {limit / 2**20:.1f}"
        found[label] = Contender(usual, others, config, limit, steps=steps)
    for n in range(steps):
        for each in list(found.values())[:: -1 if n % 2 else 1]:
            each.step()
    rows = {}
    base = np.array(found["usual"].seconds[2:])
    for label, each in found.items():
        ratio = np.array(each.seconds[2:]) / base
        rows[label] = {
            "seconds": round(float(np.median(each.seconds[2:])), 4),
            "ratio": round(float(np.median(ratio)), 3),
            "quartiles": [round(float(q), 3) for q in np.quantile(ratio, (0.25, 0.75))],
            "memory_mib": round(each.memory_bytes / 2**20, 2),
            "forwards_again": each.again,
            "opened_seconds": round(each.opened_seconds, 1),
            "loss": round(each.loss, 4),
        }
        print(name, label, json.dumps(rows[label]), flush=True)
    return rows


def main():
    parser = results.parser(__doc__, "recompute")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--breadth-first", action="store_true", help="programs in the order that is usual on a CPU"
    )
    args = parser.parse_args()
    order = "breadth first" if args.breadth_first else "memory optimized"
    rows = {name: results.row(measured(name, args.rounds)) for name in args.models}
    models = results.read(args.out).get("models", {}) | rows
    results.write(args.out, {"scheduler": order, "models": models})


if __name__ == "__main__":
    main()
