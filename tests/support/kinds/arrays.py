"""Sorts, lookups, transforms, linear algebra, sparse and special functions."""

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from .kind import LENGTH, WIDTH, layer


def matrices(x):
    """A well-conditioned matrix for each example."""
    return x[..., :LENGTH] + 3 * jnp.eye(LENGTH)


def definite(x):
    """A symmetric positive definite matrix with eigenvalues apart."""
    a = x[..., :LENGTH]
    return a @ a.mT * 0.1 + jnp.diag(jnp.arange(1.0, LENGTH + 1))


# -- sorts and lookups -----------------------------------------------------------------------------


@layer()
def sort(x):
    return jnp.sort(x, axis=1) + jnp.median(x, axis=-1, keepdims=True)


@layer()
def argsort_and_take(x):
    return jnp.take_along_axis(x, jnp.argsort(x[..., :1], axis=1), axis=1)


@layer()
def top_k(x):
    values, places = jax.lax.top_k(x, 3)
    return x * jax.nn.one_hot(places, WIDTH).sum(-2) + values.sum(-1, keepdims=True)


@layer(w=(16, WIDTH))
def lookup_of_rows(x, w):
    ids = jnp.clip(jnp.int32(8 + 4 * x[..., 0]), 0, 15)
    return w[ids] + jnp.take(w, ids[..., ::-1], axis=0, mode="clip")


@layer()
def gather_and_scatter(x):
    def one(row):
        rows, largest = jnp.arange(LENGTH), jnp.argmax(row, -1)
        return row.at[rows[::-1], 0].mul(2.0) + jnp.zeros_like(row).at[rows, largest].add(row[:, 1])

    return jax.vmap(one)(x)


@layer()
def scatter_maximum_and_minimum(x):
    ids, most = jnp.array([0, 1, 0, 1]), jnp.full((2, WIDTH), 9.0)
    return jax.vmap(lambda row: (most.at[ids].min(row) + (-most).at[ids].max(row))[ids])(x)


@layer()
def dynamic_slices(x):
    at = jnp.argmax(x[:, :, 0], -1)
    part = jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, (i, 0), (2, WIDTH)))(x, at)
    return jax.vmap(lambda row, p: jax.lax.dynamic_update_slice(row, p, (1, 0)))(x, part)


@layer()
def segment_sum(x):
    """Messages along the edges of a graph."""
    senders, receivers = jnp.array([0, 1, 2, 3, 0]), jnp.array([1, 2, 3, 0, 2])
    return jax.vmap(lambda n: jax.ops.segment_sum(n[senders], receivers, LENGTH))(x)


@layer()
def segment_softmax(x):
    ids = jnp.array([0, 0, 1, 1])

    def one(row):
        most = jax.ops.segment_max(row, ids, 2)
        exps = jnp.exp(row - most[ids])
        return exps / jax.ops.segment_sum(exps, ids, 2)[ids]

    return jax.vmap(one)(x)


# -- transforms ------------------------------------------------------------------------------------


@layer()
def rfft(x):
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=-1) * jnp.arange(5), WIDTH)


@layer(w=(WIDTH, WIDTH, 2))
def fft_with_complex_weights(x, w):
    spectrum = jnp.fft.fft2(x, axes=(1, 2))
    return jnp.fft.ifft2(spectrum @ jax.lax.complex(w[..., 0], w[..., 1]), axes=(1, 2)).real


@layer()
def complex_literal(x):
    return (x * jnp.exp(1j * jnp.arange(WIDTH))).real + (x * (2 + 1j)).imag


@layer()
def convolution_by_numpy(x):
    kernel = jnp.array([0.5, 1.0, 0.25])
    return jax.vmap(jax.vmap(lambda row: jnp.convolve(row, kernel, mode="same")))(x)


# -- linear algebra --------------------------------------------------------------------------------


@layer()
def cholesky(x):
    return jnp.linalg.cholesky(definite(x)) @ x


@layer()
def qr(x):
    q, r = jnp.linalg.qr(matrices(x))
    return q @ x + r @ x


@layer()
def eigh(x):
    values, vectors = jnp.linalg.eigh(definite(x))
    return (vectors**2 * values[:, None]) @ x


@layer()
def svd(x):
    u, s, v = jnp.linalg.svd(definite(x))
    return (u * jnp.log(s)[:, None]) @ v @ x


@layer()
def solve_and_inverse(x):
    return jnp.linalg.solve(matrices(x), x) + jnp.linalg.inv(matrices(x)) @ x


@layer()
def triangular_solve(x):
    return jax.scipy.linalg.solve_triangular(jnp.tril(matrices(x)), x, lower=True)


@layer()
def cholesky_solve(x):
    return jax.vmap(lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b))(
        definite(x), x
    )


@layer()
def slogdet(x):
    return x * jnp.linalg.slogdet(matrices(x))[1][:, None, None]


@layer()
def matrix_exponential(x):
    return jax.vmap(jax.scipy.linalg.expm)(0.1 * matrices(x)) @ x


