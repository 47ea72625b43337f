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
from typing import Any

import jax
import jax.numpy as jnp

from ..graph.local_ops import EXTREMES
from .padding import Cut, local_shard, narrow

#: float32[1], a zero, which XLA does not know.
Token = jax.Array
Arrays = list[jax.Array]


def first_token() -> Token:
    """The token before the first collective."""
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def extreme(
    x: jax.Array, token: Token, name: str, axis: str, _has_gradient: bool
) -> tuple[jax.Array, Token]:
    """The largest or smallest of partial extremes; equal ones share the gradient, if any.

    Args:
        name: Of the equation that made them.
    """
    return completed(name, x, token, axis)


def _take_extreme(
    x: jax.Array, token: Token, name: str, axis: str, _has_gradient: bool
) -> tuple[tuple[jax.Array, Token], tuple[jax.Array, Token]]:
    out, token = completed(name, x, token, axis)
    return (out, token), (x == out, token)


def _extreme_back(
    _name: str,
    axis: str,
    has_gradient: bool,
    saved: tuple[jax.Array, Token],
    back: tuple[jax.Array, Token],
) -> tuple[jax.Array, Token]:
    (is_extreme, token), (cotangent, of_token) = saved, back
    if not has_gradient:
        return jnp.zeros_like(cotangent), token + of_token
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
    """The whole result of an equation that makes a partial one."""
    reduce = jax.lax.psum
    if name in EXTREMES:
        reduce = jax.lax.pmax if EXTREMES[name] else jax.lax.pmin
    [out], token = _reduced(reduce, [x], token, axis)
    return out, token


def all_gather(arrays: Arrays, cuts: Sequence[Cut], token: Token) -> tuple[Arrays, Token]:
    """All-gather the shards of some arrays without their padding."""
    rows, token = _collective(
        lambda flat: jax.lax.all_gather(flat, cuts[0].axis, tiled=True),
        [x.reshape(1, -1) for x in arrays],
        token,
    )
    wholes = []
    for x, like, cut in zip(rows, arrays, cuts, strict=True):
        shards = x.reshape(-1, *like.shape)
        parts = [narrow(shards[d], cut.dim, size) for d, size in enumerate(cut.sizes)]
        wholes.append(jnp.concatenate(parts, axis=cut.dim))
    return wholes, token


def reduce_scatter(arrays: Arrays, cuts: Sequence[Cut], token: Token) -> tuple[Arrays, Token]:
    """This device's shards, padded, of the sums of all devices' whole arrays."""
    stacks = [
        jnp.stack([cut.widened(p) for p in jnp.split(x, cut.offsets[1:], axis=cut.dim)])
        for x, cut in zip(arrays, cuts, strict=True)
    ]
    rows, token = _collective(
        lambda flat: jax.lax.psum_scatter(flat, cuts[0].axis, tiled=True),
        [x.reshape(len(x), -1) for x in stacks],
        token,
    )
    return [x.reshape(s.shape[1:]) for x, s in zip(rows, stacks, strict=True)], token


def _sums(arrays: Arrays, token: Token, axis: str) -> tuple[Arrays, Token]:
    return _reduced(jax.lax.psum, arrays, token, axis)


def _reduced(
    reduce: Callable[[jax.Array, str], jax.Array], arrays: Arrays, token: Token, axis: str
) -> tuple[Arrays, Token]:
    flat_rows = [x.reshape(1, -1) for x in arrays]
    rows, token = _collective(lambda flat: reduce(flat, axis), flat_rows, token)
    return [x.reshape(like.shape) for x, like in zip(rows, arrays, strict=True)], token


_LARGE = 1 << 16  # elements: a copy beside others costs more than a collective


def _collective(
    run: Callable[[jax.Array], jax.Array], arrays: Arrays, token: Token
) -> tuple[Arrays, Token]:
    """Collectives of flat arrays, each after the one before.

    Small arrays of one dtype travel as one. A large one travels alone, and the token is added to
    its first element.

    Args:
        run: A collective of flat rows; its result is any number of rows of the same length.
        arrays: All of as many rows.

    Returns:
        The rows of each array after the collective, and the token of the last one.
    """
    out: dict[int, jax.Array] = {}
    for places in _bundles(arrays):
        rows = [arrays[k] for k in places]
        is_large = _is_large(rows[0])
        if is_large:
            sent = rows[0].at[0, 0].add(token[0].astype(rows[0].dtype))
        else:
            tokens = jnp.broadcast_to(token.astype(rows[0].dtype), (len(rows[0]), 1))
            sent = jnp.concatenate([*rows, tokens], axis=1)
        made = run(sent.reshape(-1)).reshape(-1, sent.shape[1])
        ends = list(itertools.accumulate(x.shape[1] for x in rows))
        out |= zip(places, jnp.split(made, ends, axis=1)[: len(rows)], strict=True)
        token = _zero_after(made[0, 0]) if is_large else made[0, -1:].astype(token.dtype)
    return [out[k] for k in range(len(arrays))], token


def _bundles(arrays: Arrays) -> list[list[int]]:
    """The places of arrays that travel together."""
    bundles: dict[Any, list[int]] = {}
    for k, x in enumerate(arrays):
        bundles.setdefault(k if _is_large(x) else x.dtype, []).append(k)
    return [*bundles.values()]


def _is_large(x: jax.Array) -> bool:
    return x.size > _LARGE and jnp.issubdtype(x.dtype, jnp.floating)


def _zero_after(x: jax.Array) -> Token:
    """A zero that the compiler does not know before `x`, which may be no number."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), x - x, jnp.zeros_like(x))[None]
