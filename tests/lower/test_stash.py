"""What waits between forward and backward in host memory: the same bits, fewer bytes here."""

import gc

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import shared_state
from support.blocks import Layers, Scanned, job, loss, planned, trained
from support.inside.choose import costs_of
from support.inside.core import num_bytes
from support.inside.job import JobContext
from support.live_bytes import live_bytes


def away(recompute, **more):
    return {"recompute": recompute, "offload": {"stash": "host"}} | more


def plain(model=Layers, **memory):
    return job(model, {"memory": memory}, optax.adamw(1e-2))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Layers, Scanned])
def test_a_chain_of_one_copy_has_the_same_bits_from_the_host(model):
    wanted = None
    for memory in ({"recompute": "none"}, away("boundaries"), away("none")):
        own = plain(model, **memory)
        plan = planned(own)
        found = plan.numerics, trained(own, plan)[2]
        wanted = wanted or found
        assert found == wanted, memory
    # A plan may say of each segment what goes, and when.
    sequence = "F0+ F1:cut O1:cut F2+ O2 F3:cut F4:cut O4:cut I4:cut B5:input I2 B4:cut B3:cut"
    sequence = (*sequence.split(), "I1:cut", "F2:cut", "B2:cut", "B1:cut", "F0:cut", "B0:cut")
    own = plan.replaced(chain=plan.chain.model_copy(update={"sequence": sequence}))
    assert trained(plain(model), own)[2] == wanted[1]


# -- memory --------------------------------------------------------------------------------------


def most_bytes(own, plan, monkeypatch):
    """The most live bytes of a step on the first device, and in its host's memory."""
    run, most = jax.stages.Compiled.__call__, {"device": 0, "pinned_host": 0}

    def watched(self, *arguments, **named):
        made = run(self, *arguments, **named)
        jax.block_until_ready(jax.live_arrays())
        for kind, size in live_bytes(0).items():
            most[kind] = max(most[kind], size)
        return made

    with own.open(plan, steps=2) as session:
        steps = iter(session)
        next(steps)
        gc.collect()
        before = live_bytes(0)
        monkeypatch.setattr(jax.stages.Compiled, "__call__", watched)
        next(steps)
        monkeypatch.undo()
        assert live_bytes(0)["pinned_host"] == before["pinned_host"] == 0
    return most["device"] - before["device"], most["pinned_host"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "word"), [(0, "none"), (3, "boundaries")])
def test_what_waits_on_the_host_is_not_on_the_device(stage, word, monkeypatch):
    """What is live between programs falls by what the plan says, and is in pinned memory."""
    found = {}
    for tier in ("device", "host"):
        memory = {"zero": stage, "recompute": word, "offload": {"stash": tier}}
        own = hxla.Job(
            lambda: Layers(nnx.Rngs(0), 10),
            {"tokens": np.zeros((16, 65), np.int32)},
            loss,
            optax.adamw(1e-2),
            batch_size=16,
            config={"memory": memory},
        )
        num = 2 if stage else 1
        plan = own.plan(
            shared_state.cluster(num, memory_bytes=1 << 30, host_memory_bytes=1 << 30),
            auto=False,
            microbatch_size=2,
            mesh={"data": num},
            counts="even",
        )
        assert plan.placement.stash == tier
        found[tier] = most_bytes(own, plan, monkeypatch), plan.prediction.devices[0].held
    (device, _), held = found["device"]
    (less, on_host), held_away = found["host"]
    assert found["device"][0][1] == 0
    expected = held.activations - held_away.activations
    assert expected > 0.3 * held.activations
    assert device - less == pytest.approx(expected, rel=0.3)
    assert on_host >= device - less


# -- plans ---------------------------------------------------------------------------------------


def described(num=1, **known):
    return shared_state.cluster(num, memory_bytes=1 << 20, **known)


def test_a_plan_says_what_the_copies_cost():
    host = dict(host_memory_bytes=1 << 20, host_bytes_per_second=1e6)
    own = plain(**away("boundaries"))
    plan = planned(own, cluster=described(**host))
    [said] = [reason for reason in plan.reasons if reason.startswith("offload")]
    costs, _ = costs_of(JobContext(own).graph(2), plan.chain.points, range(100))
    crossing = sum(cost.input_bytes for cost in costs[1:4])  # of six segments, the last two stay
    assert f"at most {num_bytes(crossing)} of the residuals" in said
    moved = 4 * 2 * crossing
    assert f"{num_bytes(moved)} there and back at 0.001 GB/s, {moved / 1e6:.3g} s" in said
    assert hxla.Plan.from_json(plan.to_json()) == plan
    assert "5 forwards are recomputed, what waits goes to the host" in plan.explain()
    unknown = planned(plain(**away("boundaries")), cluster=described())
    assert "the mesh file does not give the rate" in " ".join(unknown.reasons)


def test_a_stash_on_the_host_fits_where_one_on_the_device_does_not():
    def made(thousands, tier, **more):
        memory = {"zero": 3, "recompute": "boundaries", "offload": {"stash": tier}} | more
        own = shared_state.job(Layers, {"memory": memory}, optax.adamw(1e-2))
        return shared_state.planned(own, 2, memory_bytes=thousands * 1000)

    held = {t: made(10_000, t).prediction.devices[0].held for t in ("device", "host")}
    assert held["host"].activations < held["device"].activations
    assert held["host"].sums == held["device"].sums
    room = int((held["host"].total + held["device"].total) / 2 / 1000) + 1
    assert made(room, "host", recompute="auto").placement.stash == "host"
    with pytest.raises(hxla.PlanError, match="does not fit beside the state"):
        made(int(held["host"].total / 1000) - 8, "device", recompute="auto", waves=1)


def test_what_cannot_wait_on_the_host_is_refused():
    def refusal(config, cluster=None, **arguments):
        own = job(config=config)
        with pytest.raises((hxla.PlanError, hxla.ConfigError)) as caught:
            planned(own, cluster=cluster or shared_state.cluster(1), **arguments)
        return str(caught.value)

    def asked(word="boundaries", **more):
        return {"memory": away(word)} | more

    four = shared_state.cluster(4)
    for words, said in (
        (refusal({"memory": {"offload": {"stash": "disk"}}}), "memory.offload.stash: "),
        (refusal({"memory": {"offload": {"stash": "tape"}}}), "'device' or 'host'"),
        (refusal({"memory": {"offload": {"stahs": "host"}}}), "stahs"),
        (
            refusal({"memory": {"offload": {"stash": "host"}}}, four, stages=2),
            "memory.offload.stash='host': replicas are cut by stage",
        ),
        (
            refusal({"memory": away("boundaries", segments=2)}),
            "a chain of 2 segments keeps nothing for longer than one of them runs",
        ),
        (
            refusal(asked(), described(host_memory_bytes=1000)),
            "would keep 2,376 bytes of the residuals in the 1,000 of its host's memory",
        ),
    ):
        assert said in words, words


def test_a_plan_whose_stash_and_sequence_differ_is_refused():
    host, device = planned(plain(**away("none"))), planned(plain(recompute="none"))
    for plan, change, words in (
        (host, "device", "`chain.sequence` offloads to host memory, set 'host'"),
        (device, "host", "no operation of `chain.sequence` offloads anything, use 'device'"),
        (
            planned(plain()),
            "host",
            "only segments have a stash to offload, set `chain`, or use 'device'",
        ),
    ):
        placement = plan.placement.model_copy(update={"stash": change})
        with pytest.raises(hxla.PlanError, match=r"placement\.stash: ") as caught:
            plan.replaced(placement=placement)
        assert words in str(caught.value)
