"""Parts of unlike sizes: the single device's losses and gradients, and padding that stays zero."""

import functools
import json
import os

import jax
import numpy as np
import pytest

import hxla
from support.inside.inspect import _shapes
from support.inside.lower import padded
from support.inside.plan import LinkedDims, planned_parts
from support.tiers import rows
from support.uneven_models import RULES, UNITS, Run
from support.uneven_runs import NETS, job, planned, train


def sizes_of(seed):
    """A number of units, and shares of two to four devices."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(2, 5))
    shares = [1] * num
    while len(set(shares)) == 1:
        shares = rng.integers(1, 6, num).tolist()
    return int(rng.integers(num, 11)), shares


def compare(name, seed):
    units, shares = sizes_of(seed)
    run = Run(name, units, shares, seed=seed)
    assert run.plan.is_uneven
    run.compare()


@pytest.mark.parametrize("name", rows(UNITS, "channels"))
def test_parts_of_unlike_sizes_train_as_one_device_does(name):
    compare(name, 1 + sorted(UNITS).index(name))


# TEST_SIZES=60 tries so many of each kind; each takes ten seconds.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 20 + int(os.environ.get("TEST_SIZES", "1"))))
@pytest.mark.parametrize("name", UNITS)
def test_any_sizes_train_as_one_device_does(name, seed):
    compare(name, seed)


def assert_alike(one, other):
    (one, loss), (other, own) = one, other
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    assert own == pytest.approx(loss, rel=1e-5)


train_once = functools.cache(
    lambda *mesh, net, optimizer="sgd": train(dict(mesh), steps=3, net=net, optimizer=optimizer)
)
ONE = (("data", 1),)
#: Two copies, of which the second may have nothing to do.
PARTS = (("data", 2), ("tensor", (2, 1)))
NET = pytest.mark.parametrize("net", rows(NETS, "columns"))


@pytest.mark.slow
@NET
def test_a_checkpoint_resumes_on_one_device(net, tmp_path):
    train(dict(PARTS), steps=2, net=net, checkpoint_dir=tmp_path)
    resumed = train(dict(ONE), steps=3, net=net, checkpoint_dir=tmp_path)
    assert resumed[0].step == 3
    assert_alike(train_once(*ONE, net=net), resumed)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_other_sizes_and_on_even_ones(tmp_path):
    net = "columns"
    for steps, ratio in ((1, (2, 1)), (2, (1, 3)), (3, 2)):
        mesh = {"data": 1, "tensor": ratio}
        resumed = train(mesh, steps=steps, net=net, checkpoint_dir=tmp_path)
    assert resumed[0].step == 3
    assert_alike(train_once(*ONE, net=net), resumed)


#: What segments keep; None: the loss is no chain of segments.
KEPT = [(net, word) for net in NETS for word in (None, "none", "boundaries")]


@pytest.mark.parametrize("case", rows(KEPT, ("columns", None), ("columns", "boundaries")))
def test_bits_do_not_depend_on_counts(case):
    net, word = case
    one, two = (
        train(dict(PARTS), steps=3, net=net, counts=own, recompute=word) for own in ((2, 0), (1, 1))
    )
    assert (one[0].plan.num_segments > 1) == (word is not None)
    assert one[0].plan.numerics == two[0].plan.numerics
    assert one[0].sha256 == two[0].sha256
    assert_alike(train_once(*ONE, net=net), one)


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_bits_do_not_depend_on_copies(net):
    one = train({"data": 1, "tensor": (2, 1)}, steps=3, net=net)
    two = train(dict(PARTS), steps=3, net=net)
    assert len(two[0].plan.replicas) == 2
    assert one[0].plan.numerics == two[0].plan.numerics
    assert one[0].sha256 == two[0].sha256


def test_numerics_know_the_sizes_of_parts():
    plans = {
        ratio: planned(job("heads", num_devices=2), {"data": 1, "tensor": ratio}, "heads")
        for ratio in ((2, 1), (3, 1))
    }
    assert len({plan.numerics for plan in plans.values()}) == 2
    heads = [p.sizes for p in plans[2, 1].parameters if p.name == "attention/out/kernel"]
    assert heads == [((5, 3), (), ())]


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_an_optimizer_that_looks_at_whole_arrays_sees_no_padding(net):
    (one, _), (parts, _) = (train_once(*m, net=net, optimizer="adafactor") for m in (ONE, PARTS))
    shapes = [[x.shape for x in jax.tree.leaves(r.opt_state)] for r in (one, parts)]
    assert shapes[0] == shapes[1]
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(parts.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


def test_an_optimizer_that_would_move_zeros_moves_no_padding():
    """Nor does its norm count what it makes of padding."""
    (one, _), (parts, _) = (
        train_once(*m, net="columns", optimizer="shifted") for m in (ONE, PARTS)
    )
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(parts.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def collectives(function, *arguments):
    """Kinds of the collectives of a compiled function, and the numbers that all-reduces add."""
    found = hxla.inspect(function.lower(*arguments).compile().as_text()).main.select(None)
    arrays = [a for c in found if c.kind == "all-reduce" for a in c.arrays]
    sizes = [np.prod(_shapes.arrays(array)[0][1], dtype=int) for array in arrays]
    return sorted(c.kind for c in found), int(sum(sizes))


@pytest.mark.parametrize("name", rows(["heads", "gated columns", "experts"], "gated columns"))
def test_collectives_are_as_many_as_with_even_parts_and_no_larger(name):
    own, even = Run(name, 8, (3, 1)), Run(name, 8, (1, 1))
    leaves = [jax.tree.leaves(tree) for tree in (own.params, own.aux)]
    parts = [padded(x, p) for x, p in zip(leaves, own.paddings, strict=True)]
    kinds, added = collectives(own.on_parts, *parts)
    others, most = collectives(even.on_even_parts, *leaves)
    assert kinds == others
    assert 0 < added <= most + len(kinds)  # a token is sent with each


@functools.cache
def plan_of(shares=(3, 1), units=8):
    return Run("columns", units, shares).plan


def test_sizes_are_in_the_plan_its_file_its_words_and_its_numerics():
    plan, other = plan_of(), plan_of((1, 1, 2))
    by_name = {layout.name: layout for layout in plan.parameters}
    assert by_name["up/kernel"].sizes == ((), (6, 2))
    assert by_name["up/kernel"].padded_shape == (8, 12)
    assert plan.device_parameter_bytes == 4 * (8 * 6 + 6 + 6 * 8 + 8)
    assert hxla.Plan.from_json(plan.to_json()) == plan
    assert "sizes of up/kernel over tensor: 6 + 2 of 8, 8 units, padded by 50%" in plan.explain()
    assert any("up/kernel.sizes" in line for line in plan.diff(other))
    moved = json.loads(plan.to_json())
    for layout in moved["parameters"]:
        layout["sizes"] = [[5, 3] if own else [] for own in layout["sizes"]]
    edited = hxla.Plan.from_json(json.dumps(moved))
    assert edited.numerics != plan.numerics


def test_ten_heads_over_four_equal_devices_are_three_three_two_two():
    plan = Run("heads", 10, (1, 1, 1, 1)).plan
    by_name = {layout.name: layout for layout in plan.parameters}
    assert by_name["query/kernel"].sizes == ((), (12, 12, 8, 8))
    assert by_name["out/kernel"].sizes == ((12, 12, 8, 8), ())


def test_sizes_that_divide_alike_are_an_even_split():
    assert not plan_of((1, 1)).is_uneven


def of(plan, name):
    return next(p for p in plan["parameters"] if p["name"] == name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: of(p, "down/kernel").update(sizes=[[4, 3], []]), r"4 \+ 3 is 7, not 8"),
        (lambda p: of(p, "down/kernel").update(sizes=[[4, 3, 1], []]), "3 sizes for the 2 devices"),
        (lambda p: of(p, "down/kernel").update(sizes=[[6, 2]]), "1 entries for 2 dimensions"),
        (lambda p: of(p, "down/kernel").update(sizes=[[], [6, 2]]), "no axis cuts this dimension"),
        (lambda p: of(p, "down/kernel").update(sizes=[[8, 0], []]), "greater than 0"),
        (lambda p: p["axes"][0].update(shares=[]), "'tensor' has none"),
        (lambda p: p["axes"][0].update(shares=[1, 2, 3]), "3 for 2 devices"),
    ],
)
def test_a_plan_of_wrong_sizes_is_refused(change, message):
    plan = json.loads(plan_of().to_json())
    change(plan)
    with pytest.raises(hxla.PlanError, match=message):
        hxla.Plan.from_json(json.dumps(plan))


def test_sizes_that_disagree_or_cut_a_unit_are_refused():
    run = Run("heads", 4, (3, 1))
    linked = LinkedDims(run.graph, run.uneven.sharded.axes["tensor"])
    changed = {"out/kernel": ((6, 10), ()), "query/kernel": ((), (8, 8))}
    layouts = [
        p.model_copy(update={"sizes": changed.get(p.name, p.sizes)}) for p in run.plan.parameters
    ]
    with pytest.raises(hxla.PlanError) as error:
        planned_parts(linked, layouts, (3, 1))
    assert "is cut between units of 4" in str(error.value)
    assert "have different sizes, in units" in str(error.value)


@functools.cache
def graph_of_heads():
    return Run("heads", 3, (2, 1)).graph


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor": (2, 0)}, "must be at least 1"),
        ({"tensor": (2, 0.5)}, "no whole number"),
        ({"tensor": ()}, "states no share"),
        ({"data": (2, 1), "tensor": 2}, "which cuts no parameters"),
        ({"tensor": (2, 1), "expert": (2, 1)}, "one axis may have them"),
        ({"fsdp": 2, "tensor": (2, 1)}, "replicas with one axis"),
        ({"tensor": (2, -1)}, "must be at least 1"),
        ({"tensor": ("2", "1")}, "no whole number"),
        ({"stage": (2, 1)}, "which cuts no parameters"),
    ],
)
def test_a_ratio_that_cannot_be_met_is_one_error(mesh, message):
    graph = graph_of_heads()
    num = int(np.prod([len(s) if isinstance(s, tuple) else s for s in mesh.values()]))
    with pytest.raises(hxla.HxlaError, match=message):
        hxla.make_plan(graph, num, mesh=mesh)


def test_fewer_units_than_devices_are_refused_where_a_rule_cuts_them():
    graph = Run("classes", 3, (2, 1)).graph
    with pytest.raises(hxla.HxlaError, match="3 whole units, such as heads, cannot be cut over 4"):
        hxla.make_plan(graph, mesh={"tensor": (2, 1, 1, 1)}, rules=RULES["classes"])


def test_devices_of_unlike_speed_get_unlike_parts():
    graph = Run("columns", 8, (3, 1)).graph
    plan = hxla.make_plan(graph, "cpu-1.0-0.33", mesh={"tensor": 2})
    by_name = {layout.name: layout for layout in plan.parameters}
    # Less than a quarter: what it repeats takes the slow device three times as long, too.
    assert by_name["up/kernel"].sizes == ((), (7, 1))
    assert "by the speeds of the devices" in plan.explain()
    stated = hxla.make_plan(graph, "cpu-1.0-0.33", mesh={"tensor": (1, 1)})
    assert not stated.is_uneven
