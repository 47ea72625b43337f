"""What the search counts as kept for a backward, beside what stages of pipelines keep."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hxla
from support import families
from support.inside.choose import Chain, Group, tables
from support.inside.graph import (
    AS_THEY_ARE,
    bytes_of,
    cut_points,
    graph_at,
    graph_of,
    layer_points,
    parts_of,
    segments_at,
)
from support.inside.jax import Literal, run_equation
from support.inside.lower import StagePart, direct_parts, segment_costs
from support.inside.plan import Sharded, shard_graph
from support.inside.profile import ResidualEstimator, _kept_bytes, layer_sizes
from support.tiers import rows


class Recurrent(nnx.Module):
    """A lookup and a scan over positions."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.step, self.out = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, words):
        x = self.embed(words)
        kernel, bias = self.step.kernel[...], self.step.bias[...]

        def step(state, row):
            state = jnp.tanh(row + state @ kernel + bias)
            return state, state

        _, states = jax.lax.scan(step, x[:, 0] * 0, x.swapaxes(0, 1))
        return self.out(states)


def recurrent():
    def loss(model, batch):
        return jnp.mean(model(batch["words"]) ** 2, (0, 2))

    return Recurrent(nnx.Rngs(0)), loss, {"words": np.zeros((4, 6), np.int32)}


def blocks():
    rngs = nnx.Rngs(0)
    layers = [(nnx.Linear(8, 8, rngs=rngs), nnx.relu) for _ in range(4)]

    def loss(model, batch):
        return jnp.mean(model(batch["x"]) ** 2, 1)

    return nnx.Sequential(*itertools.chain(*layers)), loss, {"x": np.zeros((4, 8), np.float32)}


MODELS = families.FAMILIES | {"recurrent": recurrent, "blocks": blocks}


@functools.cache
def of_family(name):
    rest = []

    def make():
        model, *rest[:] = MODELS[name]()
        return model

    return graph_of(hxla.trace(nnx.eval_shape(make), *rest))


@functools.cache
def traced_gpt():
    gpt = families.example("gpt")
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), width=512, layers=3))
    text = jax.ShapeDtypeStruct((2, gpt.LENGTH + 1), jnp.uint8)
    return gpt, graph_of(hxla.trace(model, gpt.loss, {"text": text}))


@pytest.mark.parametrize("name", rows(["decoder", "encoder_decoder", "resnet"], "decoder"))
def test_layers_are_counted_with_what_a_stage_of_them_keeps(name):
    """The stage's own minimum cut is of the traced backward of all its parts at once.

    These segments are parts of layers, so that many arrays are kept by two neighbours.
    """
    graph = of_family(name)
    points = cut_points(graph, 8)
    kept = _kept_bytes.kept_bytes(graph, segments_at(graph, points))
    inner = (1, len(points) // 2 + 1)
    ends = (0, *inner, len(kept))
    parts = parts_of(graph, tuple(points[i - 1] for i in inner))
    for a, b, part in zip(ends, ends[1:], parts, strict=False):
        trained = range(len(graph.param_values))
        stage = StagePart(graph, part, AS_THEY_ARE, trained=trained, on_cpu=False)
        real = sum(bytes_of(x.shape, x.dtype) for x in stage.residuals)
        assert real <= sum(kept[a:b]) <= 1.6 * real + 64, (a, b)


@pytest.mark.parametrize("name", rows(MODELS, "recurrent", "decoder"))
def test_a_composed_program_keeps_what_the_traced_one_does(name):
    """One is put together of the gradients of its equations, the other is jax's own gradient."""
    graph = of_family(name)
    trained = range(len(graph.param_values))
    for part in parts_of(graph, cut_points(graph, 4)):
        stage = StagePart(graph, part, AS_THEY_ARE, trained=trained, on_cpu=False)
        kept = stage.composed.kept(part.inputs, is_last=part.is_last)
        found = sorted((v.aval.shape, str(v.aval.dtype)) for v in kept)
        assert found == sorted((x.shape, str(x.dtype)) for x in stage.residuals), part.segment.name


@pytest.mark.parametrize("name", rows(["recurrent", "lstm", "moe"], "recurrent"))
def test_a_composed_program_makes_the_gradients_that_jax_makes(name):
    graph = of_family(name)
    [part] = parts_of(graph, ())
    trained = range(len(graph.param_values))
    stage = StagePart(graph, part, AS_THEY_ARE, trained=trained, on_cpu=False)
    composed, rng = stage.composed, np.random.default_rng(0)
    arrays = {v: given_array(graph.values[v], rng) for v in composed.arguments}

    @jax.jit
    def by_equations(arrays):
        env = {composed.arguments[v]: x for v, x in arrays.items()}
        env |= {v: jnp.float32(1) for v in composed.cotangents.values()}
        env |= dict(zip(composed.constvars, (x for _, x in graph.consts), strict=False))
        for eqn in composed.eqns:
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, run_equation(eqn, operands), strict=True))
        return [env[v] for v in composed.results], [env[v] for v in composed.gradients]

    @jax.jit
    def by_jax(arrays):
        params = [arrays[graph.param_values[p]] for p in stage.params]
        given = {v: arrays[v] for v in part.segment.given}
        d_params, _, made = stage.backward(params, [], given, [])
        return made, d_params

    for found, wanted in zip(by_equations(arrays), by_jax(arrays), strict=True):
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())


