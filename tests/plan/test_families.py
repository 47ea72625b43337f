"""Every shipped rule set, held against a model of its family."""

import jax
import numpy as np
import pytest

import hxla
from support import families
from support.inside.choose import roles_of_mesh
from support.inside.core import names
from support.inside.graph import trace_functional
from support.inside.lower import Replica
from support.inside.model import as_sums, functional
from support.inside.plan import shard_graph

AXES = {"fsdp": 2, "tensor": 2}


def test_every_shipped_set_has_a_model_to_be_held_against():
    assert set(families.FAMILIES) == set(names("rules"))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_rule_set_leaves_no_large_parameter_whole(name):
    model, loss, batch = families.shapes_only(name)
    axes = AXES | ({"expert": 2} if name == "moe" else {})
    plan = hxla.make_plan(hxla.trace(model, loss, batch), mesh=axes, rules=name)
    assert not [w for w in plan.reasons if w.startswith("no rule")]
    # All of it but what is small, cut by every axis of the mesh.
    least = plan.parameter_bytes / np.prod(list(axes.values()))
    assert plan.device_parameter_bytes < (2.3 if name == "moe" else 1.6) * least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", "lstm", "moe"])
def test_a_model_cut_by_its_rules_gives_the_gradients_of_one_device(name):
    model, loss, batch = families.FAMILIES[name]()
    flat = functional(model, loss, loss, variables=None, seed=0, example=batch)
    graph = trace_functional(flat, batch)
    axes = (("fsdp", 2), ("expert" if name == "moe" else "tensor", 2))
    resolved = hxla.load_rules(name).resolve(graph.param_names, graph.param_shapes, dict(axes))
    sharded = shard_graph(graph, axes, roles_of_mesh(graph, axes, by_rules=True), resolved.dims)
    replica = Replica(0, tuple(jax.devices()[:4]), axes)
    run = sharded.function(replica.mesh)
    key = jax.random.key(0)
    start, aux = flat.arrays

    def value(params):
        return run(params, aux, key, batch)[0]

    def plain(params):
        return as_sums(flat.train(params, aux, key, batch)[0], 16).loss

    params = replica.put_tree(start, sharded.param_specs())
    ours, grads = jax.jit(jax.value_and_grad(value))(params)
    theirs, expected = jax.jit(jax.value_and_grad(plain))(start)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    largest = max(np.abs(np.asarray(x)).max() for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        # A key's bias has no gradient but rounding.
        scale = max(np.abs(np.asarray(b)).max(), 1e-2 * largest)
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=2e-5)
