"""Kernels of a step, and how long the card is busy with them: hxla's exact step beside plain JAX.

XLA's profiler traces a step. Its kernels are added up by name, so a difference between the walls of
two steps is either kernels, or time in which the card waits for the host.
"""

import collections
import dataclasses
import pathlib
import re
import statistics
import sys
import tempfile

import gpu_jobs
import jax
import numpy as np
import optax
from flax import nnx
from report import ROOT, Report, arguments

sys.path.insert(0, str(ROOT / "benchmarks"))

from turns import seconds_in_turns

import hxla

args = arguments()
report = Report(args.out)
SEQUENCES, ROUNDS = (2, 3) if args.tiny else (4, 8)
TRACED, MOST_NAMES = 2, 12


def kernels(run):
    """Number and nanoseconds of each kernel of a step, by its name without numbers."""
    found = collections.defaultdict(lambda: [0, 0.0])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as name:
        with jax.profiler.trace(name, profiler_options=options):
            for _ in range(TRACED):
                run()
        [path] = pathlib.Path(name).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        for plane in planes:
            is_card = plane.name.startswith("/device:GPU")
            for line in plane.lines:
                if "Stream" in line.name if is_card else line.name.startswith("tf_XLA"):
                    for event in line.events:
                        if is_card or not re.match("Thunk|end: |while|cond", event.name):
                            own = found[re.sub(r"[._]?\d+", "", event.name)]
                            own[0] += 1 / TRACED
                            own[1] += event.duration_ns / TRACED
    return dict(found)


def compare(what, runs):
    """Rows for steps of hxla and of plain JAX: walls in turns, kernels, and the busy card."""
    walls = seconds_in_turns(runs, ROUNDS)
    traced = {name: kernels(run) for name, run in runs.items()}
    ours, plain = runs
    told = {
        "wall, ms": [1e3 * statistics.median(walls[name]) for name in runs],
        "kernels": [sum(num for num, _ in traced[name].values()) for name in runs],
        "card busy, ms": [sum(ns for _, ns in traced[name].values()) / 1e6 for name in runs],
    }
    for words, (own, other) in told.items():
        ratio = f"{own / other:.2f}x" if other else ""
        report.row(f"{what}: {words} of {ours}, {plain}", f"{own:.2f}", f"{other:.2f}", ratio)
    difference = collections.Counter({n: ns for n, (_, ns) in traced[ours].items()})
    difference.subtract({n: ns for n, (_, ns) in traced[plain].items()})
    for name in sorted(difference, key=lambda name: -abs(difference[name]))[:MOST_NAMES]:
        pair = [traced[who].get(name, (0, 0.0)) for who in (ours, plain)]
        cells = [f"{ns / 1e3:.0f} us in {num:.0f}" for num, ns in pair]
        report.row(f"{what}: {name[:60]}", *cells, f"{difference[name] / 1e3:+.0f} us")
    report.detail(what, {"seconds": walls, "kernels": traced})


def steps(job, microbatch_size, batch, scanned, state, num):
    """A step of hxla and one of plain JAX, each until all is done."""
    session = job.open(job.plan(microbatch_size=microbatch_size), quiet=True)

    def ours():
        session.step(batch)
        jax.block_until_ready(jax.tree.leaves(session.state.params))

    def plain():
        _, *state[:] = scanned(*state, gpu_jobs.stacked(batch, num))
        jax.block_until_ready(state)

    return {"hxla exact": ours, "plain": plain}


def gpt():
    size = gpu_jobs.SIZES["tiny" if args.tiny else "124m"]
    size = dataclasses.replace(size, block=gpu_jobs.FusedBlock)
    optimizer, num = gpu_jobs.gpt_optimizer(), size.num_microbatches
    text = size.text()
    batch = {"text": text[: num * SEQUENCES]}
    graphdef, params, rest = nnx.split(size.make(), nnx.Param, ...)
    scanned = gpu_jobs.scanned(graphdef, rest, size.loss, optimizer)
    job = hxla.Job(
        size.make, {"text": text}, size.loss, optimizer, batch_size=num * SEQUENCES, shuffle=False
    )
    state = [params, optimizer.init(params)]
    compare("the GPT", steps(job, SEQUENCES, batch, scanned, state, num))


def perceptron():
    num, size, optimizer = 32, 4, optax.adam(1e-3)
    x = np.random.default_rng(0).normal(size=(num * size, 32)).astype(np.float32)
    batch = {"x": x, "y": np.tanh(x[:, :10])}
    graphdef, params, rest = nnx.split(gpu_jobs.perceptron(), nnx.Param, ...)
    scanned = gpu_jobs.scanned(graphdef, rest, gpu_jobs.squares, optimizer)
    job = hxla.Job(gpu_jobs.perceptron, batch, gpu_jobs.squares, optimizer, batch_size=num * size)
    state = [params, optimizer.init(params)]
    compare("a tiny model", steps(job, size, batch, scanned, state, num))


for part in (perceptron, gpt):
    report.attempt(part.__name__, part)