def given_array(value, rng):
    """Floats near a half, or ones."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    floats = rng.normal(size=value.shape) * 0.1 + 0.5
    return jnp.asarray(floats if value.differentiable else np.ones(value.shape), value.dtype)


def test_a_layer_of_a_gpt_is_counted_as_the_closed_formula_has_it():
    gpt, graph = traced_gpt()
    chain = segments_at(graph, cut_points(graph, 3))
    # Per position ten rows: inputs of both norms, queries, keys and values, the mixed values, 4
    # before the activation; and one matrix of attention (Korthikanti et al., MLSys 2023, 4.1).
    positions, width = 2 * gpt.LENGTH, 512
    closed = 4 * positions * (10 * width + gpt.HEADS * gpt.LENGTH)
    found = layer_sizes(graph, chain, shard_graph(graph, (), {}))[1].stash_bytes
    assert found == pytest.approx(closed, rel=0.05)


def test_equal_layers_are_looked_at_once(monkeypatch):
    looked = []
    real = _kept_bytes._residual_bytes
    monkeypatch.setattr(
        _kept_bytes, "_residual_bytes", lambda *own: looked.append(own[2]) or real(*own)
    )
    _, graph = traced_gpt()
    chain = segments_at(graph, cut_points(graph, 8))
    again = [real(ResidualEstimator(graph), graph, segment, None) for segment in chain]
    assert list(_kept_bytes.kept_bytes(graph, chain)) == again
    assert len(looked) < len(chain)


def test_frozen_parameters_need_no_inputs_of_their_products():
    def loss(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    def make():
        rngs = nnx.Rngs(0)
        return nnx.Sequential(*(nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)))

    batch = {"x": jax.ShapeDtypeStruct((16, 8), np.float32)}
    two = nnx.eval_shape(make)
    graph = graph_of(hxla.trace(two, loss, batch))
    (chain,) = [segments_at(graph, ())]
    whole, some = (_kept_bytes.kept_bytes(graph, chain, t)[0] for t in (None, (0,)))
    # Both activations, or only the one that the square reads; the batch is there anyway.
    assert (whole, some) == (2 * 16 * 8 * 4, 16 * 8 * 4)


def test_stages_that_run_forwards_again_keep_inputs_and_make_one_stage_again():
    group = Group(
        kind="A",
        num_devices=2,
        memory_bytes=1e6,
        forward_seconds=(1.0,) * 3,
        backward_seconds=(2.0,) * 3,
        update_seconds=(0.0,) * 3,
        parameter_bytes=(10.0, 20.0, 30.0),
        stash_bytes=(100.0, 200.0, 300.0),
    )
    chain = Chain(
        groups=(group,),
        num_microbatches=4,
        output_bytes=(7.0, 8.0, 9.0),
        state_factor=2.0,
        keeps_inputs=True,
    )
    t = tables(chain)
    assert t.state_bytes[0, 1, 3] == 2 * 50 + 500
    assert t.stash_bytes[0, 1, 3] == 7
    assert t.stash_bytes[0, 0, 2] == 0


@pytest.mark.parametrize("name", rows(MODELS, "blocks", "decoder"))
def test_segments_that_are_alike_are_traced_once_and_cost_the_same(name, monkeypatch):
    graph = of_family(name)
    own = graph_of(graph)
    ordered, parts = graph_at(own, "work", layer_points(own, None))
    stages = [
        StagePart(ordered, part, AS_THEY_ARE, trained=range(len(own.param_values)), on_cpu=False)
        for part in direct_parts(ordered, parts)
    ]
    whole = Sharded(graph, {}).over(ordered)
    found = [segment_costs(whole, stages, fused=fused) for fused in (False, True)]
    monkeypatch.setattr(StagePart, "kind", property(id))
    assert [segment_costs(whole, stages, fused=fused) for fused in (False, True)] == found
