"""Copies in groups that each have all of the state: hybrid sharding."""

import optax
import pytest

import hxla
from support.blocks import job, trained
from support.inside.choose import groups_of_nodes, travel_of
from support.process_results import results_of
from support.shared_state import shared

NODE = hxla.Link(bytes_per_second=100e9, latency_seconds=1e-6)
BETWEEN = hxla.Link(bytes_per_second=1e9, latency_seconds=1e-5)


def cluster(sizes, kinds="aaaaaaaa", **known):
    """Nodes with so many devices each."""
    devices = [
        hxla.Device(kind=f"card {kind}", node=node, **known)
        for kind, node in zip(
            kinds, (n for n, s in enumerate(sizes) for _ in range(s)), strict=False
        )
    ]
    nodes = tuple(hxla.Node(name=f"node{n}", link=NODE) for n in range(len(sizes)))
    return hxla.Cluster(name="", devices=tuple(devices), nodes=nodes, default_link=BETWEEN)


def of_four(own, counts=(3, 0, 4, 1), **known):
    four = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", **known),) * 4)
    plan = own.plan(four, auto=False, microbatch_size=1, mesh={"data": 4}, counts="even")
    return plan.with_counts(counts)


@pytest.mark.slow
def test_an_owner_is_one_of_a_group():
    """What the optimizer treats as a whole; sums of floats differ from those of one group."""
    own = shared(2, optimizer=optax.contrib.muon(1e-2), shard_groups=2)
    two = shared(2, optimizer=optax.contrib.muon(1e-2))
    plan = of_four(own)
    assert plan.placement.whole
    pair = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 2)
    alike = two.plan(pair, auto=False, microbatch_size=1, mesh={"data": 2})
    assert trained(own, plan)[2] == trained(two, alike)[2]


@pytest.mark.slow
def test_processes_that_share_in_groups_end_with_the_same_bits():
    told = results_of("shard_groups_job.py", 4, timeout=600, XLA_FLAGS="")
    assert len(told) == 4
    for key in ("sha256", "numerics"):
        assert len({form[key] for own in told for form in own.values()}) == 1


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"zero": 0, "shard_groups": 2}, "memory.shard_groups needs memory.zero of 1 to 3"),
        ({"zero": 1, "shard_groups": 3}, "4 replicas do not make so many groups"),
        ({"zero": 1, "shard_groups": 4}, "4 replicas do not make so many groups"),
        ({"zero": 1, "shares": [1, 2]}, "2 for 4 replicas: give one each"),
        ({"zero": 1, "shard_groups": "nodes"}, "all replicas are in one node"),
        (
            {"zero": 1, "shard_groups": 2, "shares": [1, 2, 3, 4]},
            "4 for 2 replicas in each of 2",
        ),
    ],
    ids=str,
)
def test_groups_that_cannot_be_are_refused(memory, said):
    with pytest.raises(hxla.PlanError, match=said):
        of_four(job(config={"memory": memory}))


def test_a_plan_by_hand_is_checked():
    plan = of_four(shared(1))
    for groups, said in ((3, "do not make 3 groups"), (4, "do not make 4 groups")):
        with pytest.raises(hxla.PlanError, match=said):
            plan.replaced(placement=plan.placement.model_copy(update={"shard_groups": groups}))
    two = plan.placement.model_copy(update={"shard_groups": 2})
    over_host = plan.sums.model_copy(update={"over": "host"})
    with pytest.raises(hxla.PlanError, match="over the host need all replicas of a process"):
        plan.replaced(placement=two, sums=over_host)
    kinds = [d.model_copy(update={"kind": "tpu" * (d.rank == 2) or "cpu"}) for d in plan.devices]
    with pytest.raises(hxla.PlanError, match="replicas 0, 2 update the same parameters on unlike"):
        plan.replaced(placement=two, devices=tuple(kinds))


@pytest.mark.parametrize(
    ("sizes", "kinds", "found"),
    [
        ((2, 2), "aaaa", 2),
        ((2, 2), "abab", 2),
        ((2, 2, 2, 2), "abababab", 4),
        ((2, 2), "aabb", "unlike kinds"),
        ((3, 2), "aaaaa", "unlike numbers of replicas, 3, 2"),
        ((1, 1, 1), "aaa", "each node has one replica only"),
        ((4,), "aaaa", "in one node"),
    ],
)
def test_nodes_make_groups_where_they_are_alike(sizes, kinds, found):
    own = job(config={})
    nodes = cluster(sizes, kinds)
    plan = own.plan(nodes, auto=False, microbatch_size=1, mesh={"data": sum(sizes)})
    plan = plan.replaced(placement=plan.placement.model_copy(update={"zero": 0, "shares": ()}))
    if isinstance(found, int):
        assert groups_of_nodes(plan, nodes) == found
        return
    with pytest.raises(hxla.PlanError, match=found):
        groups_of_nodes(plan, nodes)


def test_what_travels_is_priced_by_its_links():
    """Rings inside nodes at their speed; over the nodes two at once share a network card."""
    own, nodes = job(config={}), cluster((2, 2))
    plan = own.plan(nodes, auto=False, microbatch_size=1, mesh={"data": 4})
    size = plan.parameter_bytes
    travel = travel_of(plan, nodes, 2)
    assert travel.gather == pytest.approx(1e-6 + size / 2 / 100e9)
    assert travel.all_copies == pytest.approx(3 * (1e-5 + size / 4 / 1e9))
    assert travel.across == pytest.approx(1e-5 + 2 * size / 4 / 1e9)


def test_nodes_are_groups_where_gathers_between_them_take_long():
    """What fits plainly stays plain, and what fits in no group is shared out by all."""
    rate = hxla.Rate(dtype="float32", flops_per_second=1e12)
    own = job(config={}, optimizer=optax.adamw(1e-2))

    def placed(memory):
        known = cluster((4, 4), memory_bytes=memory, rates=(rate,))
        return own.plan(known, auto=False, microbatch_size=1, mesh={"data": 8}, counts="even")

    assert placed(10**6).placement.zero == 0
    plan = placed(84_000)
    assert (plan.placement.zero, plan.placement.shard_groups) == (3, 2)
    assert "the replicas are 2 groups of 4" in plan.explain()
    assert placed(72_000).placement.shard_groups == 1
