"""Sums in host memory: the same bits, and no collective of the devices that train."""

import json

import jax
import numpy as np
import optax
import pytest

import hxla
from support import tiers, zero_jobs
from support.inside.cluster import are_unlike, in_words, library_of
from support.inside.job import JobContext
from support.inside.session import check_runnable
from support.process_results import results_of


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes says, which have two devices each and train on one.

    The quick tier leaves out jobs without ZeRO, whose state has no owners.
    """
    folder = tmp_path_factory.mktemp("host_sums")
    flags = "--xla_force_host_platform_device_count=2"
    which = "all" if tiers.is_all else "quick"
    return results_of("host_sums_job.py", 2, folder, which, timeout=600, XLA_FLAGS=flags)


def test_bits_are_those_of_device_collectives(told):
    """Nor does it matter which of them a checkpoint is from."""
    assert len({json.dumps({k: v["sha256"] for k, v in own.items()}) for own in told}) == 1
    for own in told:
        assert own["unlike"]["sha256"] == own["device 1"]["sha256"]  # it is over the host
        if tiers.is_all:
            assert own["host 1"]["sha256"] == own["device 1"]["sha256"]
            assert own["host 3"]["sha256"] == own["device 3"]["sha256"]
            assert [own[name]["first step"] for name in ("whole", "host 0", "device 0")] == [
                1,
                2,
                2,
            ]
            assert own["host 0"]["sha256"] == own["whole"]["sha256"]
            assert own["device 0"]["sha256"] == own["whole"]["sha256"]


def test_devices_that_train_take_part_in_no_collective(told):
    for own in told:
        for name, found in own.items():
            over_host = not name.startswith("device")
            assert found["devices"] == 0
            assert found["between"] > 0
            assert found["apart"] == over_host
            assert found["local"]


def test_copies_on_unlike_devices_do_not_drift_apart(told):
    """The second process rounds otherwise, where each copy computes for itself: not a bit stays."""
    for own in told:
        assert own["unlike"]["alike"]
        assert own["unlike"]["sha256"] == own["device 1"]["sha256"]
    assert [own["unlike"]["handed"] for own in told] == [0, zero_jobs.STEPS]


# -- the choice ---------------------------------------------------------------------------------


def cluster(*kinds):
    return hxla.Cluster(name="", devices=tuple(hxla.Device(kind=kind) for kind in kinds))


def job(**config):
    return zero_jobs.job(optax.adam(1e-2), **config)


def planned(kinds, own=None, **options):
    options = {"mesh": {"data": len(kinds)}} | options
    return (own or job()).plan(cluster(*kinds), microbatch_size=2, counts="even", **options)


def over(word, **memory):
    return job(communication={"over": word}, memory=memory)


@pytest.mark.parametrize(
    ("kinds", "library"),
    [
        (("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "gpu"), "NCCL"),
        (("AMD Instinct MI250X", "gfx90a"), "RCCL"),
        (("TPU v4", "TPU v5 lite"), "TPU"),
        (("cpu", "cpu@0.5"), "Gloo"),
    ],
)
def test_devices_of_one_library_meet_in_it(kinds, library):
    assert {library_of(kind) for kind in kinds} == {library}
    assert not are_unlike(kinds)


def test_devices_without_a_common_library_meet_over_the_host():
    kinds = ("NVIDIA L4", "cpu@0.5", "NVIDIA L4")
    plan = planned(kinds)
    assert (plan.sums.over, plan.placement.zero) == ("host", 1)
    [reason] = [r for r in plan.reasons if r.startswith("sums over the host")]
    assert "NVIDIA L4 (NCCL) and cpu@0.5 (Gloo) share no library" in reason
    assert "bits depend on who runs which" in reason
    assert "equal to the bit" in reason
    assert "exact sums over the host" in plan.explain()
    assert in_words(kinds) in reason
    # Who computes what decides bits there: counts and shares are of the numerics.
    shared = plan.placement.model_copy(update={"shares": (2, 1, 1)})
    others = plan.with_counts((6, 2, 4)), plan.replaced(placement=shared)
    assert len({plan.numerics, *(p.numerics for p in others)}) == 3


def test_devices_with_a_common_library_meet_in_it_unless_asked():
    one = planned(("cpu",) * 2)
    assert one.sums.over == "device"
    two = planned(("cpu",) * 2, over("host"))
    assert two.sums.over == "host"
    assert one.numerics == two.numerics
    assert two.placement.zero == 0
    assert one.diff(two) == ("sums.over: 'device' here, 'host' there",)


REFUSED = {
    "unlike devices in one library": (
        lambda: planned(("NVIDIA L4", "cpu"), over("device")),
        r"over='device': NVIDIA L4 \(NCCL\) and cpu \(Gloo\) share no library",
    ),
    "unlike devices that update everything": (
        lambda: planned(("AMD Instinct MI250X", "NVIDIA L4"), over(None, zero=0)),
        r"memory.zero=0: AMD Instinct MI250X \(RCCL\) and NVIDIA L4 \(NCCL\).*drift apart",
    ),
    "unlike devices in a pipeline": (
        lambda: planned(("NVIDIA L4", "cpu"), mesh=None, stages=2),
        "meet over the host, where replicas of one device meet, and the axes stage need",
    ),
    "stages": (
        lambda: planned(("cpu",) * 4, over("host"), mesh=None, stages=2),
        "over='host', where replicas of one device meet, and the axes stage need collectives",
    ),
    "a split": (
        lambda: planned(("cpu",) * 4, over("host"), mesh={"data": 2, "tensor": 2}, rules="decoder"),
        "the axes tensor need collectives inside a replica: .* set communication.over to 'device'",
    ),
    "float sums": (
        lambda: planned(("cpu",) * 2, over("host"), reduction="float"),
        "sums.over: hosts add integers only, and these are float sums",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_meet_is_refused(name):
    make, words = REFUSED[name]
    with pytest.raises(hxla.PlanError, match=words):
        make()


def test_a_wrong_word_is_refused():
    with pytest.raises(hxla.ConfigError, match=r"communication.over: .*'device' or 'host'"):
        planned(("cpu",) * 2, over("hosts"))
    table = planned(("cpu",) * 2).model_dump(mode="json")
    table["sums"]["over"] = "hosts"
    with pytest.raises(hxla.PlanError, match=r"sums.over: .*'device' or 'host'"):
        hxla.Plan.from_json(json.dumps(table))
    plan = planned(("cpu",) * 4, mesh=None, stages=2)
    with pytest.raises(
        hxla.PlanError, match=r"sums.over: only replicas of one device are summed over the host"
    ):
        plan.replaced(sums=plan.sums.model_copy(update={"over": "host"}))


def test_a_plan_is_not_opened_on_devices_that_cannot_meet():
    own, plan, kinds = job(), planned(("cpu",) * 2), ("cpu", "NVIDIA L4")
    edited = plan.model_dump(mode="json")
    edited["devices"][1]["kind"] = "NVIDIA L4"
    edited = hxla.Plan.from_json(json.dumps(edited))
    with pytest.raises(hxla.PlanError, match=r"sums.over: cpu \(Gloo\) and NVIDIA L4 \(NCCL\)"):
        check_runnable(edited, JobContext(own), cluster(*kinds), tuple(jax.devices()[:2]))


@pytest.mark.parametrize("zero", tiers.rows([0, 1], 0))
def test_the_devices_of_a_process_are_added_first(zero):
    """One process: what several devices hold is added on one, and no program has a collective."""
    found = {}
    for word in ("device", "host"):
        config = {"communication": {"over": word}, "memory": {"zero": zero}}
        own = zero_jobs.linear_job(optax.adam(1e-2), **config)
        plan = planned(("cpu",) * 3, own).with_counts((7, 0, 5))
        with own.open(plan, steps=2) as session:
            losses = [record.loss for record in session]
            programs = session._programs.reducer.programs
            state = session.gather(session.state.params)
        has = [" = s32[" in p.as_text() and "collective-permute" in p.as_text() for p in programs]
        found[word] = losses, state, any(has)
    assert found["device"][2]
    assert not found["host"][2]
    assert found["device"][0] == found["host"][0]
    for a, b in zip(*(jax.tree.leaves(found[word][1]) for word in ("device", "host")), strict=True):
        np.testing.assert_array_equal(a, b)
