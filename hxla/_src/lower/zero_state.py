"""ZeRO state: shards of each replica, and their conversion to an even cut.

The even cut is the form of checkpoints and users: arrays in their own shapes, each cut evenly over
the places of `GlobalArrays`, in the first dimension that divides, or whole where none does. Leaves
are converted one after another, so at most one is whole on a device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import DATA_AXIS
from ..plan.layout import from_spec, piece_shape, to_spec
from ..plan.ownership import Ownership, Shares
from .bitcast_packing import BitcastPacking
from .chunks import all_gather
from .global_arrays import widened
from .sum import Reducer


class ZeroState:
    """The sharding of parameters, other variables and the optimizer's state over replicas.

    Args:
        leaves: Shapes of all whole arrays.
        shares: Each replica's share of each leaf; see `Ownership.of_leaves`.
        domains: Domain of each leaf; None: it is replicated.
        specs: PartitionSpec of each whole leaf over the axes inside a replica.
    """

    def __init__(
        self,
        ownership: Ownership,
        reducer: Reducer,
        leaves: Sequence[Any],
        shares: Shares,
        domains: Sequence[int | None],
        specs: Sequence[P],
    ):
        self.ownership, self._reducer, self._leaves = ownership, reducer, list(leaves)
        self._shares, self.is_common = shares, tuple(d is None for d in domains)
        #: PartitionSpec of a replica's shard of each leaf.
        self.shard_specs = [
            spec if d is None else ownership.parts_spec
            for spec, d in zip(specs, domains, strict=True)
        ]
        #: PartitionSpec of each leaf over the axes inside a replica; below the shape on a device.
        self._specs = [
            P() if d is None else ownership.spec(d) if shares.owners[k] is None else specs[k]
            for k, d in enumerate(domains)
        ]
        self._shapes = [
            piece_shape(x.shape, spec, dict(ownership.axes))
            for x, spec in zip(self._leaves, self._specs, strict=True)
        ]
        #: The shares of each place, which are those of its replicas together.
        self._placed = shares.at(reducer.arrays.places[: reducer.arrays.num_members])

    def like(self, k: int, index: int) -> jax.ShapeDtypeStruct:
        """The shape of a replica's shard: a flat piece, the whole leaf, or one element for none.

        On several devices a whole leaf is a flat shard for each device.
        """
        x, member = self._leaves[k], self.ownership.member(index)
        if self._keeps_shape(k, member):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        size = self._shard_size(k, member) * self._reducer.arrays.num_inner
        return jax.ShapeDtypeStruct((size,), x.dtype)

    def _keeps_shape(self, k: int, member: int) -> bool:
        """Whether a replica has a leaf in the user's shape."""
        return self.is_common[k] or (self._shares.owners[k] == member and not self.ownership.axes)

    def _shard_size(self, k: int, member: int) -> int:
        return self._shares.own_size(k, math.prod(self._shapes[k]), member)

    def take(self, k: int, x: jax.Array, index: int, first: Any) -> jax.Array:
        """A replica's shard of a whole leaf.

        Args:
            first: The replica's first granule, perhaps traced.
        """
        member = self.ownership.member(index)
        if self._keeps_shape(k, member):
            return x
        take = functools.partial(self._shares.taken, k, member)
        if not self.ownership.axes:
            return take(x, first)
        mapped = jax.shard_map(
            take,
            mesh=self._reducer.replicas[index].mesh,
            in_specs=(self._specs[k], P()),
            out_specs=self.ownership.parts_spec,
            check_vma=False,
        )
        shard: jax.Array = mapped(x, first)
        return shard

    def owner(self, k: int) -> tuple[bool, int | None]:
        """Whether a leaf is replicated, and the member that owns all of it; None: it is cut."""
        return self.is_common[k], self._shares.owners[k]

    def take_on_host(self, k: int, x: np.ndarray, index: int) -> np.ndarray:
        """`take` in host memory, so that only the shard is sent to the device."""
        owner, member = self._shares.owners[k], self.ownership.member(index)
        if self._keeps_shape(k, member):
            return x
        shards = np.zeros(self.like(k, index).shape, x.dtype)
        if owner in (None, member):
            replica = self._reducer.replicas[index]
            indices = replica.sharding(self._specs[k]).devices_indices_map(x.shape)
            parts = [x[indices[device]].reshape(-1) for device in replica.devices]
            granule = self._shares.granule(parts[0].size)
            first = self._shares.firsts[member] * granule if owner is None else 0
            for part, shard in zip(parts, np.split(shards, len(parts)), strict=True):
                piece = part[first : first + shard.size]
                shard[: piece.size] = piece
        return shards

    def spec(self, k: int) -> P:
        """PartitionSpec of a leaf over the places in the even cut."""
        dim = self._even_dim(k)
        if dim is None:
            return self._specs[k]
        parts = [*from_spec(self._specs[k], len(self._shapes[k]))]
        parts[dim] = (*parts[dim], DATA_AXIS)
        return to_spec(parts)

    def _even_dim(self, k: int) -> int | None:
        """The first dimension that the places of a group divide evenly; None: there is none."""
        num = len(self._placed.granules)
        if self.is_common[k]:
            return None
        return next((d for d, n in enumerate(self._shapes[k]) if n and n % num == 0), None)

    # -- between the forms -----------------------------------------------------------------------

    def evenly(self, k: int, parts: Sequence[jax.Array]) -> jax.Array:
        """A leaf in the even cut, from the local replicas' shards; every process calls this."""
        x, arrays = self._leaves[k], self._reducer.arrays
        if self.is_common[k]:
            return arrays.over_all([part.reshape(x.shape) for part in parts], P())
        if self.ownership.is_alone:
            return parts[0].reshape(-1)[: x.size].reshape(x.shape)
        even = self._program("evenly", k)(arrays.join(parts, self._lengths(k)))
        jax.block_until_ready(even)
        return even

    def shared(self, k: int, x: jax.Array) -> list[jax.Array]:
        """The local replicas' shards of a leaf in the even cut; every process calls this."""
        arrays = self._reducer.arrays
        if self.is_common[k]:
            return arrays.local_parts(x, P())
        if self.ownership.is_alone:
            shape = self.like(k, 0).shape
            return [widened(x, math.prod(shape)).reshape(shape)]
        shards = self._program("shared", k)(x)
        jax.block_until_ready(shards)
        parts = arrays.part(shards, self._lengths(k))
        if self.ownership.axes:
            return parts
        shapes = [self.like(k, r.index).shape for r in arrays.local]
        return [
            widened(part, math.prod(shape)).reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _lengths(self, k: int) -> list[int]:
        """Elements of each member's shard of a leaf; 0 if another member owns all of it."""
        shares, owner = self._shares, self._shares.owners[k]
        return [
            self._shard_size(k, c) if owner in (None, c) else 0 for c in range(len(shares.granules))
        ]

    def _program(self, way: str, k: int) -> Any:
        x, owner = self._leaves[k], self._shares.owners[k]
        return self._conversion(way, x.shape, jnp.dtype(x.dtype), owner, self._specs[k])

    @functools.cache  # noqa: B019
    def _conversion(
        self, way: str, shape: tuple[int, ...], dtype: Any, owner: int | None, leaf_spec: P
    ) -> Any:
        k = next(
            k
            for k, x in enumerate(self._leaves)
            if (x.shape, x.dtype, self._shares.owners[k]) == (shape, dtype, owner)
            and self._specs[k] == leaf_spec
            and not self.is_common[k]
        )
        arrays, spec = self._reducer.arrays, self.spec(k)
        run = self._even_part(k) if way == "evenly" else self._shard_part(k)
        shard_spec = arrays.own_spec
        in_spec, out_spec = (shard_spec, spec) if way == "evenly" else (spec, shard_spec)
        mapped = jax.shard_map(
            run, mesh=arrays.mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False
        )
        return jax.jit(mapped, out_shardings=arrays.sharding(out_spec))

    def _even_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """The function from this place's shard to its part of the even cut."""
        shape, owner = self._shapes[k], self._placed.owners[k]
        dim, num = self._even_dim(k), len(self._placed.granules)
        lengths = self._reducer.arrays.lengths(self._lengths(k))

        def run(part: jax.Array) -> jax.Array:
            me = jax.lax.axis_index(DATA_AXIS)
            if owner is None:
                flat = all_gather(part, lengths, DATA_AXIS)
                whole = flat[: math.prod(shape)].reshape(shape)
            else:
                words = BitcastPacking.like([part])
                sent = words.pack([jnp.where(me == owner, part, jnp.zeros_like(part))])
                [every] = words.unpack(jax.lax.psum(sent, DATA_AXIS))
                whole = every.reshape(shape)
            if dim is None:
                return whole
            size = shape[dim] // num
            return jax.lax.dynamic_slice_in_dim(whole, me * size, size, dim)

        return run

    def _shard_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """The function from this place's part of the even cut to its shard."""
        size, owner, shares = math.prod(self._shapes[k]), self._placed.owners[k], self._placed
        dim = self._even_dim(k)
        most = max(self._reducer.arrays.lengths(self._lengths(k)))

        def run(even: jax.Array) -> jax.Array:
            whole = even
            if dim is not None:
                whole = jax.lax.all_gather(even, DATA_AXIS, axis=dim, tiled=True)
            if owner is not None:
                return whole.reshape(-1)
            each = shares.granule(size)
            first = jnp.asarray(shares.firsts)[jax.lax.axis_index(DATA_AXIS)]
            room = jnp.pad(whole.reshape(-1), (0, each * shares.num + most - size))
            return jax.lax.dynamic_slice(room, (first * each,), (most,))

        return run
