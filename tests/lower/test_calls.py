"""Several microbatches in one call of a program, in a loop on the device."""

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import PlanError
from support import families
from support.executor_jobs import NUM, ended, job
from support.tiers import rows

pytestmark = pytest.mark.optimized

PER_CALL = 5


@functools.cache
def by_one():
    return job(cluster={"microbatches_per_call": 1}).plan(microbatch_size=2)


def planned(per_call="auto", counts=(NUM,), **more):
    own = job(range(len(counts)), {"microbatches_per_call": per_call}, **more)
    return own.plan(microbatch_size=2, counts=list(counts)), own


@functools.cache
def alone(per_call="auto"):
    """How a run on one device ends."""
    return ended(*planned(per_call))


@pytest.fixture
def calls(monkeypatch):
    """How often programs of microbatches ran, and the host arrays that each got."""
    found = []
    run = jax.stages.Compiled.__call__

    def counted(self, *arguments, **named):
        if re.search("hxla_(micro|step)", self.as_text()[:80]):
            leaves = jax.tree.leaves((arguments, named))
            found.append(sum(isinstance(x, np.ndarray) and x.size > 0 for x in leaves))
        return run(self, *arguments, **named)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    return found


SPREADS = [(7, 5), (11, 1), (12, 0), (4, 4, 4)]


@pytest.mark.parametrize("per_call", rows(["auto", 2, PER_CALL, NUM + 3], "auto", PER_CALL))
@pytest.mark.parametrize("counts", rows(SPREADS, (7, 5)))
def test_no_bit_depends_on_counts_or_devices(per_call, counts):
    plan, _ = planned(per_call)
    other, own = planned(per_call, counts)
    assert other.numerics == plan.numerics != by_one().numerics
    assert ended(other, own) == alone(per_call)


@pytest.mark.parametrize("executors", rows([2, 3, 5, NUM + 3], 2))
@pytest.mark.parametrize("per_call", rows(["auto", 2, PER_CALL], "auto"))
def test_no_bit_depends_on_executors(per_call, executors):
    plan, own = planned(per_call)
    several = tuple(r.model_copy(update={"executors": executors}) for r in plan.replicas)
    more = plan.replaced(replicas=several)
    assert more.numerics == plan.numerics
    assert ended(more, own) == alone(per_call)


@pytest.mark.parametrize("per_call", rows(["auto", PER_CALL], "auto"))
def test_a_loop_computes_what_a_call_for_each_does(per_call):
    np.testing.assert_allclose(alone(per_call)[0], ended(by_one())[0], rtol=1e-5)


#: Microbatches of a call, and of each device.
CALLS = [
    (1, (NUM,)),
    (PER_CALL, (NUM,)),
    ("auto", (NUM,)),
    ("auto", (7, 5)),
    (PER_CALL, (7, 5)),
    (PER_CALL, (11, 1)),
]


@pytest.mark.parametrize("case", rows(CALLS, (PER_CALL, (7, 5)), ("auto", (7, 5))))
def test_a_call_runs_so_many(case, calls):
    per_call, counts = case
    plan, own = planned(per_call, counts)
    with own.open(plan, steps=3) as session:
        steps = iter(session)
        next(steps)
        calls.clear()
        next(steps)
        most = plan.microbatches_per_call
        assert most == (NUM if per_call == "auto" else per_call)
        assert len(calls) == sum(math.ceil(n / most) for n in counts)
        # The batch, and the numbers of step and microbatches.
        assert set(calls) == {3 if most == 1 else 2}


@pytest.mark.slow
def test_copies_that_are_cut_take_several_too():
    def of(per_call, num):
        config = {"cluster": {"microbatches_per_call": per_call}}
        sizes = {"width": 32, "length": 8, "layers": 1}
        own = families.gpt_job(16, optax.adamw(1e-3), config, **sizes)
        cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * (2 * num))
        plan = own.plan(
            cluster, microbatch_size=2, mesh={"data": num, "tensor": 2}, rules="decoder"
        )
        return ended(plan, own)

    alone = of(3, 1)
    assert of(3, 2) == alone
    np.testing.assert_allclose(of(1, 1)[0], alone[0], rtol=1e-5)


BOUNDARIES = {"recompute": "boundaries", "segments": 3}
#: Chains of several segments: their memory, and the microbatches of each device.
CHAINS = {
    "none": ({**BOUNDARIES, "recompute": "none"}, (7, 5)),
    "boundaries": (BOUNDARIES, (11, 1)),
    "stash": ({**BOUNDARIES, "recompute": "none", "offload": {"stash": "host"}}, (12,)),
    "zero 2": ({**BOUNDARIES, "zero": 2}, (12, 0)),
    "waves": ({**BOUNDARIES, "zero": 2, "waves": 2}, (5, 7)),
    "zero 3": ({**BOUNDARIES, "zero": 3, "offload": {"parameters": "host"}}, (7, 5)),
}
BEFORE = {"clip_norm": 0.5, "clip": "before"}


