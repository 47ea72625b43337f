"""The collectives of an uneven split and their gradients, inside a `shard_map`, in one order.

A whole value is the same on all devices, and so is its cotangent. It becomes different where the
sharded work of a device reads it (`entered`). It is the same again where partial results are
completed (`added`, `extreme`) or shards are gathered. Each of these has one collective, forward or
backward.

Processes compile unlike programs, which must run the same collectives. XLA may run two that do not
wait for each other in either order, run equal ones once, and lay out several dimensions in any
order. So each collective is of flat arrays, and waits for the one before: it also sends a *token*,
which that one has received. Cotangents of tokens do the same in the backward.

References:
    Shoeybi et al., "Megatron-LM", 2019, section 3 (the conjugate operators f and g).
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..graph.local_ops import EXTREMES
from .padding import Cut, local_shard, narrow

#: float32[1], a zero that only a device knows to be one.
Token = jax.Array
Arrays = list[jax.Array]


def first_token() -> Token:
    """What the first collective waits for: nothing."""
    return jnp.zeros(1, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def entered(arrays: Arrays, token: Token, _axis: str) -> tuple[Arrays, Token]:
    """Whole values that sharded work reads: their cotangents are added over devices."""
    return arrays, token


def _enter(arrays: Arrays, token: Token, _axis: str) -> tuple[tuple[Arrays, Token], Token]:
    return (arrays, token), token


def _entered_back(axis: str, token: Token, back: tuple[Arrays, Token]) -> tuple[Arrays, Token]:
    cotangents, of_token = back
    return _sums(cotangents, token + of_token, axis)


entered.defvjp(_enter, _entered_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def added(arrays: Arrays, token: Token, axis: str) -> tuple[Arrays, Token]:
    """The sums of all devices' partial sums."""
    return _sums(arrays, token, axis)


def _add(arrays: Arrays, token: Token, axis: str) -> tuple[tuple[Arrays, Token], Token]:
    sums, token = _sums(arrays, token, axis)
    return (sums, token), token


def _added_back(_axis: str, token: Token, back: tuple[Arrays, Token]) -> tuple[Arrays, Token]:
    cotangents, of_token = back
    return cotangents, token + of_token


