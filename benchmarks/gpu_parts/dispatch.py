"""What a microbatch costs beside its arithmetic: a model of a few thousand parameters.

Its kernels take microseconds, so a step is what the host does: hxla calls a program for each
microbatch; a plain loop may do the same, or put all of them into one program.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from report import Report, arguments

import hxla

args = arguments()
report = Report(args.out)
MICRO = 4
NUMS, ROUNDS = ((4, 8), 3) if args.dry else ((32, 256), 15)
optimizer = optax.adam(1e-3)
rng = np.random.default_rng(0)
x = rng.normal(size=(4096, 32)).astype(np.float32)
data = {"x": x, "y": np.tanh(x[:, :10])}


def make():
    r = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(32, 64, rngs=r), nnx.relu, nnx.Linear(64, 10, rngs=r))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)


def batch(num):
    return jax.tree.map(lambda a: a[: num * MICRO], data)


def ours(num, reduction):
    job = hxla.Job(make(), data, loss, optimizer, batch_size=num * MICRO)
    session = job.open(job.plan(microbatch_size=MICRO, reduction=reduction))

    def step():
        session.step(batch(num))
        return jax.tree.leaves(session.state.params)

    return step


def plain(num, is_scanned):
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)
    state = [params, optimizer.init(params)]

    def value(params, part):
        return loss(nnx.merge(graphdef, params, rest), part).mean()

    def update(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def add(total, params, part):
        return jax.tree.map(jnp.add, total, jax.grad(value)(params, part))

    @jax.jit
    def whole(params, opt_state, parts):
        zero = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(lambda t, p: (add(t, params, p), None), zero, parts)
        return update(params, opt_state, total)

    one, last = jax.jit(add, donate_argnums=0), jax.jit(update)
    zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p))

    def step():
        rows = batch(num)
        if is_scanned:
            parts = jax.tree.map(lambda a: a.reshape(num, MICRO, -1), rows)
            state[:] = whole(*state, parts)
        else:
            total = zeros(state[0])
            for i in range(num):
                part = jax.tree.map(lambda a: a[i * MICRO : (i + 1) * MICRO], rows)
                total = one(total, state[0], part)
            state[:] = last(*state, total)
        return state

    return step


def seconds(steps):
    """Of a step of each, in turns."""
    times = {name: [] for name in steps}
    for n in range(ROUNDS + 1):
        for name, step in steps.items():
            begun = time.perf_counter()
            jax.block_until_ready(step())
            if n:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(t) for name, t in times.items()}


found = {}
for num in NUMS:
    found[num] = seconds(
        {
            "hxla exact": ours(num, "exact"),
            "hxla float": ours(num, "float"),
            "a call each": plain(num, is_scanned=False),
            "one program": plain(num, is_scanned=True),
        }
    )
report.detail("seconds_per_step", found)
few, many = NUMS
each = {n: (found[many][n] - found[few][n]) / (many - few) for n in found[few]}
for other in ("hxla float", "a call each", "one program"):
    report.row(
        f"a microbatch more, beside {other}",
        f"{1e6 * each['hxla exact']:.1f} us",
        f"{1e6 * each[other]:.1f} us",
        f"{each[other] / each['hxla exact']:.2f}x",
    )
fixed = {n: found[few][n] - few * each[n] for n in each}
report.row("a step without microbatches, beside a call each", f"{1e3 * fixed['hxla exact']:.2f} ms", f"{1e3 * fixed['a call each']:.2f} ms")
