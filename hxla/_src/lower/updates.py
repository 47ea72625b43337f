"""The updates of the local replicas: programs of groups of units, one after another.

While a group with offloaded state is updated, the next group's state is fetched and the previous
group's new state is written back. One program does all three, so that a GPU copies both ways while
it computes. So at most three groups are on the device.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1, the optimizer's state).
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

from ..core.types import PyTree
from ..plan.ownership import Ownership
from ..plan.parts import Tier
from .compile import extra_bytes, update_options, update_waits
from .contribution import peak_bits
from .decisions import guarded
from .exact_norms import SumPrograms, norm_of, squares_of_gradient, sum_programs, summed
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
from .units import Group, ShardedUpdate, UnitsPart, at_once, streamed, units_of
from .update import GroupArithmetic, GroupArrays, UpdateInputs, UpdateSpec, new_aux, sums_of


class ReplicaUpdate:
    """The update of one local replica, with a program for each group of its units.

    Args:
        spec: The update, with the shapes of a device's shards.
        state: Shapes of the replica's leaves of the optimizer's state.
        tier: The memory of the optimizer's state between updates.
        sharded: The update over the replica's devices; None: there is one device.
        aux: PartitionSpec of each other variable.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        ownership: Ownership,
        replica: Replica,
        state: Sequence[Any],
        tier: Tier,
        sharded: ShardedUpdate | None,
        aux: Sequence[P],
        totals: Any,
    ):
        self._spec, self._ownership = spec, ownership
        self._replica, self._sharded = replica, sharded
        self._member = ownership.member(replica.index)
        self._arithmetic = GroupArithmetic(
            spec=spec, ownership=ownership, member=self._member, sharded=sharded
        )
        self._common = self._arithmetic.common
        units = units_of(ownership, self._member, state)
        # A whole array's bits depend on what else is in its program.
        num_groups = spec.num_groups if set(ownership.owners) <= {None} else 1
        is_on_device = tier == "device"
        self._units = units
        self.groups = (
            at_once(ownership, units, num_groups) if is_on_device else streamed(ownership, units)
        )
        self.num_sums = len(ownership.update.sums)  #: Over whole arrays.
        #: Whether the programs themselves move state from and to the host.
        self._carries = tier == "host"
        self._aux = list(aux)
        #: PartitionSpecs of the inputs; all but totals are replicated.
        self._input_specs = UpdateInputs(totals, *[P()] * (len(UpdateInputs._fields) - 1))
        platform = replica.devices[0].platform
        self._options = update_options(platform, spec.contribution.form)

        def arguments(arrays: Any, inputs: UpdateInputs) -> tuple[list[Any], UnitsPart]:
            params, state, common = arrays
            return self._arithmetic.arguments(GroupArrays(units, params, state, common, inputs))

        specs = (*self._specs(units), P()), self._input_specs
        self._sums = sum_programs(
            ownership.update,
            arguments,
            self._options,
            sharded,
            specs,
            is_alone=ownership.is_alone,
            on_cpu=platform == "cpu",
        )
        self._whole_sums = self._sums.whole
        is_one = sharded is None and not self.groups.groups
        #: Whether the update's program makes the sums, too. A CPU's call costs nothing.
        self.has_sums = is_one and self._whole_sums is not None and not update_waits(platform)
        if self.has_sums:
            self._sums = SumPrograms()
        self.compiled: list[Any] = []  #: In the order of `names`.

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the programs: those of sums, then one for each group."""
        num = len(self.groups.groups) + 1
        return (*["a sum in the update"] * self._sums.num, *["the update"] * num)

    def placed(self, inputs: UpdateInputs, sums: Any = None) -> UpdateInputs:
        """The inputs with the replica's first granule and the sums over whole arrays."""
        return inputs._replace(where=self.place, sums=sums)

    @functools.cached_property
    def place(self) -> jax.Array:
        """See `UpdateInputs.where`."""
        first = self._ownership.first(self._replica.index)
        return self._replica.put(np.array([first, 0], np.int32))

    # -- programs --------------------------------------------------------------------------------

    def _specs(self, group: Group) -> tuple[dict[int, P], list[list[P]]]:
        """PartitionSpecs of a group's parameters and state."""
        ownership, sharded = self._ownership, self._sharded
        parts = ownership.parts_spec
        params = {
            i: parts if ownership.cuts_params or sharded is None else sharded.params[i]
            for unit in group
            for i in unit.params
        }
        state = [
            [
                sharded.leaves[k] if ownership.is_whole and sharded is not None else parts
                for k in unit.leaves
            ]
            for unit in group
        ]
        return params, state

    def _group_program(self, group: Group) -> Any:
        def update(params: Any, state: Any, common: Any, given: UpdateInputs) -> Any:
            return self._arithmetic.updated(GroupArrays(group, params, state, common, given))[:2]

        if self._sharded is not None:
            params, state = self._specs(group)
            new = self._ownership.parts_spec if self._ownership.sends_params else params
            update = self._sharded.mapped(
                update, (params, state, P(), self._input_specs), (new, state)
            )

        def hxla_update_group(
            params: dict[int, jax.Array],
            opt_state: list[list[jax.Array]],
            opt_common: list[jax.Array],
            given: UpdateInputs,
            coming: list[list[jax.Array]],
            going: list[list[jax.Array]],
        ) -> Any:
            new, opt_state = update(params, opt_state, opt_common, given)
            # `out_shardings` alone would copy nothing.
            brought = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), coming)
            taken = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), going)
            return new, opt_state, brought, taken

        shardings: Any = None
        if self.groups.is_offloaded:
            device = in_memory(self._replica.sharding(self.groups.spec), DEVICE)
            shardings = device, device, device, in_memory(device, HOST)
        return jax.jit(
            hxla_update_group,
            donate_argnums=(1,) if self._ownership.sends_params else (0, 1),
            out_shardings=shardings,
            compiler_options=self._options,
        )

    def _last_program(self, *, has_sums: bool) -> Any:
        """The program of the last group, which makes the sums over whole arrays or reads them."""
        spec, ownership = self._spec, self._ownership
        num, floats = ownership.num_params, spec.tensors.floats
        dtype = gathered_dtype(spec.tensors.params)

        def hxla_update(
            params: dict[int, jax.Array],
            opt_state: list[list[jax.Array]],
            made: dict[int, list[jax.Array]],
            opt_common: list[jax.Array],
            aux: list[jax.Array],
            given: UpdateInputs,
        ) -> Any:
            sums = None
            if has_sums:
                read = params, opt_state, opt_common
                sums, given = _with_sums(self._whole_sums, self.num_sums, read, given)
            arrays = GroupArrays(self.groups.last, params, opt_state, opt_common, given)
            new, opt_state, opt_common = self._arithmetic.updated(arrays)
            sent: Any = new
            if ownership.sends_params:
                slices = {i: jnp.concatenate(parts) for i, parts in made.items() if parts} | new
                none = jnp.zeros(1, dtype)
                sent = [
                    chunk.chunk(
                        [slices.get(i, none).astype(dtype) for i in chunk.tensors], self._member
                    )
                    for chunk in spec.chunks
                    if chunk.tensors
                ]
            changes = sums_of(spec, given, range(num, len(floats)), self._member)
            others = guarded(given.is_accepted, new_aux(spec, aux, changes, given), list(aux))
            return sent, opt_state, opt_common, others, given.weight + 0, sums

        run: Any = hxla_update
        if self._sharded is not None:
            params, state = self._specs(self.groups.last)
            arguments = params, state, ownership.parts_spec, P(), self._aux, self._input_specs
            new = ownership.parts_spec if ownership.sends_params else params
            run = self._sharded.mapped(run, arguments, (new, state, P(), self._aux, P(), P()))
        # A replica without units makes zeros, which need a sharding to be on its device.
        is_placed = ownership.sends_params and self._sharded is None
        return jax.jit(
            run,
            out_shardings=self._replica.sharding(P()) if is_placed else None,
            donate_argnums=(1, 3, 4) if ownership.sends_params else (0, 1, 3, 4),
            compiler_options=self._options,
        )

    def traced(self) -> Callable[..., Any]:
        """What `run` computes where all state is in one group on one device.

        Returns:
            `(params, leaves, aux, given, place) -> (the first three, sums over whole arrays)`, with
            the leaves of the optimizer's state.
        """
        assert not self.groups.groups
        assert not self._sums.levels
        last, of_group = self.groups.last, self._last_program(has_sums=True).__wrapped__

        def update(
            params: list[jax.Array],
            leaves: list[jax.Array],
            aux: list[jax.Array],
            given: UpdateInputs,
            place: jax.Array,
        ) -> Any:
            given, leaves = given._replace(where=place), list(leaves)
            common = [leaves[k] for k in self._common]
            state = self._state(last, leaves)
            new, state, common, aux, _, sums = of_group(
                _params_of(last, params), state, {}, common, aux, given
            )
            _put_state(last, state, leaves)
            for k, x in zip(self._common, common, strict=True):
                leaves[k] = x
            return [new[i] for i in range(len(params))], leaves, aux, sums

        return update

    # -- before compilation ----------------------------------------------------------------------

    def lower(
        self, params: Sequence[Any], opt_state: PyTree, aux: Sequence[Any], inputs: UpdateInputs
    ) -> list[Any]:
        """The programs before compilation, in the order of `names`.

        Args:
            params: Shapes and shardings of the trained parameters.
        """
        leaves = jax.tree.leaves(opt_state)
        shapes = [((2,), np.int32), ((self.num_sums,), np.float32)]
        where, sums = (self._replica.like(jax.ShapeDtypeStruct(*x)) for x in shapes)
        inputs = inputs._replace(where=where, sums=sums)
        common, without_words = [leaves[k] for k in self._common], inputs._replace(words=[])
        read = self.read_by_sums(params, leaves), without_words
        lowered = self._sums.lower(*read)
        groups, last = self.groups.groups, self.groups.last
        for g, group in enumerate(groups):
            moved: tuple[Any, Any] = [], []
            if self._carries:
                near = groups[g + 1 : g + 2], groups[max(g - 1, 0) : g]
                moved = (
                    self._offloaded_shapes(near[0], HOST),
                    self._offloaded_shapes(near[1], DEVICE),
                )
            state = self._state(group, leaves)
            if self.groups.is_offloaded:
                state = self._offloaded_shapes((group,), DEVICE)
            program, group_params = self._group_program(group), _params_of(group, params)
            lowered.append(program.lower(group_params, state, common, without_words, *moved))
        group_params, state = _params_of(last, params), self._state(last, leaves)
        slices = {i: self._sent_shapes(i, params[i].dtype) for i in self.groups.params}
        last_program = self._last_program(has_sums=self.has_sums)
        lowered.append(last_program.lower(group_params, state, slices, common, aux, inputs))
        return lowered

    def read_by_sums(self, params: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Arguments of the programs of sums: parameters, state on the device, common leaves."""
        offloaded = self.groups.offloaded_leaves
        local_leaves = [None if k in offloaded else x for k, x in enumerate(leaves)]
        common = [leaves[k] for k in self._common]
        return _params_of(self._units, params), self._state(self._units, local_leaves), common

    @staticmethod
    def _state(group: Group, leaves: Sequence[Any]) -> list[list[Any]]:
        return [[leaves[k] for k in unit.leaves] for unit in group]

    def _offloaded_shapes(self, groups: Sequence[Group], kind: str) -> list[list[Any]]:
        """Shapes of the offloaded state of groups, in a kind of memory."""
        sharding = in_memory(self._replica.sharding(self.groups.spec), kind)
        num = self._ownership.num_inner

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

    def _sent_shapes(self, i: int, dtype: Any) -> list[Any]:
        """Shapes of the slices of a parameter that groups update, if parameters are sent."""
        if not self._ownership.sends_params:
            return []
        size = self._spec.tensors.params[i].size
        units = [u for group in self.groups.groups for u in group if i in u.params]
        sizes = [size if u.stop is None else u.stop - u.start for u in units]
        num, spec = self._ownership.num_inner, self.groups.spec
        return [self._replica.like(jax.ShapeDtypeStruct((n * num,), dtype), spec) for n in sizes]

    # -- run -------------------------------------------------------------------------------------

    def run(
        self,
        params: Sequence[Any],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        inputs: UpdateInputs,
    ) -> Any:
        """Update.

        Args:
            params: The trained parameters; offloaded ones return to the host.
            opt_state: The optimizer's state, leaves of which may be `OffloadedLeaf`.

        Returns:
            The new parameters, or chunks of them for each bucket where they are sent, the state,
            the other variables, an array to block on, and the sums if `has_sums`.
        """
        leaves, treedef = jax.tree.flatten(opt_state)
        common, params = [leaves[k] for k in self._common], list(params)
        were_on_host = list(map(is_on_host, params))
        slices = self._run_groups(params, leaves, common, inputs, were_on_host)
        last = self.groups.last
        last_params = {i: on_device(x) for i, x in _params_of(last, params).items()}
        sent, state, common, aux, tick, sums = self.compiled[-1](
            last_params, self._state(last, leaves), slices, common, aux, inputs
        )
        _put_state(last, state, leaves)
        for k, x in zip(self._common, common, strict=True):
            leaves[k] = x
        if not self._ownership.sends_params:
            for i, x in sent.items():
                params[i] = on_host(x) if were_on_host[i] else x
            sent = params
        return sent, jax.tree.unflatten(treedef, leaves), aux, tick, sums

    def _run_groups(
        self,
        params: list[Any],
        leaves: list[Any],
        common: Sequence[jax.Array],
        inputs: UpdateInputs,
        were_on_host: Sequence[bool],
    ) -> dict[int, list[jax.Array]]:
        """Run all groups but the last, replacing their arrays; return slices of sent parameters."""
        groups, num_sums = self.groups.groups, self._sums.num
        slices: dict[int, list[jax.Array]] = {i: [] for i in self.groups.params}
        buffer = _buffer_of(leaves) if self.groups.is_offloaded and groups else None
        inputs = inputs._replace(words=[])
        if buffer is not None:
            buffer.begin()
        brought: Any = []
        going: Any = []
        for g, group in enumerate(groups):
            leaves_here = self._state(group, leaves)
            state = leaves_here if buffer is None else buffer.arrived(g, brought)
            for near in groups[g : g + 2]:  # fetch the next group's while this one is updated
                for i in (i for unit in near for i in unit.params):
                    params[i] = on_device(params[i])
            coming = buffer.coming(g + 1) if buffer is not None else []
            new, state, brought, gone = self.compiled[num_sums + g](
                _params_of(group, params), state, common, inputs, coming, going
            )
            if buffer is None:
                _put_state(group, state, leaves)
            else:
                buffer.gone(g - 1, gone)
                going = buffer.going(g, state)
            for i, x in new.items():
                if self._ownership.sends_params:
                    slices[i].append(x)
                else:
                    params[i] = on_host(x) if were_on_host[i] and self.groups.last_of[i] == g else x
        if buffer is not None:
            buffer.end()
        return slices

    # -- memory ----------------------------------------------------------------------------------

    def params_at_once(self, sizes: Sequence[int]) -> int:
        """The most bytes of offloaded parameters that are on the device at once.

        Args:
            sizes: Bytes of each parameter on the replica.
        """
        groups, last = self.groups.groups, self.groups.last
        each = [{i for u in group for i in u.params} for group in groups]
        near = (set().union(*each[max(g - 1, 0) : g + 2]) for g in range(len(each)))
        rest = {i for unit in last for i in unit.params}
        return max(sum(sizes[i] for i in at_once) for at_once in (*near, rest))

    def extra_bytes(self) -> int:
        """Bytes that one device needs beside parameters, totals and common leaves."""
        sent = self._ownership.sends_params * sum(
            x.size // self._ownership.num_inner * np.dtype(x.dtype).itemsize
            for i in self.groups.params
            for x in self._sent_shapes(i, self._spec.tensors.params[i].dtype)
        )
        if not self.groups.is_offloaded:
            return max(map(extra_bytes, self.compiled)) + sent
        stats = [p.memory_analysis() for p in self.compiled[self._sums.num :]]
        temporary = max((int(s.temp_size_in_bytes) for s in stats if s is not None), default=0)
        return temporary + self.groups.bytes_at_once + 2 * sent


def _with_sums(
    whole: Any, num: int, arrays: Any, given: UpdateInputs
) -> tuple[jax.Array, UpdateInputs]:
    """The sums over whole arrays, from `SumPrograms.whole`, and inputs that have them."""
    sums = jnp.zeros(num, jnp.float32)
    if whole is None:
        return sums, given._replace(sums=sums)
    read = given._replace(words=[], sums=sums)
    sums = jax.lax.optimization_barrier(whole.__wrapped__(arrays, read))
    # Of another zero the gradients are made again, for kept ones need the memory of all.
    assert given.where is not None
    zero = given.where[1] & peak_bits(sums)[0]
    return sums, given._replace(sums=sums, where=given.where.at[1].set(zero))


def _params_of(group: Group, params: Sequence[Any]) -> dict[int, Any]:
    return {i: params[i] for unit in group for i in unit.params}


def _put_state(group: Group, state: Sequence[Sequence[Any]], leaves: list[Any]) -> None:
    """Replace a group's leaves by its new state."""
    for unit, arrays in zip(group, state, strict=True):
        for k, x in zip(unit.leaves, arrays, strict=True):
            leaves[k] = x


def _buffer_of(leaves: Sequence[Any]) -> OffloadBuffer:
    return next(x.buffer for x in leaves if isinstance(x, OffloadedLeaf))


class WrittenUpdate:
    """The update of one local replica as the optimizer wrote it: one program."""

    names = ("the update",)

    def __init__(self, program: Any):
        self._program = program
        self.compiled: list[Any] = []

    def lower(
        self, params: Sequence[Any], opt_state: PyTree, aux: Sequence[Any], inputs: UpdateInputs
    ) -> list[Any]:
        """See `ReplicaUpdate`."""
        return [self._program.lower(params, opt_state, aux, inputs)]

    def run(
        self, params: Sequence[Any], opt_state: PyTree, aux: Sequence[Any], inputs: UpdateInputs
    ) -> Any:
        """See `ReplicaUpdate`."""
        return *self.compiled[-1](params, opt_state, aux, inputs), None

    def params_at_once(self, sizes: Sequence[int]) -> int:
        """See `ReplicaUpdate`."""
        return sum(sizes)

    def extra_bytes(self) -> int:
        """See `ReplicaUpdate`."""
        return extra_bytes(self.compiled[-1])


class Updates:
    """Runs the updates of all local replicas.

    Args:
        ownership: The units of each replica; None: each runs the optimizer's one program.
        each: The update of each local replica.
    """

    def __init__(
        self,
        reducer: Reducer,
        ownership: Ownership | None,
        each: Sequence[ReplicaUpdate | WrittenUpdate],
    ):
        self._reducer, self._ownership, self.each = reducer, ownership, each
        self._replica_updates = [update for update in each if isinstance(update, ReplicaUpdate)]
        self._squares = () if ownership is None else squares_of_gradient(ownership)
        #: The sums over whole arrays of the first local replica's last update.
        self.sums: Any = None

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the last gradient, if the update computes it; waits for it."""
        return norm_of(np.asarray(self.sums), self._squares) if self._squares else None

    @property
    def text(self) -> str:
        """A text in place of the programs where devices have unlike ones; else empty."""
        ownership = self._ownership
        if ownership is None or (ownership.is_whole and not ownership.parts):
            return ""
        return str(ownership.update.closed)

    def run(self, local: Sequence[tuple[Any, Any, Any, UpdateInputs]]) -> list[Any]:
        """Update: see `ReplicaUpdate.run`, without the sums.

        Args:
            local: For each local replica its parameters, state, other variables and inputs.
        """
        if self._ownership is not None:
            each = self._summed(self._ownership, local)
            parts = zip(self._replica_updates, local, each, strict=True)
            local = [
                (*arrays, update.placed(inputs, sums)) for update, (*arrays, inputs), sums in parts
            ]
            self.sums = each[0]
        pairs = zip(self.each, local, strict=True)
        results = [update.run(*arguments) for update, arguments in pairs]
        if any(update.has_sums for update in self._replica_updates):
            self.sums = results[0][-1]
        return [result[:-1] for result in results]

    def _summed(
        self, ownership: Ownership, local: Sequence[tuple[Any, Any, Any, UpdateInputs]]
    ) -> list[jax.Array]:
        """The sums over whole arrays, the same on all replicas."""
        if not ownership.update.sums or self._replica_updates[0].has_sums:
            return self._no_sums
        wanted, read = ownership.update.read_by_sums(), []
        every = zip(self._replica_updates, local, self._no_sums, strict=True)
        for update, (params, state, _, inputs), zeros in every:
            params_here = [on_device(x) if k in wanted else x for k, x in enumerate(params)]
            arrays = update.read_by_sums(params_here, jax.tree.leaves(state))
            read.append((arrays, update.placed(inputs._replace(words=[]), zeros)))
        compiled = [update.compiled for update in self.each]
        if ownership.is_alone:
            pairs = zip(compiled, read, strict=True)
            return [programs[0](*arguments) for programs, arguments in pairs]
        counted = [ownership.is_counted(r.index) and r.is_led_here for r in self._reducer.local]
        rank = jax.process_index(), jax.process_count()
        exchange = self._reducer.host.exchange
        sums = summed(ownership.update, compiled, read, counted, exchange, rank)
        return [replica.put(sums) for replica in self._reducer.local]

    @functools.cached_property
    def _no_sums(self) -> list[jax.Array]:
        """Zeros in place of sums, on each local replica."""
        assert self._ownership is not None
        zeros = np.zeros(len(self._ownership.update.sums), np.float32)
        return [replica.put(zeros) for replica in self._reducer.local]


def updates_of(
    spec: UpdateSpec,
    reducer: Reducer,
    ownership: Ownership,
    specs: tuple[Sequence[P], Sequence[P], Sequence[P]],
    tier: Tier,
    state: Callable[[int], PyTree],
) -> Updates:
    """The updates of all local replicas, unit by unit.

    Args:
        specs: PartitionSpecs of the trained parameters, of the leaves of the optimizer's state and
            of the other variables.
        tier: The memory of the optimizer's state between updates.
        state: From the number of a local replica to the shapes of its optimizer state.
    """
    params, leaves, aux = specs
    totals = ownership.parts_spec if spec.chunks else reducer.layout.total_specs
    each = []
    for i, replica in enumerate(reducer.local):
        device_spec, sharded = spec, None
        place = replica.only_place if ownership.parts and ownership.is_whole else None
        placed = dataclasses.replace(ownership, place=place)
        if ownership.axes:
            sharded = ShardedUpdate(
                ownership=placed,
                replica=replica,
                params=params,
                leaves=leaves,
                paddings=[*spec.padding.of_trained, *spec.padding.of_opt_state],
            )
            tensors = dataclasses.replace(
                spec.tensors,
                params=tuple(map(sharded.shape, spec.tensors.params, params)),
                aux=tuple(map(sharded.shape, spec.tensors.aux, aux)),
            )
            device_spec = dataclasses.replace(spec, tensors=tensors)
        shapes = jax.tree.leaves(state(i))
        update = ReplicaUpdate(device_spec, placed, replica, shapes, tier, sharded, aux, totals)
        each.append(update)
    return Updates(reducer, ownership, each)