@functools.cache
def alone_in_segments(per_call, **communication):
    own = planned(per_call, memory=BOUNDARIES, communication=communication)
    return own[0], ended(*own)


@pytest.mark.parametrize("name", rows(CHAINS))
def test_no_bit_of_a_chain_depends_on_what_it_keeps_or_on_who_runs_it(name):
    memory, counts = CHAINS[name]
    plan, end = alone_in_segments(PER_CALL)
    other, own = planned(PER_CALL, counts, memory=memory)
    assert other.num_segments == 3
    assert other.microbatches_per_call == PER_CALL
    assert other.numerics == plan.numerics
    assert ended(other, own) == end


@pytest.mark.parametrize("clip", rows([{}, BEFORE], BEFORE, ids=lambda clip: "clip" * bool(clip)))
def test_a_chain_computes_what_a_call_for_each_does(clip):
    several, one = (alone_in_segments(num, **clip) for num in (PER_CALL, 1))
    assert several[0].numerics != one[0].numerics
    np.testing.assert_allclose(several[1][0], one[1][0], rtol=1e-5)


def test_a_call_of_a_pipeline_runs_all_microbatches_anyway():
    devices, several = (0, 1), {"microbatches_per_call": 4}
    plans = [
        job(devices, cluster).plan(microbatch_size=2, mesh={"stage": 2})
        for cluster in (several, {})
    ]
    assert plans[0].microbatches_per_call == 1
    assert plans[0].numerics == plans[1].numerics
    said = "microbatches_per_call=4 changes nothing: one call of a pipeline runs all microbatches"
    assert said in plans[0].explain()
    with pytest.raises(PlanError, match="one call of a pipeline runs all microbatches"):
        plans[0].replaced(microbatches_per_call=4)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    plan, own = planned(PER_CALL, (7, 5))
    ended(plan, own, steps=2, checkpoint_dir=tmp_path)
    losses, sha256 = alone(PER_CALL)
    resumed = ended(plan.with_counts((9, 3)), own, checkpoint_dir=tmp_path)
    assert resumed == (losses[2:], sha256)


# -- how many, where nobody says ------------------------------------------------------------------


def plan_of(width, num=8, *, devices=1, memory_gib=None, printing=False, config=None, **more):
    """A plan of microbatches of one example of `width` floats."""

    def loss(model, batch):
        if printing:
            jax.debug.print("{}", batch["x"].sum())
        return (model(batch["x"]) ** 2).mean(-1)

    model = nnx.eval_shape(lambda: nnx.Linear(width, 1, rngs=nnx.Rngs(0)))
    data = {"x": np.zeros((num, width), np.float32)}
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    device = hxla.Device(kind="cpu", memory_bytes=memory)
    cluster = hxla.Cluster(name="", devices=(device,) * devices)
    own = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=num, config=config)
    return own.plan(cluster, auto=False, microbatch_size=1, **more)


@pytest.mark.parametrize(("kind", "num"), [("cpu", 1), ("NVIDIA H100 80GB HBM3", 8)])
def test_convolutions_on_cpus_have_a_call_for_each_microbatch(kind, num):
    """XLA computes them there in a loop at a twentieth of their speed."""
    model = nnx.eval_shape(lambda: nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0)))
    loss = lambda model, batch: jax.jit(model)(batch["x"]).mean((1, 2, 3))  # noqa: E731
    data = {"x": np.zeros((8, 8, 8, 1), np.float32)}
    own = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind=kind),))
    plan = own.plan(cluster, auto=False, microbatch_size=1)
    assert plan.microbatches_per_call == num
    assert any("convolutions inside loops" in line for line in plan.reasons) == (num == 1)


@pytest.mark.parametrize(
    ("plan", "num", "said"),
    [
        ({"width": 4}, 8, ""),
        ({"width": 4, "devices": 3}, 8, ""),
        ({"width": 1 << 20}, 4, "one call runs up to 4 microbatches: 16.0 MiB"),
        ({"width": 1 << 22}, 1, "two would have inputs of 32.0 MiB, of 16.0 MiB at most"),
        ({"width": 1 << 19, "memory_gib": 1}, 8, ""),
        ({"width": 1 << 19, "memory_gib": 0.5}, 1, "a device has room for 8.0 MiB of inputs"),
        ({"width": 4, "printing": True}, 1, "the loss calls Python"),
        (
            {"width": 4, "config": {"memory": {"recompute": "boundaries", "segments": 2}}},
            1,
            "",
        ),
    ],
)
def test_inputs_alone_decide_how_many_a_call_runs(plan, num, said):
    made = plan_of(**plan)
    assert made.microbatches_per_call == num
    assert said in made.explain()
    assert said or "call" not in made.explain()
