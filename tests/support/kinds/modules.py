"""Layers of Flax, dtypes of parameters, random keys, and losses."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .kind import LENGTH, WIDTH, layer, loss, module

# -- attention -------------------------------------------------------------------------------------


def heads(x):
    return x.reshape(*x.shape[:2], 2, WIDTH // 2)


@layer()
def dot_product_attention(x):
    return jax.nn.dot_product_attention(*[heads(x)] * 3, is_causal=True).reshape(x.shape)


@module()
def multi_head_attention(rngs):
    return nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)


@layer()
def attention_with_a_mask(x):
    """Keys beyond the length of each example are left out."""
    lengths = 1 + jnp.argmax(x[:, :, 0], -1)
    mask = (jnp.arange(LENGTH) < lengths[:, None])[:, None, None]
    return nnx.dot_product_attention(*[heads(x)] * 3, mask=mask).reshape(x.shape)


@layer(w=(WIDTH, WIDTH))
def cached_keys(x, w):
    """Decoding, position after position, with keys and values kept."""

    def step(cache, row):
        i, keys = cache
        keys = jax.lax.dynamic_update_index_in_dim(keys, row @ w, i, 1)
        scores = jnp.einsum("bd,btd->bt", row, keys)
        scores = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= i, scores, -1e9))
        return (i + 1, keys), jnp.einsum("bt,btd->bd", scores, keys)

    start = jnp.int32(0), jnp.zeros_like(x)
    return jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)


@layer()
def rotary_embedding(x):
    angles = jnp.arange(LENGTH)[:, None] / 100 ** (jnp.arange(WIDTH // 2) / (WIDTH // 2))
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@layer()
def rotary_embedding_by_complex_numbers(x):
    turns = jnp.exp(1j * jnp.arange(LENGTH)[:, None] * jnp.arange(WIDTH // 2))
    pairs = jax.lax.complex(x[..., ::2], x[..., 1::2]) * turns
    return jnp.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


# -- convolutions, norms, recurrence ---------------------------------------------------------------


@module()
def depthwise_convolution(rngs):
    return nnx.Conv(WIDTH, WIDTH, (3,), feature_group_count=WIDTH, rngs=rngs)


@module()
def dilated_causal_convolution(rngs):
    return nnx.Conv(WIDTH, WIDTH, (2,), kernel_dilation=2, padding="CAUSAL", rngs=rngs)


@module()
def transposed_convolution(rngs):
    up = nnx.ConvTranspose(WIDTH, WIDTH, (3,), strides=2, rngs=rngs)
    return nnx.Sequential(up, lambda x: x[:, ::2] + x[:, 1::2])


@module()
def pools(rngs):
    def call(x):
        square = x.reshape(-1, LENGTH, WIDTH, 1)
        most = nnx.max_pool(square, (2, 2), (1, 1), "SAME")
        return (most + nnx.avg_pool(square, (2, 2), (1, 1), "SAME"))[..., 0]

    return call


@module(by_microbatch=True)
def batch_norm(rngs):
    return nnx.BatchNorm(WIDTH, rngs=rngs)


@module()
def group_norm(rngs):
    return nnx.Sequential(nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs), jnp.sin)


@module()
def instance_norm(rngs):
    return nnx.InstanceNorm(WIDTH, rngs=rngs)


@module()
def layer_and_rms_norm(rngs):
    return nnx.Sequential(nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs))


class Copied(nnx.Module):
    """Calls a copy: these norms write what they normalise into the layer they are called of."""

    def __init__(self, norm):
        self.norm = norm

    def __call__(self, x):
        return nnx.clone(self.norm)(x)


@module()
def weight_norm(rngs):
    return Copied(nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs))


@module()
def spectral_norm(rngs):
    return Copied(nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs))


@module()
def lstm(rngs):
    return nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)


@module()
def bidirectional_gru(rngs):
    def cell():
        return nnx.RNN(nnx.GRUCell(WIDTH, WIDTH // 2, rngs=rngs), rngs=rngs)

    return nnx.Bidirectional(cell(), cell(), rngs=rngs)


# -- parameters that are shared, adapted, or of another dtype --------------------------------------


@module()
def einsum(rngs):
    return nnx.Sequential(
        nnx.Einsum("btd,dhe->bthe", (WIDTH, 2, 4), (2, 4), rngs=rngs),
        nnx.LinearGeneral((2, 4), WIDTH, axis=(-2, -1), rngs=rngs),
    )


@layer()
def logical_constraint(x):
    """Flax's own does nothing where no mesh is in force."""
    return jnp.sin(nn.with_logical_constraint(x, ("batch", "length", "embed")))


@module()
def low_rank_adapter(rngs):
    return nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)


@module()
def tied_layers(rngs):
    linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    return nnx.Sequential(linear, jnp.sin, linear)


