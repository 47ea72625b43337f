"""Parts of unlike sizes with a process for each device: each compiles its own sizes only."""

import json
import math
import re

import numpy as np
import optax
import pytest

from support.launched import start
from support.paths import TESTS
from support.uneven_runs import train

CODE = f"""
import json, re, sys
sys.path.insert(0, {str(TESTS)!r})
import models, optax
from flax import nnx
import hxla
hxla.join()
import jax
mesh = {{"data": jax.device_count() // 2, "tensor": (2, 1)}}
optimizers = {{"adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))}}
if mesh["data"] == 1:
    optimizers["adafactor"] = optax.adafactor(1e-2, min_dim_size_to_factor=4)
for name, optimizer in optimizers.items():
    result = hxla.train(
        models.NnxNet(nnx.Rngs(0), heads=8), models.tokens(), models.token_loss, optimizer,
        batch_size=8,
        microbatch_size=4, seed=1, rules="decoder", mesh=mesh, steps=3, eval_data=models.tokens(8),
        counts="even",
    )
    losses = [r.loss for r in (*result.history.steps, *result.history.evaluations)]
    told = dict(sha256=result.sha256, numerics=result.plan.numerics, losses=losses)
    told["num_split"] = len(result.history.split.names) if result.history.split else 0
    if jax.process_index() == 0:
        print("RESULT", name, json.dumps(told))

job = hxla.Job(
    models.NnxNet(nnx.Rngs(0), heads=8), models.tokens(), models.token_loss, optax.sgd(0.1),
    batch_size=8
)
plan = job.plan(microbatch_size=4, mesh=mesh, rules="decoder", counts="even")
with job.open(plan, steps=9) as session:
    programs = session._programs
    stats = programs.runners[0]._compiled.memory_analysis()
    held = sum(x.addressable_shards[0].data.nbytes for x in session._store.held[0].params)
    print("BYTES", plan.device_parameter_bytes, held, stats.argument_size_in_bytes)
    text = "".join(program.as_text() for program in programs.reducer.programs)
    sent = sum(map(int, re.findall("s32.([0-9]+).[^ ]* collective-permute.", text)))
    cuts = [(p, p.dim_of("tensor")) for p in plan.parameters]
    parts = [(p.num_bytes, p.parts(d, 2) if d is not None else (1,)) for p, d in cuts]
    own = sum(n // 4 * x[jax.process_index() % len(x)] // sum(x) for n, x in parts)
    print("SENT", sent, own + 2 * models.WIDTH)  # with the statistics of BatchNorm
    if mesh["data"] == 1:
        for _ in session:
            if session.step_number == 2 and jax.process_index() == 1:
                session.stop()
        print("ended at", session.step_number)
"""


def results(folder, *options):
    folder.mkdir()
    job = start(folder, CODE, *options)
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err[-3000:]
    lines = [line.split("RESULT ", 1)[1] for line in out.splitlines() if "RESULT " in line]
    found = dict(line.split(" ", 1) for line in lines)
    return out, {name: json.loads(text) for name, text in found.items()}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    devices = '[[device]]\nkind = "cpu"\ncore_share = 1.0\n'
    (folder / "pair.toml").write_text('name = "pair"\n' + 2 * devices)
    return {
        1: results(folder / "one", "--mesh", str(folder / "pair.toml")),
        2: results(folder / "two", "-n", "4"),
    }


@pytest.mark.slow
def test_two_pairs_of_processes_end_with_the_bits_of_one(pairs):
    one, two = (pairs[n][1]["adamw"] for n in (1, 2))
    assert one["numerics"] == two["numerics"]
    assert one["sha256"] == two["sha256"]
    assert one["losses"] == two["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adamw", optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))),
        ("adafactor", optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    ],
)
def test_processes_train_as_devices_of_one_process_do(pairs, name, optimizer):
    whole = train({"data": 1}, steps=3, optimizer=optimizer)
    history = whole.history
    losses = [r.loss for r in (*history.steps, *history.evaluations)]
    np.testing.assert_allclose(pairs[1][1][name]["losses"], losses, rtol=2e-4)


@pytest.mark.slow
def test_what_one_process_of_a_copy_asks_all_do(pairs):
    out, _ = pairs[1]
    assert "[0] ended at 3" in out
    assert "[1] ended at 3" in out


@pytest.mark.slow
def test_each_process_holds_its_padded_part(pairs):
    out, _ = pairs[1]
    lines = [line.split("BYTES ")[1] for line in out.splitlines() if "BYTES " in line]
    assert len(lines) == 2
    for planned, held, of_program in (map(int, line.split()) for line in lines):
        assert held == planned
        # Parameters, two limbs of sums of each, and a batch of bytes.
        assert of_program == pytest.approx(3 * planned, rel=0.05)


@pytest.mark.slow
def test_sums_over_copies_send_no_padding(pairs):
    out, _ = pairs[2]
    lines = [line.split("SENT ")[1] for line in out.splitlines() if "SENT " in line]
    assert len(lines) == 4
    for sent, own in (map(int, line.split()) for line in lines):
        assert sent == 2 * math.ceil(own / 2)  # half of each of two limbs, to the other copy
    assert len(set(lines)) == 2


def test_a_report_says_who_waited_where_processes_have_a_share_of_a_core(pairs):
    out, found = pairs[1]
    assert found["adamw"]["num_split"] == 2
    assert "Devices of a split, 1 step" in out
    assert pairs[2][1]["adamw"]["num_split"] == 0


MEASURED = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import models, optax
from flax import nnx
import hxla
hxla.join()
job = hxla.Job(
    models.NnxNet(nnx.Rngs(0), heads=8), models.tokens(), models.token_loss, optax.sgd(0.1),
    batch_size=8
)
said = lambda plan: [line for line in plan.explain().splitlines() if "steps of a trial" in line]
for counts in ("even", "measured"):
    mesh = {{"data": 1, "tensor": 2}}
    for _ in range(2):
        plan = job.plan(microbatch_size=4, mesh=mesh, rules="decoder", counts=counts)
        print("PLAN", plan.axes[0].shares, plan.numerics, said(plan))
        mesh = {{"data": 1, "tensor": plan.axes[0].shares}}
"""


@pytest.mark.slow
def test_sizes_are_measured_by_default_and_stating_them_gives_the_same_bits(tmp_path):
    job = start(tmp_path, MEASURED, "--mesh", "cpu-1.0-0.33")
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err[-3000:]
    plans = [line.split("PLAN ", 1) for line in out.splitlines() if "PLAN " in line]
    first, second = ([text for rank, text in plans if rank == f"[{r}] "] for r in (0, 1))
    assert first == second
    estimated, _, measured, stated = first
    assert estimated.endswith("[]")
    assert stated.endswith("[]")
    assert "worked" in measured
    assert measured.split(" [")[0] == stated.split(" [")[0]
    [ratio] = re.findall(r"'tensor': (\(.*?\))}", measured)
    assert measured.startswith(ratio)
