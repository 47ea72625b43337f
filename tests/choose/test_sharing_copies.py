"""Searches that also know copies which share their state, where whole state fits no device."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import LayerTime, Profile, Setting
from support.inside.graph import graph_of, segments
from support.inside.job import JobContext
from support.inside.profile import model_name
from support.paths import PYTHONPATH
from support.tiers import rows

BATCH, SIZE, RATE = 12, 1, 1e10
WIDTH, LENGTH, LAYERS = 64, 32, 6


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean((1, 2))


@functools.cache
def job(**memory):
    """Of parameters of 0.76 MiB: of 4.5 MiB with their gradient, sums and moments."""
    model = nnx.eval_shape(lambda: Blocks(nnx.Rngs(0)))
    data = {"x": jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), np.float32)}
    config = {"memory": memory}
    return hxla.Job(model, data, loss, optax.adam(1e-3), batch_size=BATCH, config=config)


def cluster(*rooms, rate=RATE, **host):
    """A fast device and a slow one: no layer can be cut over both."""
    devices = [
        hxla.Device(
            kind=kind,
            memory_bytes=rooms[i % len(rooms)],
            memory_bytes_per_second=1e11,
            **host,
            rates=(hxla.Rate(dtype="float32", flops_per_second=flops, measured=True),),
        )
        for i, (kind, flops) in enumerate((("fast", 2e11), ("slow", 1e11)))
    ]
    node = hxla.Node(name="both", link=hxla.Link(bytes_per_second=rate))
    return hxla.Cluster(name="", devices=tuple(devices), nodes=(node,))


def profile(own, seconds, update):
    """Of a chain whose segments take as long each."""
    chain = segments(graph_of(JobContext(own).graph(SIZE)), 8)
    times = {
        Setting(kind, SIZE): (LayerTime(forward=s / 3, backward=s * 2 / 3, update=update),)
        * len(chain)
        for kind, s in seconds.items()
    }
    found = Profile(
        model=model_name(JobContext(own).functional(SIZE).params),
        layers=tuple(segment.name for segment in chain),
        num_segments=8,
        sizes={},
        times=times,
    )
    return found, len(chain)


def runs_again(plan):
    """Forwards beyond one of each segment; that of the last is a part of its backward."""
    forwards = [text for text in plan.chain.sequence if text.startswith("F")]
    return len(forwards) - len({re.match(r"F\d+", text).group() for text in forwards})


def planned(mebibytes, own=None, *, described=None, **options):
    described = cluster(int(mebibytes * 2**20), **described or {})
    return (own or job()).plan(described, auto=True, microbatch_size=SIZE, **options)


def test_where_whole_state_fits_the_search_is_as_it_was():
    plan = planned(1024)
    assert plan.placement.zero <= 1
    assert not any("replicas of one device each" in reason for reason in plan.reasons)
    pipelines = [own for own in plan.runners_up if "stage" in own.description]
    assert plan.num_stages > 1 or pipelines


@pytest.mark.parametrize("mebibytes", rows([4.25, 4.5], 4.25))
def test_copies_that_share_are_taken_where_they_are_faster(mebibytes):
    plan, pipeline = planned(mebibytes), planned(3.5)
    assert (pipeline.num_stages, plan.num_stages, len(plan.replicas)) == (2, 1, 2)
    assert plan.placement.zero >= 2
    assert all(d.memory_bytes <= mebibytes * 2**20 for d in plan.prediction.devices)
    # The pipeline fits here as well, and is what it was.
    first, whole = plan.runners_up[0], pipeline.prediction.step_seconds
    assert first.description == "microbatches of 1, data x stage = 1 x 2"
    assert first.step_seconds == pytest.approx(whole, rel=1e-6)
    assert plan.prediction.bound_seconds <= plan.prediction.step_seconds < whole
    assert f"the best plan takes {whole:.4g} s" in plan.explain()


@pytest.mark.parametrize("shares", rows(["even", (1, 2), (5, 4)], (1, 2)))
def test_a_step_is_what_its_parts_take(shares):
    """Microbatches, a ring, and each copy's share of the update."""
    own = job(zero=2, recompute="none", shares=shares)
    times, num = profile(own, {"fast": 1e-4, "slow": 2e-4}, 3e-4)
    plan = planned(4.5, own, profile=times)
    assert (plan.counts, plan.num_stages, plan.placement.zero) == ((8, 4), 1, 2)
    assert plan.owned_parts == (
        (0.5, 0.5) if shares == "even" else tuple(s / sum(shares) for s in shares)
    )
    assert runs_again(plan) == 0
    work, update = 8 * num * 1e-4, num * 3e-4
    travels = 2 * (1 - 1 / 2) * plan.sums.travel_factor * plan.parameter_bytes / RATE
    wanted = work + travels + update * max(plan.owned_parts)
    assert plan.prediction.step_seconds == pytest.approx(wanted, rel=1e-6)
    each = [update * part for part in plan.owned_parts]
    assert plan.prediction.fixed_seconds == pytest.approx(each)


