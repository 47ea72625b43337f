"""Plans of replicas of unlike depth."""

import functools
import itertools
import json
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.inside.choose import least_maximum
from support.unlike_stages import ONE, TWO, Net

BATCH, MICRO = 64, 4
SHALLOW, DEEP = [ONE], [ONE, ONE]


#: Made up: kinds whose speeds are round numbers.
RATES = {"fast": 4e12, "slow": 1e12}


def described(kind):
    rates = [hxla.Rate(dtype="float32", flops_per_second=RATES[kind])] if kind in RATES else []
    return hxla.Device(kind=kind, rates=tuple(rates))


def cluster(*kinds):
    return hxla.Cluster(
        name="described",
        devices=tuple(map(described, kinds)),
        nodes=(hxla.Node(name="n"),),
    )


def squared(model, batch):
    return (model(batch["x"]) ** 2).mean(axis=-1)


def job(config=None, scopes=(), batch=BATCH):
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0), scopes))
    data = {"x": jax.ShapeDtypeStruct((batch, 6), np.float32)}
    return hxla.Job(model, data, squared, optax.sgd(0.1), batch_size=batch, config=config)


def planned(*replicas, kinds="AAA", config=None, **options):
    return job(config).plan(
        cluster(*kinds), microbatch_size=MICRO, stages=list(replicas), **options
    )


@functools.cache
def two():
    return planned(SHALLOW, DEEP)


def counts_of(plan):
    return list(plan.counts)


def parts_of(plan):
    return [[s.num_parts for s in replica.stages] for replica in plan.pipeline.replicas]


def test_a_replica_of_one_device_runs_the_parts_that_stages_of_another_do():
    plan = two()
    assert parts_of(plan) == [[2], [1, 1]]
    assert plan.stage_names == (("A #0",), ("A #1", "A #2"))
    [whole], stages = ([*replica.stages] for replica in plan.pipeline.replicas)
    read = [{layout.name for layout in stage.parameters} for stage in (whole, *stages)]
    assert read[0] == read[1] | read[2] == {p.name for p in plan.parameters}


def test_stages_begin_wherever_any_replica_begins_one():
    plan = planned(SHALLOW, DEEP, [ONE, ONE, ONE], kinds="A" * 6)
    num = len(plan.pipeline.cut)
    assert [sum(parts) for parts in parts_of(plan)] == [num] * 3
    assert [len(parts) for parts in parts_of(plan)] == [1, 2, 3]


def test_all_devices_share_the_state_between_steps():
    plan = two()
    assert [r.devices for r in plan.replicas] == [(0, 1, 2)]
    assert plan.axis_sizes == {"device": 3}
    assert plan.device_parameter_bytes < 0.4 * plan.parameter_bytes


def test_microbatches_go_by_the_devices_and_by_their_described_speeds():
    shallow, deep = counts_of(two())
    assert shallow + deep == BATCH // MICRO
    assert shallow < deep  # one device beside two
    fast, slow = counts_of(planned(SHALLOW, DEEP, kinds=("fast", "slow", "slow")))
    assert fast > slow


ORDERS = [("fast", "slow", "slow"), ("slow", "fast", "slow"), ("slow", "slow", "fast")]


@pytest.mark.parametrize("kinds", ORDERS)
def test_no_other_counts_of_these_replicas_are_predicted_to_be_faster(kinds):
    plan = planned(SHALLOW, DEEP, kinds=kinds)
    total, found = sum(counts_of(plan)), plan.prediction.step_seconds
    others = [planned(SHALLOW, DEEP, kinds=kinds, counts=(n, total - n)) for n in range(total + 1)]
    seconds = [other.prediction.step_seconds for other in others]
    assert 0 < found == min(seconds)
    assert max(seconds) > 1.5 * found


def test_counts_may_be_given_or_even():
    assert counts_of(planned(SHALLOW, DEEP, counts=(3, 13))) == [3, 13]
    assert counts_of(planned(SHALLOW, DEEP, counts="even")) == [8, 8]
    assert counts_of(two().with_counts((1, 15))) == [1, 15]
    with pytest.raises(hxla.ConfigError, match=re.escape("counts=(3, 12)")):
        planned(SHALLOW, DEEP, counts=(3, 12))
    with pytest.raises(hxla.PlanError, match="1 counts for 2 replicas"):
        two().with_counts((16,))


