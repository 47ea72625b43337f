"""Units of an update: the arrays that belong together, whole or a slice of each, on one replica.

Every update is a list of groups of units, and the groups run one after another. A replica that has
all of the state has a unit for each parameter and its moments; one that shares it out has its
granules of them, or the whole of what it alone owns; state that waits elsewhere comes a group at a
time. Each product is rounded by itself and sums over whole arrays are made before, so no bit
depends on how units are cut, grouped or placed.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..jax.program_parts import balanced
from ..jax.separable_update import MISSING, Part
from ..plan.layout import names_of
from ..plan.ownership import LEAST_GRANULE, Ownership
from ..plan.stage_storage import piece_shape
from .chunks import moved
from .padding import Padding
from .replica import Replica
from .uneven_collectives import replaced

_NUM_GROUPS = 24  # three of them are on a device: an eighth of the state
_LEAST_BYTES = 1 << 20  # of a group
_ALIGNED = 8  # elements: what is fewer is compiled in another way


@dataclasses.dataclass(frozen=True)
class Unit:
    """What of a domain is updated at once, on one device.

    Attributes:
        leaves: Places of its arrays in the optimizer's state.
        shapes: Of these, as they wait: flat slices where the domain is cut.
        start: The first element of the replica's flat piece.
        stop: The one behind its last; None: its arrays are updated in their own shapes.
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
        """Of its state."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


Group = tuple[Unit, ...]


@dataclasses.dataclass(frozen=True)
class UpdateGroups:
    """The update of a replica, in the order in which it runs.

    Attributes:
        groups: All but the last.
        last: With it the other variables change.
        spec: How what waits elsewhere is sharded over the devices of the replica.
        waits: Whether the state of all groups but the last waits elsewhere.
    """

    groups: tuple[Group, ...]
    last: Group
    spec: P
    waits: bool = False

    @property
    def away(self) -> frozenset[int]:
        """The places of the leaves of the optimizer's state that wait elsewhere."""
        if not self.waits:
            return frozenset()
        return frozenset(k for group in self.groups for unit in group for k in unit.leaves)

    @property
    def bytes_at_once(self) -> int:
        """Of the state of a group, of the one before and of the next one, the most of any."""
        each = [sum(unit.num_bytes for unit in group) for group in self.groups]
        return max((sum(each[max(g - 1, 0) : g + 2]) for g in range(len(each))), default=0)

    @functools.cached_property
    def params(self) -> list[int]:
        """The parameters of all groups but the last."""
        return sorted({i for group in self.groups for unit in group for i in unit.params})

    @functools.cached_property
    def last_of(self) -> dict[int, int]:
        """The last group that has some of a parameter, for each of `params`."""
        return {i: g for g, group in enumerate(self.groups) for u in group for i in u.params}


