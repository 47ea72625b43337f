"""Gradient rules, rematerialisation, and derivatives inside a model."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .kind import WIDTH, layer, module

policies = jax.checkpoint_policies


@layer()
def custom_vjp_with_nondiff_arguments(x):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def scaled(power, x, scale):
        return scale * x**power

    def forward(power, x, scale):
        return scaled(power, x, scale), x

    def backward(power, scale, x, g):
        return (jnp.clip(scale * power * x ** (power - 1) * g, -1, 1),)

    scaled.defvjp(forward, backward)
    return scaled(3, x, 0.5)


@layer()
def custom_vjp_optimised_for_remat(x):
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,), optimize_remat=True)
    return sine(x)


@layer()
def custom_jvp(x):
    @jax.custom_jvp
    def softplus(x):
        return jnp.logaddexp(x, 0)

    softplus.defjvps(lambda t, out, x: jax.nn.sigmoid(x) * t)
    return softplus(x)


def block(x, w):
    return checkpoint_name(jnp.tanh(checkpoint_name(x @ w, "product")), "bend") @ w.T


@layer(w=(WIDTH, 2 * WIDTH))
def checkpoint_with_dots(x, w):
    return jax.checkpoint(block, policy=policies.dots_with_no_batch_dims_saveable)(x, w)


@layer(w=(WIDTH, 2 * WIDTH))
def checkpoint_with_names(x, w):
    return jax.checkpoint(block, policy=policies.save_only_these_names("bend"))(x, w)


@layer(w=(WIDTH, 2 * WIDTH))
def checkpoint_with_offload(x, w):
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(block, policy=policy)(x, w)


@layer(w=(WIDTH, 2 * WIDTH))
def nested_checkpoints(x, w):
    inner = jax.checkpoint(block)
    return jax.checkpoint(lambda x, w: inner(inner(x, w), w), prevent_cse=False)(x, w)


@layer(w=(WIDTH, WIDTH))
def checkpoint_inside_a_scan(x, w):
    body = jax.checkpoint(lambda x, _: (jnp.tanh(x @ w), None), prevent_cse=False)
    return jax.lax.scan(body, x, length=3)[0]


@module()
def nnx_remat(rngs):
    class Remat(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        @nnx.remat
        def __call__(self, x):
            return jnp.sin(self.linear(x))

    return Remat()


@module()
def nnx_custom_vjp(rngs):
    @nnx.custom_vjp
    def call(linear, x):
        return jnp.sin(linear(x))

    def forward(linear, x):
        return call(linear, x), (linear, x)

    def backward(saved, g):
        ((linear_g, _), g), (linear, x) = g, saved
        g = g * jnp.cos(linear(x))
        linear_g = jax.tree.map(lambda x: x, linear_g)
        linear_g["kernel"][...] = jnp.einsum("bti,bto->io", x, g)
        linear_g["bias"][...] = g.sum((0, 1))
        return linear_g, g @ linear.kernel[...].T

    call.defvjp(forward, backward)

    class Ruled(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return call(self.linear, x)

    return Ruled()


def energy(x, w):
    return (jnp.tanh(x @ w) ** 2).sum()


@layer(w=(WIDTH, WIDTH))
def gradient_inside(x, w):
    """A force field: what it returns is the gradient of an energy."""
    return jax.grad(energy)(x, w)


@layer(w=(WIDTH, WIDTH))
def product_with_a_hessian(x, w):
    return jax.jvp(lambda x: jax.grad(energy)(x, w), (x,), (jnp.cos(x),))[1]


@layer(w=(3, WIDTH))
def jacobian_inside(x, w):
    def row(x):
        return jnp.tanh(w @ x)

    return x * (jax.vmap(jax.vmap(jax.jacfwd(row)))(x) ** 2).sum(-2)


@layer()
def stopped_gradient(x):
    return x * jax.lax.stop_gradient(jnp.exp(x))


@layer()
def straight_through_estimator(x):
    return x + jax.lax.stop_gradient(jnp.round(4 * x) / 4 - x)


@layer()
def reversed_gradient(x):
    """Ganin et al., 2016."""

    @jax.custom_vjp
    def reverse(x):
        return x

    reverse.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))
    return reverse(x)


@layer(w=(WIDTH, WIDTH))
def implicit_layer(x, w):
    """A fixed point with the gradient of the implicit function theorem, as in a DEQ."""

    def step(z, x, w):
        return jnp.tanh(0.3 * z @ w + x)

    def iterate(step, start):
        return jax.lax.fori_loop(0, 12, lambda _, z: step(z), start)

    @jax.custom_vjp
    def fixed(x, w):
        return iterate(lambda z: step(z, x, w), jnp.zeros_like(x))

    def forward(x, w):
        z = fixed(x, w)
        return z, (z, x, w)

    def backward(saved, g):
        z, x, w = saved
        _, pull_z = jax.vjp(lambda z: step(z, x, w), z)
        _, pull = jax.vjp(lambda x, w: step(z, x, w), x, w)
        return pull(iterate(lambda u: g + pull_z(u)[0], g))

    fixed.defvjp(forward, backward)
    return fixed(x, w)
