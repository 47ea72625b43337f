"""Small models whose parts of unlike sizes are of every kind of unit, and runs of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla
from support import models
from support.inside.lower import Padding, padded, sharded_of, uneven_of, unpadded
from support.inside.plan import to_spec

BATCH, LENGTH, WIDTH = 4, 5, 8
_QUICK = {"xla_backend_optimization_level": 0}  # to compile


class Attention(nnx.Module):
    """Heads of 4, each key and value shared by `group` of them, with and without biases."""

    def __init__(self, rngs, units, group=1):
        def dense(num):
            return nnx.Linear(WIDTH, num * 4, use_bias=group > 1, rngs=rngs)

        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query, self.key, self.value = dense(units * group), dense(units), dense(units)
        self.out = nnx.Linear(units * group * 4, WIDTH, rngs=rngs)
        self.units, self.group = units, group

    def __call__(self, x):
        with hxla.replicate():
            y = self.norm(x)
        with hxla.split():
            shape = (*x.shape[:2], self.units)
            q = self.query(y).reshape(*shape, self.group, 4)
            k, v = self.key(y).reshape(*shape, 4), self.value(y).reshape(*shape, 4)
            scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / 2
            scores = jnp.where(np.tril(np.ones((x.shape[1],) * 2)), scores, -1e9)
            mixed = jnp.einsum("bkgts,bskd->btkgd", nnx.softmax(scores), v)
            return x + self.out(mixed.reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
    def __init__(self, rngs, units, gated=False):
        self.up = nnx.Linear(WIDTH, units, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, units, rngs=rngs) if gated else None
        self.down = nnx.Linear(units, WIDTH, rngs=rngs)

    def __call__(self, x):
        with hxla.split():
            y = self.up(x)
            y = nnx.gelu(y) if self.gate is None else y * nnx.silu(self.gate(x))
            return x + self.down(nnx.relu(y))


class Experts(nnx.Module):
    """Every expert sees all tokens, weighted by a softmax over experts."""

    def __init__(self, rngs, units):
        normal = jax.nn.initializers.normal(0.3)
        self.router = nnx.Linear(WIDTH, units, rngs=rngs)
        self.up = nnx.Param(normal(rngs.params(), (units, WIDTH, 6)))
        self.down = nnx.Param(normal(rngs.params(), (units, 6, WIDTH)))

    def __call__(self, x):
        with hxla.split():
            weights = nnx.softmax(self.router(x))
            hidden = nnx.relu(jnp.einsum("btd,edf->btef", x, self.up[...]))
            return x + jnp.einsum("btef,efd,bte->btd", hidden, self.down[...], weights)


class Regression(nnx.Module):
    def __init__(self, rngs, inner):
        self.inner = inner(rngs)

    def __call__(self, x):
        return self.inner(x)


class Tied(nnx.Module):
    """An embedding that is also the head."""

    def __init__(self, rngs, units):
        self.embed = nnx.Embed(units, WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        with hxla.split():
            x = self.embed(tokens)
        with hxla.replicate():
            x = nnx.relu(self.mix(x))
        with hxla.split():
            return self.embed.attend(x)


class Classifier(nnx.Module):
    def __init__(self, rngs, units):
        self.features = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.classes = nnx.Linear(WIDTH, units, rngs=rngs)

    def __call__(self, x):
        with hxla.replicate():
            x = nnx.relu(self.features(x))
        with hxla.split():
            return self.classes(x)


class Channels(nnx.Module):
    def __init__(self, rngs, units):
        self.first = nnx.Conv(3, units, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(units, rngs=rngs)
        self.second = nnx.Conv(units, WIDTH, (3, 3), rngs=rngs)

    def __call__(self, x):
        with hxla.split():
            y = nnx.relu(self.norm(self.first(x)))
            y = nnx.max_pool(y, (2, 2), (2, 2))
            return self.second(y).mean((1, 2))


class Gates(nnx.Module):
    def __init__(self, rngs, units):
        self.rnn = nnx.RNN(nnx.LSTMCell(WIDTH, units, rngs=rngs))
        self.out = nnx.Linear(units, WIDTH, rngs=rngs)

    def __call__(self, x):
        with hxla.split():
            return self.out(self.rnn(x))


class LinenMlp(nn.Module):
    units: int

    @nn.compact
    def __call__(self, x):
        with hxla.split():
            y = nn.gelu(nn.Dense(self.units)(x))
            return x + nn.Dense(WIDTH)(y)


class LinenAttention(nn.Module):
    units: int

    @nn.compact
    def __call__(self, x):
        with hxla.split():
            return x + nn.MultiHeadDotProductAttention(self.units, qkv_features=4 * self.units)(x)


def _vectors(rng, units):
    x = rng.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[..., ::-1]).copy()}


def _tokens(rng, units):
    return {"tokens": rng.integers(0, units, (BATCH, LENGTH + 1)).astype(np.int32)}


def _classes(rng, units):
    x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "label": rng.integers(0, units, BATCH).astype(np.int32)}


def _images(rng, units):
    x = rng.normal(size=(BATCH, 4, 4, 3)).astype(np.float32)
    return {"x": x, "y": x[:, 0, 0, :1] * np.ones(WIDTH, np.float32)}


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=tuple(range(1, batch["y"].ndim)))


def class_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])


#: name: (the model of so many units, its loss, a batch)
UNITS = {
    "heads": (lambda units: Attention(nnx.Rngs(0), units), squared, _vectors),
    "groups of heads": (lambda units: Attention(nnx.Rngs(0), units, 2), squared, _vectors),
    "columns": (lambda units: Mlp(nnx.Rngs(0), units), squared, _vectors),
    "gated columns": (lambda units: Mlp(nnx.Rngs(0), units, True), squared, _vectors),
    "vocabulary": (lambda units: Tied(nnx.Rngs(0), units), models.token_loss, _tokens),
    "classes": (lambda units: Classifier(nnx.Rngs(0), units), class_loss, _classes),
    "experts": (lambda units: Experts(nnx.Rngs(0), units), squared, _vectors),
    "channels": (lambda units: Channels(nnx.Rngs(0), units), squared, _images),
    "gates": (lambda units: Gates(nnx.Rngs(0), units), squared, _vectors),
    "columns, Linen": (lambda units: LinenMlp(units), squared, _vectors),
    "heads, Linen": (lambda units: LinenAttention(units), squared, _vectors),
}

#: Where annotations would cut something smaller.
RULES = {
    "vocabulary": hxla.RuleSet(
        name="vocabulary", rules=(hxla.Rule(path="embed/embedding$", axes=("tensor", "")),)
    ),
    "classes": hxla.RuleSet(
        name="classes",
        rules=(
            hxla.Rule(path="classes/kernel$", axes=("", "tensor")),
            hxla.Rule(path="classes/bias$", axes=("tensor",)),
        ),
    ),
}


def moved(params, grads, rate):
    """The parameters after a step of gradient descent."""
    return [np.asarray(p) - rate * np.asarray(g) for p, g in zip(params, grads, strict=True)]


class Run:
    """A loss on one device and on parts of unlike sizes, without sessions or sums.

    Args:
        name: Of a kind of unit.
        units: Of the model.
        shares: Of each device.
        rules: Or none, for the annotations.
    """

    def __init__(self, name, units, shares, rules=None, seed=0):
        self._make, loss, batch = UNITS[name]
        self._make = functools.partial(self._make, units)
        self.batch = batch(np.random.default_rng(seed), units)
        self._is_linen = name.endswith("Linen")
        model = self._make() if self._is_linen else nnx.eval_shape(self._make)
        variables = self._variables if self._is_linen else None
        self.graph = hxla.trace(model, loss, self.batch, variables=variables)
        rules = RULES.get(name) if rules is None else rules
        self.plan = hxla.make_plan(self.graph, mesh={"tensor": tuple(shares)}, rules=rules)
        self.specs = [to_spec(layout.spec) for layout in self.plan.parameters]
        self.padding = [Padding(layout.sizes) for layout in self.plan.parameters]
        self.uneven = uneven_of(sharded_of(self.graph, self.plan), self.plan)
        self.mesh = models.mesh(tensor=len(shares))

    @functools.cached_property
    def _variables(self):
        return self._make().init(jax.random.key(0), self.batch["x"])

    @functools.cached_property
    def _values(self):
        """Parameters and other variables at the start, which a plan alone does not need."""
        if self._is_linen:
            return self._variables["params"], {}
        _, params, _, rest = nnx.split(nnx.jit(self._make)(), nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    @property
    def params(self):
        return jax.tree.map(np.asarray, self._values[0])

    @property
    def aux(self):
        return jax.tree.map(np.asarray, self._values[1])

    @functools.cached_property
    def on_parts(self):
        """`(params, aux) -> (loss, aux, gradients)` on the devices, with padding."""
        places = range(len(self.padding))
        gradient = self.uneven.gradient(self.mesh, places, on_cpu=True)

        def run(params, aux):
            (loss, (_, *aux)), grads = gradient(params, aux, jax.random.key(0), self._batch())
            return loss, aux, grads

        return jax.jit(run, compiler_options=_QUICK)

    @property
    def paddings(self):
        """Of the parameters, and of other variables."""
        return self.padding, self.uneven.aux_paddings()

    @functools.cached_property
    def on_even_parts(self):
        """The same where parts are alike and XLA cuts the program."""
        sharded = sharded_of(self.graph, self.plan)
        run = sharded.function(self.mesh)
        places = [jax.sharding.NamedSharding(self.mesh, s) for s in sharded.param_specs()]

        def loss(params, aux):
            value, _, *aux = run(params, aux, jax.random.key(0), self._batch())
            return value, aux

        gradient = jax.value_and_grad(loss, has_aux=True)
        return jax.jit(gradient, in_shardings=(places, None), out_shardings=((None, None), places))

    @functools.cached_property
    def on_one(self):
        """The same of the program as jax traced it."""
        program = jax.extend.core.jaxpr_as_fun(self.graph.program)

        def loss(params, aux):
            value, _, *aux = program(*params, *aux, jax.random.key(0), *self._batch())
            return value, aux

        def run(params, aux):
            (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, aux)
            return value, aux, grads

        return jax.jit(run, compiler_options=_QUICK)

    def _batch(self):
        return jax.tree.leaves(self.batch)

    def compare(self, steps=3):
        """Losses, states and gradients of some steps, and that padding gets no gradient."""
        one = jax.tree.leaves(self.params), jax.tree.leaves(self.aux)
        of_aux = self.uneven.aux_paddings()
        parts = padded(one[0], self.padding), padded(one[1], of_aux)
        rate = 0.1
        for _ in range(steps):
            loss, aux, grads = self.on_one(*one)
            own_loss, own_aux, own_grads = self.on_parts(*parts)
            np.testing.assert_allclose(loss, own_loss, rtol=5e-6)
            largest = max(float(np.abs(g).max()) for g in grads)
            for a, b, own in zip(
                [*grads, *aux], [*own_grads, *own_aux], [*self.padding, *of_aux], strict=True
            ):
                b = np.asarray(b)
                np.testing.assert_allclose(a, own.unpad(b), rtol=1e-5, atol=2e-6 * largest)
                np.testing.assert_array_equal(b, own.pad(own.unpad(np.asarray(b))))
            one = moved(one[0], grads, rate), aux
            parts = moved(parts[0], own_grads, rate), own_aux
        for a, b in zip(one[0], unpadded(parts[0], self.padding), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
