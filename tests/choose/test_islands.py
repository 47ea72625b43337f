"""Which replicas are islands, and when a plan says that they would be faster."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import families

FAST, SLOW = 100e9, 0.125e9  # bytes a second of the link between the nodes


def office(between, nodes=(2, 1)):
    """Nodes of equal devices, each slow enough for a small model to matter."""
    rates = (hxla.Rate(dtype="float32", flops_per_second=1e11),)
    devices = [
        hxla.Device(kind="card", node=n, memory_bytes=1 << 30, rates=rates)
        for n, num in enumerate(nodes)
        for _ in range(num)
    ]
    return hxla.Cluster(
        name="office",
        devices=tuple(devices),
        nodes=tuple(
            hxla.Node(name=f"n{n}", link=hxla.Link(bytes_per_second=FAST))
            for n in range(len(nodes))
        ),
        default_link=hxla.Link(bytes_per_second=between),
    )


def job(**config):
    gpt = families.example("gpt")
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), width=64, length=32, layers=2))
    data = {"text": np.zeros((64, 33), np.uint8)}
    return hxla.Job(model, data, gpt.loss, optax.adamw(1e-3), batch_size=32, config=config)


@pytest.fixture(scope="module")
def graph():
    model = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    batch = {"x": jax.ShapeDtypeStruct((2, 8), "float32")}
    return hxla.trace(model, lambda model, batch: model(batch["x"]).mean(), batch)


COLUMNS = hxla.RuleSet(name="columns", rules=(hxla.Rule(path="kernel", axes=((), ("tensor",))),))


def islands_of(graph, cluster, mesh, **islands):
    config = {"islands": {"every": 10, **islands}}
    options = {"rules": COLUMNS} if "tensor" in mesh else {}
    plan = hxla.make_plan(graph, cluster, mesh=mesh, batch_size=24, config=config, **options)
    return plan.islands.replicas


def test_an_island_is_the_replicas_of_a_node(graph):
    assert islands_of(graph, office(SLOW), {"data": 3}) == (2, 1)
    assert islands_of(graph, office(SLOW, (2, 4)), {"data": 3, "tensor": 2}) == (1, 2)
    assert islands_of(graph, office(SLOW, (4,)), {"data": 4}) == (1, 1, 1, 1)
    assert islands_of(graph, office(SLOW, (4,)), {"data": 4}, replicas=[3, 1]) == (3, 1)


def test_an_island_is_consecutive(graph):
    mixed = office(SLOW, (1, 1))
    again = mixed.devices[0].model_copy(update={"node": 0})
    with pytest.raises(hxla.ConfigError, match=r"not consecutive.*such as \[2, 1\]"):
        islands_of(
            graph, mixed.model_copy(update={"devices": (*mixed.devices, again)}), {"data": 3}
        )


@pytest.mark.parametrize(("momentum", "num"), [(0.0, 1), (0.5, 2)])
def test_memory_has_the_parameters_of_the_last_meeting_and_a_momentum(momentum, num):
    def bytes_of(islands):
        plan = job(islands=islands, memory={"zero": 0}).plan(
            office(FAST), mesh={"data": 3}, microbatch_size=2
        )
        return plan.prediction.devices[0].memory_bytes, plan.device_parameter_bytes

    alone, parameters = bytes_of({})
    apart, _ = bytes_of({"every": 10, "momentum": momentum})
    assert apart - alone == num * parameters


def test_more_islands_than_microbatches_are_refused(graph):
    with pytest.raises(hxla.PlanError, match="2 islands for 1 microbatch of a step"):
        hxla.make_plan(graph, 2, mesh={"data": 2}, batch_size=2, config={"islands": {"every": 10}})


def notes(cluster):
    plan = job().plan(cluster, auto=True)
    return plan, [reason for reason in plan.reasons if reason.startswith("islands.every")]


def test_a_plan_says_where_islands_would_be_faster():
    plan, [note] = notes(office(SLOW))
    assert "on all 3 devices" in note
    said = re.search(
        r"every = (\d+) .* about ([\d.]+) (m?s) a step.*meeting of ([\d.]+) (m?s)", note
    )
    every, step, meeting = int(said[1]), float(said[2]), float(said[4])
    step *= 1e-3 if said[3] == "ms" else 1.0
    meeting *= 1e-3 if said[5] == "ms" else 1.0
    assert plan.prediction.step_seconds > 1.25 * step
    assert meeting / every < 0.06 * step or every == 500
    # A node sends half of its parameters and two moments, float32, and half of the means.
    sent = 3 * 2 / 2 * sum(4 * int(np.prod(p.shape)) for p in plan.parameters)
    assert meeting == pytest.approx(sent / SLOW, rel=0.1)


def test_a_plan_says_nothing_of_islands_on_fast_links_or_one_node():
    assert not notes(office(FAST))[1]
    assert not notes(office(SLOW, (3,)))[1]