class Tied(nnx.Module):
    """Tokens embedded, and logits by the same table."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(x + self.embed(jnp.argmax(x, -1)))


@module()
def embedding_that_attends(rngs):
    return Tied(rngs)


@module(by_microbatch=True, most=0.05)
def bfloat16_parameters(rngs):
    linear = nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
    return nnx.Sequential(linear, lambda x: x.astype(jnp.float32))


@module(by_microbatch=True, most=0.01)
def float16_products(rngs):
    linear = nnx.Linear(WIDTH, WIDTH, dtype=jnp.float16, rngs=rngs)
    return nnx.Sequential(linear, lambda x: x.astype(jnp.float32))


class Quantised(nnx.Module):
    """Weights in int8 that are not trained, and a scale that is."""

    def __init__(self, rngs):
        self.table = nnx.Variable(
            jax.random.randint(rngs.params(), (WIDTH, WIDTH), -9, 9, jnp.int8)
        )
        self.scale = nnx.Param(jnp.full((WIDTH,), 0.1))

    def __call__(self, x):
        return x @ (self.table[...].astype(x.dtype) * self.scale[...])


@module()
def int8_parameters(rngs):
    return Quantised(rngs)


@layer(w=(WIDTH, WIDTH), by_microbatch=True, most=0.2)
def float8_product(x, w):
    low = jnp.float8_e4m3fn
    return jnp.dot(x.astype(low), w.astype(low), preferred_element_type=jnp.float32)


@layer(w=(WIDTH, WIDTH))
def int8_product(x, w):
    a = jnp.int8(jnp.clip(jnp.round(64 * x), -127, 127))
    b = jnp.int8(jnp.clip(jnp.round(64 * w), -127, 127))
    exact = jax.lax.dot_general(
        a, b, (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    return x @ w + jax.lax.stop_gradient(exact / 4096 - x @ w)


# -- random keys -----------------------------------------------------------------------------------


@module(by_microbatch=True)
def dropout(rngs):
    return nnx.Dropout(0.5, rngs=rngs)


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.rngs = rngs.fork()

    def __call__(self, x):
        first, second = jax.random.split(self.rngs.noise())
        rows = jax.vmap(lambda k: jax.random.gumbel(k, (WIDTH,)))(jax.random.split(first, LENGTH))
        return x * jax.random.bernoulli(second, 0.7, x.shape) + jax.nn.softmax(x + rows)


@module(by_microbatch=True)
def keys_split_inside(rngs):
    return Noisy(rngs)


@layer()
def keys_of_constants(x):
    """Random features: the same numbers in each step."""
    return jnp.cos(x @ jax.random.normal(jax.random.key(7), (WIDTH, WIDTH)))


# -- losses ----------------------------------------------------------------------------------------


@loss()
def integer_labels(y, batch):
    return optax.softmax_cross_entropy_with_integer_labels(y, batch["labels"]).mean(-1)


@loss()
def fused_logits(y, batch):
    """Cross entropy without all logits at once: a scan over slices of the vocabulary."""

    def step(carry, i):
        logits = jax.lax.dynamic_slice_in_dim(y, 2 * i, 2, axis=-1)
        return jnp.logaddexp(carry, jax.nn.logsumexp(logits, -1)), None

    step = jax.checkpoint(step)
    total, _ = jax.lax.scan(step, jnp.full(y.shape[:-1], -1e9), jnp.arange(WIDTH // 2))
    picked = jnp.take_along_axis(y, batch["labels"][..., None], -1)[..., 0]
    return (total - picked).mean(-1)


@loss()
def ctc(y, batch):
    labels = 1 + batch["labels"][:, :2] % (WIDTH - 1)
    return optax.ctc_loss(y, jnp.zeros(y.shape[:2]), labels, jnp.zeros(labels.shape))


@loss()
def norms_at_zero(y, batch):
    error = y - batch["y"]
    return optax.safe_norm(error * (error > 9), 1e-6, axis=-1).sum(-1) + optax.safe_norm(
        error, 1e-6, axis=(1, 2)
    )


@loss()
def hinge_and_huber(y, batch):
    signs = 2.0 * (batch["y"] > 0) - 1
    return (optax.hinge_loss(y, signs) + optax.huber_loss(y, batch["y"])).mean((1, 2))


@loss()
def soft_dynamic_programme(y, batch):
    """The sum over all alignments, as of a linear-chain CRF."""

    def step(alpha, scores):
        return jax.nn.logsumexp(alpha[..., None] + scores[:, None], 1), None

    alpha, _ = jax.lax.scan(step, y[:, 0], y[:, 1:].swapaxes(0, 1))
    path = jnp.take_along_axis(y, batch["labels"][..., None], -1)[..., 0].sum(-1)
    return jax.nn.logsumexp(alpha, -1) - path
