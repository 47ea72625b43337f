"""Rules for data x tensor parallelism beside the same model sharded by hand in plain JAX.

    hxla run -n 1 benchmarks/hand_sharded.py [--rounds 6]

Eight fake devices on this machine's cores: only ratios mean anything. The plain step is one
`jax.jit` with donation over the same mesh: `jax.shard_map` over `data`, a local `lax.scan` over
microbatches and one `psum`, while XLA cuts the model over `tensor` by Megatron's PartitionSpecs,
written out, with constraints on the activations between heads and MLP. Batches are handed over
beforehand. Both bring the loss to the host in every step. hxla also looks for gradients that are
not finite, in every tensor, which the plain step does not.

Each runs with one microbatch per copy and step, and with as many as hxla chooses when it is given
no size (it measures some). The step that a user gets is that of hxla's own choice; beside it stands
the faster of the plain ones, which a user by hand would take.

All take turns of a step, until the update is done; their losses must agree. Also the time that
making the plan takes beside opening a session, which compiles it. Writes
benchmarks/results/hand_sharded.json.
"""

import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import plain  # noqa: E402
import results  # noqa: E402
import turns  # noqa: E402

import hxla  # noqa: E402

DATA, TENSOR, BATCH_SIZE, LENGTH = 2, 4, 32, 128
WIDTH, HEADS, LAYERS, VOCABULARY = 256, 8, 4, 512
OPTIMIZER = optax.adamw(1e-3)

Constrain = Callable[..., jax.Array]


class Block(nnx.Module):
    """Attention and MLP; `constrain` may say how activations are cut."""

    def __init__(self, rngs: nnx.Rngs, constrain: Constrain):
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query, self.key, self.value = (dense(WIDTH, WIDTH) for _ in range(3))
        self.attention = nnx.Dict(out=dense(WIDTH, WIDTH))
        self.up, self.down = dense(WIDTH, 4 * WIDTH), dense(4 * WIDTH, WIDTH)
        self.constrain = constrain

    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            self.constrain(f(y).reshape(B, T, HEADS, -1), None, None, "tensor")
            for f in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, WIDTH)
        x = x + self.constrain(self.attention["out"](mixed))
        hidden = self.constrain(jax.nn.gelu(self.up(self.norm2(x))), None, None, "tensor")
        return x + self.constrain(self.down(hidden))


class Net(nnx.Module):
    """Tokens in, logits out."""

    def __init__(self, rngs: nnx.Rngs, constrain: Constrain = lambda x, *_: x):
        self.tok = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, constrain) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean over tokens."""
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def by_hand(tokens: np.ndarray, num: int) -> Callable[[], float]:
    """A step of plain JAX with so many microbatches: the specs of the rule set, written out."""
    mesh = jax.make_mesh((DATA, TENSOR), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def constrain(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, P(*spec))

    graphdef, params = nnx.split(Net(nnx.Rngs(0), constrain))
    column, row = {"query", "key", "value", "up", "head"}, {"out", "down", "tok"}

    def spec(path: jax.tree_util.KeyPath, _: jax.Array) -> P:
        names = {str(getattr(key, "key", "")) for key in path}
        return P(None, "tensor") if names & column else P("tensor") if names & row else P()

    def mean_loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        return loss(nnx.merge(graphdef, params), {"tokens": tokens})

    return plain.data_parallel(
        jax.value_and_grad(mean_loss),
        params,
        OPTIMIZER,
        tokens,
        mesh,
        batch_size=BATCH_SIZE,
        microbatch_size=BATCH_SIZE // DATA // num,
        specs=jax.tree.map_with_path(spec, params),
    )


def ours(job: hxla.Job, plan: hxla.Plan) -> Callable[[], float]:
    """A step of hxla."""
    session = job.open(plan)

    def step() -> float:
        record = session.step()
        jax.block_until_ready(jax.live_arrays())  # of every copy of the model
        return record.loss

    return step


def planned(job: hxla.Job, num: int | None, reduction: str) -> hxla.Plan:
    """With so many microbatches for each copy of the model; None: as hxla chooses."""
    return job.plan(
        mesh={"data": DATA, "tensor": TENSOR},
        rules="decoder",
        microbatch_size=num and BATCH_SIZE // DATA // num,
        counts="even",
        reduction=reduction,
    )


def main() -> None:
    """All of them."""
    parser = results.parser(__doc__, "hand_sharded")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DATA * TENSOR)
    shape = (BATCH_SIZE * (args.rounds + 4), LENGTH + 1)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, shape).astype(np.int32)
    job = hxla.Job(
        Net(nnx.Rngs(0)), {"tokens": tokens}, loss, OPTIMIZER, batch_size=BATCH_SIZE, shuffle=False
    )
    begun = time.perf_counter()
    first = planned(job, 1, "exact")
    planning = time.perf_counter() - begun
    begun = time.perf_counter()
    runs = {"hxla exact, 1": ours(job, first)}
    opening = time.perf_counter() - begun
    chosen = planned(job, None, "exact").num_microbatches // DATA
    runs |= {"by hand, 1": by_hand(tokens, 1), "hxla float, 1": ours(job, planned(job, 1, "float"))}
    if chosen > 1:
        runs[f"hxla exact, {chosen}"] = ours(job, planned(job, chosen, "exact"))
        runs[f"by hand, {chosen}"] = by_hand(tokens, chosen)
        runs[f"hxla float, {chosen}"] = ours(job, planned(job, chosen, "float"))
    seconds = turns.seconds_in_turns(runs, args.rounds, tolerance=1e-3)
    best = min((1, chosen), key=lambda n: statistics.median(seconds[f"by hand, {n}"]))
    pairs = dict.fromkeys(
        (f"hxla {reduction}, {n}", f"by hand, {m}")
        for n, m in ((chosen, best), (chosen, chosen), (1, 1))
        for reduction in ("exact", "float")
    )
    result = {
        "mesh": {"data": DATA, "tensor": TENSOR},
        "microbatches": {"hxla chooses": chosen, "by hand is faster with": best},
        "step_seconds": turns.medians(seconds),
        "ratios": {f"{a} / {b}": turns.over(seconds[b], seconds[a]) for a, b in pairs},
        "planning_seconds": round(planning, 3),
        "opening_seconds": round(opening, 3),
        "seconds": {name: [round(s, 4) for s in own] for name, own in seconds.items()},
    }
    results.write(args.out, result)


if __name__ == "__main__":
    main()
