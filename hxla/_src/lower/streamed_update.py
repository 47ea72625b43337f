"""The update of a copy whose optimizer state waits elsewhere: a group of it after another.

While a group is updated, the state of the next one comes to the device and the new state of the one
before goes back: one program does all three, so that a GPU copies both ways while it computes. So
no more than three groups are ever on the device.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..plan.ownership import Ownership
from .chunks import Chunks
from .compile import update_options
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
from .sharded_update import ShardedUpdate
from .update import UpdateInputs, UpdateSpec, new_aux
from .update_groups import Group, GroupUpdate, UpdateGroups, update_groups
from .zero_update import gathered_dtype, own_sums


class StreamedUpdate:
    """Runs the update of one local copy in groups.

    Args:
        spec: What the update is made from.
        chunks: For each bucket of the sums.
        state: Shapes of the leaves of the optimizer's state as the copy has them.
        carries: Whether the programs bring and take state themselves, to and from the host.
        on: The devices of the copy, if there are several; what the update is made from has the
            shapes of their parts.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        own: Ownership,
        chunks: Sequence[Chunks],
        replica: Replica,
        state: Sequence[Any],
        carries: bool,
        on: ShardedUpdate | None = None,
    ):
        self._on, self._num_inner = on, own.num_inner
        self._spec, self._own, self._chunks, self._replica = spec, own, chunks, replica
        self._member = own.member(replica.index)
        self.groups: UpdateGroups = update_groups(own, self._member, state)
        domains = own.update.domain_of[own.num_params : own.num_arrays]
        self._common = tuple(k for k, d in enumerate(domains) if d is None)
        self._away = self.groups.away
        self._carries = carries
        self._run = GroupUpdate(
            spec=spec, own=own, chunks=chunks, copy=self._member, common=self._common, on=on
        )
        self._options = update_options(replica.devices[0].platform, spec.contribution.form)
        self._compiled: list[Any] = []

    @property
    def num_programs(self) -> int:
        """One for each group, and the last."""
        return len(self.groups.groups) + 1

    # -- before compilation ----------------------------------------------------------------------

    def lower(
        self, params: Sequence[Any], opt_state: PyTree, aux: Sequence[Any], given: UpdateInputs
    ) -> list[Any]:
        """The programs before compilation, in order.

        Args:
            params: Shapes of the trained parameters, as they lie.
            given: Of what else is read.
        """
        leaves = jax.tree.leaves(opt_state)
        common = [leaves[k] for k in self._common]
        lowered = []
        groups = self.groups.groups
        for g, group in enumerate(groups):
            moved: tuple[Any, Any] = [], []
            if self._carries:
                near = groups[g + 1 : g + 2], groups[max(g - 1, 0) : g]
                moved = self._like(near[0], HOST), self._like(near[1], DEVICE)
            own = {i: params[i] for unit in group for i in unit.params}
            [state] = [self._like((group,), DEVICE)]
            program = self._group_program(group)
            lowered.append(program.lower(own, state, common, given._replace(words=[]), *moved))
        rest = {i: params[i] for unit in self.groups.rest for i in unit.params}
        made = {i: self._made_shapes(i, params[i].dtype) for i in self._streamed_params}
        lowered.append(self._last_program().lower(rest, made, common, aux, given))
        return lowered

    def _like(self, groups: Sequence[Group], kind: str) -> list[list[Any]]:
        """Shapes of the state of a group, if there is one."""
        sharding = in_memory(self._replica.sharding(self.groups.lie), kind)

        def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape if self._num_inner == 1 else (math.prod(shape) * self._num_inner,)

        return [
            [
                jax.ShapeDtypeStruct(whole(shape), dtype, sharding=sharding)
                for shape, dtype in zip(unit.shapes, unit.dtypes, strict=True)
            ]
            for group in groups
            for unit in group
        ]

    @property
    def _streamed_params(self) -> list[int]:
        """Those of groups."""
        return sorted({i for group in self.groups.groups for u in group for i in u.params})

    def _made_shapes(self, i: int, dtype: Any) -> list[Any]:
        """What groups made of a parameter, where it is sent."""
        if not self._own.sends_params:
            return []
        size = self._spec.tensors.params[i].size
        units = [u for group in self.groups.groups for u in group if i in u.params]
        sizes = [size if u.stop is None else u.stop - u.start for u in units]
        num, lie = self._num_inner, self.groups.lie
        return [self._replica.like(jax.ShapeDtypeStruct((n * num,), dtype), lie) for n in sizes]

    def _group_program(self, group: Group) -> Any:
        device = in_memory(self._replica.sharding(self.groups.lie), DEVICE)
        host = in_memory(device, HOST)

        def update(params: Any, state: Any, common: Any, given: UpdateInputs) -> Any:
            return self._run.run(group, params, state, common, given)[:2]

        if self._on is not None:
            update = self._on.group(update, {i for unit in group for i in unit.params})

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

        return jax.jit(
            hxla_update_group,
            donate_argnums=(1,) if self._own.sends_params else (0, 1),
            out_shardings=(device, device, device, host),
            compiler_options=self._options,
        )

    def _last_program(self) -> Any:
        spec, own, copy = self._spec, self._own, self._member
        num, floats = own.num_params, spec.tensors.floats
        dtype = gathered_dtype(spec.tensors.params)

        def hxla_update_rest(
            params: dict[int, jax.Array],
            made: dict[int, list[jax.Array]],
            common: list[jax.Array],
            aux: list[jax.Array],
            given: UpdateInputs,
        ) -> Any:
            group = self.groups.rest
            new, _, common = self._run.run(group, params, [[] for _ in group], common, given)
            sent: Any = new
            if own.sends_params:
                every = {i: jnp.concatenate(parts) for i, parts in made.items() if parts} | new
                none = jnp.zeros(1, dtype)
                sent = [
                    chunk.chunk([every.get(i, none).astype(dtype) for i in chunk.tensors], copy)
                    for chunk in self._chunks
                    if chunk.tensors
                ]
            others = range(num, len(floats))
            values = own_sums(spec, self._chunks, copy, given, others)
            changed = [values[i].reshape(floats[i].shape) for i in others]
            return sent, common, new_aux(spec, aux, changed, given.words), given.weight + 0

        run: Any = hxla_update_rest
        if self._on is not None:
            run = self._on.rest(run, {i for unit in self.groups.rest for i in unit.params})
        return jax.jit(
            run,
            # A copy that owns nothing makes zeros, and makes them where it is.
            out_shardings=self._replica.sharding(P()) if self._on is None else None,
            donate_argnums=(2, 3) if own.sends_params else (0, 2, 3),
            compiler_options=self._options,
        )

    # -- run -------------------------------------------------------------------------------------

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        self._compiled = list(compiled)

    def run(
        self,
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        given: UpdateInputs,
    ) -> Any:
        """Update; the results are those of `own_update_program`.

        Args:
            params: The trained parameters; those that wait on the host go back there.
            opt_state: The optimizer's state, leaves of which are `OffloadedLeaf`.
            given: What else is read.
        """
        leaves, treedef = jax.tree.flatten(opt_state)
        common, params = [leaves[k] for k in self._common], list(params)
        made: dict[int, list[jax.Array]] = {i: [] for i in self._streamed_params}
        groups = self.groups.groups
        away, last = list(map(is_on_host, params)), self._last_groups
        if groups:
            shelf = _shelf_of(leaves)
            shelf.begin()
            brought: Any = []
            going: Any = []
            for g, group in enumerate(groups):
                state = shelf.arrived(g, brought)
                for near in groups[g : g + 2]:  # the next one's come while this one is updated
                    for i in (i for unit in near for i in unit.params):
                        params[i] = on_device(params[i])
                own = {i: params[i] for unit in group for i in unit.params}
                moved = (shelf.coming(g + 1), going) if self._carries else ([], [])
                new, state, brought, gone = self._compiled[g](
                    own, state, common, given._replace(words=[]), *moved
                )
                shelf.gone(g - 1, gone)
                going = shelf.going(g, state)
                for i, x in new.items():
                    if self._own.sends_params:
                        made[i].append(x)
                    else:
                        params[i] = on_host(x) if away[i] and last[i] == g else x
            shelf.end()
        rest = {i: on_device(params[i]) for unit in self.groups.rest for i in unit.params}
        sent, common, aux, tick = self._compiled[-1](rest, made, common, aux, given)
        for k, x in zip(self._common, common, strict=True):
            leaves[k] = x
        if not self._own.sends_params:
            for i, x in sent.items():
                params[i] = on_host(x) if away[i] else x
            sent = params
        return sent, jax.tree.unflatten(treedef, leaves), aux, tick

    @functools.cached_property
    def _last_groups(self) -> dict[int, int]:
        """Of each parameter of groups the last one that has some of it."""
        return {i: g for g, group in enumerate(self.groups.groups) for u in group for i in u.params}

    def params_at_once(self, sizes: Sequence[int]) -> int:
        """Bytes of parameters that wait on the host, as far as they are here at once.

        Args:
            sizes: Of each parameter, of what the copy has.
        """
        each = [{i for u in group for i in u.params} for group in self.groups.groups]
        near = (set().union(*each[max(g - 1, 0) : g + 2]) for g in range(len(each)))
        rest = {i for unit in self.groups.rest for i in unit.params}
        return max(sum(sizes[i] for i in own) for own in (*near, rest))

    def extra_bytes(self) -> int:
        """Bytes that one device needs beside parameters, totals and what all copies have."""
        stats = [program.memory_analysis() for program in self._compiled]
        temporary = max((int(s.temp_size_in_bytes) for s in stats if s is not None), default=0)
        sent = self._own.sends_params * sum(
            x.size // self._num_inner * np.dtype(x.dtype).itemsize
            for i in self._streamed_params
            for x in self._made_shapes(i, self._spec.tensors.params[i].dtype)
        )
        return temporary + self.groups.bytes_at_once + 2 * sent


def _shelf_of(leaves: Sequence[Any]) -> OffloadBuffer:
    return next(x.shelf for x in leaves if isinstance(x, OffloadedLeaf))
