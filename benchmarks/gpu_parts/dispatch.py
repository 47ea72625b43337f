"""What a microbatch costs beside its arithmetic: a model of a few thousand parameters.

Its kernels take microseconds, so a step is what the host does: hxla calls a program for each
microbatch, or for 32 of them (`cluster.microbatches_per_call`); a plain loop may call one for each
too, or put all of them into one program.
"""

import statistics
import time

import gpu_jobs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from report import Report, arguments

import hxla

args = arguments()
report = Report(args.out)
SIZE = 4
NUMS, ROUNDS = ((4, 8), 3) if args.tiny else ((32, 256), 15)
IN_CALLS = "hxla exact, 32 a call"
optimizer = optax.adam(1e-3)
x = np.random.default_rng(0).normal(size=(4096, 32)).astype(np.float32)
data = {"x": x, "y": np.tanh(x[:, :10])}


def batch(num):
    return {name: a[: num * SIZE] for name, a in data.items()}


def ours(num, reduction, per_call=1):
    config = {"cluster": {"microbatches_per_call": per_call}}
    own = gpu_jobs.perceptron()
    job = hxla.Job(own, data, gpu_jobs.squares, optimizer, batch_size=num * SIZE, config=config)
    session = job.open(job.plan(microbatch_size=SIZE, reduction=reduction))

    def step():
        session.step(batch(num))
        return session.state.params

    return step


def one_program(num):
    graphdef, params, rest = nnx.split(gpu_jobs.perceptron(), nnx.Param, ...)
    run = gpu_jobs.scanned(graphdef, rest, gpu_jobs.squares, optimizer)
    state = [params, optimizer.init(params)]

    def step():
        _, *state[:] = run(*state, gpu_jobs.stacked(batch(num), num))
        return state

    return step


def a_call_each(num):
    graphdef, params, rest = nnx.split(gpu_jobs.perceptron(), nnx.Param, ...)
    state = [params, optimizer.init(params)]

    def value(params, part):
        return gpu_jobs.squares(nnx.merge(graphdef, params, rest), part).mean()

    def add(total, params, part):
        return jax.tree.map(jnp.add, total, jax.grad(value)(params, part))

    def last(params, opt_state, total):
        grads = jax.tree.map(lambda x: x / num, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params))
    add, last = jax.jit(add, donate_argnums=0), jax.jit(last, donate_argnums=(0, 1))

    def step():
        rows, total = batch(num), zeros(state[0])
        for i in range(num):
            part = {name: a[i * SIZE : (i + 1) * SIZE] for name, a in rows.items()}
            total = add(total, state[0], part)
        state[:] = last(*state, total)
        return state

    return step


def seconds(steps):
    """Of a step of each, in turns."""
    times = {name: [] for name in steps}
    for n in range(ROUNDS + 1):
        for name, step in steps.items():
            begun = time.perf_counter()
            jax.block_until_ready(jax.tree.leaves(step()))
            if n:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(t) for name, t in times.items()}


found = {}
for num in NUMS:
    steps = {f"hxla {kind}": ours(num, kind) for kind in ("exact", "float")}
    steps[IN_CALLS] = ours(num, "exact", 32)
    found[num] = seconds(
        {**steps, "a call each": a_call_each(num), "one program": one_program(num)}
    )
report.detail("seconds_per_step", found)
few, many = NUMS
each = {name: (found[many][name] - found[few][name]) / (many - few) for name in found[few]}
pairs = [("hxla exact", other) for other in ("hxla float", "a call each", "one program")]
for own, other in [*pairs, (IN_CALLS, "one program")]:
    a, b = each[own], each[other]
    what = f"{own}: a microbatch more, beside {other}"
    report.row(what, f"{1e6 * a:.1f} us", f"{1e6 * b:.1f} us", f"{a / b:.2f}x")
    step = f"{own}: a step of {few} microbatches, beside {other}"
    pair = found[few][own], found[few][other]
    report.row(step, *(f"{1e3 * s:.2f} ms" for s in pair), f"{pair[0] / pair[1]:.2f}x")