def most_at_once(num_bytes: int) -> int:
    """Bytes of a group, for a state of so many."""
    return max(num_bytes // _NUM_GROUPS, _LEAST_BYTES)


# -- cut into groups ------------------------------------------------------------------------------


def units_of(own: Ownership, member: int, state: Sequence[Any]) -> Group:
    """All that a replica updates.

    Args:
        state: Shapes of the leaves of the optimizer's state as the replica has them.
    """
    return tuple(
        _unit(own, domain, member, state)
        for domain, owner in enumerate(own.owners)
        if owner in (None, member)
    )


def at_once(own: Ownership, units: Group, num_groups: int) -> UpdateGroups:
    """The groups of a replica whose state is on its devices, of about equal size.

    Args:
        num_groups: At most; one has all units.
    """
    arrays, num = own.update.closed.out_avals, min(num_groups, len(units))
    if num < 2:
        return UpdateGroups((), units, own.parts_spec)
    sizes = [sum(arrays[i].size * arrays[i].dtype.itemsize for i in u.params) for u in units]
    groups = [tuple(units[u] for u in places) for places in balanced(sizes, num)]
    return UpdateGroups(tuple(groups[:-1]), groups[-1], own.parts_spec)


def streamed(own: Ownership, units: Group) -> UpdateGroups:
    """The groups of a replica whose state waits elsewhere: the last one has none."""
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
    return UpdateGroups(tuple(map(tuple, groups)), last, own.parts_spec, waits=True)


def _unit(own: Ownership, domain: int, member: int, state: Sequence[Any]) -> Unit:
    num, update = own.num_params, own.update
    arrays = [k for k, d in enumerate(update.domain_of[: own.num_arrays]) if d == domain]
    leaves = tuple(k - num for k in arrays if k >= num)
    stop = None
    if own.owners[domain] is None:
        size = math.prod(own.local_shape(domain))
        # Arrays of few elements are flat and padded: else they are compiled as single numbers are.
        if not own.is_whole or own.axes or size < LEAST_GRANULE:
            stop = own.granules[member] * own.shares.granule(size)
    return Unit(
        domain=domain,
        params=tuple(k for k in arrays if k < num),
        leaves=leaves,
        shapes=tuple(
            tuple(state[k].shape) if own.num_inner == 1 else (state[k].size // own.num_inner,)
            for k in leaves
        ),
        dtypes=tuple(jnp.dtype(state[k].dtype) for k in leaves),
        stop=stop,
    )


def _cut(unit: Unit, most_bytes: int) -> list[Unit]:
    """A unit in slices of about equal size, if it is large and may be cut."""
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
    """A device's part of a whole array, inside a `shard_map`."""
    shape = piece_shape(x.shape, spec, sizes)
    for dim, part in enumerate(spec):
        names = names_of(part)
        if names:
            place = jax.lax.axis_index(names) * shape[dim]
            x = jax.lax.dynamic_slice_in_dim(x, place, shape[dim], dim)
    return x


class UnitsPart(Part):
    """What a device has of the arrays of an update: those of some units.

    Args:
        first: The replica's first granule, perhaps traced.
    """

    def __init__(self, own: Ownership, member: int, first: Any, units: Sequence[Unit]):
        self._own, self._member, self._first = own, member, first
        self._units = {unit.domain: unit for unit in units}

    def only(self, domains: Collection[int]) -> "UnitsPart":
        """The part without other domains."""
        units = [unit for domain, unit in self._units.items() if domain in domains]
        return UnitsPart(self._own, self._member, self._first, units)

    def owns(self, domain: int) -> bool:
        """Whether some unit is of the domain."""
        return domain in self._units

    def has_whole(self, domain: int) -> bool:
        """Whether the arrays of a domain are updated in their own shapes."""
        return self._units[domain].stop is None

    def piece(self, domain: int, x: Any) -> Any:
        """What a unit has of a whole array."""
        if self.has_whole(domain):
            return x
        own = self._own
        if own.axes:
            x = Padding(own.parts_of(domain)).pad(x)
            x = local_part(x, own.spec(domain), dict(own.axes))
        return self.taken(self._units[domain], x)

    def taken(self, unit: Unit, x: Any, *, is_flat: bool = False) -> Any:
        """An array of the device as the unit is updated.

        Args:
            is_flat: Whether it is the replica's flat piece already.
        """
        if unit.stop is None:
            return x
        own = self._own
        if not is_flat:
            if own.place is not None and own.parts_of(unit.domain):
                x = x[tuple(map(slice, own.local_shape(unit.domain)))]
            x = own.shares.piece(x, own.granules[self._member], self._first)
        return x if (unit.start, unit.stop) == (0, x.size) else x[unit.start : unit.stop]

    def kept(self, unit: Unit, old: Any, new: Any) -> Any:
        """An array of the device in which a unit is new.

        Args:
            new: From what `taken` gave.
        """
        if any(self._own.parts_of(unit.domain)):
            shape = self._own.local_shape(unit.domain)
            new = self.own(unit.domain, new)[: math.prod(shape)].reshape(shape)
            return replaced(old, new)  # its padding is zero and stays so
        if new.shape == old.shape:
            return new
        if new.size >= old.size:
            return new.reshape(-1)[: old.size].reshape(old.shape)
        start = (jnp.int32(unit.start),)
        return jax.lax.dynamic_update_slice(old.reshape(-1), new, start).reshape(old.shape)

    def own(self, domain: int, x: Any) -> Any:
        """What a unit has of an array, with zeros where it is padding."""
        unit = self._units[domain]
        if unit.stop is None:
            return x
        own = self._own
        shape, parts = own.local_shape(domain), own.parts_of(domain)
        if own.place is None and any(parts):
            inside = jnp.ones(shape, bool)
            [axis] = (name for name, _ in own.axes)
            for dim, sizes in enumerate(parts):
                if sizes:
                    here = jnp.asarray(sizes)[jax.lax.axis_index(axis)]
                    inside &= jax.lax.broadcasted_iota(jnp.int32, shape, dim) < here
            return jnp.where(self.taken(unit, inside), x, jnp.zeros((), x.dtype))
        size = math.prod(shape)
        places = self._first * own.shares.granule(size) + unit.start + jnp.arange(x.size)
        return jnp.where(places < size, x, jnp.zeros((), x.dtype))


# -- on several devices ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedUpdate:
    """Runs what is written for one device on each device of a replica, on its own parts.

    What these cut is cut once more over the replicas, as granules of each device's part; only sums
    over whole arrays are added over the devices that have unlike parts. What the optimizer treats
    as a whole is put together on every device of the replica that owns it, and each keeps its own
    part of what is made.

    Attributes:
        params: PartitionSpec of each trained parameter.
        leaves: PartitionSpec of the whole of each leaf of the optimizer's state.
    """

    own: Ownership
    replica: Replica
    params: Sequence[P]
    leaves: Sequence[P]

    def mapped(self, run: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
        """A function on each device, from how its arguments and its results are sharded."""
        mapped: Callable[..., Any] = jax.shard_map(
            run, mesh=self.replica.mesh, in_specs=given, out_specs=made, check_vma=False
        )
        return functools.wraps(run)(mapped)

    def shape(self, x: Any, spec: P) -> jax.ShapeDtypeStruct:
        """Of a device's part of an array."""
        return jax.ShapeDtypeStruct(piece_shape(x.shape, spec, dict(self.own.axes)), x.dtype)

    def run(
        self, arguments: Sequence[Any], part: UnitsPart, zero: jax.Array, sums: jax.Array
    ) -> list[Any]:
        """The results of the traced update: the device's own part, flat, of what is whole there.

        Args:
            arguments: As a device has them, its parts perhaps flat.
            zero: See `SeparableUpdate.run`.
            sums: See `SeparableUpdate.run`.
        """
        update, wholes = self.own.update, dict(self._wholes(part))

        def made(arguments: Sequence[Any], part: UnitsPart) -> dict[int, Any]:
            found = dict(enumerate(update.run(arguments, part, zero, sums)))
            axes, own = dict(self.own.axes), dict(self._wholes(part))
            parts = {k: local_part(found[k], spec, axes).reshape(-1) for k, spec in own.items()}
            return parts or {k: x for k, x in found.items() if k not in wholes}

        found = self.each(made, arguments, part, zero)
        return [found[k] for k in range(self.own.num_arrays)]

    def each(
        self,
        run: Callable[[Sequence[Any], UnitsPart], dict[int, Any]],
        arguments: Sequence[Any],
        part: UnitsPart,
        zero: jax.Array,
    ) -> dict[int, Any]:
        """What a function makes of what is cut, and of each domain that the replica has whole.

        Each of these is a branch of its own, with which XLA fuses nothing else: so one after
        another is whole, and no bit depends on what else the replica owns.

        Args:
            run: From arguments of the traced update, and what they have, to numbered results.
            arguments: See `run`.
            zero: See `run`.
        """
        domains, owners = self.own.update.domain_of, self.own.owners
        here = {d for d in range(len(owners)) if part.owns(d)}
        cut = {d for d in here if owners[d] is None}
        found = run(arguments, part.only(cut))
        for domain in sorted(here - cut):
            only = part.only({domain})
            read = {
                k: x
                for k, (x, d) in enumerate(zip(arguments, domains, strict=True))
                if d in (None, domain) and x is not MISSING
            }

            def made(read: dict[int, Any], only: UnitsPart = only) -> dict[int, Any]:
                own = [read.get(k, MISSING) for k in range(len(domains))]
                return run(self._gathered(own, only), only)

            like = jax.eval_shape(made, read)
            none = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), like)
            found |= jax.lax.cond(zero == 0, made, lambda _: none(), read)  # noqa: B023
        return found

    def _gathered(self, arguments: Sequence[Any], part: UnitsPart) -> list[Any]:
        """The arguments with the whole of what is updated as a whole; None: it is elsewhere."""
        found, num, arrays = list(arguments), self.own.num_arrays, self.own.update.closed.out_avals
        for k, spec in self._wholes(part):
            # A gradient is sharded as its parameter.
            for place in (k, num + k) if k < self.own.num_params else (k,):
                if found[place] is not None:
                    shape = piece_shape(arrays[k].shape, spec, dict(self.own.axes))
                    found[place] = _whole(found[place].reshape(shape), spec)
        return found

    def _wholes(self, part: UnitsPart) -> Iterator[tuple[int, P]]:
        """Numbers of the arrays that are updated as a whole, and how the devices cut them."""
        owners, domains = self.own.owners, self.own.update.domain_of
        for k, spec in enumerate((*self.params, *self.leaves)):
            domain = domains[k]
            if domain is not None and owners[domain] is not None and part.owns(domain):
                yield k, spec

    def largest(self, found: jax.Array) -> jax.Array:
        """The largest of what the devices have."""
        return jax.lax.pmax(found, tuple(name for name, _ in self.own.axes))

    def added(self, digits: jax.Array, domain: int) -> jax.Array:
        """The sum over the devices that have unlike parts of a domain's arrays."""
        if self.own.owners[domain] is not None:
            return digits  # of the whole, on each
        names = tuple(n for part in self.own.spec(domain) for n in names_of(part))
        return jax.lax.psum(digits, names) if names else digits


def _whole(x: jax.Array, spec: P) -> jax.Array:
    """An array from the parts of all devices."""
    for dim, part in enumerate(spec):
        names = names_of(part)
        if names:
            gather = functools.partial(jax.lax.all_gather, axis_name=names, axis=dim, tiled=True)
            x = moved(gather, x, x.dtype)
    return x
