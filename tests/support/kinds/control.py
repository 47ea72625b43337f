"""Branches, loops, scans and mapped functions."""

import jax
import jax.numpy as jnp
from flax import nnx

from .kind import LENGTH, WIDTH, layer, module


@layer()
def cond(x):
    def one(row):
        return jax.lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row)

    return jax.lax.map(one, x)


@layer()
def switch(x):
    index = jnp.argmax(x[..., :3], -1)
    branches = [jnp.sin, jnp.cos, jnp.square]
    return jax.vmap(jax.vmap(lambda i, row: jax.lax.switch(i, branches, row)))(index, x)


@layer()
def switch_on_a_scalar(x):
    return jax.lax.switch(x.shape[-1] % jnp.int32(3), [jnp.sin, jnp.cos, jnp.square], x)


@layer()
def while_of_fixed_length(x):
    steps = jax.lax.while_loop(
        lambda s: s[0] < 5,
        lambda s: (s[0] + 1, jnp.tanh(2 * s[1])),
        (0, jax.lax.stop_gradient(x)),
    )
    return x * steps[1]


@layer()
def while_that_data_ends(x):
    def halvings(row):
        def halve(s):
            return s[0] + 1, s[1] / 2

        return jax.lax.while_loop(lambda s: jnp.abs(s[1]).max() > 0.1, halve, (0.0, row))[0]

    num = jax.vmap(halvings)(jax.lax.stop_gradient(x))
    return x * (0.1 * num)[:, None, None]


@layer(w=(WIDTH, WIDTH))
def fori_loop(x, w):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w + i), x)


@layer(w=(WIDTH, WIDTH))
def scan_over_time(x, w):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


@layer(w=(WIDTH, WIDTH))
def scan_in_reverse(x, w):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    rows = x.swapaxes(0, 1)
    return jax.lax.scan(step, jnp.zeros_like(rows[0]), rows, reverse=True, unroll=2)[1].swapaxes(
        0, 1
    )


@layer(w=(3, WIDTH, WIDTH))
def scan_over_layers(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


@layer()
def lax_map(x):
    return jax.lax.map(lambda row: jnp.sin(row) * row.sum(), x, batch_size=2)


@layer()
def associative_scan(x):
    """A recurrence of first order, as in state-space models."""

    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    return jax.lax.associative_scan(combine, (jax.nn.sigmoid(x), x), axis=1)[1]


@layer()
def cumulative_sum(x):
    return jnp.cumsum(x, axis=1)


@layer()
def cumulative_product_and_maximum(x):
    return jnp.cumprod(1 + x, axis=1) + jax.lax.cummax(x, axis=1)


@layer()
def cumulative_logsumexp(x):
    return jax.lax.cumlogsumexp(x, axis=1, reverse=True)


@layer()
def vmap_axis(x):
    def one(row):
        return row - jax.lax.pmean(row, "time") + 0.1 * jax.lax.axis_index("time")

    return jax.vmap(one, in_axes=1, out_axes=1, axis_name="time")(x)


@layer()
def collectives_of_a_vmap_axis(x):
    def one(row):
        others = jax.lax.all_gather(row, "time").sum(0) - jax.lax.psum(row, "time")
        ring = [(i, (i + 1) % LENGTH) for i in range(LENGTH)]
        return jax.lax.ppermute(row, "time", ring) + others

    return jax.vmap(one, in_axes=1, out_axes=1, axis_name="time")(x)


@layer(axis_name="batch")
def unbound_axis(x):
    return x - jax.lax.pmean(x, "batch") + jax.lax.psum(x, "batch")


@layer(w=(WIDTH, WIDTH))
def jit_inside(x, w):
    return jax.jit(lambda x, w: jnp.sin(x @ w))(x, w)


@module()
def nnx_scan_over_layers(rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stacked(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    class Layers(nnx.Module):
        def __init__(self):
            self.layers = stacked(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, linear):
                return jnp.tanh(linear(x))

            return forward(x, self.layers)

    return Layers()


@module()
def nnx_vmap_over_members(rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stacked(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    class Ensemble(nnx.Module):
        def __init__(self):
            self.members = stacked(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.members, x).mean(0)

    return Ensemble()


class Counted(nnx.Module):
    """A layer that counts its calls."""

    def __init__(self, rngs, function):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))
        self.function = function

    def __call__(self, x):
        return self.function(self, x)

    def once(self, x):
        self.calls[...] += 1
        return jnp.sin(self.linear(x))


@module()
def nnx_cond_with_state(rngs):
    def other(self, x):
        self.calls[...] += 2
        return self.linear(x)

    return Counted(
        rngs, lambda self, x: nnx.cond(self.calls[...] < 1, Counted.once, other, self, x)
    )


@module()
def nnx_switch(rngs):
    def branch(power):
        return lambda linear, x: linear(x) ** power

    return Counted(
        rngs,
        lambda self, x: nnx.switch(self.calls[...], [branch(1), branch(2)], self.linear, x),
    )


@module()
def nnx_fori_loop(rngs):
    def body(_, carry):
        model, x = carry
        return model, model.once(x)

    return Counted(rngs, lambda self, x: nnx.fori_loop(0, 3, body, (self, x))[1])


@module()
def nnx_while_loop(rngs):
    """Of a loop whose end is not known no gradient flows, in jax either."""

    def body(carry):
        model, x, i = carry
        return model, jnp.sin(model.linear(x)), i + 1

    def call(self, x):
        frozen = nnx.clone(self)
        nnx.update(frozen, jax.lax.stop_gradient(nnx.state(self)))
        start = jax.lax.stop_gradient(x)
        return self.linear(x) * nnx.while_loop(lambda c: c[2] < 3, body, (frozen, start, 0))[1]

    return Counted(rngs, call)


@module()
def nnx_jit_with_state(rngs):
    return Counted(rngs, nnx.jit(Counted.once))
