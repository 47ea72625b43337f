"""How every array of the state is sharded and padded: known before there is any array.

With ZeRO each replica has shards, which are converted to an even cut. The even cut is the form of
checkpoints and users: arrays in their own shapes, each cut evenly over the places of
`GlobalArrays`, in the first dimension that divides, or whole where none does. Leaves are converted
one after another, so at most one is whole on a device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import DATA_AXIS, PyTree
from ..model.functional import Functional, leaf_names
from ..model.optimizer import Optimizer
from ..plan.layout import from_spec, piece_shape, to_spec
from ..plan.ownership import Ownership, Shares
from ..plan.parts import Placement, SumsForm
from .bitcast_packing import BitcastPacking
from .chunks import all_gather
from .compile import update_options
from .global_arrays import widened
from .padding import Padding, even_spec
from .replica import ReplicaArrays, StateSpecs, device_bytes
from .sum import Reducer


class ZeroState:
    """The sharding of parameters, other variables and the optimizer's state over replicas.

    Args:
        leaves: Shapes of all whole arrays.
        shares: Each replica's share of each leaf; see `Ownership.of_leaves`.
        domains: Domain of each leaf; None: it is replicated.
        specs: PartitionSpec of each whole leaf over the axes inside a replica.
        paddings: Padding of each whole leaf, which is shared out like its elements.
    """

    def __init__(
        self,
        ownership: Ownership,
        reducer: Reducer,
        leaves: Sequence[Any],
        shares: Shares,
        domains: Sequence[int | None],
        specs: Sequence[P],
        paddings: Sequence[Padding],
    ):
        self.ownership, self._reducer, self._leaves = ownership, reducer, list(leaves)
        self._shares, self.is_common = shares, tuple(d is None for d in domains)
        #: PartitionSpec of a replica's shard of each leaf.
        self.shard_specs = [
            spec if d is None else ownership.parts_spec
            for spec, d in zip(specs, domains, strict=True)
        ]
        #: PartitionSpec of each leaf over the axes inside a replica, and its padding; below the
        #: shape on a device.
        self._specs = [
            P() if d is None else ownership.spec(d) if shares.owners[k] is None else specs[k]
            for k, d in enumerate(domains)
        ]
        self.paddings = [
            paddings[k]
            if d is None or shares.owners[k] is not None
            else Padding(ownership.parts_of(d))
            for k, d in enumerate(domains)
        ]
        axes, pairs = dict(ownership.axes), zip(self._leaves, self.paddings, strict=True)
        self._padded = [padding.like(x) for x, padding in pairs]
        self._shapes = [
            piece_shape(x.shape, spec, axes)
            for x, spec in zip(self._padded, self._specs, strict=True)
        ]
        #: The same in the even cut, before it is cut over the places.
        self._even_specs = [
            even_spec(x.shape, spec, padding, axes)
            for x, spec, padding in zip(self._leaves, self._specs, self.paddings, strict=True)
        ]
        self._even_shapes = [
            piece_shape(x.shape, spec, axes)
            for x, spec in zip(self._leaves, self._even_specs, strict=True)
        ]
        #: The shares of each place, which are those of its replicas together.
        self._placed = shares.at(reducer.arrays.places[: reducer.arrays.num_members])
        self._conversions: dict[Any, Any] = {}  # programs, by what makes leaves alike

    def like(self, k: int, index: int) -> jax.ShapeDtypeStruct:
        """The shape of a replica's shard: a flat piece, the whole leaf, or one element for none.

        On several devices a whole leaf is a flat shard for each device.
        """
        x, member = self._padded[k], self.ownership.member(index)
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
        """A replica's shard of a whole leaf, which is padded.

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
            return self._even_specs[k]
        parts = [*from_spec(self._even_specs[k], len(self._even_shapes[k]))]
        parts[dim] = (*parts[dim], DATA_AXIS)
        return to_spec(parts)

    def _even_dim(self, k: int) -> int | None:
        """The first dimension that the places of a group divide evenly; None: there is none."""
        num = len(self._placed.granules)
        if self.is_common[k]:
            return None
        return next((d for d, n in enumerate(self._even_shapes[k]) if n and n % num == 0), None)

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
        alike = way, x.shape, jnp.dtype(x.dtype), owner, self._specs[k], self.paddings[k]
        if alike not in self._conversions:
            self._conversions[alike] = self._conversion(way, k)
        return self._conversions[alike]

    def _conversion(self, way: str, k: int) -> Any:
        arrays, padding, is_even = self._reducer.arrays, self.paddings[k], way == "evenly"
        # A padded leaf is whole at its places while its padding changes.
        whole = self.spec(k) if padding.is_none else self._specs[k]
        in_spec, out_spec = (arrays.own_spec, whole) if is_even else (whole, arrays.own_spec)
        mapped = jax.shard_map(
            self._even_part(k) if is_even else self._shard_part(k),
            mesh=arrays.mesh,
            in_specs=in_spec,
            out_specs=out_spec,
            check_vma=False,
        )

        def hxla_convert(x: jax.Array) -> jax.Array:
            return padding.unpad(mapped(x)) if is_even else mapped(padding.pad(x))  # type: ignore[no-any-return]

        result = self.spec(k) if is_even else arrays.own_spec
        return jax.jit(hxla_convert, out_shardings=arrays.sharding(result))

    def _even_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """The function from this place's shard to its part of the even cut."""
        shape, owner = self._shapes[k], self._placed.owners[k]
        dim, num = self._dim_of_part(k), len(self._placed.granules)
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

    def _dim_of_part(self, k: int) -> int | None:
        """The dimension that places cut in `_even_part`; None: each has all of its shard."""
        return self._even_dim(k) if self.paddings[k].is_none else None

    def _shard_part(self, k: int) -> Callable[[jax.Array], jax.Array]:
        """The function from this place's part of the even cut to its shard."""
        size, owner, shares = math.prod(self._shapes[k]), self._placed.owners[k], self._placed
        dim = self._dim_of_part(k)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The arrays of a state, on all replicas.

    In these methods `k` is the place of an array in `ReplicaArrays.leaves`, and `i` that of a
    local replica.

    Attributes:
        model: The model as pure functions, with its arrays or their shapes.
        ownership: The units that each replica updates; None: each updates everything.
    """

    model: Functional
    optimizer: Optimizer
    reducer: Reducer
    specs: StateSpecs
    sums: SumsForm
    ownership: Ownership | None = None

    @functools.cached_property
    def opt_shapes(self) -> PyTree:
        """Shapes of the optimizer's state, as optax makes it."""
        return self.optimizer.state_shapes(self.model.trained)

    @functools.cached_property
    def shapes(self) -> list[Any]:
        """Shapes of the whole arrays, without padding."""
        return jax.tree.leaves((self.model.params, self.model.aux, self.opt_shapes))

    @property
    def num_params(self) -> int:
        """The number of parameters, the first arrays."""
        return len(self.specs.params)

    @property
    def first_state(self) -> int:
        """The place of the first array of the optimizer's state."""
        return len(self.specs.params) + len(self.specs.aux)

    @functools.cached_property
    def zero(self) -> ZeroState | None:
        """The state that is sharded over replicas; None: every replica has all of it."""
        if self.ownership is None:
            return None
        shares, domains = self.ownership.of_leaves(self.model.is_trained, len(self.specs.aux))
        specs, paddings = self.specs.leaves(), self.specs.padding.leaves()
        return ZeroState(
            self.ownership, self.reducer, self.shapes, shares, domains, specs, paddings
        )

    @functools.cached_property
    def paddings(self) -> list[Padding]:
        """Padding of each whole array."""
        return self.specs.padding.leaves() if self.zero is None else self.zero.paddings

    @functools.cached_property
    def shard_specs(self) -> list[P]:
        """PartitionSpec of each replica's shard of each array."""
        return self.specs.leaves() if self.zero is None else self.zero.shard_specs

    @functools.cached_property
    def even_specs(self) -> list[P]:
        """PartitionSpecs of arrays without their padding."""
        sizes, padding = dict(self.reducer.replicas[0].axes), self.specs.padding.leaves()
        each = zip(self.shapes, self.specs.leaves(), padding, strict=True)
        return [even_spec(x.shape, spec, padding, sizes) for x, spec, padding in each]

    def is_sharded(self, k: int) -> bool:
        """Whether an array is sharded over replicas."""
        return self.zero is not None and not self.zero.is_common[k]

    @property
    def program_key(self) -> Any:
        """The key of programs, besides the kinds of devices."""
        return None if self.ownership is None else self.ownership.program_key

    def names(self) -> tuple[str, ...]:
        """Names of all arrays, for messages."""
        names = leaf_names(self.model.params), leaf_names(self.model.aux)
        of_optimizer = (f"optimizer state {n}" for n in leaf_names(self.opt_shapes))
        return *names[0], *names[1], *of_optimizer

    def replica_arrays(self, leaves: Sequence[Any]) -> ReplicaArrays:
        """Arrays in the order of `ReplicaArrays.leaves`, in their three parts."""
        num, end = self.num_params, self.first_state
        opt_state = jax.tree.unflatten(jax.tree.structure(self.opt_shapes), leaves[end:])
        return ReplicaArrays(
            params=list(leaves[:num]), aux=list(leaves[num:end]), opt_state=opt_state
        )

    # -- shapes on a local replica ---------------------------------------------------------------

    def whole_like(self, i: int) -> tuple[list[Any], list[Any]]:
        """Shapes of whole parameters and other variables, for microbatches."""
        padding, like = self.specs.padding, functools.partial(self._padded_like, i)
        return (
            list(map(like, jax.tree.leaves(self.model.params), self.specs.params, padding.params)),
            list(map(like, jax.tree.leaves(self.model.aux), self.specs.aux, padding.aux)),
        )

    def like(self, i: int) -> tuple[list[Any], list[Any], Any]:
        """Shapes of the parameters, other variables and optimizer state between steps."""
        if self.zero is None:
            specs, padding = self.specs.opt_state, self.specs.padding.opt_state
            like = functools.partial(self._padded_like, i)
            return *self.whole_like(i), jax.tree.map(like, self.opt_shapes, specs, padding)
        replica = self.reducer.local[i]
        shards = self.replica_arrays(
            [
                replica.like(self.zero.like(k, replica.index), spec)
                for k, spec in enumerate(self.shard_specs)
            ]
        )
        return shards.params, shards.aux, shards.opt_state

    def device_bytes(self, i: int, placement: Placement) -> int:
        """Bytes on one device of a local replica's state, without what is offloaded."""
        params, aux, opt_state = self.like(i)
        state = jax.tree.leaves(opt_state)
        tiers: list[str] = [placement.parameters] * len(params)
        tiers += ["device"] * len(aux) + [placement.optimizer] * len(state)
        return sum(
            device_bytes(x)
            for k, (x, tier) in enumerate(zip([*params, *aux, *state], tiers, strict=True))
            if tier == "device" or not self.is_sharded(k)
        )

    def _padded_like(self, i: int, x: Any, spec: P, padding: Padding) -> jax.ShapeDtypeStruct:
        return self.reducer.local[i].like(padding.like(x), spec)

    # -- shards ----------------------------------------------------------------------------------

    def first_granule(self, i: int) -> np.int32:
        """The first granule of a local replica."""
        if self.ownership is None:
            return np.int32(0)
        return np.int32(self.ownership.first(self.reducer.local[i].index))

    def shard(self, i: int, k: int, x: jax.Array, first: Any) -> jax.Array:
        """A local replica's shard of a whole array, which has no padding yet.

        Args:
            first: The replica's first granule, perhaps traced.
        """
        x = self.paddings[k].pad(x)
        return x if self.zero is None else self.zero.take(k, x, self.reducer.local[i].index, first)

    def put(self, i: int, k: int, host: np.ndarray) -> jax.Array:
        """Place a local replica's shard of an array that is whole in host memory."""
        shard, replica = self.paddings[k].pad(host), self.reducer.local[i]
        if self.zero is not None:
            shard = self.zero.take_on_host(k, shard, replica.index)
        return replica.put(shard, self.shard_specs[k])

    def jit(self, i: int, function: Callable[..., Any], specs: PyTree) -> Any:
        """`jax.jit` of a function whose results have PartitionSpecs on a local replica."""
        replica, is_spec = self.reducer.local[i], lambda s: isinstance(s, P)
        shardings = jax.tree.map(replica.sharding, specs, is_leaf=is_spec)
        # At most one sharded array may be whole at a time.
        options = update_options(self.reducer.local[0].devices[0].platform, self.sums)
        return jax.jit(function, out_shardings=shardings, compiler_options=options)
