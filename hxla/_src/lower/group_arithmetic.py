"""The arithmetic of a group of units: the traced update over the arrays of the group only."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..jax.separable_update import MISSING
from ..plan.ownership import Ownership
from .decisions import guarded
from .units import Group, ShardedUpdate, Unit, UnitsPart
from .update import UpdateInputs, UpdateSpec, means_of


class GroupArrays(NamedTuple):
    """The arrays that the update of a group reads.

    Attributes:
        params: By place.
        state: For each unit its leaves of the optimizer's state.
        common: Leaves of that state that no unit has.
    """

    group: Group
    params: Mapping[int, Any]
    state: Sequence[Sequence[Any]]
    common: Sequence[Any]
    inputs: UpdateInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupArithmetic:
    """The update of any group of a replica's units, as functions that are traced.

    Attributes:
        spec: The update, with the shapes of a device's shards.
        member: The number of the replica in its group of replicas.
        sharded: The update over the replica's devices; None: there is one device.
    """

    spec: UpdateSpec
    ownership: Ownership
    member: int
    sharded: ShardedUpdate | None

    @functools.cached_property
    def common(self) -> tuple[int, ...]:
        """Places of the leaves of the optimizer's state that no unit has."""
        ownership = self.ownership
        domains = ownership.update.domain_of[ownership.num_params : ownership.num_arrays]
        return tuple(k for k, d in enumerate(domains) if d is None)

    def arguments(self, read: GroupArrays) -> tuple[list[Any], UnitsPart]:
        """Arguments of the traced update, and their part of its arrays."""
        ownership, num = self.ownership, self.ownership.num_params
        group, params, state, common, inputs = read
        is_sharded = bool(self.spec.chunks)
        first = 0 if ownership.is_alone else inputs.where[0]
        part = UnitsPart(ownership, self.member, first, group)
        arguments: list[Any] = [MISSING] * len(ownership.update.closed.jaxpr.invars)
        arguments[-1] = inputs.value
        wanted = {i for unit in group for i in unit.params}
        grads = means_of(self.spec, inputs, wanted, self.member)
        for unit, arrays in zip(group, state, strict=True):
            for i in unit.params:
                grad = part.taken(unit, grads[i], is_flat=is_sharded)
                if unit.stop is None:
                    grad = grad.reshape(params[i].shape)
                arguments[i] = part.taken(unit, params[i], is_flat=ownership.cuts_params)
                arguments[ownership.num_arrays + i] = grad.astype(params[i].dtype)
            for k, x in zip(unit.leaves, arrays, strict=True):
                arguments[num + k] = part.taken(unit, x) if ownership.is_whole else x
        for k, x in zip(self.common, common, strict=True):
            arguments[num + k] = x
        return arguments, part

    def updated(self, read: GroupArrays) -> tuple[dict[int, Any], list[list[Any]], list[Any]]:
        """The new parameters of a group, its state, and the common leaves.

        Parameters to be sent are flat, and only the group's slices of them.
        """
        ownership, num = self.ownership, self.ownership.num_params
        group, params, state, _, inputs = read
        arguments, part = self.arguments(read)
        run = ownership.update.run if self.sharded is None else self.sharded.run
        made = run(arguments, part, inputs.where[1], inputs.sums)
        results: list[Any] = [
            x if x is MISSING else guarded(inputs.is_accepted, x, old.reshape(x.shape))
            for x, old in zip(made, arguments, strict=False)
        ]

        def new(unit: Unit, i: int) -> jax.Array:
            if ownership.sends_params:
                return results[i].reshape(-1)  # type: ignore[no-any-return]
            return part.kept(unit, params[i], results[i])  # type: ignore[no-any-return]

        after = [
            [part.kept(unit, x, results[num + k]) for k, x in zip(unit.leaves, arrays, strict=True)]
            for unit, arrays in zip(group, state, strict=True)
        ]
        new_params = {i: new(unit, i) for unit in group for i in unit.params}
        return new_params, after, [results[num + k] for k in self.common]
