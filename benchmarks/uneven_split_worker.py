"""Trains a Transformer in turns of a step: split over devices, whole on one, or a part of it."""

import argparse
import json
import pathlib
import sys

import jax

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from gpt import GPT, LENGTH, library, loss  # noqa: E402
from turns import take_turn  # noqa: E402

import hxla  # noqa: E402

WIDTH, HEADS = 1024, 16
MICROBATCH = 8

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--shares", help="of the devices of a copy, 1,1; none: by their speeds")
parser.add_argument("--estimated", action="store_true", help="speeds are those of the mesh file")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--copies", type=int, default=1)
parser.add_argument("--manual", action="store_true", help="equal parts in the form of unlike ones")
parser.add_argument("--units", type=int, help="no split: so many heads, with their columns")
parser.add_argument("--collectives", type=int, help="nothing but so many all-reduces")
args = parser.parse_args()


class Part(nnx.Module):
    """What a device does of a block that has some of the units; see `gpt.Block`."""

    def __init__(self, rngs: nnx.Rngs, units: int):
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        own = WIDTH * units // HEADS
        self.norm1 = nnx.LayerNorm(WIDTH, use_bias=False, rngs=rngs)
        self.qkv, self.out = dense(WIDTH, 3 * own), dense(own, WIDTH)
        self.norm2 = nnx.LayerNorm(WIDTH, use_bias=False, rngs=rngs)
        self.up, self.down = dense(WIDTH, 4 * own), dense(4 * own, WIDTH)
        self.units = units

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        B, T, _ = x_BTD.shape
        N, H = self.units, WIDTH // HEADS
        qkv_BTN3H = self.qkv(self.norm1(x_BTD)).reshape(B, T, N, 3, H)
        q_BNTH, k_BNTH, v_BNTH = qkv_BTN3H.transpose(3, 0, 2, 1, 4)
        scores_BNTT = q_BNTH @ k_BNTH.swapaxes(2, 3) * H**-0.5
        mask_TT = jnp.tril(jnp.ones((T, T), bool))
        weights_BNTT = jax.nn.softmax(jnp.where(mask_TT, scores_BNTT, -1e9))
        mixed = (weights_BNTT @ v_BNTH).transpose(0, 2, 1, 3).reshape(B, T, N * H)
        x_BTD = x_BTD + self.out(mixed)
        return x_BTD + self.down(jax.nn.gelu(self.up(self.norm2(x_BTD))))


def tell(**told: object) -> None:
    """What the job says of itself."""
    if jax.process_index() == 0:
        print("RESULT " + json.dumps(told))


def all_reduces(num: int) -> None:
    """Turns of so many sums over all devices of a microbatch's activations."""
    hxla.join()
    mesh = jax.make_mesh((jax.device_count(),), ("tensor",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sums = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.fori_loop(0, num, lambda _, y: jax.lax.psum(y, "tensor") / 2, x),
            mesh=mesh,
            in_specs=jax.sharding.PartitionSpec(),
            out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )
    )
    shape = (MICROBATCH, LENGTH, WIDTH)
    x = jax.make_array_from_callback(
        shape, everywhere, lambda index: jnp.ones(shape, jnp.float32)[index]
    )
    for _ in range(args.turns + 1):
        x = jax.block_until_ready(sums(x))
        take_turn(args.folder, jax.process_index())
    tell(num=num)


def steps() -> None:
    """Turns of a step."""
    model = GPT(nnx.Rngs(0), width=WIDTH, heads=HEADS, layers=1)
    if args.units:
        model.blocks = nnx.List([Part(nnx.Rngs(0), args.units)])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
    job = hxla.Job(model, library(), loss, optimizer, batch_size=args.batch_size)
    if args.units:
        plan = job.plan(microbatch_size=MICROBATCH)
    else:
        shares = tuple(map(int, args.shares.split(","))) if args.shares else 2
        mesh = {"data": args.copies, "tensor": shares}
        counts = "even" if args.estimated else "measured"
        plan = job.plan(microbatch_size=MICROBATCH, mesh=mesh, rules="decoder", counts=counts)
    if args.manual:
        [axis] = plan.axes
        plan = plan.replaced(axes=(axis.model_copy(update={"shares": (1,) * axis.size}),))
    with job.open(plan, steps=args.turns + 1) as session:
        for _ in session:
            take_turn(args.folder, jax.process_index())
        history = session.result().history
    work = history.split
    tell(
        losses=[round(step.loss, 4) for step in history.steps],
        better_shares=work.better_shares if work else (),
        shares=plan.axes[0].shares if plan.axes else (),
        device_parameter_bytes=plan.device_parameter_bytes,
        sent_bytes=plan.prediction.sent_bytes if plan.prediction is not None else 0,
    )


if args.collectives:
    all_reduces(args.collectives)
else:
    steps()
