"""TaskGraphs: what belongs to which, and how much work it is."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hxla
from support.inside.graph import trace_sums


class Two(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        with hxla.replicate():
            x = nnx.relu(self.a(x))
        with hxla.split():
            return self.b(x)


def shapes(model):
    return nnx.eval_shape(lambda: model(nnx.Rngs(0)))


def square(model, batch):
    return (model(batch) ** 2).mean(axis=-1)


X = np.ones((4, 8), np.float32)


def params_of(graph):
    return [(t.strategy, t.device_count, t.params) for t in graph.task_graphs]


def test_equations_and_parameters_belong_to_their_scope():
    graph = hxla.trace(shapes(Two), square, X)
    assert params_of(graph) == [
        ("replicate", None, ("a/bias", "a/kernel")),
        ("split", None, ("b/bias", "b/kernel")),
    ]
    first, second = graph.task_graphs
    assert first.flops >= 2 * 4 * 8 * 16
    assert second.param_bytes == (16 * 8 + 8) * 4
    assert second.inputs == ("float32[4,16]",)
    assert "test_trace.py" in first.source
    assert "split()" in str(graph)


def test_task_graphs_are_drawn_with_their_strategies_and_bytes(tmp_path):
    graph = hxla.trace(shapes(Two), square, X)
    graph.draw(tmp_path / "pictures" / "graph.svg")
    comments = (tmp_path / "pictures" / "graph.svg").read_text()  # matplotlib's, of every text
    assert re.search(r"<!--.*replicate.*-->", comments)
    assert re.search(r"<!--.*split.*-->", comments)


def test_without_annotation_there_is_one_task_graph():
    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.a(x)

    graph = hxla.trace(shapes(Plain), square, X)
    assert params_of(graph) == [("replicate", None, ("a/bias", "a/kernel"))]


def test_a_parameter_that_two_task_graphs_read_is_known_as_shared():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 8, rngs=rngs)

        def __call__(self, x):
            with hxla.replicate():
                x = self.embed(x.astype(int)[:, 0])
            with hxla.split():
                return self.embed.attend(x)

    graph = hxla.trace(shapes(Tied), square, X)
    assert [t.shared_params for t in graph.task_graphs] == [("embed/embedding",)] * 2


def annotated_in_init(rngs):
    class Net(nnx.Module):
        def __init__(self, rngs):
            with hxla.replicate():
                self.a = nnx.Linear(8, 16, rngs=rngs)
            with hxla.split():
                self.rest = nnx.List([nnx.Linear(16, 8, rngs=rngs)])

        def __call__(self, x):
            return self.rest[0](nnx.relu(self.a(x)))

    return Net(rngs), None


def annotated_class(rngs):
    @hxla.split()
    class Second(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = hxla.replicate()(nnx.Linear(8, 16, rngs=rngs))
            self.b = Second(rngs)

        def __call__(self, x):
            return self.b(nnx.relu(self.a(x)))

    return Net(rngs), None


def annotated_setup(rngs):
    class Net(nn.Module):
        def setup(self):
            with hxla.replicate():
                self.a = nn.Dense(16)
            with hxla.split():
                self.b = nn.Dense(8)

        def __call__(self, x):
            return self.b(nn.relu(self.a(x)))

    return Net(), None


def annotated_linen_class(rngs):
    @hxla.split()
    class Second(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = hxla.replicate()(nn.Dense(16))(x)
            return Second()(nn.relu(x))

    return Net(), None


def annotated_function(rngs):
    model = Two(rngs)

    @hxla.replicate()
    def first(model, x):
        return nnx.relu(model.a(x))

    @hxla.split()
    def second(model, x):
        return model.b(x)

    return model, lambda m, x: (second(m, first(m, x)) ** 2).mean(-1)


@pytest.mark.parametrize(
    "make",
    [
        annotated_in_init,
        annotated_class,
        annotated_setup,
        annotated_linen_class,
        annotated_function,
    ],
)
def test_every_way_to_annotate_gives_the_same_task_graphs(make):
    model, loss = make(nnx.Rngs(0))
    graph = hxla.trace(model, loss or square, X)
    assert [t.strategy for t in graph.task_graphs] == ["replicate", "split"]
    assert [t.param_bytes for t in graph.task_graphs] == [(8 * 16 + 16) * 4, (16 * 8 + 8) * 4]


def test_annotation_does_not_change_the_class_name_or_the_values():
    plain = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    annotated = hxla.split()(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
    assert type(annotated).__qualname__ == type(plain).__qualname__
    np.testing.assert_array_equal(annotated(X), plain(X))
    graphdef, state = nnx.split(annotated)
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(X), plain(X))


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, nnx.jit, nnx.remat])
def test_scopes_are_seen_through_transforms(transform):
    class Net(Two):
        def __call__(self, x):
            x = nnx.relu(self.a(x))

            def second(b, x):
                with hxla.split():
                    return b(x)

            if transform in (nnx.jit, nnx.remat):
                return transform(second)(self.b, x)
            graphdef, state = nnx.split(self.b)
            return transform(lambda s, x: second(nnx.merge(graphdef, s), x))(state, x)

    graph = hxla.trace(shapes(Net), square, X)
    assert params_of(graph) == [
        ("replicate", None, ("a/bias", "a/kernel")),
        ("split", None, ("b/bias", "b/kernel")),
    ]


def test_a_scope_inside_a_scanned_layer_is_one_task_graph_run_many_times():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            with hxla.split():
                return jnp.sin(nn.Dense(8, use_bias=False)(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=5
            )
            return layers()(x, None)[0]

    graph = hxla.trace(Net(), square, X)
    splits = [t for t in graph.task_graphs if t.strategy == "split"]
    assert len(splits) == 1
    assert splits[0].flops >= 5 * 2 * 4 * 8 * 8


def test_flops_agree_with_xlas_own_cost_analysis():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 16, (3, 3), padding="VALID", rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
            self.up = nnx.Linear(16, 64, rngs=rngs)

        def __call__(self, image):
            with hxla.replicate():
                x = self.conv(image).reshape(image.shape[0], -1, 16)
            with hxla.split():
                return self.up(self.attention(x))

    net = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    image = np.ones((4, 10, 10, 3), np.float32)
    graphdef, state = nnx.split(net)
    compiled = jax.jit(lambda s, x: square(nnx.merge(graphdef, s), x).sum()).lower(state, image)
    theirs = compiled.compile().cost_analysis()["flops"]
    assert hxla.trace(net, square, image).flops == pytest.approx(theirs, rel=0.05)


def test_a_model_too_large_for_this_machine_is_traced_from_shapes():
    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(1 << 20, 1 << 20, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    model = nnx.eval_shape(lambda: Wide(nnx.Rngs(0)))
    graph = hxla.trace(model, square, jax.ShapeDtypeStruct((4, 1 << 20), jnp.float32))
    assert graph.task_graphs[0].param_bytes == ((1 << 40) + (1 << 20)) * 4


def test_the_default_strategy_covers_what_is_not_annotated():
    class Net(Two):
        def __call__(self, x):
            x = nnx.relu(self.a(x))
            with hxla.split():
                return self.b(x)

    graph = hxla.trace(shapes(Net), square, X, default=hxla.replicate(2))
    assert [(t.strategy, t.device_count) for t in graph.task_graphs] == [
        ("replicate", 2),
        ("split", None),
    ]


def test_each_entry_of_a_loop_is_a_task_graph_of_its_own():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                with hxla.replicate(1):
                    x = layer(x)
            return x

    graph = hxla.trace(shapes(Net), square, X)
    assert [t.params for t in graph.task_graphs] == [
        (f"layers/{i}/bias", f"layers/{i}/kernel") for i in range(3)
    ]


def test_gradients_flow_through_what_a_scan_carries_and_through_complex_numbers():
    """The scan puts out what it was given: zeros first, then what the parameters made."""

    def run(params, aux, key, batch):
        def step(before, x):
            return x * params["w"], before

        _, shifted = jax.lax.scan(step, jnp.zeros(3), batch)
        waves = jnp.fft.rfft(batch * params["w"])
        value = shifted.sum() + jnp.abs(waves).sum()
        return value, jnp.stack([value, 1.0]), aux

    graph = trace_sums(run, {"w": jnp.ones(3)}, {}, jnp.ones((4, 3)))
    (scan,) = (op for op in graph.ops if op.kind == "scan")
    assert [graph.values[v].differentiable for v in scan.outputs] == [True, True]
    (fft,) = (op for op in graph.ops if op.eqn.primitive.name == "fft")
    assert graph.values[fft.outputs[0]].differentiable