@pytest.mark.parametrize("counts", [5, "5,11", ("5", "11"), (True, 15), (5.0, 11.0), (17, -1)])
def test_what_is_no_count_for_each_replica_is_refused(counts):
    with pytest.raises(hxla.ConfigError, match="counts"):
        planned(SHALLOW, DEEP, counts=counts)
    with pytest.raises(hxla.PlanError):
        two().with_counts(counts)


def test_a_comparison_shows_the_counts_of_each_replica():
    lines = two().with_counts((1, 15)).compare(two().with_counts((15, 1)))
    assert re.search(r"microbatches +1, 15 +15, 1", lines)


def test_work_in_the_table_says_where_a_replica_is_cut():
    first, other = (
        planned(SHALLOW, [ONE | {"work": a}, ONE | {"work": b}]) for a, b in ((1, 9), (9, 1))
    )
    begins = [plan.pipeline.points for plan in (first, other)]
    assert begins[0] < begins[1]


def test_the_place_of_a_microbatch_decides_no_bit_where_stages_are_single_devices():
    plans = [two(), planned(DEEP, SHALLOW), *(two().with_counts((n, 16 - n)) for n in (0, 7, 16))]
    assert len({plan.numerics for plan in plans}) == 1


def test_it_does_where_a_stage_is_sharded_or_devices_are_unlike():
    for plan in (planned(SHALLOW, [TWO]), planned(SHALLOW, DEEP, kinds=("fast", "slow", "slow"))):
        others = [plan.with_counts((n, 16 - n)) for n in (5, 6)]
        assert len({other.numerics for other in others}) == 2
    deep = [ONE | {"work": 1}] * 2
    forms = ((SHALLOW, deep), (deep, SHALLOW))
    kinds, counts = ("fast", "slow", "slow"), (8, 8)
    plans = [planned(*form, kinds=kinds, counts=counts) for form in forms]
    assert len({plan.pipeline.cut for plan in plans}) == 1
    assert len({plan.numerics for plan in plans}) == 2


def test_the_cut_decides_bits():
    cuts = [[ONE | {"work": a}, ONE | {"work": b}] for a, b in ((1, 9), (1, 1), (9, 1))]
    assert len({planned(SHALLOW, cut).numerics for cut in cuts}) == 3


def test_a_plan_goes_through_its_file_and_explains_each_replica():
    plan = two()
    assert hxla.Plan.from_json(plan.to_json()) == plan
    text = plan.explain()
    for name, num in zip(("A #0", "A #1-2"), counts_of(plan), strict=True):
        assert re.search(rf"{name} +{num} microbatches", text)
    assert "A #0: the whole model" in text


def test_a_picture_has_a_row_for_each_device(tmp_path):
    two().draw(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert text.startswith("<?xml")


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([SHALLOW], "a list of lists has a list for each of several replicas"),
        ([SHALLOW, []], "stages[1]: [] is no list of tables"),
        ([SHALLOW, 2], "stages[1]: 2 is no list of tables"),
        ([SHALLOW, [{"devices": 2}]], "stages[1][0]: 2 devices, but nothing says what each"),
        ([SHALLOW, [ONE, {"fsdp": 2}]], "stages[1][1]: there is no key 'fsdp'"),
        ([ONE, SHALLOW], "stages[1]: [{'devices': 1}] is no table"),
    ],
)
def test_lists_that_say_nothing_are_refused_by_their_numbers(replicas, message):
    with pytest.raises(hxla.ConfigError, match=re.escape(message)):
        planned(*replicas)