added.defvjp(_add, _added_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def extreme(x: jax.Array, token: Token, axis: str, largest: bool) -> tuple[jax.Array, Token]:
    """The largest or smallest of partial extremes; equal ones share the gradient."""
    reduce = jax.lax.pmax if largest else jax.lax.pmin
    [out], token = _by_dtype(lambda flat: reduce(flat, axis), [x], token)
    return out, token


def _take_extreme(
    x: jax.Array, token: Token, axis: str, largest: bool
) -> tuple[tuple[jax.Array, Token], tuple[jax.Array, Token]]:
    out, token = extreme(x, token, axis, largest)
    return (out, token), (x == out, token)


def _extreme_back(
    axis: str, _largest: bool, saved: tuple[jax.Array, Token], back: tuple[jax.Array, Token]
) -> tuple[jax.Array, Token]:
    (is_extreme, token), (cotangent, of_token) = saved, back
    share = is_extreme.astype(cotangent.dtype)
    [num], token = _sums([share], token + of_token, axis)
    return cotangent * share / num, token


extreme.defvjp(_take_extreme, _extreme_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gathered(x: jax.Array, token: Token, cut: Cut) -> tuple[jax.Array, Token]:
    """All-gather the shards without their padding, for work that all devices repeat."""
    [whole], token = all_gather([x], [cut], token)
    return whole, token


def _gather(x: jax.Array, token: Token, cut: Cut) -> tuple[tuple[jax.Array, Token], Token]:
    [whole], token = all_gather([x], [cut], token)
    return (whole, token), token


def _gathered_back(
    cut: Cut, token: Token, back: tuple[jax.Array, Token]
) -> tuple[jax.Array, Token]:
    cotangent, of_token = back
    return local_shard(cotangent, cut), token + of_token


gathered.defvjp(_gather, _gathered_back)


# -- without gradients ---------------------------------------------------------------------------


def completed(name: str, x: jax.Array, token: Token, axis: str) -> tuple[jax.Array, Token]:
    """Complete a partial result.

    Args:
        name: Of the equation that made it.
    """
    reduce = jax.lax.psum
    if name in EXTREMES:
        reduce = jax.lax.pmax if EXTREMES[name] else jax.lax.pmin
    [out], token = _by_dtype(lambda flat: reduce(flat, axis), [x], token)
    return out, token


def all_gather(arrays: Arrays, cuts: Sequence[Cut], token: Token) -> tuple[Arrays, Token]:
    """All-gather the shards of some arrays without their padding."""
    if not arrays:
        return [], token
    axis, num = cuts[0].axis, len(cuts[0].sizes)
    stacks, token = _by_dtype(
        lambda flat: jax.lax.all_gather(flat, axis, tiled=True).reshape(num, -1), arrays, token
    )
    wholes = [
        jnp.concatenate([narrow(x[d], cut.dim, size) for d, size in enumerate(cut.sizes)], cut.dim)
        for x, cut in zip(stacks, cuts, strict=True)
    ]
    return wholes, token


def reduce_scatter(arrays: Arrays, cuts: Sequence[Cut], token: Token) -> tuple[Arrays, Token]:
    """This device's shards, padded, of the sums of all devices' whole arrays."""
    if not arrays:
        return [], token
    axis, num = cuts[0].axis, len(cuts[0].sizes)
    shards: list[jax.Array] = []
    for places in _places_by_dtype(arrays):
        rows = [_padded_rows(arrays[k], cuts[k]) for k in places]
        flags = jnp.broadcast_to(token.astype(rows[0].dtype), (num, 1))
        flat = jnp.concatenate([*(row.reshape(num, -1) for row in rows), flags], axis=1)
        own = jax.lax.psum_scatter(flat.reshape(-1), axis, tiled=True)
        shards += _parts_of(own, [row[0] for row in rows])
        token = own[-1:].astype(token.dtype)
    order = [k for places in _places_by_dtype(arrays) for k in places]
    return [x for _, x in sorted(zip(order, shards, strict=True), key=lambda pair: pair[0])], token


def _padded_rows(x: jax.Array, cut: Cut) -> jax.Array:
    """The shards of an array, padded, in a stack."""
    return jnp.stack([cut.widened(p) for p in jnp.split(x, cut.offsets[1:], axis=cut.dim)])


def _sums(arrays: Arrays, token: Token, axis: str) -> tuple[Arrays, Token]:
    return _by_dtype(lambda flat: jax.lax.psum(flat, axis), arrays, token)


def _by_dtype(
    run: Callable[[jax.Array], jax.Array], arrays: Arrays, token: Token
) -> tuple[Arrays, Token]:
    """A collective of flat arrays and a token, for each dtype among the arrays.

    Args:
        run: Its results have the same last dimension, or begin with one over devices.
    """
    out: dict[int, jax.Array] = {}
    for places in _places_by_dtype(arrays):
        each = [arrays[k] for k in places]
        flat = jnp.concatenate([*(x.reshape(-1) for x in each), token.astype(each[0].dtype)])
        made = run(flat)
        out |= zip(places, _parts_of(made, each), strict=True)
        token = made.reshape(-1)[-1:].astype(token.dtype)
    return [out[k] for k in range(len(arrays))], token


def _places_by_dtype(arrays: Arrays) -> list[list[int]]:
    dtypes = dict.fromkeys(x.dtype for x in arrays)
    return [[k for k, x in enumerate(arrays) if x.dtype == dtype] for dtype in dtypes]


def _parts_of(flat: jax.Array, like: Arrays) -> Arrays:
    """Arrays from the last dimension of a flat one, one after another."""
    ends = list(itertools.accumulate(x.size for x in like))
    pieces = jnp.split(flat, ends, axis=-1)[: len(like)]
    return [p.reshape(*flat.shape[:-1], *x.shape) for p, x in zip(pieces, like, strict=True)]
