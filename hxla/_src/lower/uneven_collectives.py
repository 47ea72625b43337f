"""Collectives of an uneven split with their gradients, inside a `shard_map`.

A whole value is the same on all devices, and so is its cotangent. It becomes different where the
sharded work of a device reads it (`entered`). It is the same again where partial results are
completed or shards are gathered. Each of these has one collective, forward or backward.

References:
    Shoeybi et al., "Megatron-LM", 2019, section 3 (the conjugate operators f and g).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def entered(x: jax.Array, _axis: str) -> jax.Array:
    """A whole value that sharded work reads: its cotangents are added over devices."""
    return x


def _enter(x: jax.Array, _axis: str) -> tuple[jax.Array, None]:
    return x, None


def _entered_back(axis: str, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum(cotangent, axis),)


entered.defvjp(_enter, _entered_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def added(x: jax.Array, axis: str) -> jax.Array:
    """The sum of all devices' partial sums."""
    return jax.lax.psum(x, axis)


def _add(x: jax.Array, axis: str) -> tuple[jax.Array, None]:
    return jax.lax.psum(x, axis), None


def _added_back(_axis: str, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent,)


added.defvjp(_add, _added_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def extreme(x: jax.Array, axis: str, largest: bool) -> jax.Array:
    """The largest or smallest of partial extremes; equal ones share the gradient."""
    return _extreme(x, axis, largest)


def _extreme(x: jax.Array, axis: str, largest: bool) -> jax.Array:
    reduce = jax.lax.pmax if largest else jax.lax.pmin
    return reduce(x, axis)  # type: ignore[no-any-return]


def _take_extreme(x: jax.Array, axis: str, largest: bool) -> tuple[jax.Array, jax.Array]:
    out = _extreme(x, axis, largest)
    return out, x == out


def _extreme_back(
    axis: str, _largest: bool, is_extreme: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    share = is_extreme.astype(cotangent.dtype)
    return (cotangent * share / jax.lax.psum(share, axis),)


extreme.defvjp(_take_extreme, _extreme_back)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a dimension is cut.

    Attributes:
        axis: Name of the mesh axis.
        place: Place of the one device that runs a program; None: any device runs it.
    """

    dim: int
    sizes: tuple[int, ...]
    axis: str
    place: int | None = None

    @property
    def padded(self) -> int:
        """Size of every device's padded shard."""
        return max(self.sizes)

    def local_value(self, of_each: Sequence[int]) -> jax.Array:
        """This device's entry of a list over devices, int32."""
        if self.place is not None:
            return jnp.int32(of_each[self.place])
        return jnp.asarray(of_each, jnp.int32)[jax.lax.axis_index(self.axis)]

    def narrowed(self, x: jax.Array) -> jax.Array:
        """The shard of the one device that runs the program, without its padding."""
        assert self.place is not None
        return narrow(x, self.dim, self.sizes[self.place])  # type: ignore[no-any-return]

    def widened(self, x: jax.Array) -> jax.Array:
        """A device's shard, padded with zeros."""
        return widen(x, self.dim, self.padded)  # type: ignore[no-any-return]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each shard begins."""
        return tuple(sum(self.sizes[:d]) for d in range(len(self.sizes)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(x: jax.Array, cut: Cut) -> jax.Array:
    """All-gather the shards without their padding."""
    return _gather(x, cut)


def _gather(x: jax.Array, cut: Cut) -> jax.Array:
    every = jax.lax.all_gather(x, cut.axis)
    parts = [narrow(every[d], cut.dim, size) for d, size in enumerate(cut.sizes)]
    return jnp.concatenate(parts, axis=cut.dim)


def _gather_forward(x: jax.Array, cut: Cut) -> tuple[jax.Array, None]:
    return _gather(x, cut), None


def _gathered_back(cut: Cut, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (local_shard(cotangent, cut),)


gathered.defvjp(_gather_forward, _gathered_back)


def local_shard(x: jax.Array, cut: Cut) -> jax.Array:
    """This device's shard of a whole array, padded with zeros."""
    most = cut.padded
    room = widen(x, cut.dim, x.shape[cut.dim] + most)
    part = jax.lax.dynamic_slice_in_dim(room, cut.local_value(cut.offsets), most, cut.dim)
    if len(set(cut.sizes)) == 1:
        return part
    places = jax.lax.broadcasted_iota(jnp.int32, part.shape, cut.dim)
    return jnp.where(places < cut.local_value(cut.sizes), part, jnp.zeros((), part.dtype))


def narrow(x: Any, dim: int, size: int) -> Any:
    """The first entries of a dimension."""
    return x if x.shape[dim] == size else jax.lax.slice_in_dim(x, 0, size, axis=dim)


def widen(x: Any, dim: int, size: int) -> Any:
    """A dimension filled up with zeros."""
    if x.shape[dim] == size:
        return x
    low_high = [(0, size - x.shape[dim], 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), low_high)


def replaced(x: jax.Array, first: jax.Array) -> jax.Array:
    """An array with other first entries."""
    return jax.lax.dynamic_update_slice(x, first, (0,) * x.ndim)
