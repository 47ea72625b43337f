"""Which replica updates which parameters and optimizer state: granules, or whole tensors.

A tensor that may be cut anywhere is flattened and cut into granules of equal size, as many as all
shares together; each replica has consecutive ones. So replicas with equal shares have arrays of
equal shapes, and one program. A tensor that the optimizer treats as a whole, such as a matrix that
it orthogonalises, belongs to one replica.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1, the optimizer's state).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.jaxpr import as_function
from ..jax.separable_update import SeparableUpdate, independent
from ..model.optimizer import Optimizer
from .layout import padded_shape, piece_shape, to_spec

#: In elements, since XLA compiles arithmetic on one number differently than on several.
LEAST_GRANULE = 8
SUMMED_STATE = (
    "the optimizer's sums over whole parameters, such as trust ratios, read its state, which would "
    "come to the device twice in a step"
)


@dataclasses.dataclass(frozen=True)
class Shares:
    """The shard of each replica of a group; without groups all replicas are one group.

    Attributes:
        granules: For each replica of the group.
        owners: For each tensor the replica that owns all of it; None: it is cut into granules.
    """

    granules: tuple[int, ...]
    owners: tuple[int | None, ...]

    @property
    def num(self) -> int:
        """Granules of all replicas."""
        return sum(self.granules)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first granule of each replica."""
        return tuple(itertools.accumulate(self.granules, initial=0))[:-1]

    def member(self, replica: int) -> int:
        """The number of a replica in its group."""
        return replica % len(self.granules)

    def at(self, places: Sequence[Sequence[int]]) -> "Shares":
        """The shares of places, each of which has several consecutive replicas.

        Args:
            places: For each place its replicas.
        """
        place_of = {replica: p for p, replicas in enumerate(places) for replica in replicas}
        return Shares(
            tuple(sum(self.granules[r] for r in replicas) for replicas in places),
            tuple(None if owner is None else place_of[owner] for owner in self.owners),
        )

    def granule(self, size: int) -> int:
        """Elements of a granule of a tensor of `size` elements."""
        return max(-(-size // self.num), LEAST_GRANULE)

    def own_size(self, tensor: int, size: int, replica: int) -> int:
        """Elements of a replica's shard of a tensor, with padding.

        One where another replica owns the tensor, since XLA mishandles empty donated buffers.
        """
        owner = self.owners[tensor]
        if owner is None:
            return self.granules[replica] * self.granule(size)
        return size if owner == replica else 1

    def piece(self, x: jax.Array, granules: int, first: Any) -> jax.Array:
        """Consecutive granules of a whole tensor, flat.

        Args:
            first: The first granule, which may be traced.
        """
        each = self.granule(x.size)
        flat = jnp.pad(x.reshape(-1), (0, each * self.num - x.size))
        return jax.lax.dynamic_slice(flat, (first * each,), (granules * each,))

    def taken(self, tensor: int, replica: int, x: jax.Array, first: Any) -> jax.Array:
        """A replica's shard of a whole tensor, flat.

        Args:
            first: The replica's first granule, which may be traced.
        """
        owner = self.owners[tensor]
        if owner is None:
            return self.piece(x, self.granules[replica], first)
        return x.reshape(-1) if owner == replica else jnp.zeros(1, x.dtype)


@dataclasses.dataclass(frozen=True)
class Ownership:
    """Which replica updates which tensors.

    Attributes:
        update: From trained parameters and the optimizer's state to their next values.
        granules: For each replica of a group; all groups have the same.
        owners: For each domain of the update the replica of a group that owns it; None: it is cut.
        cuts_params: Whether each copy has only its share of the parameters, as of the state.
        is_whole: Whether every copy updates everything, and keeps arrays in their own shapes.
        axes: Names and sizes of the mesh axes inside a copy: each device's part is cut then.
        specs: For each domain how its arrays lie on them; empty: there are none.
        parts: For each domain the sizes of unlike parts, see `ParameterLayout.sizes`; empty: none
            are unlike.
        place: Of the one device that programs are made for, where parts are unlike: its own have no
            padding then; None: any device runs them.
    """

    update: SeparableUpdate
    granules: tuple[int, ...]
    owners: tuple[int | None, ...]
    num_params: int
    cuts_params: bool = False
    is_whole: bool = False
    axes: tuple[tuple[str, int], ...] = ()
    specs: tuple[P, ...] = ()
    parts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    place: int | None = None

    def spec(self, domain: int) -> P:
        """PartitionSpec of a domain's arrays on the axes inside a replica."""
        return self.specs[domain] if self.specs else P()

    def local_shape(self, domain: int) -> tuple[int, ...]:
        """The shape of a device's part of the first array of a domain, as it is updated."""
        k = self.update.domain_of.index(domain)
        parts = self.parts_of(domain)
        whole = padded_shape(self.update.closed.out_avals[k].shape, parts)
        shape = list(piece_shape(whole, self.spec(domain), dict(self.axes)))
        for dim, sizes in enumerate(parts):
            if sizes and self.place is not None:
                shape[dim] = sizes[self.place]
        return tuple(shape)

    def parts_of(self, domain: int) -> tuple[tuple[int, ...], ...]:
        """For each dimension the sizes of its parts, where they are unlike; else nothing."""
        return self.parts[domain] if self.parts else ()

    @property
    def num_inner(self) -> int:
        """Devices of each replica."""
        return math.prod(size for _, size in self.axes)

    @property
    def parts_spec(self) -> P:
        """PartitionSpec of flat arrays in which the devices of a replica follow each other."""
        return to_spec([[name for name, _ in self.axes]])

    def member(self, replica: int) -> int:
        """The number of a replica in its group."""
        return self.shares.member(replica)

    def first(self, replica: int) -> int:
        """The first granule of a replica."""
        return self.shares.firsts[self.member(replica)]

    def is_counted(self, replica: int) -> bool:
        """Whether a replica is in the first group; all groups have equal state."""
        return replica < len(self.granules)

    @property
    def is_alone(self) -> bool:
        """Whether a group has one replica, which owns everything."""
        return len(self.granules) == 1

    @property
    def sends_params(self) -> bool:
        """Whether updated parameters are gathered, so that every replica has all of them."""
        return not (self.is_alone or self.cuts_params)

    @property
    def summed_state(self) -> bool:
        """Whether sums over whole arrays, such as trust ratios, read sharded optimizer state."""
        read = self.update.read_by_sums()
        domains = self.update.domain_of
        return any(
            k in read and domains[k] is not None for k in range(self.num_params, self.num_arrays)
        )

    @functools.cached_property
    def shares(self) -> Shares:
        """The shares of the parameters."""
        return self._shares(self.update.domain_of[: self.num_params])

    def of_leaves(
        self, is_trained: Sequence[bool], num_aux: int
    ) -> tuple[Shares, tuple[int | None, ...]]:
        """The shares of all parameters, then other variables, then the optimizer's state.

        Returns:
            The shares, and for each leaf its domain; None: every replica has the whole leaf.
        """
        trained = iter(self.update.domain_of[: self.num_params])
        domains = [
            *(next(trained) if trains and self.cuts_params else None for trains in is_trained),
            *[None] * num_aux,
            *self.update.domain_of[self.num_params : self.num_arrays],
        ]
        return self._shares(domains), tuple(domains)

    @property
    def num_arrays(self) -> int:
        """Parameters and leaves of the optimizer's state."""
        return len(self.update.closed.jaxpr.outvars)

    def program_key(self, replica: int) -> Any:
        """Replicas with equal keys run the same programs."""
        member = self.member(replica)
        return self.granules[member], tuple(o == member for o in self.owners)

    def _shares(self, domains: Sequence[int | None]) -> Shares:
        return Shares(self.granules, tuple(None if d is None else self.owners[d] for d in domains))


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """An optimizer's traced update.

    Attributes:
        update: Split into independent domains.
        arrays: Shapes of its results: parameters and the optimizer's state.
    """

    update: SeparableUpdate
    arrays: Sequence[Any]
    num_params: int


def ownership(traced: TracedUpdate, granules: Sequence[int]) -> Ownership:
    """Share out an optimizer's update.

    Tensors that may be cut are cut into granules. The others, largest first, go to the replica
    with the least load per granule.

    Args:
        granules: For each replica of a group.
    """
    update, arrays = traced.update, traced.arrays
    sizes = [0] * len(update.slices)
    for domain, x in zip(update.domain_of, arrays, strict=False):
        if domain is not None:
            sizes[domain] += x.size
    owners: list[int | None] = [None] * len(sizes)
    load = [0.0] * len(granules)
    for d in sorted(range(len(sizes)), key=lambda d: -sizes[d]):
        if update.slices[d]:
            continue
        best = min(range(len(granules)), key=lambda c: (load[c] + sizes[d]) / granules[c])
        owners[d], load[best] = best, load[best] + sizes[d]
    return Ownership(update, tuple(granules), tuple(owners), traced.num_params)


def traced_update(
    optimizer: Optimizer, params: PyTree, clip_norm: float | None = None
) -> TracedUpdate:
    """Trace an update, and split it into independent domains.

    Args:
        params: Shapes of the trained parameters.
        clip_norm: Global norm to which gradients are clipped first; None: no clipping.
    """
    leaves, tree = jax.tree.flatten(params)
    state = jax.tree.leaves(optimizer.state_shapes(params))
    program, shapes = optimizer.traced(params)
    run, results = as_function(program), jax.tree.structure(shapes)
    num, num_arrays = len(leaves), len(leaves) + len(state)

    def update(*arrays: Any) -> list[Any]:
        own = jax.tree.unflatten(tree, arrays[:num])
        grads = list(arrays[num_arrays:-1])
        if clip_norm is not None:
            grads, _ = optax.clip_by_global_norm(clip_norm).update(grads, optax.EmptyState())
        made = run(*grads, *arrays[num:num_arrays], *arrays[:num], arrays[-1])
        updates, after = jax.tree.unflatten(results, made)
        return [*jax.tree.leaves(optax.apply_updates(own, updates)), *jax.tree.leaves(after)]

    value = jax.ShapeDtypeStruct((), np.float32)
    same = [*range(num), -1]
    arrays = [*leaves, *state]
    return TracedUpdate(independent(update, arrays, [*leaves, value], same), arrays, num)
