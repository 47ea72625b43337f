"""Calls that leave XLA: callbacks, Pallas kernels, foreign functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from .kind import LENGTH, layer

#: Forms with programs of several devices, in which jax keeps no order.
_OF_SEVERAL = "tensor", "unlike replicas", "sharded stages", "stages the other way"


@layer()
def pure_callback(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    constant = jax.lax.stop_gradient(x)
    return x + jax.pure_callback(lambda x: np.round(x), shape, constant, vmap_method="sequential")


@layer()
def callback_with_a_gradient(x):
    """A function of NumPy with its rule, which is one of NumPy too."""

    def of_numpy(function, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(function, shape, x, vmap_method="broadcast_all")

    @jax.custom_vjp
    def cube(x):
        return of_numpy(lambda x: np.asarray(x) ** 3, x)

    cube.defvjp(
        lambda x: (cube(x), x), lambda x, g: (g * of_numpy(lambda x: 3 * np.asarray(x) ** 2, x),)
    )
    return cube(x)


@layer()
def unordered_callback(x):
    io_callback(lambda x: None, None, jax.lax.stop_gradient(x).sum())
    return jnp.sin(x)


@layer(refused=dict.fromkeys(_OF_SEVERAL, "ordered=True"))
def ordered_callback(x):
    io_callback(lambda x: None, None, jax.lax.stop_gradient(x).sum(), ordered=True)
    return jnp.sin(x)


@layer()
def debug_callback(x):
    jax.debug.callback(lambda x: None, jax.lax.stop_gradient(x).sum())
    return jnp.sin(x)


@layer(refused=dict.fromkeys(_OF_SEVERAL, "ordered=True"))
def ordered_debug_callback(x):
    jax.debug.callback(lambda x: None, x.sum(), ordered=True)
    return jnp.sin(x)


def _elementwise(function, *arrays):
    def kernel(*refs):
        *reads, out = refs
        out[...] = function(*(r[...] for r in reads))

    shape = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(*arrays)


@layer()
def pallas_kernel(x):
    @jax.custom_vjp
    def sine(x):
        return _elementwise(jnp.sin, x)

    sine.defvjp(
        lambda x: (sine(x), x), lambda x, g: (_elementwise(lambda x, g: jnp.cos(x) * g, x, g),)
    )
    return sine(x)


@layer()
def pallas_kernel_with_a_grid(x):
    """A sum over blocks, in the order of the grid."""

    @functools.partial(jax.custom_vjp)
    def total(x):
        def kernel(x, out):
            @pl.when(pl.program_id(1) == 0)
            def _():
                out[...] = jnp.zeros_like(out)

            out[...] += x[...]

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((x.shape[0], 1, x.shape[2]), x.dtype),
            grid=x.shape[:2],
            in_specs=[pl.BlockSpec((1, 1, x.shape[2]), lambda i, j: (i, j, 0))],
            out_specs=pl.BlockSpec((1, 1, x.shape[2]), lambda i, j: (i, 0, 0)),
            interpret=True,
        )(x)

    total.defvjp(lambda x: (total(x), None), lambda _, g: (jnp.repeat(g, LENGTH, 1),))
    return x * total(x)


@layer()
def foreign_function(x):
    """A Cholesky factor by a handler of LAPACK that is called by name."""
    with jax.ensure_compile_time_eval():
        jnp.linalg.cholesky(jnp.eye(1))  # jaxlib looks for LAPACK with the first call of its own
    a = jax.lax.stop_gradient(x[..., :LENGTH])
    a = a @ a.mT + 2 * jnp.eye(LENGTH)
    shapes = (
        jax.ShapeDtypeStruct(a.shape, a.dtype),
        jax.ShapeDtypeStruct(a.shape[:1], jnp.int32),
    )
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", shapes, vmap_method="broadcast_all")
    factor, _ = call(a, uplo=np.uint8(ord("L")))
    return jnp.tril(factor) @ x
