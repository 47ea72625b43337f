"""Parts of unlike sizes with a process for each device: each compiles its own sizes only."""

import functools
import json
import re

import numpy as np
import pytest

from support.launched import start
from support.tiers import rows
from support.uneven_runs import OPTIMIZERS, train

LIMIT_SECONDS = 300

CODE = """
import json, os, re
import hxla
hxla.join()
import jax
from support import models
from support.uneven_runs import OPTIMIZERS, SIZE, Columns
from flax import nnx
rank, num = jax.process_index(), jax.process_count()

def facts(record, session):
    if session.step_number == 3:
        session.evaluate(models.regression(8))
    if session.step_number != 2:
        return
    if rank == 1:
        session.stop()
    plan, programs = session.plan, session._programs
    stats = programs.runners[0]._programs.of(0)["loss"].memory_analysis()
    held = sum(x.addressable_shards[0].data.nbytes for x in session._store.held[0].params)
    print("BYTES", plan.device_parameter_bytes, held, stats.argument_size_in_bytes)
    text = "".join(program.as_text() for program in programs.reducer.programs)
    sent = sum(map(int, re.findall("s32.([0-9]+).[^ ]* collective-permute.", text)))
    cuts = [(p, p.dim_of("tensor")) for p in plan.parameters]
    parts = [(p.num_bytes, p.parts(d, 2) if d is not None else (1,)) for p, d in cuts]
    own = [n // 4 * x[rank % len(x)] // sum(x) for n, x in parts if len(x) > 1]
    whole = [n // 4 for n, x in parts if len(x) == 1]
    print("SENT", sent, sum(own), sum(whole) + 2 * 6)  # with the statistics of BatchNorm

for name in os.environ["NAMES"].split():
    result = hxla.train(
        hxla.Job(
            Columns(nnx.Rngs(0)),
            models.regression(96),
            models.squared_error,
            OPTIMIZERS[name],
            batch_size=2 * SIZE,
            seed=1,
            config={"memory": json.loads(os.environ.get("MEMORY", "{}"))},
        ),
        microbatch_size=SIZE,
        steps=9,
        callbacks=[facts],
        mesh={"data": num // 2, "tensor": (2, 1)},
        counts="even",
    )
    print("ended at", result.step)
    losses = [r.loss for r in (*result.history.steps, *result.history.evaluations)]
    told = dict(sha256=result.sha256, numerics=result.plan.numerics, losses=losses)
    told["num_split"] = len(result.history.split.names) if result.history.split else 0
    if rank == 0:
        print("RESULT", name, json.dumps(told))
"""


def results(folder, *options, names=("sgd",), **memory):
    folder.mkdir(exist_ok=True)
    env = {"NAMES": " ".join(names), "MEMORY": json.dumps(memory)}
    job = start(folder, CODE, *options, env=env)
    out, err = job.communicate(timeout=LIMIT_SECONDS)
    assert job.returncode == 0, err[-3000:]
    lines = [line.split("RESULT ", 1)[1] for line in out.splitlines() if "RESULT " in line]
    found = dict(line.split(" ", 1) for line in lines)
    return out + err, {name: json.loads(text) for name, text in found.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A process for each device of one copy: its output, and what it found."""
    folder = tmp_path_factory.mktemp("pair")
    devices = '[[device]]\nkind = "cpu"\ncore_share = 1.0\n'
    (folder / "pair.toml").write_text('name = "pair"\n' + 2 * devices)

    @functools.cache
    def of(name):
        return results(folder, "--mesh", str(folder / "pair.toml"), names=(name,))

    return of


@pytest.fixture(scope="module")
def two_pairs(tmp_path_factory):
    return results(tmp_path_factory.mktemp("two"), "-n", "4")


@pytest.mark.slow
def test_two_pairs_of_processes_end_with_the_bits_of_one(pair, two_pairs):
    one, two = pair("sgd")[1]["sgd"], two_pairs[1]["sgd"]
    assert one["numerics"] == two["numerics"]
    assert one["sha256"] == two["sha256"]
    assert one["losses"] == two["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{"zero": 1, "shares": [2, 1]}, {"zero": 3}], ids=str)
def test_processes_that_share_the_state_end_with_the_bits_of_others(two_pairs, tmp_path, memory):
    whole, shared = two_pairs[1]["sgd"], results(tmp_path / "shared", "-n", "4", **memory)[1]["sgd"]
    assert shared["numerics"] == whole["numerics"]
    assert shared["sha256"] == whole["sha256"]
    assert shared["losses"] == whole["losses"]


@pytest.mark.parametrize("name", rows(OPTIMIZERS, "sgd"))
def test_processes_train_as_devices_of_one_process_do(pair, name):
    whole, evaluated = train({"data": 1}, steps=3, optimizer=name)
    losses = [*(r.loss for r in whole.history.steps), evaluated]
    np.testing.assert_allclose(pair(name)[1][name]["losses"], losses, rtol=2e-4)


def test_what_one_process_of_a_copy_asks_all_do(pair):
    out, _ = pair("sgd")
    assert "[0] ended at 3" in out
    assert "[1] ended at 3" in out


def test_each_process_holds_its_padded_part(pair):
    out, _ = pair("sgd")
    lines = [line.split("BYTES ")[1] for line in out.splitlines() if "BYTES " in line]
    assert len(lines) == 2
    for planned, held, of_program in (map(int, line.split()) for line in lines):
        assert held == planned
        # Parameters, two limbs of sums of each, and a batch of bytes.
        assert of_program == pytest.approx(3 * planned, rel=0.05)


@pytest.mark.slow
def test_sums_over_copies_send_no_padding(two_pairs):
    out, _ = two_pairs
    lines = [line.split("SENT ")[1] for line in out.splitlines() if "SENT " in line]
    assert len(lines) == 4
    for sent, own, whole in (map(int, line.split()) for line in lines):
        # Half of each of two limbs, to the other copy; what is not cut may be of either device.
        assert own <= sent <= own + whole + 1
    assert len(set(lines)) == 2


def test_a_report_says_who_waited_where_processes_have_a_share_of_a_core(pair):
    out, found = pair("sgd")
    assert found["sgd"]["num_split"] == 2
    assert "of a split worked" in out


@pytest.mark.slow
def test_a_report_is_silent_where_processes_share_cores(two_pairs):
    assert two_pairs[1]["sgd"]["num_split"] == 0


MEASURED = """
import hxla
hxla.join()
from support.uneven_runs import SIZE, job
job = job("heads")
said = lambda plan: [line for line in plan.explain().splitlines() if "steps of a trial" in line]
for counts in ("even", "measured"):
    mesh = {"data": 1, "tensor": 2}
    for _ in range(2):
        plan = job.plan(microbatch_size=SIZE, mesh=mesh, rules="decoder", counts=counts)
        print("PLAN", plan.axes[0].shares, plan.numerics, said(plan))
        mesh = {"data": 1, "tensor": plan.axes[0].shares}
"""


@pytest.mark.slow
def test_sizes_are_measured_by_default_and_stating_them_gives_the_same_bits(tmp_path):
    job = start(tmp_path, MEASURED, "--mesh", "cpu-1.0-0.33")
    out, err = job.communicate(timeout=LIMIT_SECONDS)
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
