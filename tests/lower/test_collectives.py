"""Collectives in compiled programs, counted against theory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import hxla
from hxla import Strategy, testing
from support import models
from support.inside.graph import trace_sums
from support.inside.inspect import _shapes
from support.inside.plan import shard_graph
from support.tiers import rows

WIDTH, HEADS, LENGTH, BATCH = 32, 8, 16, 8
#: Collectives are those of HLO, whatever LLVM makes of the rest.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def shapes(text, kind=None):
    """Array shapes that the collectives of one kind work on, or of all kinds."""
    found = hxla.inspect(text).main.select(kind)
    return [_shapes.arrays(array)[0][1] for c in found for array in c.arrays]


class Split:
    """A loss cut over one axis of n devices: its forward pass and its gradient, compiled."""

    def __init__(self, loss, params, batch, n=4):
        def sums(params, aux, key, batch):
            value = loss(params, batch)
            return value, jnp.stack([value, jnp.float32(1)]), aux

        self.graph = trace_sums(sums, params, {}, batch)
        roles = tuple(
            "split" if t.strategy == "split" else "replicate" for t in self.graph.task_graphs
        )
        self.sharded = shard_graph(self.graph, (("tensor", n),), {"tensor": roles}, None)
        self.mesh = jax.make_mesh(
            (n,), ("tensor",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,)
        )
        run = self.sharded.function(self.mesh)
        named = lambda s: jax.sharding.NamedSharding(self.mesh, s)  # noqa: E731
        place = jax.tree.structure(params).unflatten(map(named, self.sharded.param_specs()))
        batch_place = jax.tree.structure(batch).unflatten(map(named, self.sharded.batch_specs()))
        key = jax.random.key(0)
        self.params = params
        self.loss = loss

        def value(params, batch):
            return run(params, {}, key, batch)[0]

        self._forward = jax.jit(
            value, in_shardings=(place, batch_place), compiler_options=QUICK_TO_COMPILE
        )
        self._gradient = jax.jit(
            jax.value_and_grad(value, argnums=0),
            in_shardings=(place, batch_place),
            out_shardings=(None, place),
            compiler_options=QUICK_TO_COMPILE,
        )
        self.batch = batch

    @functools.cached_property
    def forward(self):
        return self._forward.lower(self.params, self.batch).compile()

    @functools.cached_property
    def gradient(self):
        return self._gradient.lower(self.params, self.batch).compile()

    def forward_text(self):
        return self.forward.as_text()

    def gradient_text(self):
        return self.gradient.as_text()

    def check(self):
        """Loss and gradients equal those of plain JAX on one device."""
        place, batch_place = self.gradient.input_shardings[0]
        placed = jax.device_put((self.params, self.batch), (place, batch_place))
        value, grads = self.gradient(*placed)
        plain = jax.jit(jax.value_and_grad(self.loss), compiler_options=QUICK_TO_COMPILE)
        expected, their = plain(self.params, self.batch)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(their), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def normal(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape, scale=0.1).astype(np.float32)


def block_params():
    return {
        "norm1": np.ones(WIDTH, np.float32),
        "norm2": np.ones(WIDTH, np.float32),
        "qkv": normal(WIDTH, HEADS, 3 * WIDTH // HEADS),
        "out": normal(HEADS, WIDTH // HEADS, WIDTH),
        "up": normal(WIDTH, 4 * WIDTH),
        "up_bias": np.zeros(4 * WIDTH, np.float32),
        "down": normal(4 * WIDTH, WIDTH),
        "down_bias": np.zeros(WIDTH, np.float32),
    }


def norm(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(p, x):
    """Megatron's block: attention by heads, then an MLP, each with a residual."""
    heads = jnp.einsum("btc,chd->bhtd", norm(x, p["norm1"]), p["qkv"])
    q, k, v = jnp.split(heads, 3, axis=-1)
    weights = jax.nn.softmax(q @ k.swapaxes(2, 3))
    x = x + jnp.einsum("bhtd,hdc->btc", weights @ v, p["out"])
    hidden = jax.nn.gelu(norm(x, p["norm2"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


@pytest.mark.slow
def test_a_megatron_block_has_two_all_reduces_forward_and_two_backward():
    def loss(params, batch):
        with hxla.split():
            return (block(params, batch["x"] * params["scale"]) * batch["y"]).sum()

    params = block_params() | {"scale": np.ones(WIDTH, np.float32)}
    batch = {"x": normal(BATCH, LENGTH, WIDTH), "y": normal(BATCH, LENGTH, WIDTH)}
    split = Split(loss, params, batch)
    split.check()
    only_all_reduces = functools.partial(
        testing.assert_collectives,
        all_gather=0,
        reduce_scatter=0,
        all_to_all=0,
        collective_permute=0,
    )
    only_all_reduces(split.forward_text(), all_reduce=2)
    both = split.gradient_text()
    # The forward value is not needed for the gradient of a sum; what is left of its second
    # all-reduce is that of the loss itself.
    of_activations = [s for s in shapes(both, "all-reduce") if s == (BATCH, LENGTH, WIDTH)]
    assert len(of_activations) == split.sharded.axes["tensor"].num_collectives == 4
    only_all_reduces(both)


@pytest.mark.parametrize("num", [1, 3])
def test_the_collectives_of_pairs_of_products_are_counted(num):
    """Forward one for each pair; backward one for each pair whose input has a gradient."""

    def loss(params, batch):
        with hxla.split():
            x = batch["x"]
            for pair in params:
                x = jnp.tanh(jnp.tanh(x @ pair["up"]) @ pair["down"])
            return (x * batch["y"]).sum()

    params = [{"up": normal(16, 64), "down": normal(64, 16)} for _ in range(num)]
    batch = {"x": normal(BATCH, 16), "y": normal(BATCH, 16)}
    split = Split(loss, params, batch)
    counted = split.sharded.axes["tensor"].num_collectives
    assert counted == len(shapes(split.gradient_text())) == 2 * num - 1


def classifier(params, batch):
    with hxla.replicate():
        features = jnp.tanh(batch["x"] @ params["features"])
    with hxla.split():
        logits = features @ params["classes"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def test_a_split_classifier_moves_features_and_not_its_weights():
    classes = 1024
    params = {"features": normal(16, 24), "classes": normal(24, classes)}
    batch = {"x": normal(BATCH, 16), "y": np.arange(BATCH, dtype=np.int32) * 100}
    split = Split(classifier, params, batch)
    split.check()
    moved = shapes(split.gradient_text())
    testing.assert_no_all_gather_of_parameters(split.gradient)
    assert moved
    # Features and the gradient of what makes them; the classifier's is 24 x 1024.
    assert max(np.prod(s) for s in moved) == 16 * 24, moved
    gathered = shapes(split.forward_text(), "all-gather")
    assert gathered in ([(BATCH, 24)], [(24, BATCH)])
    (bridge,) = [b for b in split.sharded.bridges() if b.array == f"float32[{BATCH},24]"]
    assert bridge.kind == "gather"


def test_a_fused_bridge_leaves_no_collective():
    def loss(params, batch):
        with hxla.split():
            hidden = jnp.tanh(batch["x"] @ params["a"])
        with hxla.split():
            return (hidden @ params["b"] * batch["y"]).sum()

    params = {"a": normal(16, 64), "b": normal(64, 16)}
    batch = {"x": normal(BATCH, 16), "y": normal(BATCH, 16)}
    split = Split(loss, params, batch)
    split.check()
    (bridge,) = [b for b in split.sharded.bridges() if b.array == f"float32[{BATCH},64]"]
    assert bridge.kind == "fused"
    (total,) = hxla.inspect(split.forward_text()).collectives  # the row-parallel sum
    assert total.kind == "all-reduce"


def test_replicate_after_replicate_moves_gradients_only():
    def loss(params, batch):
        with hxla.replicate():
            hidden = jnp.tanh(batch["x"] @ params["a"])
        with hxla.replicate():
            return ((hidden @ params["b"]) ** 2).sum()

    params = {"a": normal(16, 64), "b": normal(64, 16)}
    batch = {"x": normal(BATCH, 16)}
    split = Split(loss, params, batch)
    split.check()
    moved = shapes(split.gradient_text(), "all-reduce")
    assert sorted(moved) in (
        [(), (16, 64), (64, 16)],
        [(16, 64), (64, 16)],
    )
    (total,) = hxla.inspect(split.forward_text()).collectives  # the loss
    assert total.kind == "all-reduce"


def test_experts_exchange_tokens_by_all_to_all():
    experts, groups, capacity = 8, 8, 4

    def loss(params, batch):
        with hxla.replicate():
            x = jnp.tanh(batch["x"] @ params["in"])
        with hxla.split():
            sent = jnp.einsum("gsec,gsm->egcm", batch["sent"], x)
            hidden = jax.nn.gelu(jnp.einsum("egcm,emh->egch", sent, params["up"]))
            back = jnp.einsum("egch,ehm->egcm", hidden, params["down"])
            y = jnp.einsum("gsec,egcm->gsm", batch["sent"], back)
        with hxla.replicate():
            return (y**2).sum()

    params = {
        "in": normal(16, 16),
        "up": normal(experts, 16, 64),
        "down": normal(experts, 64, 16),
    }
    sent = np.zeros((groups, 8, experts, capacity), np.float32)
    for g in range(groups):
        for s in range(8):
            sent[g, s, (g + s) % experts, s % capacity] = 1
    batch = {"x": normal(groups, 8, 16), "sent": sent}
    split = Split(loss, params, batch)
    split.check()
    text = split.forward_text()
    testing.assert_collectives(text, all_to_all=2, all_gather=0)
    cut = dict(zip(split.graph.param_names, split.sharded.param_specs(), strict=True))
    assert cut["up"][0] == cut["down"][0] == "tensor"


@pytest.mark.parametrize("kind", ["replicate", "split"])
def test_a_strategy_prints_as_it_is_written(kind):
    assert repr(Strategy(kind, 4)) == f"hxla.{kind}(4)"
    assert repr(Strategy(kind, None)) == f"hxla.{kind}()"


MEMORY = [{}, {"zero": 1, "shard_groups": 2}, {"zero": 2, "shares": [3, 1, 1, 1]}]


@pytest.mark.parametrize("memory", rows(MEMORY, *MEMORY[:2]))
def test_no_loop_of_a_sum_has_a_collective(memory):
    """Their order would be lost in XLA's compilation cache, see `chunks.ring_sum`."""
    job = hxla.Job(
        models.NnxNet(nnx.Rngs(0)),
        models.tokens(64),
        models.token_loss,
        optax.adam(1e-3),
        batch_size=16,
        config={"memory": memory},
    )
    mesh = models.mesh(data=4)
    plan = job.plan(mesh=mesh, microbatch_size=2)
    with job.open(plan, mesh=mesh, quiet=True) as session:
        texts = [program.as_text() for program in session._programs.reducer.programs]
    entry = re.compile(r"^ENTRY .*?^}", re.DOTALL | re.MULTILINE)
    of_loops = "".join(entry.sub("", text) for text in texts)
    kinds = r"= \S+ (?:all-\S+|collective-permute|reduce-scatter)\("
    assert len(re.findall(kinds, "".join(texts))) > 3
    assert not re.findall(kinds, of_loops)