def test_what_does_not_go_with_them_is_refused():
    with pytest.raises(hxla.PlanError, match=re.escape("replicas of 1 + 2 devices: use 3")):
        planned(SHALLOW, DEEP, kinds="AAAA")
    with pytest.raises(hxla.ConfigError, match="leave the mesh out"):
        planned(SHALLOW, DEEP, mesh={"data": 1, "tensor": 3})
    with pytest.raises(hxla.ConfigError, match="no stage has this axis"):
        planned(SHALLOW, DEEP, rules="decoder")
    with pytest.raises(hxla.PlanError, match=r"memory\.zero=1: all devices share one state"):
        planned(SHALLOW, DEEP, config={"memory": {"zero": 1}})
    with pytest.raises(hxla.ConfigError, match=r"numerics\.cut of 'any'"):
        planned(SHALLOW, DEEP, config={"numerics": {"cut": "any"}})
    with pytest.raises(hxla.PlanError, match="too few for 9 stages"):
        planned(SHALLOW, [ONE] * 9, kinds="A" * 10)
    with pytest.raises(hxla.PlanError, match=r"sums.kind: .*'float'"):
        planned(SHALLOW, DEEP, reduction="float")


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (
            lambda p: p["pipeline"]["replicas"][0].update(num_microbatches=99),
            "microbatches, a step has 16",
        ),
        (
            lambda p: p["pipeline"]["replicas"][0]["stages"][0].update(num_parts=1),
            "pipeline.replicas.0.stages: they run 1 parts, the pipeline has 2",
        ),
        (
            lambda p: p["pipeline"]["replicas"][1]["stages"][1]["parameters"][0].update(name="no"),
            "pipeline.replicas.1.stages.1.parameters.no: there is no such parameter",
        ),
        (
            lambda p: p["pipeline"].update(stages=p["pipeline"]["replicas"][1]["stages"]),
            "pipeline.stages: the replicas have stages of their own",
        ),
        (lambda p: p["pipeline"].update(schedule="zb-h1"), "pipeline.schedule: unlike replicas"),
        (lambda p: p["axes"][0].update(size=4), "axes: unlike stages have 3 devices"),
        (
            lambda p: p["pipeline"]["replicas"][1]["stages"][0].update(
                axes=[{"name": "tensor", "size": 1, "roles": ["split"], "granules": 4}]
            ),
            "pipeline.replicas: bits are free of the cut only if every stage",
        ),
    ],
)
def test_a_plan_edited_wrongly_is_refused_by_key(edit, fault):
    table = json.loads(two().to_json())
    edit(table)
    with pytest.raises(hxla.PlanError, match=re.escape(fault)):
        hxla.Plan.from_json(json.dumps(table))


def test_consecutive_groups_have_the_least_maximum():
    rng = np.random.default_rng(0)
    for num, size in ((1, 4), (2, 5), (3, 6)):
        costs = rng.random((num, size)) + 0.01
        ends = least_maximum(num, size, lambda i, a, b, costs=costs: costs[i, a:b].sum())

        def most(ends, costs=costs):
            bounds = itertools.pairwise((0, *ends))
            return max(row[a:b].sum() for row, (a, b) in zip(costs, bounds, strict=True))

        size = costs.shape[1]
        every = [(*inner, size) for inner in itertools.combinations(range(1, size), num - 1)]
        assert most(ends) == pytest.approx(min(map(most, every)))


def in_memory(*kib, config=None, micro=MICRO):
    devices = tuple(hxla.Device(kind="A", memory_bytes=int(n * 1024)) for n in kib)
    described = hxla.Cluster(name="of memory", devices=devices, nodes=(hxla.Node(name="n"),))
    return job(config, batch=16 * micro).plan(
        described, microbatch_size=micro, stages=[SHALLOW, DEEP], counts=(8, 8)
    )


def needs(plan):
    return [device.memory_bytes for device in plan.prediction.devices]


def test_each_device_is_predicted_to_need_what_its_own_stage_does():
    plan = in_memory(1000, 1000, 1000)
    whole, first, second = needs(plan)
    assert whole > max(first, second)
    for device in plan.prediction.devices:
        assert device.memory_bytes == pytest.approx(device.held.total)
        # All have an even part of the state, and their own stage's parameters.
        assert device.held.parameters >= plan.device_parameter_bytes
    held = [device.held.parameters for device in plan.prediction.devices]
    inside = [parameters - plan.device_parameter_bytes for parameters in held]
    assert inside[0] == plan.parameter_bytes == inside[1] + inside[2]


def test_a_model_that_fits_the_large_device_only_is_planned_where_the_others_share_it():
    whole, first, second = (need / 1024 for need in needs(in_memory(1000, 1000, 1000)))
    in_memory(1.01 * whole, 1.01 * first, 1.01 * second)
    for small in range(3):
        sizes = [1.01 * need for need in (whole, first, second)]
        sizes[small] *= 0.9
        with pytest.raises(hxla.PlanError, match=f"device {small}"):
            in_memory(*sizes)


def test_forwards_run_again_where_the_residuals_do_not_fit():
    auto = {"memory": {"recompute": "auto"}}
    planned = functools.partial(in_memory, micro=256)  # most memory is of residuals
    ample = planned(9000, 9000, 9000, config=auto)
    assert not ample.pipeline.recompute
    always = planned(9000, 9000, 9000, config={"memory": {"recompute": "boundaries"}})
    sizes = [1.001 * need / 1024 for need in needs(always)]
    tight = planned(*sizes, config=auto)
    assert tight.pipeline.recompute
    with pytest.raises(hxla.PlanError, match=r"device \d .* needs"):
        planned(*(0.9 * size for size in sizes), config=auto)
