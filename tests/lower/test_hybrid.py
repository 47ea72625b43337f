"""Hybrids of replicate and split train as the single-device model does."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.tiers import rows
from support.training import train_with

WIDTH, CLASSES, EXPERTS = 16, 32, 8


class NnxNet(nnx.Module):
    """Two parts, each under a strategy of its own."""

    def __init__(self, rngs, first, second):
        self.first, self.second = first, second
        self.embed = nnx.Embed(models.VOCABULARY, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, tokens):
        with self.first():
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x))
        with self.second():
            x = x + self.down(jax.nn.gelu(self.up(x)))
            return self.head(x)


class LinenNet(nn.Module):
    first: object
    second: object

    @nn.compact
    def __call__(self, tokens):
        with self.first():
            x = nn.Embed(models.VOCABULARY, WIDTH)(tokens)
            x = x + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(x))
        with self.second():
            x = x + nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(4 * WIDTH)(x)))
            return nn.Dense(CLASSES)(x)


class Experts(nnx.Module):
    """Every token goes to its best expert, with room for all (GShard's einsums, capacity C)."""

    def __init__(self, rngs, strategy):
        self.strategy = strategy
        init = nnx.initializers.lecun_normal()
        self.gate = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, 4 * WIDTH)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, 4 * WIDTH, WIDTH)))

    def __call__(self, x_GSM):
        gates_GSE = jax.nn.softmax(self.gate(x_GSM))
        best_GSE = jax.nn.one_hot(gates_GSE.argmax(-1), EXPERTS)
        place_GSE = (jnp.cumsum(best_GSE, axis=1) - 1) * best_GSE
        capacity = x_GSM.shape[1]
        sent_GSEC = jax.nn.one_hot(place_GSE.astype(jnp.int32), capacity) * best_GSE[..., None]
        with self.strategy():
            x_EGCM = jnp.einsum("gsec,gsm->egcm", sent_GSEC, x_GSM)
            x_EGCH = jax.nn.gelu(jnp.einsum("egcm,emh->egch", x_EGCM, self.up[...]))
            y_EGCM = jnp.einsum("egch,ehm->egcm", x_EGCH, self.down[...])
            back_GSEC = sent_GSEC * gates_GSE[..., None]
            return jnp.einsum("gsec,egcm->gsm", back_GSEC, y_EGCM)


class MoeNet(nnx.Module):
    def __init__(self, rngs, first, second):
        self.first = first
        self.embed = nnx.Embed(models.VOCABULARY, WIDTH, rngs=rngs)
        self.experts = Experts(rngs, second)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, tokens):
        with self.first():
            x = self.embed(tokens)
        x = x + self.experts(x)
        with self.first():
            return self.head(x)


class Inside:
    """`replicate(copies)` around `split(parts)`."""

    def __init__(self, copies, parts):
        self.copies, self.parts = copies, parts

    def __call__(self):
        return self

    def __enter__(self):
        self.scopes = [hxla.replicate(self.copies), hxla.split(self.parts)]
        for scope in self.scopes:
            scope.__enter__()

    def __exit__(self, *error):
        for scope in self.scopes[::-1]:
            scope.__exit__(*error)


def count(kind, n=None):
    return lambda: kind(n)


R, S = hxla.replicate, hxla.split
HYBRIDS = {
    "replicate": (count(R), count(R)),
    "split": (count(S), count(S)),
    "replicate-split": (count(R), count(S)),
    "split-replicate": (count(S), count(R)),
    "replicate-split4-nested": (count(R), count(S, 4)),
    "split2-nested": (count(S, 2), count(S, 2)),
    "split4-split2": (count(S, 4), count(S, 2)),
    "replicate2xsplit4": (Inside(2, 4), Inside(2, 4)),
}


def make_optimizer():
    # Not Adam: it would blow up the rounding of a key's bias, whose gradient is zero.
    return optax.sgd(0.1, momentum=0.9)


def batches(steps, size):
    tokens = models.tokens()["tokens"]
    return [{"tokens": tokens[i * size : (i + 1) * size]} for i in range(steps)]


