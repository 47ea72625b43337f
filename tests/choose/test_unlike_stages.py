"""Plans of unlike stages."""

import functools
import json
import math
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import families
from support.unlike_stages import DATA, ONE, TWO, Net

BATCH = 32


def cluster(num):
    return hxla.Cluster(
        name="described",
        devices=tuple(hxla.Device(kind="A") for _ in range(num)),
        nodes=(hxla.Node(name="n"),),
    )


def squared(model, batch):
    return (model(batch["x"]) ** 2).mean(axis=-1)


def planned(*stages, num=3, scopes=(), config=None, **options):
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0), scopes))
    data = {"x": jax.ShapeDtypeStruct((BATCH, 6), np.float32)}
    job = hxla.Job(model, data, squared, optax.sgd(0.1), batch_size=BATCH, config=config)
    asked = {"stages": list(stages)} if stages else {}
    return job.plan(cluster(num), microbatch_size=4, **asked, **options)


@functools.cache
def one_and_two():
    return planned(ONE, TWO)


def devices_of(plan):
    return [[axis.size for axis in stage.axes] for stage in plan.pipeline.stages]


def test_a_plan_has_the_devices_and_axes_of_each_stage():
    plan = one_and_two()
    assert plan.num_stages == 2
    assert devices_of(plan) == [[], [2]]
    assert [r.devices for r in plan.replicas] == [(0, 1, 2)]
    assert plan.stage_names == (("A #0", "A #1-2"),)
    first, second = plan.pipeline.stages
    assert not any(names for layout in first.parameters for names in layout.spec)
    assert all(any(layout.spec) for layout in second.parameters if len(layout.shape) > 1)
    named = [layout.name for stage in plan.pipeline.stages for layout in stage.parameters]
    assert sorted(named) == sorted(p.name for p in plan.parameters)


def test_between_steps_all_devices_of_a_replica_share_the_state():
    plan = one_and_two()
    assert plan.axis_sizes == {"device": 3}
    assert plan.device_parameter_bytes < 0.4 * plan.parameter_bytes


def test_a_stage_of_more_devices_has_more_of_the_work():
    flops = lambda plan: plan.pipeline.cut  # noqa: E731
    assert flops(planned(ONE, TWO)) != flops(planned(TWO, ONE))
    most = planned(ONE | {"work": 30}, TWO | {"work": 1})
    assert most.pipeline.cut[0] > one_and_two().pipeline.cut[0]


def test_more_devices_are_more_pipelines():
    plan = planned(ONE, TWO, num=6)
    assert [r.devices for r in plan.replicas] == [(0, 1, 2), (3, 4, 5)]
    assert plan.numerics == one_and_two().numerics


