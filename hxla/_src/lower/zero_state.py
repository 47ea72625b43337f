"""State of which each copy of the model has a part: how it lies, and how it is brought into a form
that has nothing to do with shares.

That form is what checkpoints and users see: the user's own arrays, each cut evenly over the places
where copies meet, in the first dimension that divides, or whole where none does. Leaves are changed
one after another, so no more than one is ever whole on a device.
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
from ..plan.layout import from_spec, to_spec
from ..plan.ownership import Ownership, Shares
from ..plan.stage_storage import piece_shape
from .bitcast_packing import BitcastPacking
from .chunks import all_gather
from .global_arrays import widened
from .sum import Reducer


class ZeroState:
    """Where parameters, other variables and the leaves of the optimizer's state are.

    Args:
        leaves: Shapes of all of them, whole.
        shares: What each copy has of each; see `Ownership.of_leaves`.
        domains: Of each; None: all copies have the whole of it.
        specs: How the whole of each lies on the axes inside a copy.
    """

    def __init__(
        self,
        own: Ownership,
        reducer: Reducer,
        leaves: Sequence[Any],
        shares: Shares,
        domains: Sequence[int | None],
        specs: Sequence[P],
    ):
        self.own, self._reducer, self._leaves = own, reducer, list(leaves)
        self._shares, self.is_common = shares, tuple(d is None for d in domains)
        #: How what a copy has of each lies on its devices.
        self.held_specs = [
            spec if d is None else own.parts_spec for spec, d in zip(specs, domains, strict=True)
        ]
        #: How each leaf lies on the axes inside a copy, and the shape of a device's part.
        self._specs = [
            P() if d is None else own.spec(d) if shares.owners[k] is None else specs[k]
            for k, d in enumerate(domains)
        ]
        self._shapes = [
            piece_shape(x.shape, spec, dict(own.axes))
            for x, spec in zip(self._leaves, self._specs, strict=True)
        ]
        #: What the copies at each place have together.
        self._placed = shares.at(reducer.arrays.places[: reducer.arrays.num_members])

    def like(self, k: int, copy: int) -> jax.ShapeDtypeStruct:
        """The shape of a leaf as a copy has it: a flat piece, the whole, or a number for none.

        Of the whole each of several devices has its part, flat.
        """
        x, member = self._leaves[k], self.own.member(copy)
        if self._is_as_it_is(k, member):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        size = self._own_size(k, member) * self._reducer.arrays.num_inner
        return jax.ShapeDtypeStruct((size,), x.dtype)

    def _is_as_it_is(self, k: int, member: int) -> bool:
        """Whether a copy has a leaf in the user's own shape."""
        return self.is_common[k] or (self._shares.owners[k] == member and not self.own.axes)

    def _own_size(self, k: int, member: int) -> int:
        return self._shares.own_size(k, math.prod(self._shapes[k]), member)

    def take(self, k: int, x: jax.Array, copy: int, first: Any) -> jax.Array:
        """What a copy has of a whole leaf.

        Args:
            first: Its first granule, perhaps traced.
        """
        member = self.own.member(copy)
        if self._is_as_it_is(k, member):
            return x
        take = functools.partial(self._shares.taken, k, member)
        if not self.own.axes:
            return take(x, first)
        mapped = jax.shard_map(
            take,
            mesh=self._reducer.replicas[copy].mesh,
            in_specs=(self._specs[k], P()),
            out_specs=self.own.parts_spec,
            check_vma=False,
        )
        found: jax.Array = mapped(x, first)
        return found

    def owner(self, k: int) -> tuple[bool, int | None]:
        """Whether all copies have the whole of a leaf, and else which one, if it is not cut."""
        return self.is_common[k], self._shares.owners[k]

    def take_on_host(self, k: int, x: np.ndarray, copy: int) -> np.ndarray:
        """`take` of an array in host memory: no more of it goes to the device."""
        owner, member = self._shares.owners[k], self.own.member(copy)
        if self._is_as_it_is(k, member):
            return x
        found = np.zeros(self.like(k, copy).shape, x.dtype)
        if owner in (None, member):
            replica = self._reducer.replicas[copy]
            where = replica.sharding(self._specs[k]).devices_indices_map(x.shape)
            parts = [x[where[device]].reshape(-1) for device in replica.devices]
            granule = self._shares.granule(parts[0].size)
            first = self._shares.firsts[member] * granule if owner is None else 0
            for part, own in zip(parts, np.split(found, len(parts)), strict=True):
                piece = part[first : first + own.size]
                own[: piece.size] = piece
        return found

    def spec(self, k: int) -> P:
        """How the leaf lies over the places in the form that knows no shares."""
        dim = self._even_dim(k)
        if dim is None:
            return self._specs[k]
        parts = [*from_spec(self._specs[k], len(self._shapes[k]))]
        parts[dim] = (*parts[dim], DATA_AXIS)
        return to_spec(parts)

    def _even_dim(self, k: int) -> int | None:
        """The first dimension of which each place of a group may have as much."""
        num = len(self._placed.granules)
        if self.is_common[k]:
            return None
        return next((d for d, n in enumerate(self._shapes[k]) if n and n % num == 0), None)

    # -- between the forms -----------------------------------------------------------------------

    def evenly(self, k: int, parts: Sequence[jax.Array]) -> jax.Array:
        """A leaf in the form that knows no shares; every process calls this.

        Args:
            parts: What the local copies have of it.
        """
        x, arrays = self._leaves[k], self._reducer.arrays
        if self.is_common[k]:
            return arrays.over_all([part.reshape(x.shape) for part in parts], P())
        if self.own.is_alone:
            return parts[0].reshape(-1)[: x.size].reshape(x.shape)
        found = self._program("evenly", k)(arrays.join(parts, self._lengths(k)))
        jax.block_until_ready(found)
        return found

    def shared(self, k: int, x: jax.Array) -> list[jax.Array]:
        """What the local copies have of a leaf; every process calls this.

        Args:
            x: In the form that knows no shares.
        """
        arrays = self._reducer.arrays
        if self.is_common[k]:
            return arrays.local_parts(x, P())
        if self.own.is_alone:
            shape = self.like(k, 0).shape
            return [widened(x, math.prod(shape)).reshape(shape)]
        found = self._program("shared", k)(x)
        jax.block_until_ready(found)
        parts = arrays.part(found, self._lengths(k))
        if self.own.axes:
            return parts
        shapes = [self.like(k, r.index).shape for r in arrays.local]
        return [
            widened(part, math.prod(shape)).reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _lengths(self, k: int) -> list[int]:
        """Elements of each part of a group of a leaf; none where another copy owns the whole."""
        shares, owner = self._shares, self._shares.owners[k]
        return [
            self._own_size(k, c) if owner in (None, c) else 0 for c in range(len(shares.granules))
        ]

    def _program(self, way: str, k: int) -> Any:
        x, owner = self._leaves[k], self._shares.owners[k]
        return self._made(way, x.shape, jnp.dtype(x.dtype), owner, self._specs[k])

    @functools.cache  # noqa: B019
    def _made(
        self, way: str, shape: tuple[int, ...], dtype: Any, owner: int | None, lies: P
    ) -> Any:
        k = next(
            k
            for k, x in enumerate(self._leaves)
            if (x.shape, x.dtype, self._shares.owners[k]) == (shape, dtype, owner)
            and self._specs[k] == lies
            and not self.is_common[k]
        )
        arrays, spec = self._reducer.arrays, self.spec(k)
        run = self._even_part(k) if way == "evenly" else self._own_part(k)
        own = arrays.own_spec
        given, wanted = (own, spec) if way == "evenly" else (spec, own)
        mapped = jax.shard_map(
            run, mesh=arrays.mesh, in_specs=given, out_specs=wanted, check_vma=False
        )
        return jax.jit(mapped, out_shardings=arrays.sharding(wanted))

    def _even_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """From the parts of all places to this place's even part."""
        shape, owner = self._shapes[k], self._placed.owners[k]
        dim, num = self._even_dim(k), len(self._placed.granules)
        own = self._reducer.arrays.lengths(self._lengths(k))

        def run(part: jax.Array) -> jax.Array:
            me = jax.lax.axis_index(DATA_AXIS)
            if owner is None:
                flat = all_gather(part, own, DATA_AXIS)
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

    def _own_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """From this place's even part to its own one."""
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
