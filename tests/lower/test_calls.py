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
@pytest.mark.parametrize("counts", rows(SPREADS, (7, 5), (12, 0)))
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


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"memory": {"recompute": "boundaries"}}, {}, "a chain of segments has several programs"),
        ({}, {"mesh": {"stage": 2}}, "a pipeline has several programs"),
    ],
)
def test_what_has_no_such_program_is_refused(config, more, said):
    cluster = {"microbatches_per_call": 4, **config.pop("cluster", {})}
    devices = tuple(range(math.prod(more.get("mesh", {"data": 1}).values())))
    with pytest.raises(PlanError, match=said):
        job(devices, cluster, **config).plan(microbatch_size=2, **more)


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
