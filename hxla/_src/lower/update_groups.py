"""An update in groups of its arrays, so that state which waits elsewhere comes a group at a time.

A group is made of units: the arrays that belong together, such as a parameter with its moments, or
a slice of every one of them where they are large and may be cut. Each product is rounded by itself
and sums over whole arrays are made before, as in all updates of parts, so no bit depends on how the
groups are cut.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..jax.separable_update import MISSING
from ..plan.ownership import Ownership
from .chunks import Chunks
from .sharded_update import ShardedUpdate
from .update import UpdateInputs, UpdateSpec
from .zero_update import ZeroPart, mean_of, own_sums

_NUM_GROUPS = 24  # three of them are on a device: an eighth of the state
_LEAST_BYTES = 1 << 20  # of a group
_ALIGNED = 8  # elements: what is fewer is compiled in another way


@dataclasses.dataclass(frozen=True)
class Unit:
    """What of a domain is updated at once, on one device.

    Attributes:
        leaves: Places of its arrays in the optimizer's state.
        shapes: Of these, as they wait: flat slices where the domain is cut.
        start: The first element of the copy's flat piece that it has.
        stop: The one behind its last; None: the domain is not cut.
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
    """What of a copy's update runs at once.

    Attributes:
        groups: Those with state that waits elsewhere, in order.
        rest: Units without state.
        lie: How what waits lies on the devices of the copy.
    """

    groups: tuple[Group, ...]
    rest: Group
    lie: P

    @property
    def away(self) -> frozenset[int]:
        """The places of the leaves of the optimizer's state that wait elsewhere."""
        return frozenset(k for group in self.groups for unit in group for k in unit.leaves)

    @property
    def num_bytes(self) -> int:
        """Of the state that waits elsewhere."""
        return sum(unit.num_bytes for group in self.groups for unit in group)

    @property
    def bytes_at_once(self) -> int:
        """Of the state of a group, of the one before and of the next one, the most of any."""
        each = [sum(unit.num_bytes for unit in group) for group in self.groups]
        return max((sum(each[max(g - 1, 0) : g + 2]) for g in range(len(each))), default=0)


def most_at_once(num_bytes: int) -> int:
    """Bytes of a group, for a state of so many."""
    return max(num_bytes // _NUM_GROUPS, _LEAST_BYTES)


def update_groups(own: Ownership, copy: int, state: Sequence[Any]) -> UpdateGroups:
    """Cut a copy's update into groups.

    Args:
        state: Shapes of the leaves of the optimizer's state as the copy has them.
    """
    units = [_unit(own, d, copy, state) for d, o in enumerate(own.owners) if o in (None, copy)]
    total = sum(unit.num_bytes for unit in units)
    most = most_at_once(total)
    groups: list[list[Unit]] = []
    left = 0
    for unit in itertools.chain.from_iterable(_cut(u, most) for u in units if u.leaves):
        is_next = not groups or unit.num_bytes > left or groups[-1][-1].domain == unit.domain
        if is_next:
            groups.append([])
            left = most
        groups[-1].append(unit)
        left -= unit.num_bytes
    rest = tuple(u for u in units if not u.leaves)
    return UpdateGroups(tuple(map(tuple, groups)), rest, own.parts_spec)


def _unit(own: Ownership, domain: int, copy: int, state: Sequence[Any]) -> Unit:
    """All that a copy has of a domain."""
    num, update = own.num_params, own.update
    members = [k for k, d in enumerate(update.domain_of[: own.num_arrays]) if d == domain]
    leaves = tuple(k - num for k in members if k >= num)
    stop = None
    if own.owners[domain] is None:
        size = own.local_size(domain, update.closed.jaxpr.outvars[members[0]].aval.shape)
        stop = own.granules[copy] * own.shares.granule(size)
    return Unit(
        domain=domain,
        params=tuple(k for k in members if k < num),
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


class GroupPart(ZeroPart):
    """What a group has of the arrays of an update.

    Args:
        first: Of its first granule, perhaps traced.
    """

    def __init__(self, own: Ownership, copy: int, first: Any, group: Group):
        super().__init__(own, copy, first)
        self._units = {unit.domain: unit for unit in group}

    def owns(self, domain: int) -> bool:
        """Whether the group has some of a domain."""
        return domain in self._units

    def piece(self, domain: int, x: Any) -> Any:
        """Its slice of a whole array."""
        unit = self._units[domain]
        return super().piece(domain, x)[unit.start : unit.stop]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupUpdate:
    """The update of a group, as a traced function has it.

    Attributes:
        spec: What the update is made from.
        chunks: For each bucket of the sums.
        common: Places of the leaves of the optimizer's state that all copies have.
        on: The devices of the copy, if there are several.
    """

    spec: UpdateSpec
    own: Ownership
    chunks: Sequence[Chunks]
    copy: int
    common: tuple[int, ...]
    on: ShardedUpdate | None

    def run(
        self,
        group: Group,
        params: Mapping[int, jax.Array],
        state: Sequence[Sequence[jax.Array]],
        common: Sequence[jax.Array],
        given: UpdateInputs,
    ) -> tuple[dict[int, jax.Array], list[list[jax.Array]], list[jax.Array]]:
        """The new parameters of a group, its state, and the leaves that all copies have.

        Parameters are whole where the copy is alone, pieces where each keeps its own, else what the
        group made of them, to be sent.

        Args:
            params: By number, as the copy has them.
            common: The leaves that all copies have.
            given: What else is read.
        """
        own, update, num = self.own, self.own.update, self.own.num_params
        part = GroupPart(own, self.copy, given.where[0], group)
        arguments: list[Any] = [MISSING] * len(update.closed.jaxpr.invars)
        arguments[-1] = given.value
        wanted = {i for unit in group for i in unit.params}
        found = own_sums(self.spec, self.chunks, self.copy, given, wanted)
        for unit, arrays in zip(group, state, strict=True):
            for i in unit.params:
                p = params[i]
                grad, cut = found[i], slice(unit.start, unit.stop)
                if unit.stop is None:
                    arguments[i], grad = p, grad.reshape(p.shape)
                else:
                    piece = p if own.cuts_params else part.of(i, p)
                    arguments[i], grad = piece[cut], grad[cut]
                arguments[own.num_arrays + i] = mean_of(grad, given).astype(p.dtype)
            for k, x in zip(unit.leaves, arrays, strict=True):
                arguments[num + k] = x
        for k, x in zip(self.common, common, strict=True):
            arguments[num + k] = x
        run_update = update.run if self.on is None else self.on.run
        results = run_update(arguments, part, given.where[1], given.sums)
        new = {i: self._placed(unit, params[i], results[i]) for unit in group for i in unit.params}
        after = [[results[num + k] for k in unit.leaves] for unit in group]
        return new, after, [results[num + k] for k in self.common]

    def _placed(self, unit: Unit, old: jax.Array, new: jax.Array) -> jax.Array:
        """What a unit made of a parameter, where it belongs."""
        if self.own.sends_params:
            return new.reshape(-1)
        if unit.stop is None:
            return new
        if new.size >= old.size:
            return new[: old.size].reshape(old.shape)
        start = jnp.int32(unit.start)
        flat = jax.lax.dynamic_update_slice(old.reshape(-1), new, (start,))
        return flat.reshape(old.shape)
