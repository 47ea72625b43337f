"""Several microbatches in one call of a program."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import PlanError
from support import families
from support.executor_jobs import NUM, Net, ended, job, loss

BY_ONE = job().plan(microbatch_size=2)


def planned(per_call, counts=(NUM,), **more):
    own = job(range(len(counts)), {"microbatches_per_call": per_call}, **more)
    return own.plan(microbatch_size=2, counts=list(counts)), own


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


@pytest.mark.slow
@pytest.mark.parametrize("per_call", [2, 5, NUM + 3])
def test_no_bit_depends_on_counts_or_devices(per_call):
    plan, own = planned(per_call)
    alone = ended(plan, own)
    for counts in ((7, 5), (11, 1), (4, 4, 4)):
        other, own = planned(per_call, counts)
        assert other.numerics == plan.numerics != BY_ONE.numerics
        assert ended(other, own) == alone


def test_a_loop_computes_what_a_call_for_each_does():
    np.testing.assert_allclose(ended(*planned(5))[0], ended(BY_ONE)[0], rtol=1e-5)


@pytest.mark.parametrize(("per_call", "counts"), [(1, (12,)), (5, (12,)), (16, (12,)), (5, (7, 5))])
def test_a_call_runs_so_many(per_call, counts, calls):
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
    def run(steps, counts):
        rng = np.random.default_rng(5)
        data = {"x": rng.normal(size=(96, 6)).astype(np.float32), "y": np.zeros(96, np.float32)}
        return hxla.train(
            Net(nnx.Rngs(0)),
            data,
            loss,
            optax.adam(1e-2),
            batch_size=2 * NUM,
            microbatch_size=2,
            steps=steps,
            counts=counts,
            config={
                "cluster": {
                    "visible_devices": list(range(len(counts))),
                    "microbatches_per_call": 5,
                }
            },
            checkpoint_dir=None if steps == 6 and len(counts) == 1 else tmp_path,
        ).sha256

    whole = run(6, [NUM])
    run(3, [5, 7])
    assert run(6, [9, 3]) == whole
