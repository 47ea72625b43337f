"""The updates of the local replicas: programs of groups of units, one after another.

While a group is updated whose state waits elsewhere, the state of the next one comes to the device
and the new state of the one before goes back: one program does all three, so that a GPU copies both
ways while it computes. So no more than three groups are ever on the device.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1, the optimizer's state).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.separable_update import MISSING
from ..plan.ownership import Ownership
from ..plan.parts import Tier
from .compile import extra_bytes, update_options
from .exact_norms import lowered_sums, sum_programs, summed
from .gather import gathered_dtype
from .offload import (
    DEVICE,
    HOST,
    OffloadBuffer,
    OffloadedLeaf,
    in_memory,
    is_on_host,
    on_device,
    on_host,
)
from .replica import Replica
from .sum import Reducer
from .units import Group, ShardedUpdate, Unit, UnitsPart, at_once, streamed, units_of
from .update import UpdateInputs, UpdateSpec, means_of, new_aux, sums_of


class ReplicaUpdate:
    """The update of one local replica, with a program for each group of its units.

    Args:
        spec: What it is made from, with the shapes of a device's parts.
        own: What the replica updates.
        state: Shapes of the leaves of the optimizer's state as the replica has them.
        tier: Where the optimizer's state waits.
        on: The devices of the replica, if there are several.
        aux: PartitionSpec of each other variable.
        totals: PartitionSpecs of the totals.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        own: Ownership,
        replica: Replica,
        state: Sequence[Any],
        tier: Tier,
        on: ShardedUpdate | None,
        aux: Sequence[P],
        totals: Any,
    ):
        self._spec, self._own, self._replica, self._on = spec, own, replica, on
        self._member = own.member(replica.index)
        units = units_of(own, self._member, state)
        num_groups = spec.num_groups if own.is_whole else 1
        is_here = tier == "device"
        self._units = units
        self.groups = at_once(own, units, num_groups) if is_here else streamed(own, units)
        #: Whether the programs bring and take state themselves, to and from the host.
        self._carries = tier == "host"
        domains = own.update.domain_of[own.num_params : own.num_arrays]
        self._common = tuple(k for k, d in enumerate(domains) if d is None)
        self._aux = list(aux)
        #: Of what an update reads besides; what is whole is so everywhere.
        self._given = UpdateInputs(totals, *[P()] * (len(UpdateInputs._fields) - 1))
        self._options = update_options(replica.devices[0].platform, spec.contribution.form)
        self._where = np.array([own.first(replica.index), 0], np.int32)

        def arguments(arrays: Any, given: UpdateInputs) -> tuple[list[Any], UnitsPart]:
            params, state, common = arrays
            return self._arguments(units, params, state, common, given)

        specs = (*self._specs(units), P()), self._given
        self._sums = sum_programs(own.update, arguments, self._options, on, specs)
        self.compiled: list[Any] = []  #: First those of sums.

    @property
    def names(self) -> tuple[str, ...]:
        """Of its programs: for sums two of each level, one for each group."""
        num = len(self.groups.groups) + 1
        return (*["a sum in the update"] * (2 * len(self._sums)), *["the update"] * num)

    def placed(self, given: UpdateInputs, sums: np.ndarray | None = None) -> UpdateInputs:
        """With the replica's place among others, and the sums over whole arrays."""
        return given._replace(where=self._where, sums=sums)

    # -- the arithmetic --------------------------------------------------------------------------

    def _arguments(
        self,
        group: Group,
        params: dict[int, Any],
        state: Sequence[Sequence[Any]],
        common: Sequence[Any],
        given: UpdateInputs,
    ) -> tuple[list[Any], UnitsPart]:
        """Those of the traced update, and what they have of its arrays."""
        own, num, is_shared = self._own, self._own.num_params, bool(self._spec.chunks)
        part = UnitsPart(own, self._member, 0 if own.is_alone else given.where[0], group)
        arguments: list[Any] = [MISSING] * len(own.update.closed.jaxpr.invars)
        arguments[-1] = given.value
        wanted = {i for unit in group for i in unit.params}
        grads = means_of(self._spec, given, wanted, self._member)
        for unit, arrays in zip(group, state, strict=True):
            for i in unit.params:
                grad = part.taken(unit, grads[i], is_flat=is_shared)
                if unit.stop is None:
                    grad = grad.reshape(params[i].shape)
                arguments[i] = part.taken(unit, params[i], is_flat=own.cuts_params)
                arguments[own.num_arrays + i] = grad.astype(params[i].dtype)
            for k, x in zip(unit.leaves, arrays, strict=True):
                arguments[num + k] = part.taken(unit, x) if own.is_whole else x
        for k, x in zip(self._common, common, strict=True):
            arguments[num + k] = x
        return arguments, part

    def _updated(
        self,
        group: Group,
        params: dict[int, Any],
        state: Sequence[Sequence[Any]],
        common: Sequence[Any],
        given: UpdateInputs,
    ) -> tuple[dict[int, Any], list[list[Any]], list[Any]]:
        """The new parameters of a group, its state, and the leaves that all replicas have.

        Parameters that are sent are flat, only what the group made of them.
        """
        own, num = self._own, self._own.num_params
        arguments, part = self._arguments(group, params, state, common, given)
        run = own.update.run if self._on is None else self._on.run
        results = run(arguments, part, given.where[1], given.sums)

        def new(unit: Unit, i: int) -> jax.Array:
            if own.sends_params:
                return results[i].reshape(-1)  # type: ignore[no-any-return]
            return part.kept(unit, params[i], results[i])  # type: ignore[no-any-return]

        after = [
            [part.kept(unit, x, results[num + k]) for k, x in zip(unit.leaves, arrays, strict=True)]
            for unit, arrays in zip(group, state, strict=True)
        ]
        made = {i: new(unit, i) for unit in group for i in unit.params}
        return made, after, [results[num + k] for k in self._common]

    # -- programs --------------------------------------------------------------------------------

    def _specs(self, group: Group) -> tuple[dict[int, P], list[list[P]]]:
        """PartitionSpecs of the parameters of a group, and of its state."""
        own, on = self._own, self._on
        parts = own.parts_spec
        params = {
            i: parts if own.cuts_params or on is None else on.params[i]
            for unit in group
            for i in unit.params
        }
        state = [
            [on.leaves[k] if own.is_whole and on is not None else parts for k in unit.leaves]
            for unit in group
        ]
        return params, state

    def _group_program(self, group: Group) -> Any:
        def update(params: Any, state: Any, common: Any, given: UpdateInputs) -> Any:
            return self._updated(group, params, state, common, given)[:2]

        if self._on is not None:
            params, state = self._specs(group)
            new = self._own.parts_spec if self._own.sends_params else params
            update = self._on.mapped(update, (params, state, P(), self._given), (new, state))

        def hxla_update_group(
            params: dict[int, jax.Array],
            state: list[list[jax.Array]],
            common: list[jax.Array],
            given: UpdateInputs,
            coming: list[list[jax.Array]],
            going: list[list[jax.Array]],
        ) -> Any:
            new, state = update(params, state, common, given)
            # Without these two nothing would be copied, whatever the shardings say.
            brought = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), coming)
            taken = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), going)
            return new, state, brought, taken

        where: Any = None
        if self.groups.waits:
            device = in_memory(self._replica.sharding(self.groups.spec), DEVICE)
            where = device, device, device, in_memory(device, HOST)
        return jax.jit(
            hxla_update_group,
            donate_argnums=(1,) if self._own.sends_params else (0, 1),
            out_shardings=where,
            compiler_options=self._options,
        )

    def _last_program(self) -> Any:
        spec, own = self._spec, self._own
        num, floats = own.num_params, spec.tensors.floats
        dtype = gathered_dtype(spec.tensors.params)

        def hxla_update(
            params: dict[int, jax.Array],
            state: list[list[jax.Array]],
            made: dict[int, list[jax.Array]],
            common: list[jax.Array],
            aux: list[jax.Array],
            given: UpdateInputs,
        ) -> Any:
            group = self.groups.last
            new, state, common = self._updated(group, params, state, common, given)
            sent: Any = new
            if own.sends_params:
                every = {i: jnp.concatenate(parts) for i, parts in made.items() if parts} | new
                none = jnp.zeros(1, dtype)
                sent = [
                    chunk.chunk(
                        [every.get(i, none).astype(dtype) for i in chunk.tensors], self._member
                    )
                    for chunk in spec.chunks
                    if chunk.tensors
                ]
            others = sums_of(spec, given, range(num, len(floats)), self._member)
            return sent, state, common, new_aux(spec, aux, others, given), given.weight + 0

        run: Any = hxla_update
        if self._on is not None:
            params, state = self._specs(self.groups.last)
            arguments = params, state, own.parts_spec, P(), self._aux, self._given
            new = own.parts_spec if own.sends_params else params
            run = self._on.mapped(run, arguments, (new, state, P(), self._aux, P()))
        # A replica that owns nothing makes zeros, and makes them where it is.
        is_placed = own.sends_params and self._on is None
        return jax.jit(
            run,
            out_shardings=self._replica.sharding(P()) if is_placed else None,
            donate_argnums=(1, 3, 4) if own.sends_params else (0, 1, 3, 4),
            compiler_options=self._options,
        )

    # -- before compilation ----------------------------------------------------------------------

    def lower(
        self, params: Sequence[Any], opt_state: PyTree, aux: Sequence[Any], given: UpdateInputs
    ) -> list[Any]:
        """The programs before compilation, in the order of `names`.

        Args:
            params: Shapes of the trained parameters, as they are sharded.
            given: Shapes of what else is read.
        """
        leaves = jax.tree.leaves(opt_state)
        given = self.placed(given, np.zeros(len(self._own.update.sums), np.float32))
        common, without_words = [leaves[k] for k in self._common], given._replace(words=[])
        read = self.read_by_sums(params, leaves), without_words
        lowered = lowered_sums(self._own.update, self._sums, read)
        groups, last = self.groups.groups, self.groups.last
        for g, group in enumerate(groups):
            moved: tuple[Any, Any] = [], []
            if self._carries:
                near = groups[g + 1 : g + 2], groups[max(g - 1, 0) : g]
                moved = self._waiting(near[0], HOST), self._waiting(near[1], DEVICE)
            state = self._state(group, leaves)
            if self.groups.waits:
                state = self._waiting((group,), DEVICE)
            program, own = self._group_program(group), _params_of(group, params)
            lowered.append(program.lower(own, state, common, without_words, *moved))
        own, state = _params_of(last, params), self._state(last, leaves)
        made = {i: self._made_shapes(i, params[i].dtype) for i in self.groups.params}
        lowered.append(self._last_program().lower(own, state, made, common, aux, given))
        return lowered

    def read_by_sums(self, params: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """What programs of sums take: parameters, state that is on the device, common leaves."""
        away = self.groups.away
        here = [None if k in away else x for k, x in enumerate(leaves)]
        common = [leaves[k] for k in self._common]
        return _params_of(self._units, params), self._state(self._units, here), common

    @staticmethod
    def _state(group: Group, leaves: Sequence[Any]) -> list[list[Any]]:
        return [[leaves[k] for k in unit.leaves] for unit in group]

    def _waiting(self, groups: Sequence[Group], kind: str) -> list[list[Any]]:
        """Shapes of the state of a group that waits elsewhere, if there is one."""
        sharding = in_memory(self._replica.sharding(self.groups.spec), kind)
        num = self._own.num_inner

        def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape if num == 1 else (math.prod(shape) * num,)

        return [
            [
                jax.ShapeDtypeStruct(whole(shape), dtype, sharding=sharding)
                for shape, dtype in zip(unit.shapes, unit.dtypes, strict=True)
            ]
            for group in groups
            for unit in group
        ]

    def _made_shapes(self, i: int, dtype: Any) -> list[Any]:
        """What groups made of a parameter, where it is sent."""
        if not self._own.sends_params:
            return []
        size = self._spec.tensors.params[i].size
        units = [u for group in self.groups.groups for u in group if i in u.params]
        sizes = [size if u.stop is None else u.stop - u.start for u in units]
        num, spec = self._own.num_inner, self.groups.spec
        return [self._replica.like(jax.ShapeDtypeStruct((n * num,), dtype), spec) for n in sizes]

    # -- run -------------------------------------------------------------------------------------

    def run(
        self,
        params: Sequence[Any],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        given: UpdateInputs,
    ) -> Any:
        """Update.

        Args:
            params: The trained parameters; those that wait on the host go back there.
            opt_state: The optimizer's state, leaves of which may be `OffloadedLeaf`.
            given: What else is read.

        Returns:
            The new parameters, or chunks of them for each bucket where they are sent, the state,
            the other variables, and a tick.
        """
        leaves, treedef = jax.tree.flatten(opt_state)
        common, params = [leaves[k] for k in self._common], list(params)
        away = list(map(is_on_host, params))
        made = self._run_groups(params, leaves, common, given, away)
        last = self.groups.last
        own = {i: on_device(x) for i, x in _params_of(last, params).items()}
        sent, state, common, aux, tick = self.compiled[-1](
            own, self._state(last, leaves), made, common, aux, given
        )
        _keep(last, state, leaves)
        for k, x in zip(self._common, common, strict=True):
            leaves[k] = x
        if not self._own.sends_params:
            for i, x in sent.items():
                params[i] = on_host(x) if away[i] else x
            sent = params
        return sent, jax.tree.unflatten(treedef, leaves), aux, tick

    def _run_groups(
        self,
        params: list[Any],
        leaves: list[Any],
        common: Sequence[jax.Array],
        given: UpdateInputs,
        away: Sequence[bool],
    ) -> dict[int, list[jax.Array]]:
        """All but the last, whose arrays are replaced; what they made of parameters to be sent."""
        groups, num_sums = self.groups.groups, 2 * len(self._sums)
        made: dict[int, list[jax.Array]] = {i: [] for i in self.groups.params}
        buffer = _buffer_of(leaves) if self.groups.waits and groups else None
        given = given._replace(words=[])
        if buffer is not None:
            buffer.begin()
        brought: Any = []
        going: Any = []
        for g, group in enumerate(groups):
            here = self._state(group, leaves)
            state = here if buffer is None else buffer.arrived(g, brought)
            for near in groups[g : g + 2]:  # the next one's come while this one is updated
                for i in (i for unit in near for i in unit.params):
                    params[i] = on_device(params[i])
            coming = buffer.coming(g + 1) if buffer is not None else []
            new, state, brought, gone = self.compiled[num_sums + g](
                _params_of(group, params), state, common, given, coming, going
            )
            if buffer is None:
                _keep(group, state, leaves)
            else:
                buffer.gone(g - 1, gone)
                going = buffer.going(g, state)
            for i, x in new.items():
                if self._own.sends_params:
                    made[i].append(x)
                else:
                    params[i] = on_host(x) if away[i] and self.groups.last_of[i] == g else x
        if buffer is not None:
            buffer.end()
        return made

    # -- memory ----------------------------------------------------------------------------------

    def params_at_once(self, sizes: Sequence[int]) -> int:
        """Bytes of parameters that wait on the host, as far as they are here at once.

        Args:
            sizes: Of each parameter, of what the replica has.
        """
        groups, last = self.groups.groups, self.groups.last
        each = [{i for u in group for i in u.params} for group in groups]
        near = (set().union(*each[max(g - 1, 0) : g + 2]) for g in range(len(each)))
        rest = {i for unit in last for i in unit.params}
        return max(sum(sizes[i] for i in own) for own in (*near, rest))

    def extra_bytes(self) -> int:
        """Bytes that one device needs beside parameters, totals and what all replicas have."""
        if not self.groups.waits:
            return max(map(extra_bytes, self.compiled))
        stats = [p.memory_analysis() for p in self.compiled[2 * len(self._sums) :]]
        temporary = max((int(s.temp_size_in_bytes) for s in stats if s is not None), default=0)
        sent = self._own.sends_params * sum(
            x.size // self._own.num_inner * np.dtype(x.dtype).itemsize
            for i in self.groups.params
            for x in self._made_shapes(i, self._spec.tensors.params[i].dtype)
        )
        return temporary + self.groups.bytes_at_once + 2 * sent


def _params_of(group: Group, params: Sequence[Any]) -> dict[int, Any]:
    return {i: params[i] for unit in group for i in unit.params}


def _keep(group: Group, state: Sequence[Sequence[Any]], leaves: list[Any]) -> None:
    """Put a group's new state among all leaves."""
    for unit, arrays in zip(group, state, strict=True):
        for k, x in zip(unit.leaves, arrays, strict=True):
            leaves[k] = x


def _buffer_of(leaves: Sequence[Any]) -> OffloadBuffer:
    return next(x.shelf for x in leaves if isinstance(x, OffloadedLeaf))


class WrittenUpdate:
    """The update of one local replica as the optimizer wrote it: one program."""

    names = ("the update",)

    def __init__(self, program: Any):
        self._program = program
        self.compiled: list[Any] = []

    def lower(
        self, params: Sequence[Any], opt_state: PyTree, aux: Sequence[Any], given: UpdateInputs
    ) -> list[Any]:
        """See `ReplicaUpdate`."""
        return [self._program.lower(params, opt_state, aux, given)]

    def run(
        self, params: Sequence[Any], opt_state: PyTree, aux: Sequence[Any], given: UpdateInputs
    ) -> Any:
        """See `ReplicaUpdate`."""
        return self.compiled[-1](params, opt_state, aux, given)

    def params_at_once(self, sizes: Sequence[int]) -> int:
        """See `ReplicaUpdate`."""
        return sum(sizes)

    def extra_bytes(self) -> int:
        """See `ReplicaUpdate`."""
        return extra_bytes(self.compiled[-1])


class Updates:
    """Runs the updates of all local replicas.

    Args:
        own: Which replica updates what; None: each runs one program as the optimizer wrote it.
        each: Of each local replica.
    """

    def __init__(
        self,
        reducer: Reducer,
        own: Ownership | None,
        each: Sequence[ReplicaUpdate | WrittenUpdate],
    ):
        self._reducer, self._own, self.each = reducer, own, each
        self._of_units = [update for update in each if isinstance(update, ReplicaUpdate)]

    @property
    def text(self) -> str:
        """What stands for the update where replicas or their devices have unlike programs of it."""
        own = self._own
        if own is None or (own.is_whole and not own.parts):
            return ""
        return str(own.update.closed)

    def run(self, local: Sequence[tuple[Any, Any, Any, UpdateInputs]]) -> list[Any]:
        """Update: see `ReplicaUpdate.run`.

        Args:
            local: For each local replica its parameters, state, other variables, and what else is
                read.
        """
        if self._own is not None:
            sums = self._summed(self._own, local)
            local = [
                (*arrays, update.placed(given, sums))
                for update, (*arrays, given) in zip(self._of_units, local, strict=True)
            ]
        return [update.run(*own) for update, own in zip(self.each, local, strict=True)]

    def _summed(self, own: Ownership, local: Sequence[tuple[Any, Any, Any, UpdateInputs]]) -> Any:
        """The sums over whole arrays, the same on all replicas."""
        if not own.update.sums:
            return np.zeros(0, np.float32)
        wanted, read = own.update.read_by_sums(), []
        for update, (params, state, _, given) in zip(self._of_units, local, strict=True):
            here = [on_device(x) if k in wanted else x for k, x in enumerate(params)]
            arrays = update.read_by_sums(here, jax.tree.leaves(state))
            read.append((arrays, update.placed(given._replace(words=[]))))
        compiled = [update.compiled for update in self.each]
        if own.is_alone:  # any replica has all terms, and those of several devices need each other
            num = len(compiled) if own.axes else 1
            counted = [True] + [False] * (num - 1)
            return summed(own.update, compiled[:num], read[:num], counted, lambda x: x, (0, 1))
        counted = [own.is_counted(r.index) and r.is_led_here for r in self._reducer.local]
        rank = jax.process_index(), jax.process_count()
        return summed(own.update, compiled, read, counted, self._reducer.host.exchange, rank)


def updates_of(
    spec: UpdateSpec,
    reducer: Reducer,
    own: Ownership,
    specs: tuple[Sequence[P], Sequence[P], Sequence[P]],
    tier: Tier,
    state: Callable[[int], PyTree],
) -> Updates:
    """The updates of all local replicas, unit by unit.

    Args:
        spec: What they are made from.
        specs: PartitionSpecs of the trained parameters, of the leaves of the optimizer's state and
            of the other variables.
        tier: Where the optimizer's state waits.
        state: From the number of a local replica to the shapes of its optimizer state.
    """
    params, leaves, aux = specs
    totals = own.parts_spec if spec.chunks else reducer.total_specs
    each = []
    for i, replica in enumerate(reducer.local):
        of_device, on = spec, None
        here = dataclasses.replace(own, place=replica.only_place if own.parts else None)
        if own.axes:
            on = ShardedUpdate(own=here, replica=replica, params=params, leaves=leaves)
            tensors = dataclasses.replace(
                spec.tensors,
                params=tuple(map(on.shape, spec.tensors.params, params)),
                aux=tuple(map(on.shape, spec.tensors.aux, aux)),
            )
            of_device = dataclasses.replace(spec, tensors=tensors)
        shapes = jax.tree.leaves(state(i))
        each.append(ReplicaUpdate(of_device, here, replica, shapes, tier, on, aux, totals))
    return Updates(reducer, own, each)
