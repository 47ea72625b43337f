"""Units of an update: the arrays that belong together, whole or a slice of each, on one replica.

Every update is a list of groups of units, and the groups run one after another. A replica with all
of the state has a unit for each parameter and its moments. With a shard of the state it has
granules of them, or arrays that it alone owns. Offloaded state is fetched a group at a time. Each
product is rounded by itself and sums over whole arrays are made before. So no bit depends on how
units are cut, grouped or placed.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..jax.program_parts import balanced
from ..jax.separable_update import MISSING, Part
from ..plan.layout import names_of, piece_shape
from ..plan.ownership import LEAST_GRANULE, Ownership
from .chunks import moved
from .padding import Padding, replaced
from .replica import Replica

_NUM_GROUPS = 24  # three of them are on a device: an eighth of the state
_LEAST_BYTES = 1 << 20  # of a group
_ALIGNED = 8  # elements: XLA compiles shorter arrays in another way


@dataclasses.dataclass(frozen=True)
class Unit:
    """A domain, or a slice of it, that a device updates at once.

    Attributes:
        leaves: Places of the unit's arrays in the optimizer's state.
        shapes: Shapes of these arrays where they are stored: flat slices if the domain is cut.
        start: The first element in the replica's flat piece.
        stop: One past the last element; None: arrays are updated in their own shapes.
    """

    domain: int
    params: tuple[int, ...]
    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    start: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the unit's state."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


Group = tuple[Unit, ...]


@dataclasses.dataclass(frozen=True)
class UpdateGroups:
    """The update of a replica, in the order in which it runs.

    Attributes:
        last: The group whose program also changes the other variables.
        spec: PartitionSpec of offloaded arrays over the devices of the replica.
        is_offloaded: Whether the state of all groups but the last is offloaded.
    """

    groups: tuple[Group, ...]
    last: Group
    spec: P
    is_offloaded: bool = False

    @property
    def offloaded_leaves(self) -> frozenset[int]:
        """The places of the offloaded leaves in the optimizer's state."""
        if not self.is_offloaded:
            return frozenset()
        return frozenset(k for group in self.groups for unit in group for k in unit.leaves)

    @property
    def bytes_at_once(self) -> int:
        """The largest state of three consecutive groups, which are on the device together."""
        each = [sum(unit.num_bytes for unit in group) for group in self.groups]
        return max((sum(each[max(g - 1, 0) : g + 2]) for g in range(len(each))), default=0)

    @functools.cached_property
    def params(self) -> list[int]:
        """The parameters of all groups but the last."""
        return sorted({i for group in self.groups for unit in group for i in unit.params})

    @functools.cached_property
    def last_of(self) -> dict[int, int]:
        """The last group with a unit of a parameter, for each of `params`."""
        return {i: g for g, group in enumerate(self.groups) for u in group for i in u.params}


