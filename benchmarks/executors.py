"""Two microbatches at once on one device beside one after another.

    python benchmarks/executors.py

Trains models in this process, whose only device is a CPU with all its cores, with one executor and
with two, in turns of a step: a recurrent one, whose small operations leave cores idle, a small
GPT-like one, and a wide perceptron, whose products use all cores. A ratio above 1 says that two are
faster; `chosen` is what `cluster.executors = "auto"` takes. Bits are compared.
Writes benchmarks/results/executors.json.
"""

import contextlib

import numpy as np
import optax
import results
from flax import nnx
from turns import medians, over, seconds_in_turns

import hxla

SIZE, BATCH = 8, 128  # examples of a microbatch and of a step
TRIED_STEPS = 1000  # so many that a session tries executors


class Recurrent(nnx.Module):
    """An LSTM over 64 steps."""

    def __init__(self, rngs: nnx.Rngs):
        self.cells = nnx.RNN(nnx.LSTMCell(32, 64, rngs=rngs))
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.cells(x)[:, -1])[:, 0]


class Attentive(nnx.Module):
    """Two layers of attention and a perceptron."""

    def __init__(self, rngs: nnx.Rngs):
        self.inp = nnx.Linear(32, 64, rngs=rngs)
        self.mixes = nnx.List(
            [nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs) for _ in range(2)]
        )
        self.ups = nnx.List([nnx.Linear(64, 256, rngs=rngs) for _ in range(2)])
        self.downs = nnx.List([nnx.Linear(256, 64, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        x = self.inp(x)
        for mix, up, down in zip(self.mixes, self.ups, self.downs, strict=True):
            x = x + mix(x)
            x = x + down(nnx.gelu(up(x)))
        return self.out(x.mean(axis=1))[:, 0]


class Wide(nnx.Module):
    """A perceptron of width 2048."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [nnx.Linear(n, m, rngs=rngs) for n, m in [(2048, 2048), (2048, 2048), (2048, 1)]]
        )

    def __call__(self, x):
        x = x.reshape(len(x), 2048)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x[:, 0]


def loss(model, batch):
    """Of each example."""
    return (model(batch["x"]) - batch["y"]) ** 2


def job_of(make, executors):
    """A job whose device has so many executors."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(512, 64, 32)).astype(np.float32),
        "y": rng.normal(size=512).astype(np.float32),
    }
    config = {"cluster": {"executors": executors}}
    model = make(nnx.Rngs(0))
    return hxla.Job(model, data, loss, optax.adam(1e-3), batch_size=BATCH, config=config)


def measured(make, num_rounds):
    """One model with one executor and with two."""
    with contextlib.ExitStack() as stack:
        runs, ends = {}, {}
        for num in (1, 2):
            job = job_of(make, num)
            opened = job.open(job.plan(microbatch_size=SIZE), steps=num_rounds + 1)
            ends[num] = session = stack.enter_context(opened)
            runs[f"executors {num}"] = lambda session=session: session.step().loss
        seconds = seconds_in_turns(runs, num_rounds, tolerance=0.0)
        digests = {session.result().sha256 for session in ends.values()}
    if len(digests) > 1:
        raise SystemExit(f"bits differ: {digests}")
    job = job_of(make, "auto")
    with job.open(job.plan(microbatch_size=SIZE), steps=TRIED_STEPS, balance=True) as session:
        chosen = session.plan.replicas[0].executors
    ratio = over(seconds["executors 1"], seconds["executors 2"])
    return {"seconds a step": medians(seconds), "speed-up of two": ratio, "chosen": chosen}


parser = results.parser(__doc__, "executors")
parser.add_argument("--rounds", type=int, default=100)
args = parser.parse_args()
models = {"recurrent": Recurrent, "attentive": Attentive, "wide": Wide}
found = {name: measured(make, args.rounds) for name, make in models.items()}
results.write(args.out, found)
