"""Parameters that wait in host memory in ZeRO's stage 3: the same bits, none on the device."""

import gc

import jax
import optax
import pytest

import hxla
from support import shared_state
from support.blocks import job, trained
from support.inside.lower import _units
from support.live_bytes import live_bytes


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """So small that parameters are cut into slices."""
    monkeypatch.setattr(_units, "_LEAST_BYTES", 512)
    monkeypatch.setattr(_units, "_NUM_GROUPS", 5)


def away(optimizer=None, stash="device", **more):
    offload = {"parameters": "host", "optimizer": optimizer, "stash": stash}
    return {"offload": {k: v for k, v in offload.items() if v}} | more


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "sgd"])
def test_updates_that_sum_over_parameters_or_keep_no_state_are_the_same(name):
    make = {"lamb": lambda: optax.lamb(1e-2), "sgd": lambda: optax.sgd(0.5)}[name]
    found = set()
    for memory in ({}, away("host" if name == "sgd" else None)):
        own = shared_state.shared(3, optimizer=make(), **memory)
        found.add(trained(own, shared_state.planned(own, 2))[2])
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_shares_of_parameters_are_on_the_host_between_steps(optimizer):
    own = shared_state.shared(3, **away(optimizer))
    gc.collect()
    before = live_bytes(0)
    with own.open(shared_state.planned(own, 2), steps=2) as session:
        next(iter(session))
        gc.collect()
        after = live_bytes(0)
        leaves = jax.tree.leaves(session.state.params)
        num = sum(x.size for x in leaves)
        assert {x.sharding.memory_kind for x in leaves if x.size > 16} == {"pinned_host"}
    device, host = (after[k] - before[k] for k in ("device", "pinned_host"))
    state = 8 / 2
    is_away = optimizer == "host"
    assert host / num == pytest.approx(4 / 2 + state * is_away, rel=0.1)
    assert device / num == pytest.approx(state * (not is_away), rel=0.1, abs=0.6)


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_counts_and_says_what_the_parameters_cost():
    def held(**memory):
        own = shared_state.shared(3, **memory)
        known = dict(memory_bytes=10**7, host_memory_bytes=10**6, host_bytes_per_second=1e6)
        plan = shared_state.planned(own, 2, **known)
        return plan, plan.prediction.devices[0].held

    plan, found = held(**away())
    _, usual = held()
    share = 8755 * 4 / 2
    # Beside the segments one piece of each of two is here, in place of all.
    assert usual.parameters - found.parameters == pytest.approx(share, rel=0.8)
    assert found.parameters < usual.parameters
    assert found.sums == usual.sums
    [said] = [reason for reason in plan.reasons if reason.startswith("offload")]
    assert "17.1 KiB of the parameters of a replica are in host memory" in said
    # All twice but for the last segment, which has the embedding too, and both ways in the update.
    moved = share * 4
    assert f"{moved / 1e6:.1g}"[:4] in said
    assert "at 0.001 GB/s" in said


def test_parameters_that_cannot_wait_on_the_host_are_refused():
    def refusal(num=2, known=None, **memory):
        own = job(config={"memory": memory}, optimizer=optax.adamw(1e-2))
        with pytest.raises((hxla.PlanError, hxla.ConfigError)) as caught:
            shared_state.planned(own, num, **(known or {}))
        return str(caught.value)

    needs = "memory.offload.parameters='host' needs memory.zero of 3"
    for words, said in (
        (refusal(offload={"parameters": "disk"}), "memory.offload.parameters: "),
        (refusal(zero=2, **away()), needs),
        (refusal(zero=0, **away()), needs),
        (refusal(1, **away()), needs),
        (
            refusal(zero=3, known={"host_memory_bytes": 20_000}, **away(stash="host")),
            "would keep 17,510 bytes of the parameters and 6,464 bytes of the residuals"
            " in the 20,000 of its host's memory",
        ),
    ):
        assert said in words, words
    own = shared_state.shared(2)
    plan = shared_state.planned(own, 2)
    placement = plan.placement.model_copy(update={"parameters": "host"})
    with pytest.raises(hxla.PlanError, match=r"placement\.parameters: only ZeRO's stage 3"):
        plan.replaced(placement=placement)


def test_a_job_with_all_of_it_on_the_host_needs_least_of_the_device():
    def least(**memory):
        own = shared_state.shared(3, **memory)
        plan = shared_state.planned(own, 2, memory_bytes=10**7)
        return plan.prediction.devices[0].memory_bytes

    found = [least(), least(**away()), least(**away("host")), least(**away("host", "host"))]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4