def reference(net, batches):
    """Plain JAX on one device."""
    optimizer = make_optimizer()
    if isinstance(net, nnx.Module):
        graphdef, params, rest = nnx.split(net, nnx.Param, ...)
        apply = lambda p, b: models.token_loss(nnx.merge(graphdef, p, rest), b).mean()  # noqa: E731
    else:
        params = net.init(jax.random.key(0), batches[0]["tokens"][:, :-1])["params"]
        apply = lambda p, b: nn.apply(models.token_loss, net)({"params": p}, b).mean()  # noqa: E731

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(apply)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = optimizer.init(params), []
    for batch in batches:
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    return losses, params


def trained(net, batches, size, micro, variables=None, **options):
    return train_with(
        net,
        iter(batches),
        models.token_loss,
        make_optimizer(),
        batch_size=size,
        microbatch_size=micro,
        steps=len(batches),
        shuffle=False,
        counts="even",
        variables=variables,
        config={"cluster": {"share_devices": True}},
        **options,
    )


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=2e-5)


class Tied(nnx.Module):
    """One parameter in two TaskGraphs of different strategy."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(models.VOCABULARY, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        with hxla.replicate():
            x = jnp.tanh(self.embed(tokens))
        with hxla.split():
            return self.embed.attend(x)


FLAVOURS = {
    "nnx": lambda *scopes: NnxNet(nnx.Rngs(0), *scopes),
    "linen": LinenNet,
    "experts": lambda *scopes: MoeNet(nnx.Rngs(0), *scopes),
    "tied": lambda *_: Tied(nnx.Rngs(0)),
    "scanned": lambda *_: models.SplitLayers(2, CLASSES, remat=True),
}
# Each replica compiles for itself: those with eight of them are tried once.
MANY = ("replicate", "split2-nested")
CASES = [
    *(("nnx", name) for name in HYBRIDS),
    *((f, name) for f in ("linen", "experts") for name in HYBRIDS if name not in MANY),
    ("tied", "replicate-split"),
    ("scanned", "split"),
]
QUICK = [("tied", "replicate-split")]


@pytest.mark.parametrize("case", rows(CASES, *QUICK, ids="-".join))
def test_a_hybrid_trains_as_one_device_does(case):
    flavour, name = case
    data = batches(3, 32)
    make = lambda: FLAVOURS[flavour](*HYBRIDS[name])  # noqa: E731
    losses, params = reference(make(), data)
    variables, is_linen = None, isinstance(make(), nn.Module)
    if is_linen:
        variables = make().init(jax.random.key(0), data[0]["tokens"][:, :-1])
    result = trained(make(), data, 32, 4 if name in MANY else 8, variables)
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    close(result.state["params"] if is_linen else nnx.state(result.model, nnx.Param), params)
    if flavour == "scanned":
        cut = [r for r in result.plan.reasons if "Dense" in r and "tensor" in r]
        assert len(cut) >= 2


@pytest.mark.slow
def test_the_bits_do_not_depend_on_how_replicas_share_the_work():
    data = batches(3, 32)

    def run(counts):
        net = NnxNet(nnx.Rngs(0), count(R), count(S, 4))
        return hxla.train(
            hxla.Job(
                net,
                iter(data),
                models.token_loss,
                optax.adam(1e-2),
                batch_size=32,
                shuffle=False,
            ),
            microbatch_size=4,
            steps=3,
            counts=counts,
        ).sha256

    assert run((4, 4)) == run((7, 1)) == run((1, 7))


@pytest.mark.parametrize("n", rows([1, 2, 4, 8], 4))
def test_memory_of_a_split_classifier_falls_as_one_over_n(n):
    num_classes = 20_000

    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(64, num_classes, use_bias=False, rngs=rngs)

        def __call__(self, x):
            with hxla.split():
                return self.head(x)

    mesh = models.mesh(data=1, tensor=n)
    job = hxla.Job(
        Classifier(nnx.Rngs(0)),
        {"x": np.ones((8, 64), np.float32), "y": np.arange(8, dtype=np.int32)},
        lambda m, b: optax.softmax_cross_entropy_with_integer_labels(m(b["x"]), b["y"]),
        optax.adam(1e-3),
        batch_size=8,
    )
    with job.open(job.plan(microbatch_size=8, mesh=mesh), mesh=mesh) as session:
        seen = session.running_plan.memory_bytes
    whole = 64 * num_classes * 4
    # Parameters, two moments, two limbs, and what the update makes anew.
    assert seen / (whole / n) < 9
    assert seen / (whole / n) > 5
