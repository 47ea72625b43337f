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

from .._core._types import DATA_AXIS
from .._plan._ownership import Ownership, Shares
from ._chunks import all_gather
from ._global_arrays import widened
from ._sum import Reducer
from ._words import Words


class OwnState:
    """Where parameters, other variables and the leaves of the optimizer's state are.

    Args:
        own: Who updates what.
        reducer: Knows all copies.
        leaves: Shapes of all of them, whole.
        shares: What each copy has of each; see `Ownership.of_leaves`.
        is_common: For each whether all copies have the whole of it.
    """

    def __init__(
        self,
        own: Ownership,
        reducer: Reducer,
        leaves: Sequence[Any],
        shares: Shares,
        is_common: Sequence[bool],
    ):
        self.own, self._reducer, self._leaves = own, reducer, list(leaves)
        self._shares, self.is_common = shares, tuple(is_common)
        #: What the copies at each place have together.
        self._placed = shares.at(reducer.arrays.places[: reducer.arrays.num_members])

    def like(self, k: int, copy: int) -> jax.ShapeDtypeStruct:
        """The shape of a leaf as a copy has it: a flat piece, the whole, or a number for none."""
        x, member = self._leaves[k], self.own.member(copy)
        if self.is_common[k] or self._shares.owners[k] == member:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ShapeDtypeStruct((self._shares.own_size(k, x.size, member),), x.dtype)

    def take(self, k: int, x: jax.Array, copy: int, first: Any) -> jax.Array:
        """What a copy has of a whole leaf.

        Args:
            k: Number of the leaf.
            x: The leaf.
            copy: Number of the copy.
            first: Its first granule, perhaps traced.
        """
        owner, member = self._shares.owners[k], self.own.member(copy)
        if self.is_common[k] or owner == member:
            return x
        if owner is None:
            return self._shares.piece(x, self._shares.granules[member], first)
        return jnp.zeros(1, x.dtype)

    def owner(self, k: int) -> tuple[bool, int | None]:
        """Whether all copies have the whole of a leaf, and else which one, if it is not cut."""
        return self.is_common[k], self._shares.owners[k]

    def take_on_host(self, k: int, x: np.ndarray, copy: int) -> np.ndarray:
        """`take` of an array in host memory: no more of it goes to the device."""
        owner, member = self._shares.owners[k], self.own.member(copy)
        if self.is_common[k] or owner == member:
            return x
        found = np.zeros(self.like(k, copy).shape, x.dtype)
        if owner is None:
            first = self._shares.firsts[member] * self._shares.granule(x.size)
            piece = x.reshape(-1)[first : first + found.size]
            found[: piece.size] = piece
        return found

    def spec(self, k: int) -> P:
        """How the leaf lies over the places in the form that knows no shares."""
        shape, num = self._leaves[k].shape, len(self._placed.granules)
        if self.is_common[k]:
            return P()
        dim = next((d for d, n in enumerate(shape) if n and n % num == 0), None)
        return P() if dim is None else P(*[None] * dim, DATA_AXIS)

    # -- between the forms -----------------------------------------------------------------------

    def evenly(self, k: int, parts: Sequence[jax.Array]) -> jax.Array:
        """A leaf in the form that knows no shares; every process calls this.

        Args:
            k: Number of the leaf.
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
            k: Number of the leaf.
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
        if self._shares.owners[k] is None:
            parts = arrays.part(found, self._lengths(k))
        else:
            parts = arrays.local_parts(found, P(DATA_AXIS))
        shapes = [self.like(k, r.index).shape for r in arrays.local]
        return [
            widened(part, math.prod(shape)).reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _lengths(self, k: int) -> list[int]:
        """Elements of each part of a group of a leaf; none where another copy owns the whole."""
        size, shares = self._leaves[k].size, self._shares
        owner = shares.owners[k]
        return [
            shares.own_size(k, size, c) if owner in (None, c) else 0
            for c in range(len(shares.granules))
        ]

    def _program(self, way: str, k: int) -> Any:
        x, owner = self._leaves[k], self._shares.owners[k]
        return self._made(way, x.shape, jnp.dtype(x.dtype), owner)

    @functools.cache  # noqa: B019
    def _made(self, way: str, shape: tuple[int, ...], dtype: Any, owner: int | None) -> Any:
        k = next(
            k
            for k, x in enumerate(self._leaves)
            if (x.shape, x.dtype, self._shares.owners[k]) == (shape, dtype, owner)
            and not self.is_common[k]
        )
        arrays, spec = self._reducer.arrays, self.spec(k)
        run = self._even_part(k) if way == "evenly" else self._own_part(k)
        given, wanted = (P(DATA_AXIS), spec) if way == "evenly" else (spec, P(DATA_AXIS))
        mapped = jax.shard_map(
            run, mesh=arrays.mesh, in_specs=given, out_specs=wanted, check_vma=False
        )
        return jax.jit(mapped, out_shardings=arrays.sharding(wanted))

    def _even_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """From the parts of all places to this place's even part."""
        x, owner = self._leaves[k], self._placed.owners[k]
        dim, num = len(self.spec(k)) - 1, len(self._placed.granules)
        own = self._reducer.arrays.lengths(self._lengths(k))

        def run(part: jax.Array) -> jax.Array:
            me = jax.lax.axis_index(DATA_AXIS)
            if owner is None:
                whole = all_gather(part, own, DATA_AXIS)[: x.size].reshape(x.shape)
            else:
                words = Words.like([part])
                sent = words.pack([jnp.where(me == owner, part, jnp.zeros_like(part))])
                [every] = words.unpack(jax.lax.psum(sent, DATA_AXIS))
                whole = every.reshape(x.shape)
            if dim < 0:
                return whole
            size = x.shape[dim] // num
            return jax.lax.dynamic_slice_in_dim(whole, me * size, size, dim)

        return run

    def _own_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """From this place's even part to its own one."""
        x, owner, shares = self._leaves[k], self._placed.owners[k], self._placed
        dim = len(self.spec(k)) - 1
        most = max(self._reducer.arrays.lengths(self._lengths(k)))

        def run(even: jax.Array) -> jax.Array:
            whole = even
            if dim >= 0:
                whole = jax.lax.all_gather(even, DATA_AXIS, axis=dim, tiled=True)
            if owner is not None:
                return whole.reshape(-1)
            each = shares.granule(x.size)
            first = jnp.asarray(shares.firsts)[jax.lax.axis_index(DATA_AXIS)]
            room = jnp.pad(whole.reshape(-1), (0, each * shares.num + most - x.size))
            return jax.lax.dynamic_slice(room, (first * each,), (most,))

        return run
