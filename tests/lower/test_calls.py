"""Several microbatches in one call of a program."""

import functools
import math

import jax
import numpy as np
import optax
import pytest

import hxla
from hxla import PlanError
from support import families
from support.executor_jobs import NUM, ended, job
from support.tiers import rows

PER_CALL = 5


@functools.cache
def by_one():
    return job().plan(microbatch_size=2)


def planned(per_call, counts=(NUM,), **more):
    own = job(range(len(counts)), {"microbatches_per_call": per_call}, **more)
    return own.plan(microbatch_size=2, counts=list(counts)), own


@functools.cache
def alone(per_call):
    """How a run on one device ends."""
    return ended(*planned(per_call))


@pytest.fixture
def calls(monkeypatch):
    """How often programs of microbatches ran."""
    found = []
    run = jax.stages.Compiled.__call__

    def counted(self, *arguments, **named):
        found.append("hxla_micro" in self.as_text()[:80])
        return run(self, *arguments, **named)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    return lambda: sum(found)


SPREADS = [(7, 5), (11, 1), (4, 4, 4)]


@pytest.mark.parametrize("per_call", rows([2, PER_CALL, NUM + 3], PER_CALL))
@pytest.mark.parametrize("counts", rows(SPREADS, (7, 5)))
def test_no_bit_depends_on_counts_or_devices(per_call, counts):
    plan, _ = planned(per_call)
    other, own = planned(per_call, counts)
    assert other.numerics == plan.numerics != by_one().numerics
    assert ended(other, own) == alone(per_call)


def test_a_loop_computes_what_a_call_for_each_does():
    np.testing.assert_allclose(alone(PER_CALL)[0], ended(by_one())[0], rtol=1e-5)


#: Microbatches of a call, and of each device.
CALLS = [
    (1, (NUM,)),
    (PER_CALL, (NUM,)),
    (NUM + 3, (NUM,)),
    (PER_CALL, (7, 5)),
    (PER_CALL, (11, 1)),
]


@pytest.mark.parametrize("case", rows(CALLS, *(own for own in CALLS if own[0] == PER_CALL)))
def test_a_call_runs_so_many(case, calls):
    per_call, counts = case
    plan, own = planned(per_call, counts)
    with own.open(plan, steps=3) as session:
        steps = iter(session)
        next(steps)
        before = calls()
        next(steps)
        assert calls() - before == sum(math.ceil(n / per_call) for n in counts)


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
        ({"cluster": {"executors": 2}}, {}, "use 1, or executors 1"),
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