def most_at_once(num_bytes: int) -> int:
    """Bytes of a group, for a state of `num_bytes`."""
    return max(num_bytes // _NUM_GROUPS, _LEAST_BYTES)


# -- cut into groups ------------------------------------------------------------------------------


def units_of(ownership: Ownership, member: int, state: Sequence[Any]) -> Group:
    """All units of a replica.

    Args:
        state: Shapes of the replica's leaves of the optimizer's state.
    """
    return tuple(
        _unit(ownership, domain, member, state)
        for domain, owner in enumerate(ownership.owners)
        if owner in (None, member)
    )


def at_once(ownership: Ownership, units: Group, num_groups: int) -> UpdateGroups:
    """At most `num_groups` groups of about equal size, for state on the devices."""
    arrays, num = ownership.update.closed.out_avals, min(num_groups, len(units))
    if num < 2:
        return UpdateGroups((), units, ownership.parts_spec)
    sizes = [sum(arrays[i].size * arrays[i].dtype.itemsize for i in u.params) for u in units]
    groups = [tuple(units[u] for u in places) for places in balanced(sizes, num)]
    return UpdateGroups(tuple(groups[:-1]), groups[-1], ownership.parts_spec)


def streamed(ownership: Ownership, units: Group) -> UpdateGroups:
    """The groups of a replica whose state is offloaded; the last one has no state."""
    most = most_at_once(sum(unit.num_bytes for unit in units))
    groups: list[list[Unit]] = []
    left = 0
    for unit in itertools.chain.from_iterable(_cut(u, most) for u in units if u.leaves):
        is_next = not groups or unit.num_bytes > left or groups[-1][-1].domain == unit.domain
        if is_next:
            groups.append([])
            left = most
        groups[-1].append(unit)
        left -= unit.num_bytes
    last = tuple(u for u in units if not u.leaves)
    return UpdateGroups(tuple(map(tuple, groups)), last, ownership.parts_spec, is_offloaded=True)


def _unit(ownership: Ownership, domain: int, member: int, state: Sequence[Any]) -> Unit:
    num, update = ownership.num_params, ownership.update
    arrays = [k for k, d in enumerate(update.domain_of[: ownership.num_arrays]) if d == domain]
    leaves = tuple(k - num for k in arrays if k >= num)
    stop = None
    if ownership.owners[domain] is None:
        size = math.prod(ownership.local_shape(domain))
        # Short arrays are flat and padded: otherwise XLA compiles them as scalars.
        if not ownership.is_whole or ownership.axes or size < LEAST_GRANULE:
            stop = ownership.granules[member] * ownership.shares.granule(size)
    return Unit(
        domain=domain,
        params=tuple(k for k in arrays if k < num),
        leaves=leaves,
        shapes=tuple(
            tuple(state[k].shape)
            if ownership.num_inner == 1
            else (state[k].size // ownership.num_inner,)
            for k in leaves
        ),
        dtypes=tuple(jnp.dtype(state[k].dtype) for k in leaves),
        stop=stop,
    )


def _cut(unit: Unit, most_bytes: int) -> list[Unit]:
    """Slices of a unit of about equal size, if it is large and may be cut."""
    num = -(-unit.num_bytes // most_bytes)
    if unit.stop is None or num < 2:
        return [unit]
    steps = unit.stop // _ALIGNED
    num = min(num, steps)
    ends = [steps * n // num * _ALIGNED for n in range(num)] + [unit.stop]
    return [
        dataclasses.replace(unit, start=a, stop=b, shapes=((b - a,),) * len(unit.leaves))
        for a, b in itertools.pairwise(ends)
    ]


# -- on a device ----------------------------------------------------------------------------------


def local_part(x: jax.Array, spec: P, sizes: dict[str, int]) -> jax.Array:
    """A device's shard of a whole array, inside a `shard_map`."""
    shape = piece_shape(x.shape, spec, sizes)
    for dim, part in enumerate(spec):
        names = names_of(part)
        if names:
            place = jax.lax.axis_index(names) * shape[dim]
            x = jax.lax.dynamic_slice_in_dim(x, place, shape[dim], dim)
    return x


class UnitsPart(Part):
    """A device's part of the arrays of an update: some units.

    Args:
        first: The replica's first granule, perhaps traced.
    """

    def __init__(self, ownership: Ownership, member: int, first: Any, units: Sequence[Unit]):
        self._ownership, self._member, self._first = ownership, member, first
        self._units = {unit.domain: unit for unit in units}

    def only(self, domains: Collection[int]) -> "UnitsPart":
        """The part restricted to some domains."""
        units = [unit for domain, unit in self._units.items() if domain in domains]
        return UnitsPart(self._ownership, self._member, self._first, units)

    def owns(self, domain: int) -> bool:
        """Whether the part has a unit of the domain."""
        return domain in self._units

    def has_whole(self, domain: int) -> bool:
        """Whether the arrays of a domain are updated in their own shapes."""
        return self._units[domain].stop is None

    def piece(self, domain: int, x: Any) -> Any:
        """A unit's elements of a whole array."""
        if self.has_whole(domain):
            return x
        ownership = self._ownership
        if ownership.axes:
            x = Padding(ownership.parts_of(domain)).pad(x)
            x = local_part(x, ownership.spec(domain), dict(ownership.axes))
        return self.taken(self._units[domain], x)

    def taken(self, unit: Unit, x: Any, *, is_flat: bool = False) -> Any:
        """A unit's elements of the device's array.

        Args:
            is_flat: Whether the array is the replica's flat piece already.
        """
        if unit.stop is None:
            return x
        ownership = self._ownership
        if not is_flat:
            if ownership.place is not None and ownership.parts_of(unit.domain):
                x = x[tuple(map(slice, ownership.local_shape(unit.domain)))]
            x = ownership.shares.piece(x, ownership.granules[self._member], self._first)
        return x if (unit.start, unit.stop) == (0, x.size) else x[unit.start : unit.stop]

    def kept(self, unit: Unit, old: Any, new: Any) -> Any:
        """The device's array with new elements of a unit, in the form of `taken`."""
        new = self.with_zeros(unit.domain, new)
        if self._ownership.is_whole and any(self._ownership.parts_of(unit.domain)):
            shape = self._ownership.local_shape(unit.domain)
            return replaced(old, new[: math.prod(shape)].reshape(shape))
        if new.shape == old.shape:
            return new
        if new.size >= old.size:
            return new.reshape(-1)[: old.size].reshape(old.shape)
        start = (jnp.int32(unit.start),)
        return jax.lax.dynamic_update_slice(old.reshape(-1), new, start).reshape(old.shape)

    def with_zeros(self, domain: int, x: Any) -> Any:
        """New elements of a unit, of which those in padding stay zero."""
        return self.own(domain, x) if any(self._ownership.parts_of(domain)) else x

    def own(self, domain: int, x: Any) -> Any:
        """A unit's elements of an array, with zeros for padding."""
        unit = self._units[domain]
        if unit.stop is None:
            return x
        ownership = self._ownership
        shape, parts = ownership.local_shape(domain), ownership.parts_of(domain)
        if ownership.place is None and any(parts):
            is_inside = jnp.ones(shape, bool)
            [axis] = (name for name, _ in ownership.axes)
            for dim, sizes in enumerate(parts):
                if sizes:
                    size_here = jnp.asarray(sizes)[jax.lax.axis_index(axis)]
                    is_inside &= jax.lax.broadcasted_iota(jnp.int32, shape, dim) < size_here
            return jnp.where(self.taken(unit, is_inside), x, jnp.zeros((), x.dtype))
        size = math.prod(shape)
        places = self._first * ownership.shares.granule(size) + unit.start + jnp.arange(x.size)
        return jnp.where(places < size, x, jnp.zeros((), x.dtype))


# -- on several devices ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedUpdate:
    """Runs an update written for one device on the shards of each device of a replica.

    A device's shard is cut once more over the replicas, into granules. Sums over whole arrays are
    added over the devices with different shards. Arrays that the optimizer treats as a whole are
    gathered on every device of the replica that owns them, and each keeps its shard of the result.

    Attributes:
        params: PartitionSpec of each trained parameter.
        leaves: PartitionSpec of each leaf of the optimizer's state, before it is cut over replicas.
        paddings: Padding of each trained parameter, then of each of these leaves.
    """

    ownership: Ownership
    replica: Replica
    params: Sequence[P]
    leaves: Sequence[P]
    paddings: Sequence[Padding]

    def mapped(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`shard_map` of a function over the devices of the replica."""
        mapped: Callable[..., Any] = jax.shard_map(
            run, mesh=self.replica.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return functools.wraps(run)(mapped)

    def shape(self, x: Any, spec: P) -> jax.ShapeDtypeStruct:
        """The shape of a device's shard."""
        return jax.ShapeDtypeStruct(piece_shape(x.shape, spec, dict(self.ownership.axes)), x.dtype)

    def run(
        self, arguments: Sequence[Any], part: UnitsPart, zero: jax.Array, sums: jax.Array
    ) -> list[Any]:
        """The results of the traced update; of whole arrays the device's shard, flat.

        Args:
            arguments: The device's shards, perhaps flat.
            zero: See `SeparableUpdate.run`.
            sums: See `SeparableUpdate.run`.
        """
        update, wholes = self.ownership.update, dict(self._whole_arrays(part))

        def made(arguments: Sequence[Any], part: UnitsPart) -> dict[int, Any]:
            results = dict(enumerate(update.run(arguments, part, zero, sums)))
            axes, shard_specs = dict(self.ownership.axes), dict(self._whole_arrays(part))
            shards = {
                k: local_part(self.paddings[k].pad(results[k]), spec, axes).reshape(-1)
                for k, spec in shard_specs.items()
            }
            return shards or {k: x for k, x in results.items() if k not in wholes}

        results = self.each(made, arguments, part, zero)
        return [results[k] for k in range(self.ownership.num_arrays)]

    def each(
        self,
        run: Callable[[Sequence[Any], UnitsPart], dict[int, Any]],
        arguments: Sequence[Any],
        part: UnitsPart,
        zero: jax.Array,
    ) -> dict[int, Any]:
        """Run a function once for all domains that are cut, and once for each whole domain.

        Each whole domain has a branch of its own, with which XLA fuses nothing else. So only one
        domain is gathered at a time, and no bit depends on what else the replica owns.

        Args:
            run: From arguments of the traced update, and their part, to numbered results.
        """
        domains, owners = self.ownership.update.domain_of, self.ownership.owners
        domains_here = {d for d in range(len(owners)) if part.owns(d)}
        cut = {d for d in domains_here if owners[d] is None}
        results = run(arguments, part.only(cut))
        for domain in sorted(domains_here - cut):
            only = part.only({domain})
            read = {
                k: x
                for k, (x, d) in enumerate(zip(arguments, domains, strict=True))
                if d in (None, domain) and x is not MISSING
            }

            def made(read: dict[int, Any], only: UnitsPart = only) -> dict[int, Any]:
                shards = [read.get(k, MISSING) for k in range(len(domains))]
                return run(self._with_whole_arrays(shards, only), only)

            like = jax.eval_shape(made, read)
            none = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), like)
            results |= jax.lax.cond(zero == 0, made, lambda _: none(), read)  # noqa: B023
        return results

    def _with_whole_arrays(self, arguments: Sequence[Any], part: UnitsPart) -> list[Any]:
        """The arguments, with arrays gathered that are updated whole; None stays."""
        gathered, num = list(arguments), self.ownership.num_arrays
        arrays = self.ownership.update.closed.out_avals
        for k, spec in self._whole_arrays(part):
            padding = self.paddings[k]
            shape = piece_shape(padding.like(arrays[k]).shape, spec, dict(self.ownership.axes))
            # A gradient is sharded as its parameter.
            for place in (k, num + k) if k < self.ownership.num_params else (k,):
                if gathered[place] is not None:
                    whole = _whole(gathered[place].reshape(shape), spec)
                    gathered[place] = padding.unpad(whole)
        return gathered

    def _whole_arrays(self, part: UnitsPart) -> Iterator[tuple[int, P]]:
        """Numbers and PartitionSpecs of the arrays that are updated as a whole."""
        owners, domains = self.ownership.owners, self.ownership.update.domain_of
        for k, spec in enumerate((*self.params, *self.leaves)):
            domain = domains[k]
            if domain is not None and owners[domain] is not None and part.owns(domain):
                yield k, spec

    def largest(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices."""
        return jax.lax.pmax(x, tuple(name for name, _ in self.ownership.axes))

    def added(self, digits: jax.Array, domains: Sequence[int]) -> jax.Array:
        """Sums over the devices with different shards of domains' arrays.

        One all-reduce for each set of mesh axes, of one array: Gloo adds several one by one.

        Args:
            digits: [K, ...] of integers.
            domains: One for each of the K sums.
        """
        places: dict[tuple[str, ...], list[int]] = {}
        for k, domain in enumerate(domains):
            names = tuple(n for part in self.ownership.spec(domain) for n in names_of(part))
            # A domain with an owner has its whole sum on each device.
            if names and self.ownership.owners[domain] is None:
                places.setdefault(names, []).append(k)
        for names, where in places.items():
            here = np.array(where)
            digits = digits.at[here].set(jax.lax.psum(digits[here], names))
        return digits


def _whole(x: jax.Array, spec: P) -> jax.Array:
    """A whole array, gathered from the shards of all devices."""
    for dim, part in enumerate(spec):
        names = names_of(part)
        if names:
            gather = functools.partial(jax.lax.all_gather, axis_name=names, axis=dim, tiled=True)
            x = moved(gather, x, x.dtype)
    return x
