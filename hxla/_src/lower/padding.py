"""Arrays whose shards are padded to the largest: padding, unpadding, loops over slices.

SPMD gives every device an array of the largest shard's shape. Element-wise work on all of it would
take a device with half the units as long as one with all. So it runs on slices of one static size,
and each device loops over the slices that cover its shard. The last slice may reach into the
padding, which stays zero.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..plan.layout import from_spec, padded_shape, to_spec


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


@dataclasses.dataclass(frozen=True)
class Padding:
    """How an array is padded.

    Attributes:
        parts: For each dimension the sizes of its shards, where they are unlike; else empty.
    """

    parts: tuple[tuple[int, ...], ...] = ()

    @property
    def is_none(self) -> bool:
        """Whether the array has no padding."""
        return not any(self.parts)

    def like(self, x: Any) -> jax.ShapeDtypeStruct:
        """The padded shape and the dtype."""
        return jax.ShapeDtypeStruct(padded_shape(x.shape, self.parts), x.dtype)

    def pad(self, x: Any) -> Any:
        """The padded array, a NumPy or a jax array as `x` is."""
        of = np if isinstance(x, np.ndarray) else jnp
        for dim, parts in enumerate(self.parts):
            if parts:
                pieces = of.split(x, np.cumsum(parts)[:-1].tolist(), axis=dim)
                x = of.concatenate([_pad_dim(of, p, dim, max(parts)) for p in pieces], axis=dim)
        return x

    def unpad(self, x: Any) -> Any:
        """The array without its padding."""
        of = np if isinstance(x, np.ndarray) else jnp
        for dim, parts in enumerate(self.parts):
            if parts:
                pieces = of.split(x, len(parts), axis=dim)
                shards = [_narrow(p, dim, n) for p, n in zip(pieces, parts, strict=True)]
                x = of.concatenate(shards, axis=dim)
        return x


NOT_PADDED = Padding()


def _pad_dim(of: Any, x: Any, dim: int, size: int) -> Any:
    return of.pad(x, [(0, size - n) if d == dim else (0, 0) for d, n in enumerate(x.shape)])


def _narrow(x: Any, dim: int, size: int) -> Any:
    return x[tuple(slice(size) if d == dim else slice(None) for d in range(x.ndim))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePadding:
    """How the arrays of a state are padded.

    Attributes:
        opt_state: A padding for each leaf, as a tree like the optimizer's state.
    """

    params: list[Padding]
    aux: list[Padding]
    opt_state: Any
    trained: tuple[int, ...]

    @property
    def of_trained(self) -> list[Padding]:
        """Padding of each trained parameter."""
        return [self.params[i] for i in self.trained]

    @property
    def of_opt_state(self) -> list[Padding]:
        """Padding of each leaf of the optimizer's state, in order."""
        return jax.tree.leaves(self.opt_state)

    def leaves(self) -> list[Padding]:
        """Padding of each leaf, in the order of `ReplicaArrays.leaves`."""
        return [*self.params, *self.aux, *self.of_opt_state]

    @property
    def is_none(self) -> bool:
        """Whether nothing is padded."""
        return all(p.is_none for p in self.leaves())


def padded(tree: Any, each: Sequence[Padding]) -> Any:
    """Pad the leaves of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [p.pad(x) for p, x in zip(each, leaves, strict=True)])


def unpadded(tree: Any, each: Sequence[Padding]) -> Any:
    """Remove the padding of the leaves of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [p.unpad(x) for p, x in zip(each, leaves, strict=True)])


def changing(
    each: Sequence[Padding],
    how: Literal["pad", "unpad"],
    jit: Callable[[Callable[..., Any], list[P]], Any],
    specs: Sequence[P],
) -> Callable[[list[Any]], list[Any]]:
    """A function that pads or unpads arrays: one program of those that have padding.

    Args:
        jit: Makes the program, from the PartitionSpecs of its results.
        specs: PartitionSpecs of all arrays after the change.
    """
    places = [k for k, p in enumerate(each) if not p.is_none]
    changes = [getattr(each[k], how) for k in places]

    def run(own: list[jax.Array]) -> list[jax.Array]:
        return [change(x) for change, x in zip(changes, own, strict=True)]

    program = jit(run, [specs[k] for k in places])

    def changed(arrays: list[Any]) -> list[Any]:
        by_place = dict(zip(places, program([arrays[k] for k in places]), strict=True))
        return [by_place.get(k, x) for k, x in enumerate(arrays)]

    return changed if places else list


def even_spec(shape: Sequence[int], spec: P, padding: Padding, sizes: Mapping[str, int]) -> P:
    """PartitionSpec without padding: another dimension that divides, or none, is cut."""
    parts = [list(names) for names in from_spec(spec, len(shape))]
    for dim, sizes_of_parts in enumerate(padding.parts):
        if not sizes_of_parts:
            continue
        names, parts[dim] = parts[dim], []
        num = math.prod(sizes[name] for name in names)
        free = (d for d, n in enumerate(shape) if n and not parts[d] and n % num == 0)
        other = next(free, None)
        if other is not None:
            parts[other] = names
    return to_spec(parts)


_MOST_GRANULES = 16  # each is a round of a loop, some microseconds


@dataclasses.dataclass(frozen=True)
class Granules:
    """Slices of a padded dimension.

    Attributes:
        cut: How the dimension is cut.
        size: Size of each slice; a divisor of the padded size.
    """

    cut: Cut
    size: int

    @classmethod
    def of(cls, cut: Cut) -> "Granules":
        """The slices with which devices do the least work on padding."""
        most = cut.padded
        sizes = [most // n for n in range(1, _MOST_GRANULES + 1) if most % n == 0]
        return cls(cut, min(sizes, key=lambda size: (_covered_elements(cut, size), -size)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Slices of each device."""
        return tuple(-(-shard // self.size) for shard in self.cut.sizes)

    def take(self, x: jax.Array, i: Any) -> jax.Array:
        """One slice."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, self.cut.dim)

    def put(self, x: jax.Array, part: jax.Array, i: Any) -> jax.Array:
        """The array with one slice replaced."""
        return jax.lax.dynamic_update_slice_in_dim(x, part, i * self.size, self.cut.dim)

    def loop(
        self,
        step: Callable[[Any, list[jax.Array], Any], tuple[Sequence[jax.Array], Any]],
        arrays: Sequence[jax.Array],
        carry: Any,
    ) -> tuple[list[jax.Array], Any]:
        """Replace this device's shards of some arrays, slice by slice.

        Args:
            step: `(i, slices, carry) -> (new slices, carry)`.

        Returns:
            The arrays and the last carry.
        """

        def body(i: Any, state: Any) -> Any:
            arrays, carry = state
            slices, carry = step(i, [self.take(x, i) for x in arrays], carry)
            return [self.put(x, new, i) for x, new in zip(arrays, slices, strict=True)], carry

        count = self.cut.local_value(self.counts)
        return jax.lax.fori_loop(0, count, body, (list(arrays), carry))  # type: ignore[no-any-return]


def _covered_elements(cut: Cut, size: int) -> int:
    return sum(-(-shard // size) * size for shard in cut.sizes)
