"""A graph cut into a chain gives what the whole gives, and is cut where little crosses."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hxla
from support import lowering, models
from support.inside.graph import in_task_order, run_segment, segments, task_points, trace_functional
from support.inside.model import as_sums, functional
from support.paths import ROOT


def chain_results(graph, chain, model, key, batch):
    """The loss and its gradients, one segment after another."""

    def loss(params):
        given = dict(zip(graph.aux_values, jax.tree.leaves(model.aux), strict=True))
        given[graph.key_value] = key
        given |= dict(zip(graph.batch_values, jax.tree.leaves(batch), strict=True))
        crossing = {}
        for segment in chain:
            inputs = {v: crossing[v] for v in segment.inputs}
            own = [params[p] for p in segment.params]
            outputs = run_segment(graph, segment)(own, inputs, {v: given[v] for v in segment.given})
            crossing |= dict(zip(segment.outputs, outputs, strict=True))
        return crossing[graph.result_values[0]]

    return jax.value_and_grad(loss)(jax.tree.leaves(model.params))


@pytest.mark.slow
@pytest.mark.parametrize(("net", "num"), [("nnx", 1), ("nnx", 5), ("linen", 2)])
def test_a_chain_gives_the_loss_and_gradients_of_the_whole(net, num):
    batch = models.tokens(8)
    module = models.NnxNet(nnx.Rngs(0)) if net == "nnx" else models.LinenNet()
    loss = models.token_loss
    model = lowering.with_arrays(
        functional(module, loss, loss, variables=None, seed=0, example=batch)
    )
    graph = trace_functional(model, batch)
    chain = segments(graph, num)
    assert 1 <= len(chain) <= num
    key = jax.random.key(3)

    @jax.jit
    def whole(params, aux):
        tree = jax.tree.unflatten(jax.tree.structure(model.params), params)
        out, _ = model.train(tree, aux, key, batch)
        return as_sums(out, 8).loss

    value, grads = chain_results(graph, chain, model, key, batch)
    expected, wanted = jax.value_and_grad(whole)(jax.tree.leaves(model.params), model.aux)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def gpt():
    path = ROOT / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_transformer_is_cut_between_its_blocks():
    module = gpt()
    batch = {"text": jax.ShapeDtypeStruct((2, module.LENGTH + 1), jnp.int32)}
    model = nnx.eval_shape(lambda: module.GPT(nnx.Rngs(0), dropout=0.0))
    graph = hxla.trace(model, module.loss, batch)
    chain = segments(graph, module.LAYERS)
    assert len(chain) == module.LAYERS
    residual = 2 * module.LENGTH * module.WIDTH * 4
    assert [s.output_bytes for s in chain[:-1]] == [residual] * (module.LAYERS - 1)
    assert sum(s.flops for s in chain) == graph.flops
    assert {p for s in chain for p in s.params} == set(range(len(graph.param_values)))


def test_a_tied_embedding_belongs_to_both_ends():
    model = nnx.eval_shape(lambda: models.NnxNet(nnx.Rngs(0)))

    def loss(m, b):
        x = m.attention(m.embed(b["tokens"]))
        return m.embed.attend(x).mean(axis=(1, 2))

    chain = segments(hxla.trace(model, loss, models.tokens(8)), 3)
    shared = set(chain[0].params) & set(chain[-1].params)
    assert len(chain) > 1
    assert len(shared) == 1


def test_no_segments_are_refused():
    batch = {k: v[:4] for k, v in models.regression().items()}
    model = nnx.eval_shape(lambda: models.Dense(nnx.Rngs(0)))
    graph = hxla.trace(model, models.squared_error, batch)
    with pytest.raises(hxla.PlanError, match="at least one segment"):
        segments(graph, 0)


class Stages(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 5, rngs=rngs)
        self.second = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        with hxla.replicate(1):
            x = self.first(x)
            kept = x.sum(-1)
        with hxla.replicate(1):
            return self.second(x), kept


def weighted(model, batch):
    """Weights and a metric that read the batch and the first stage only, after the second."""
    made, kept = model(batch["x"])
    return ((made - batch["y"]) ** 2).sum(-1), batch["mask"] + 0.5, {"kept": kept * 2}


def test_what_no_annotation_covers_follows_what_it_reads():
    batch = {k: v[:4] for k, v in models.regression().items()}
    graph = hxla.trace(nnx.eval_shape(lambda: Stages(nnx.Rngs(0))), weighted, batch)
    assert len(task_points(graph)) > 1
    ordered = in_task_order(graph)
    assert len(task_points(ordered)) == 1
    assert [op.task for op in ordered.ops] == sorted(op.task for op in ordered.ops)
    assert sorted(op.outputs for op in ordered.ops) == sorted(op.outputs for op in graph.ops)
    known = {*graph.param_values, *graph.batch_values, *graph.aux_values, graph.key_value}
    known |= {v for v, _ in graph.consts}
    for op in ordered.ops:
        assert all(v in known for v in op.inputs if isinstance(v, int))
        known |= set(op.outputs)


def test_a_task_graph_that_reads_what_a_later_one_makes_is_no_stage():
    def loss(model, batch):
        with hxla.replicate(1):
            x = model.first(batch["x"])
        with hxla.replicate(1):
            x = jnp.tanh(x)
        return weighted(lambda _: (model.second(x), x[:, 0]), batch)

    batch = {k: v[:4] for k, v in models.regression().items()}
    model = nnx.eval_shape(lambda: Stages(nnx.Rngs(0)))
    graph = hxla.trace(model, loss, batch)
    tasks = [1 - op.task for op in graph.ops]  # as if the second were written first
    tasks = [dataclasses.replace(op, task=t) for op, t in zip(graph.ops, tasks, strict=True)]
    with pytest.raises(hxla.PlanError, match=r"TaskGraph 0 .* reads what TaskGraph 1 .* makes"):
        in_task_order(dataclasses.replace(graph, ops=tuple(tasks)))