def test_what_runs_again_and_what_is_gathered_counts():
    times, _ = profile(job(), {"fast": 1e-4, "slow": 2e-4}, 0.0)
    steps = {}
    for zero, recompute in ((2, "none"), (2, "boundaries"), (3, "none")):
        own = job(zero=zero, recompute=recompute, shares="even")
        plan = planned(4.5, own, profile=times)
        assert (plan.placement.zero, plan.num_stages) == (zero, 1), plan.explain()
        steps[zero, recompute] = plan.prediction.step_seconds, plan
    (keeps, _), (again, plan), (gathers, _) = steps.values()
    assert runs_again(plan) >= len(plan.chain.segments) - 1
    assert 1.2 < again / keeps < 1.34  # a forward is a third of a microbatch
    more = plan.parameter_bytes / 2 / RATE
    assert gathers - keeps == pytest.approx(more, rel=0.05)
    # Times that were measured in that form know what it runs again.
    known = dataclasses.replace(times, form=plan.memory_form)
    own = job(zero=2, recompute="boundaries", shares="even")
    timed = planned(4.5, own, profile=known)
    assert timed.memory_form == plan.memory_form
    assert timed.prediction.step_seconds == pytest.approx(keeps, rel=1e-6)


HOST = {"host_memory_bytes": 1 << 30, "host_bytes_per_second": 1e10}


def test_state_that_fits_on_hosts_alone_is_left_there_and_bounded():
    plan = planned(2, described=HOST)
    assert (plan.num_stages, len(plan.replicas), plan.placement.optimizer) == (1, 2, "host")
    assert all(d.memory_bytes <= 2 << 20 for d in plan.prediction.devices)
    assert 0 < plan.prediction.bound_seconds <= plan.prediction.step_seconds


def test_what_fits_in_no_form_is_refused_with_what_the_search_says():
    with pytest.raises(hxla.PlanError, match="no pipeline fits these devices"):
        planned(1.5)


def test_settings_that_only_copies_can_have_leave_nothing_else():
    """A pipeline of one replica has nobody to share its state with."""
    assert planned(3.5).num_stages == 2
    plan = planned(3.5, job(zero=3, recompute="boundaries"))
    assert (plan.num_stages, plan.placement.zero, len(plan.replicas)) == (1, 3, 2)


SCRIPT = """
import sys

import jax, optax, hxla
from flax import nnx
from support import families

gpt = families.example("gpt")
how = {"plan": "auto"} if sys.argv[1] == "auto" else {"mesh": {"data": 2}, "counts": "even"}
job = hxla.Job(
    gpt.GPT(nnx.Rngs(0), width=64, length=32, layers=2), gpt.library(length=32), gpt.loss,
    optax.adam(1e-3), batch_size=8, config={"memory": {"zero": 2}},
)
result = hxla.train(job, microbatch_size=2, steps=3, **how)
if jax.process_index() == 0:
    print("told", result.sha256, result.plan.placement.zero, len(result.plan.replicas))
"""


@pytest.mark.slow
def test_processes_find_the_same_copies_and_train_them_to_the_same_bits(tmp_path):
    """Memory for a share of the state and not for all of it; the processes measure."""
    (tmp_path / "script.py").write_text(SCRIPT)
    device = '[[device]]\nkind = "cpu"\ncount = 2\ncore_share = 1.0\nmemory_gib = 0.0033\n'
    (tmp_path / "small.toml").write_text(f'name = "small"\n{device}')

    def told(*words):
        ran = subprocess.run(
            [sys.executable, "-m", "hxla", "run", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
            | {"PYTHONPATH": PYTHONPATH},
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return re.search(r"told (\w+) (\d) (\d)", ran.stdout).groups(), ran.stderr

    (sha256, *form), said = told("--mesh", "small.toml", "script.py", "auto")
    assert form == ["2", "2"], said
    assert "replicas of one device each: no plan without sharded state fits" in said
    assert told("-n", "2", "script.py", "copies")[0] == (sha256, "2", "2")