def test_a_plan_goes_through_its_file_and_explains_each_stage():
    plan = one_and_two()
    assert hxla.Plan.from_json(plan.to_json()) == plan
    text = plan.explain()
    assert "stage 0 on A #0: one device" in text
    assert "stage 1 on A #1-2: tensor 2" in text


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ({"stage": 2, "sequence": 2}, {"sequence": 2}),
        ({"stage": 2, "tensor": (2, 1)}, {"tensor": (2, 1)}),
        ({"data": 2, "tensor": 2, "stage": 2, "sequence": 2}, {"sequence": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_a_mesh_whose_stages_need_programs_of_their_own_is_a_list_of_equal_stages(mesh, stage):
    own = families.gpt_job(16, optax.sgd(0.1), width=32, length=16, layers=2)
    num = math.prod(len(n) if isinstance(n, tuple) else n for n in mesh.values())
    options = {"microbatch_size": 2, "rules": "decoder"}
    plan = own.plan(cluster(num), mesh=mesh, **options)
    assert plan.numerics == own.plan(cluster(num), stages=[stage] * 2, **options).numerics
    assert [dict(s.axis_sizes) for s in plan.pipeline.stages] == [
        {name: len(n) if isinstance(n, tuple) else n for name, n in stage.items()}
    ] * 2
    # A stage has the places of the mesh, whose axes are in the order of the user.
    grid = np.arange(num).reshape([len(n) if isinstance(n, tuple) else n for n in mesh.values()])
    order = [name for name in ("data", "stage", "sequence", "tensor") if name in mesh]
    ranks = grid.transpose([list(mesh).index(name) for name in order])
    rows = ranks if "data" in mesh else ranks[None]
    assert [r.devices for r in plan.replicas] == [tuple(row.flat) for row in rows]


def test_the_forms_of_stages_decide_bits():
    plans = [one_and_two(), planned(TWO, ONE), planned(ONE, DATA), planned(ONE, ONE, num=2)]
    assert len({plan.numerics for plan in plans}) == len(plans)


def test_a_stage_may_have_shards_of_unlike_sizes():
    plans = [planned(ONE, {"tensor": ratio}) for ratio in ((2, 1), (3, 1), (1, 1))]
    uneven, other, even = plans
    second = uneven.pipeline.stages[1]
    assert second.shares == (2, 1)
    sizes = {layout.name: layout.sizes for layout in second.parameters if layout.sizes}
    assert sizes
    assert all({*each} <= {(), (43, 21), (11, 5), (22, 10), (2, 1)} for each in sizes.values())
    assert hxla.Plan.from_json(uneven.to_json()) == uneven
    assert "stage 1 on A #1-2: tensor 2:1" in uneven.explain()
    assert len({plan.numerics for plan in plans}) == 3
    assert even.numerics == one_and_two().numerics
    assert not any(layout.sizes for layout in even.pipeline.stages[1].parameters)
    # Between steps the state is shared evenly, as of any stages.
    assert other.parameters == uneven.parameters == one_and_two().parameters


def test_annotations_make_the_plan_of_tables():
    scopes = [lambda: hxla.replicate(1), lambda: hxla.split(2), lambda: hxla.replicate(2)]
    plan = planned(num=5, scopes=scopes)
    assert plan.pipeline.cut_by == "annotations"
    assert [stage.axis_sizes for stage in plan.pipeline.stages] == [{}, {"tensor": 2}, {"data": 2}]
    assert [s.axis_sizes for s in planned(ONE, TWO, DATA, num=5).pipeline.stages] == [
        stage.axis_sizes for stage in plan.pipeline.stages
    ]


def test_a_task_graph_that_shares_some_devices_of_another_is_no_stage():
    scopes = [lambda: hxla.replicate(1), lambda: hxla.split(), lambda: hxla.replicate(2)]
    with pytest.raises(hxla.PlanError, match="a device belongs to one stage"):
        planned(num=3, scopes=scopes)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([ONE], "a pipeline has at least two stages"),
        ([ONE, {"data": (2, 1)}], "stages[1]: data=(2, 1): data has no ratio of shards"),
        ([ONE, {"tensor": (2, 0)}], "stages[1]: tensor=(2, 0) is no count"),
        ([ONE, {"tensor": (2, 0.5)}], "stages[1]: tensor=(2, 0.5) is no count"),
        ([ONE, {"devices": 3, "tensor": (2, 1)}], "stages[1]: 3 devices, but its axes take 2"),
        (
            [ONE, {"data": 2, "tensor": (2, 1)}],
            "stages[1]: uneven shards need a stage with one axis",
        ),
        (
            [ONE, {"sequence": (1, 1), "tensor": (2, 1)}],
            "stages[1]: uneven shards need a stage with one axis",
        ),
        ([ONE, {"devices": 2}], "stages[1]: 2 devices, but nothing says what each computes"),
        ([ONE, {"devices": 3, "tensor": 2}], "stages[1]: 3 devices, but its axes take 2"),
        ([ONE, {"fsdp": 2}], "stages[1]: there is no key 'fsdp'"),
        ([ONE, {"tensor": 0}], "stages[1]: tensor=0 is no count"),
        ([ONE, {"work": -1}], "stages[1]: work=-1 is no number above 0"),
        ([ONE, 2], "stages[1]: 2 is no table"),
    ],
)
def test_a_table_that_says_nothing_is_refused_by_its_number(stages, message):
    with pytest.raises(hxla.ConfigError, match=re.escape(message)):
        planned(*stages)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"memory": {"zero": 2}}, "memory.zero=2"),
        ({"memory": {"offload": {"stash": "host"}}}, "memory.offload.stash='host'"),
        ({"pipeline": {"schedule": "zb-h1"}}, "pipeline.schedule='zb-h1'"),
    ],
)
def test_what_such_stages_cannot_do_yet_is_refused_by_name(config, setting):
    with pytest.raises(hxla.ConfigError, match=re.escape(f"do not run with {setting} yet")):
        planned(ONE, TWO, config=config)


def test_other_arguments_that_do_not_go_with_them_are_refused():
    with pytest.raises(hxla.PlanError, match=r"sums.kind: .*'float'"):
        planned(ONE, TWO, reduction="float")
    with pytest.raises(hxla.ConfigError, match="leave the mesh out"):
        planned(ONE, TWO, mesh={"data": 1, "tensor": 3})
    with pytest.raises(hxla.ConfigError, match="no stage has this axis"):
        planned(ONE, DATA, rules="decoder")
    for memory in ({"zero": 1}, {"offload": {"optimizer": "host"}}):
        with pytest.raises(hxla.PlanError, match="all devices share one state here"):
            planned(ONE, TWO, config={"memory": memory})
    with pytest.raises(hxla.PlanError, match=re.escape("stages of 1 + 2 devices: use 3, 6, ")):
        planned(ONE, TWO, num=4)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda p: p["axes"][0].update(size=4), "axes: unlike stages have 3"),
        (
            lambda p: p["pipeline"]["stages"][1]["axes"][0].update(name="fsdp"),
            "pipeline.stages.1.axes: a stage has no axis 'fsdp'",
        ),
        (
            lambda p: p["pipeline"]["stages"][1]["parameters"][0].update(name="no such"),
            "pipeline.stages.1.parameters.no such: there is no such parameter",
        ),
        (lambda p: p["placement"].update(zero=2), "placement.zero: unlike stages"),
        (
            lambda p: p["pipeline"]["stages"][1]["axes"][0].update(shares=[2, 1, 1]),
            "pipeline.stages.1.axes.tensor.shares: 3 for 2 devices",
        ),
        (
            lambda p: p["pipeline"]["stages"][1]["parameters"][0].update(sizes=[[1, 2, 3]] * 2),
            "pipeline.stages.1.parameters.",
        ),
    ],
)
def test_a_plan_edited_wrongly_is_refused_by_key(edit, fault):
    table = json.loads(one_and_two().to_json())
    edit(table)
    with pytest.raises(hxla.PlanError, match=re.escape(fault)):
        hxla.Plan.from_json(json.dumps(table))
