"""Arrays packed into 32-bit words come back bit for bit."""

import itertools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from support.inside.lower import BitcastPacking
from support.tiers import examples

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "int32",
    "int16",
    "int8",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex64",
    "int4",
    "uint4",
)


def bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def check(arrays, size=None):
    words = BitcastPacking.like(arrays)
    packed = jax.jit(words.pack, static_argnums=1)(arrays, size)
    assert packed.dtype == jnp.uint32
    assert packed.shape == (words.size if size is None else size,)
    assert words.size == sum(words.sizes)
    back = jax.jit(words.unpack)(packed)
    for a, b in zip(arrays, back, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bits(a) == bits(b), (a.shape, a.dtype)
    return packed


def random_bits(dtype, shape, seed=0):
    """Any pattern of bits, NaN and subnormal numbers among them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        low = -8 if dtype == ml_dtypes.int4 else 0
        return rng.integers(low, low + 16, shape).astype(dtype)
    data = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


SHAPES = (), (1,), (7,), (3, 5), (2, 0, 3), (4, 2, 2)


def test_arrays_of_all_dtypes_and_shapes_come_back_bit_for_bit():
    check([random_bits(jnp.dtype(d), shape) for d, shape in itertools.product(DTYPES, SHAPES)])


def test_random_keys_come_back():
    keys = [jax.random.key(3, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg")]
    check([*keys, *(jax.random.split(key, (2, 3)) for key in keys), jnp.ones(5)])


def test_nothing_is_packed_into_nothing_or_zeros():
    assert check([]).shape == (0,)
    assert np.array_equal(check([], 3), np.zeros(3))
    assert check([jnp.zeros((0, 4)), jnp.zeros((3, 0), bool)]).shape == (0,)


def test_what_is_left_of_a_buffer_is_zeros():
    x = jnp.arange(1, 4, dtype=jnp.int8)
    packed = check([x], 5)
    assert np.asarray(packed).tobytes() == bytes([1, 2, 3] + 17 * [0])


def test_each_array_begins_at_a_word_of_its_own():
    arrays = [jnp.ones(3, jnp.int8), jnp.ones(1, jnp.float32), jnp.ones((3, 3), bool)]
    assert BitcastPacking.like(arrays).sizes == (1, 1, 3)


@hypothesis.settings(max_examples=examples(4, 50))
@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=4,
    ),
    st.integers(0, 9),
)
def test_several_arrays_come_back_from_a_larger_buffer(kinds, more):
    arrays = [random_bits(jnp.dtype(d), shape, i) for i, (d, shape) in enumerate(kinds)]
    check(arrays, BitcastPacking.like(arrays).size + more)
