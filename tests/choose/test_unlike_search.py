"""Searched pipelines of unlike stages, beside all of them."""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import scanned_models
from support.blocks import ONE, trained
from support.inside.choose import Alternative, ChainWork, layer_times, propose, unlike_pipelines
from support.models import Blocks, mean_square
from support.tiers import examples

WIDTH, LENGTH, LAYERS, BATCH = 64, 16, 8, 8


def job(loss=mean_square, **config):
    model = nnx.eval_shape(lambda: Blocks(nnx.Rngs(0), WIDTH, LAYERS))
    data = {"x": jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), np.float32)}
    config = {"memory": {"zero": 0}} | config
    return hxla.Job(model, data, loss, optax.adam(0.1), batch_size=BATCH, config=config)


def cluster(*devices, bytes_per_second=1e10):
    """Devices by kind, speed and memory."""
    link = hxla.Link(bytes_per_second=bytes_per_second) if bytes_per_second else None
    return hxla.Cluster(
        name="described",
        devices=tuple(
            hxla.Device(
                kind=kind,
                memory_bytes=int(memory),
                memory_bytes_per_second=1e11,
                rates=(hxla.Rate(dtype="float32", flops_per_second=speed),),
            )
            for kind, speed, memory in devices
        ),
        nodes=(hxla.Node(name="n", link=link),),
    )


LARGE_AND_TWO = cluster(("cpu", 1e10, 1e6), ("cpu", 1e10, 4e5), ("cpu", 1e10, 4e5))


def planned(where=LARGE_AND_TWO, own=None, **arguments):
    return (own or job()).plan(where, auto=True, microbatch_size=2, **arguments)


def test_two_devices_share_a_stage_where_three_stages_take_longer():
    plan = planned()
    assert [stage.axis_sizes for stage in plan.pipeline.stages] == [{"tensor": 2}, {}]
    assert [replica.devices for replica in plan.replicas] == [(1, 2, 0)]
    assert hxla.Plan.from_json(plan.to_json()) == plan
    best = plan.runners_up[0]
    assert best.description == "microbatches of 2, data x stage = 1 x 3"
    assert plan.prediction.step_seconds < 0.8 * best.step_seconds
    devices = plan.prediction.devices
    assert sorted(device.rank for device in devices) == [0, 1, 2]
    assert plan.prediction.bound_seconds == 0  # a bound on stages of one form is none on these


UNKNOWN_LINK = cluster(("cpu", 1e10, 1e6), *[("cpu", 1e10, 4e5)] * 2, bytes_per_second=0)


@pytest.mark.parametrize(
    ("where", "config", "arguments"),
    [
        (UNKNOWN_LINK, {}, {}),
        (LARGE_AND_TWO, {}, {"reduction": "float"}),
        (LARGE_AND_TWO, {"memory": {"zero": 2}}, {}),
    ],
    ids=["unknown links", "float sums", "zero 2"],
)
def test_where_unlike_stages_do_not_run_none_are_proposed(where, config, arguments):
    plan = planned(where, job(**config), **arguments)
    assert plan.pipeline is None or not plan.pipeline.stages


def test_a_plan_trains_as_one_device_does():
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(3 * BATCH, LENGTH, WIDTH)).astype(np.float32)}
    own = hxla.Job(
        lambda: Blocks(nnx.Rngs(0), WIDTH, LAYERS),
        data,
        mean_square,
        optax.sgd(0.1),
        batch_size=BATCH,
        config={},
    )
    found = planned(LARGE_AND_TWO, own).replaced(cluster="")
    alone = own.plan(ONE, auto=False, microbatch_size=2)
    losses, params, _ = trained(own, found, steps=3)
    plain, expected, _ = trained(own, alone, steps=3)
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, expected
    )


def test_a_plan_that_does_not_fit_in_fact_gives_way_to_one_that_does():
    """The search counts fewer bytes of sums than a complete plan."""
    plan = planned(cluster(("cpu", 1e10, 2e6), ("cpu", 1e10, 1e6)))
    assert plan.num_stages == 2
    assert all(d.capacity_bytes in (1e6, 2e6) for d in plan.prediction.devices)


def chain_of(rng, sizes, num_layers):
    """Layers of unlike work; a device of two has half of each."""
    flops, params, sent = (rng.uniform(0.2, 1.0, num_layers) for _ in range(3))
    out = {}
    for size, tensor in itertools.product(sizes, (1, 2)):
        out[size, tensor] = tuple(
            hxla.LayerSize(
                parameter_bytes=1e6 * p / tensor,
                output_bytes=1e5 * s * size,
                stash_bytes=1e5 * size / tensor,
                flops=1e9 * f * size / tensor,
            )
            for f, p, s in zip(flops, params, sent, strict=True)
        )
    return ChainWork(
        layers=tuple(map(str, range(num_layers))),
        sizes=out,
        sent_bytes={(size, 2): (5e4 * size,) * num_layers for size in sizes},
        input_bytes=dict.fromkeys(sizes, 0),
        batch_size=BATCH,
        state_factor=8.0,
        reduce_factor=1.5,
    )


def of_stage(work, where, ranks, axis, size):
    """[3, L] Seconds of the layers on devices that share a stage, and [L] bytes on each."""
    part = len(ranks)
    link = where.link(*ranks[:2]) if part > 1 else None
    device, sizes = where.devices[ranks[0]], work.sizes[size, part if axis == "tensor" else 1]
    seconds = layer_times(
        device,
        Alternative(size, part if axis == "tensor" else 1),
        sizes,
        None,
        state_factor=work.state_factor,
        whole=work.sizes[size, 1],
        sent_bytes=work.sent_bytes[size, 2] if axis == "tensor" else (),
        link=link,
    )[0]
    stored = np.array([layer.parameter_bytes for layer in sizes])
    if axis == "data":
        seconds[:2] /= part
        seconds[1] += 2 * (part - 1) / part * stored / link.bytes_per_second
    return seconds, stored