@layer()
def matrix_power_and_norms(x):
    a = matrices(x)
    norms = jnp.linalg.norm(a, "nuc", axis=(1, 2)) + jnp.linalg.norm(a, axis=(1, 2))
    return 0.1 * jnp.linalg.matrix_power(a, 3) @ x * norms[:, None, None]


@layer()
def custom_linear_solve(x):
    def solve(apply, b):
        return jax.scipy.sparse.linalg.cg(apply, b, maxiter=6)[0]

    def one(a, b):
        return jax.lax.custom_linear_solve(lambda v: a @ v, b, solve, symmetric=True)

    return jax.vmap(one)(definite(x), x)


@layer()
def custom_root(x):
    def residual(z):
        return z + 0.3 * jnp.tanh(z) - x

    def solve(f, start):
        return jax.lax.fori_loop(0, 8, lambda _, z: z - f(z) / 1.3, start)

    return jax.lax.custom_root(
        residual, jnp.zeros_like(x), solve, lambda g, y: y / g(jnp.ones_like(y))
    )


@layer()
def conjugate_gradients(x):
    def one(a, b):
        return jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=5)[0]

    return jax.vmap(one)(definite(x), x)


# -- sparse, ragged and special --------------------------------------------------------------------


@layer(w=(12,))
def sparse_matrix(x, w):
    """A BCOO whose values are trained."""
    places = jnp.stack([jnp.arange(12) % WIDTH, (5 * jnp.arange(12)) % WIDTH], -1)
    matrix = sparse.BCOO((w, places), shape=(WIDTH, WIDTH))
    return (matrix @ x.reshape(-1, WIDTH).T).T.reshape(x.shape)


@layer(w=(3, WIDTH, WIDTH))
def ragged_dot(x, w):
    sizes = jnp.array([1, 2, 1], jnp.int32)
    return jax.lax.map(lambda row: jax.lax.ragged_dot(row, w, sizes), x)


@layer(w=(3, WIDTH, WIDTH))
def ragged_dot_of_data(x, w):
    """Experts without capacity: tokens sorted by expert, so many rows for each."""

    def one(row):
        expert = jnp.argmax(row[:, :3], -1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=3).astype(jnp.int32)
        return jax.lax.ragged_dot(row[order], w, sizes)[jnp.argsort(order)]

    return jax.lax.map(one, x)


@layer(w=(3, WIDTH, WIDTH))
def experts_by_top_k(x, w):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x[..., :3]), 2)
    return jnp.einsum("btk,btki,btkio->bto", gates, x[:, :, None] * jnp.ones((2, 1)), w[chosen])


@layer(w=(3, WIDTH, WIDTH))
def experts_by_scatter(x, w):
    """Tokens in slots of their expert, those beyond its capacity dropped."""
    expert = jnp.argmax(x[..., :3], -1)
    before = jnp.cumsum(jax.nn.one_hot(expert, 3, dtype=jnp.int32), 1) - 1
    slot = jnp.take_along_axis(before, expert[..., None], -1)[..., 0]

    def one(row, e, s):
        full = jnp.zeros((3, 2, WIDTH)).at[e, s].set(row, mode="drop")
        return jnp.einsum("esi,eio->eso", full, w).at[e, s].get(mode="fill", fill_value=0)

    return jax.vmap(one)(x, expert, slot)


@layer()
def special_functions(x):
    up, inside = jnp.abs(x) + 1, 0.9 * x  # in 16 bits a tanh may be 1, of which erf_inv is infinite
    gammas = jax.lax.lgamma(up) + jax.lax.digamma(up)
    return jax.scipy.special.erf(x) + gammas + jax.lax.erf_inv(inside)


@layer()
def more_special_functions(x):
    up = jnp.abs(x) + 1
    return (
        jax.lax.bessel_i1e(x)
        + jax.scipy.special.gammainc(up, up)
        + jax.lax.betainc(2.0, 3.0, jax.nn.sigmoid(x))
    )


@layer()
def reduce_precision(x):
    return jax.lax.reduce_precision(x, 8, 10)


@layer()
def optimization_barrier(x):
    return jnp.sin(jax.lax.optimization_barrier(x))


@layer()
def platform_dependent(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.sin)


@layer()
def windows(x):
    """Pools as reductions over windows."""
    most = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 1, 1), "SAME")
    return most + jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 1), (1, 1, 1), "SAME")


@layer()
def logsumexp_under_a_mask(x):
    mask = x > -0.5
    return x - jax.nn.logsumexp(x, -1, where=mask.at[..., 0].set(True), keepdims=True)


@layer()
def integer_bits(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return x * (1 + jax.lax.population_count((bits >> 23) & 7))


@layer(w=(WIDTH, WIDTH))
def rounding_modes(x, w):
    product = jnp.dot(x, w, precision="highest", preferred_element_type=jnp.float32)
    return product + jnp.nan_to_num(jnp.where(x > 0, x, jnp.nan)) + jnp.hypot(x, 1)
