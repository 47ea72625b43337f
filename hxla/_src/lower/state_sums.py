"""Changes of the variables that are not parameters, and their values after a step.

Averages and sums of floats are float tensors beside the gradients. Other variables are 32-bit
words, which integer sums and maxima combine bit for bit; zeros are neutral.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..model.plain_arrays import from_real_parts, is_complex, real_parts

_LIMB_BITS = 16  # of a 64-bit integer, so that sums of 2^15 terms fit
_ORDERED = ("max", "min")


def is_summed(rule: str, dtype: Any) -> bool:
    """Whether changes of a variable are summed as a float tensor."""
    return rule in ("mean", "sum") and bool(jnp.issubdtype(dtype, jnp.inexact))


def is_decided(rule: str, dtype: Any) -> bool:
    """Whether a variable travels as words."""
    return rule != "same" and not is_summed(rule, dtype)


# -- changes of floats ---------------------------------------------------------------------------


def as_real(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of a float variable's changes; complex ones have two real parts."""
    return jax.eval_shape(_real, x)


def change(old: jax.Array, new: jax.Array) -> jax.Array:
    """float32: what a microbatch added to a variable; 0 where it is unchanged, even if infinite."""
    a, b = _real(old), _real(new)
    is_same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return jnp.where(is_same, 0, b - a).astype(jnp.float32)


def changed(old: jax.Array, by: jax.Array) -> jax.Array:
    """A variable after its summed changes."""
    real = _real(old)
    by = by.reshape(real.shape).astype(real.dtype)
    real = jnp.where(by == 0, real, real + by)
    return (from_real_parts(real) if is_complex(old) else real).astype(old.dtype)


def _real(x: jax.Array) -> jax.Array:
    """float32 or float64; complex numbers as a last dimension of two."""
    if is_complex(x):
        return real_parts(x)
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


# -- words ---------------------------------------------------------------------------------------


def words_like(rule: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of a variable's words, int32."""
    return jax.eval_shape(lambda x: _words(rule, x, x), x)


def own_words(rule: str, old: jax.Array, new: jax.Array, index: jax.Array, num: int) -> jax.Array:
    """int32: the words of a microbatch for a variable.

    Args:
        rule: See `Graph.merges`.
        old: The variable before the step.
    """
    words = _words(rule, old, new)
    if rule in ("first", "last"):
        words = jnp.where(index == (0 if rule == "first" else num - 1), words, 0)
    return words


def joined(rule: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The words of two sets of microbatches, combined."""
    if rule in _ORDERED:
        return _unsigned_order(jnp.maximum(_unsigned_order(a), _unsigned_order(b)))
    return a + b


def joined_over(
    names: Any, rules: Sequence[str], words: Sequence[jax.Array], flatly: Callable[..., Any]
) -> list[jax.Array]:
    """The words of all devices along mesh axes, combined by one collective for each kind of rule.

    Args:
        flatly: Runs a function of one array on several.
    """
    out = list(words)
    for is_ordered in (False, True):
        places = [i for i, rule in enumerate(rules) if (rule in _ORDERED) is is_ordered]
        if not places:
            continue
        arrays = [_unsigned_order(out[i]) if is_ordered else out[i] for i in places]
        over = jax.lax.pmax if is_ordered else jax.lax.psum
        combined = flatly(lambda x, over=over: over(x, names), arrays)
        for i, x in zip(places, combined, strict=True):
            out[i] = _unsigned_order(x) if is_ordered else x
    return out


def decided(rule: str, old: jax.Array, words: jax.Array) -> jax.Array:
    """A variable from the combined words of all microbatches."""
    words = words.reshape(words_like(rule, jax.ShapeDtypeStruct(old.shape, old.dtype)).shape)
    if rule in _ORDERED:
        return _from_order(words if rule == "max" else ~words, old.dtype)
    if rule == "sum":
        return old + _from_limbs(words, old.dtype)
    return _from_bits(words, old.dtype)


def _words(rule: str, old: jax.Array, new: jax.Array) -> jax.Array:
    if rule in _ORDERED:
        order = _order(new)
        if jnp.issubdtype(new.dtype, jnp.floating):  # NaN wins, as in jnp.max
            order = jnp.where(jnp.isnan(new), -1 if rule == "max" else 0, order)
        return order if rule == "max" else ~order
    return _limbs(new - old) if rule == "sum" else _bits(new)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of an array as int32; 64-bit and complex numbers get a last dimension of two."""
    if is_complex(x):
        return _bits(real_parts(x))
    size = _num_bits(x.dtype)
    if size == 32 or size == 64:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        if size < 8:
            return _bits(x.astype(jnp.float32))
        x = jax.lax.bitcast_convert_type(x, jnp.uint8 if size == 8 else jnp.uint16)
    return x.astype(jnp.int32)


def _from_bits(words: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return from_real_parts(_from_bits(words, jnp.finfo(dtype).dtype))
    size = _num_bits(dtype)
    if size == 32 or size == 64:
        return jax.lax.bitcast_convert_type(words, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return words.astype(dtype)
    if size < 8:
        return _from_bits(words, jnp.float32).astype(dtype)
    narrow = words.astype(jnp.uint8 if size == 8 else jnp.uint16)
    return jax.lax.bitcast_convert_type(narrow, dtype)


def _num_bits(dtype: Any) -> int:
    if dtype == jnp.bool_:
        return 1
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return int(info(dtype).bits)


def _limbs(x: jax.Array) -> jax.Array:
    """Integers as int32; 64-bit ones as four limbs of 16 bits, whose sums fit 32 bits."""
    if _num_bits(x.dtype) < 64:
        return x.astype(jnp.int32)
    each = [(x >> (_LIMB_BITS * i)) & (1 << _LIMB_BITS) - 1 for i in range(4)]
    return jnp.stack(each, -1).astype(jnp.int32)


def _from_limbs(words: jax.Array, dtype: Any) -> jax.Array:
    if _num_bits(dtype) < 64:
        return words.astype(dtype)
    each = words.astype(dtype)
    return sum(each[..., i] << (_LIMB_BITS * i) for i in range(4))  # type: ignore[return-value]


def _order(x: jax.Array) -> jax.Array:
    """int32 whose bits, read as unsigned integers, are ordered as the array's elements."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        return jnp.where(bits < 0, ~bits, _unsigned_order(bits))
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        return _unsigned_order(x.astype(jnp.int32))
    return jax.lax.bitcast_convert_type(x.astype(jnp.uint32), jnp.int32)


def _from_order(words: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.where(words < 0, _unsigned_order(words), ~words)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return _unsigned_order(words).astype(dtype)
    return jax.lax.bitcast_convert_type(words, jnp.uint32).astype(dtype)


def _unsigned_order(words: jax.Array) -> jax.Array:
    """Convert between signed order and unsigned order of bits; its own inverse."""
    return words ^ jnp.int32(-(2**31))