def brute(work, where, kinds, size):
    """The least seconds of one pipeline: all forms, orders and cuts, by the formula of 1F1B."""
    rate = where.link(0, 1).bytes_per_second
    sent = [layer.output_bytes for layer in work.sizes[size, 1]]
    num, best = BATCH // size, np.inf
    options = []
    for ranks in kinds:
        forms = [[((rank,), "") for rank in ranks]]
        if len(ranks) == 2:
            forms += [[(ranks, "tensor")], [(ranks, "data")]]
        options.append(forms)
    for chosen in itertools.product(*options):
        stages = [*itertools.chain(*chosen)]
        if all(not axis for _, axis in stages) or len(stages) < 2:
            continue
        for order in itertools.permutations(stages):
            each = [of_stage(work, where, ranks, axis, size) for ranks, axis in order]
            gathers = [1 + (len(r) - 1) / len(r) if axis == "tensor" else 1 for r, axis in order]
            for inner in itertools.combinations(range(1, len(sent)), len(order) - 1):
                cuts = (0, *inner, len(sent))
                spans = [*itertools.pairwise(cuts)]
                rows = [x[0][:, a:b].sum(1) for x, (a, b) in zip(each, spans, strict=True)]
                edges = [
                    sent[cut - 1] * (gathers[i] + gathers[i + 1]) / rate
                    for i, cut in enumerate(inner)
                ]
                around = [0.0, *edges, 0.0]
                busy = [row[:2].sum() for row in rows]
                period = max(b + around[i] + around[i + 1] for i, b in enumerate(busy))
                state = max(
                    2 * work.reduce_factor * x[1][a:b].sum() / rate
                    for x, (a, b) in zip(each, spans, strict=True)
                )
                update = max(row[2] for row in rows)
                total = sum(busy) + sum(edges) + (num - 1) * period + state + update
                best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(examples(6, 60)))
def test_the_best_of_all_forms_orders_and_cuts_is_found(seed):
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(5e9, 2e10, 2)
    groups = [(0,), (1, 2)] if seed % 2 else [(0, 1), (2, 3)]
    devices = [(f"kind {k}", speeds[k], 1e12) for k, ranks in enumerate(groups) for _ in ranks]
    where = cluster(*devices, bytes_per_second=10 ** rng.uniform(8, 10))
    work = chain_of(rng, [2], 5)
    found = unlike_pipelines(
        work, where, None, recompute=(False,), max_stages=None, faster_than=np.inf
    )
    best = brute(work, where, groups, 2)
    assert sorted(itertools.chain(*found.replicas)) == list(range(len(devices)))
    assert sum(found.layers) == 5
    # A replay takes at most what the formula says.
    assert found.prediction.step_seconds <= best * (1 + 1e-9)
    assert found.prediction.step_seconds >= 0.8 * best


def test_a_scan_over_layers_is_cut_for_them():
    own = scanned_models.job(scanned_models.NnxNet())
    plan = own.plan(LARGE_AND_TWO, auto=True, microbatch_size=2)
    assert [stage.axis_sizes for stage in plan.pipeline.stages] == [{}, {"tensor": 2}]
    text = plan.explain()
    assert "stage 0: embed .. layers[1]" in text
    assert "stage 1: layers[2] .. head" in text


def test_a_model_with_ordered_callbacks_gets_replicas_of_one_device():
    def loss(model, batch):
        jax.debug.callback(lambda x: None, batch["x"].sum(), ordered=True)
        return mean_square(model, batch)

    where = cluster(*[("A", 1e9, 1e9)] * 4)
    assert all(len(replica.devices) > 1 for replica in planned(where).replicas)
    plan = planned(where, job(loss))
    assert all(len(replica.devices) == 1 for replica in plan.replicas)
    assert any("ordered=True" in reason for reason in plan.reasons)


def test_convolutions_on_cpus_get_no_pipeline():
    """Its one program has them in a loop, where XLA is slow at them."""

    def loss(model, batch):
        picture = batch["x"][:, None]
        kernel = np.ones((1, 1, 3, 3), np.float32)
        smooth = jax.lax.conv(picture, kernel, (1, 1), "SAME")
        return mean_square(model, batch) + smooth.mean((1, 2, 3))

    roomy = cluster(("cpu", 1e10, 1e9), ("cpu", 1e10, 1e9), ("cpu", 1e10, 1e9))
    plan = planned(roomy, job(loss))
    assert plan.num_stages == 1
    assert any(line.startswith("no pipelines") for line in plan.reasons)


def test_where_every_device_must_take_part_none_is_left_out():
    """Tensor groups have no place for a device that is alone of its kind."""
    where = cluster(("slow", 2e9, 1e12), ("fast", 1e10, 1e12), ("fast", 1e10, 1e12))
    work = dataclasses.replace(chain_of(np.random.default_rng(0), [2], 5), batch_size=4)
    used = {}
    for every in (False, True):
        proposal, _ = propose(work, where, None, all_devices=every)
        used[every] = sorted(itertools.chain(*proposal.replicas))
    assert used == {False: [1, 2], True: [0, 1, 2]}
