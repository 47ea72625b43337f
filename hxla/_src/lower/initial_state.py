"""The state of training as a value, and its first arrays.

They are made as they are sharded, or placed from the host one by one.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.program_parts import ResultGroup
from ..model.loss_scale import ScaleState
from ..model.optimizer import Optimizer
from ..weights.weights import Gather, Read, filled
from .bitcast_packing import array_bytes
from .compile import for_each
from .offload import OffloadedArrays, on_device
from .padding import Padding
from .replica import Replica, ReplicaArrays
from .state_layout import StateLayout
from .units import most_at_once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state that a training step reads and writes, as it is sharded.

    The arrays are on the devices of this process's first replica, and the next step overwrites
    them: copy those that you keep. Where a replica spans several processes (a pipeline, rules),
    each process has its shards only; `Session.gather` gives whole arrays. Where shards have unlike
    sizes, padding is removed when the state is read: then every process must read it. State that is
    offloaded to the host or a disk is returned in host memory.

    Attributes:
        step: The number of updates done.
        params: The parameters in the user's own tree.
        aux: The other variables (BatchNorm statistics) in the user's own tree.
        opt_state: The state of the optimizer, as optax makes it. Random keys, here and in `aux`,
            are given by their key data.
        loss_scale: The loss scale and its number of good steps; None: the loss is not scaled.
        exponents: int32[T], the scales of the exact sums of T tensors, as powers of two.
    """

    step: int
    params: PyTree
    aux: PyTree
    opt_state: PyTree
    exponents: np.ndarray
    loss_scale: ScaleState | None = dataclasses.field(default=None, metadata={"static": True})


def opt_state_values(
    optimizer: Optimizer, params: PyTree, each: Sequence[Any], other: Any
) -> PyTree:
    """A value for each leaf of the optimizer's state, from the parameter of its path and shape.

    The path of a leaf ends with the path of its parameter; of several, the longest one counts.

    Args:
        params: Arrays or shapes.
        each: The value of each parameter, such as its PartitionSpec or its padding.
        other: The value of a leaf without a parameter.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    by_path = {path: (x.shape, value) for (path, x), value in zip(leaves, each, strict=True)}

    def value_of(path: tuple[Any, ...], x: Any) -> Any:
        ends = (path[i:] for i in range(len(path) + 1))
        shape, value = next((by_path[end] for end in ends if end in by_path), (None, other))
        return value if x.shape == shape else other

    return jax.tree_util.tree_map_with_path(value_of, optimizer.state_shapes(params))


def initial_state(
    layout: StateLayout,
    offloaded: OffloadedArrays,
    gather: Gather,
    weights: Sequence[Read | None] | None = None,
) -> list[ReplicaArrays]:
    """The first arrays of each local replica, which differ where devices of unlike kinds made them.

    Args:
        offloaded: Takes the shards that are offloaded.
        gather: From a name and a text to the texts of all processes.
        weights: For each array a reader from a file; None: the model's initial value.
    """
    specs, local = layout.shard_specs[: layout.first_state], layout.reducer.local
    readers = list(weights) if weights is not None else [None] * len(specs)
    if None not in readers:
        placed: list[list[Any]] = [[None] * len(specs) for _ in local]
    elif layout.model.initialise is not None:
        placed = _made(layout, offloaded, readers)
    else:
        placed = _from_host(layout, offloaded, gather, readers)
    for i, (replica, arrays) in enumerate(zip(local, placed, strict=True)):
        for k, (spec, read) in enumerate(zip(specs, readers, strict=True)):
            if read is not None:
                arrays[k] = offloaded.put(i, k, _read(layout, k, replica, spec, read))
    states = _opt_states(layout, offloaded, placed)
    pairs = zip(placed, states, strict=True)
    return [layout.replica_arrays([*arrays, *state]) for arrays, state in pairs]


def _made(
    layout: StateLayout, offloaded: OffloadedArrays, readers: Sequence[Read | None]
) -> list[list[Any]]:
    """The model's initial arrays, each made as it is sharded; None where weights are read."""
    specs, local = layout.shard_specs[: layout.first_state], layout.reducer.local
    paddings = layout.paddings
    placed: list[list[Any]] = [[None] * len(specs) for _ in local]
    inits: dict[Any, list[Any]] = {}
    for group in layout.model.made_apart([k for k, read in enumerate(readers) if read is None]):

        def lowered(i: int, group: ResultGroup = group) -> Any:
            def run(first: jax.Array, operands: Sequence[Any]) -> list[jax.Array]:
                made = zip(group.places, group.run(operands), strict=True)
                return [layout.shard(i, k, x, first) for k, x in made]

            group_specs = [specs[k] for k in group.places]
            return layout.jit(i, run, group_specs).lower(np.int32(0), group.operands)

        owners = [None if layout.zero is None else layout.zero.owner(k) for k in group.places]
        each = zip(group.places, owners, strict=True)
        like = group.like, str([(specs[k], paddings[k], owner) for k, owner in each])
        if like not in inits:
            inits[like] = for_each(local, lowered, layout.program_key)
        for i, init in enumerate(inits[like]):
            # One group after another: its whole arrays are freed before the next begins.
            new = jax.block_until_ready(init(layout.first_granule(i), group.operands))
            for k, x in zip(group.places, new, strict=True):
                placed[i][k] = offloaded.put(i, k, x)
    return placed


def _from_host(
    layout: StateLayout,
    offloaded: OffloadedArrays,
    gather: Gather,
    readers: Sequence[Read | None],
) -> list[list[Any]]:
    """The user's arrays, placed one after another; all processes use those of process 0."""
    leaves = jax.tree.leaves(layout.model.arrays)
    initial = [None if read else x for x, read in zip(leaves, readers, strict=True)]
    digests = " ".join("-" if x is None else f"{zlib.crc32(array_bytes(x)):08x}" for x in initial)
    by_process = [text.split() for text in gather("initial arrays", digests)]
    placed: list[list[Any]] = [[] for _ in layout.reducer.local]
    for k, x in enumerate(initial):
        if x is None:
            for arrays in placed:
                arrays.append(None)
            continue
        # A real copy: steps donate their buffers, and the user's arrays must stay alive.
        host = np.array(x, copy=True, order="C")
        if any(row[k] != by_process[0][k] for row in by_process):
            host = np.zeros_like(host) if jax.process_index() else host
            host = layout.reducer.host.exchange_bits(host)
        for i, arrays in enumerate(placed):
            arrays.append(offloaded.put(i, k, layout.put(i, k, host)))
    return placed


def _read(layout: StateLayout, k: int, replica: Replica, spec: P, read: Read) -> jax.Array:
    """An array from a file, sharded on a replica."""
    plain = filled(layout.shapes[k].shape, replica.sharding(layout.even_specs[k]), read)
    padding = layout.paddings[k]
    zero, index = layout.zero, replica.index
    if zero is not None and layout.is_sharded(k):
        if not replica.axes:
            return replica.put(zero.take_on_host(k, np.asarray(plain), index), spec)
        sharding = replica.sharding(spec)
        take = jax.jit(
            lambda x, first: zero.take(k, padding.pad(x), index, first), out_shardings=sharding
        )
        return take(plain, np.int32(zero.ownership.first(index)))  # type: ignore[no-any-return]
    if padding.is_none:
        return plain
    return jax.jit(padding.pad, out_shardings=replica.sharding(spec))(plain)


# -- the optimizer's state -----------------------------------------------------------------------


def _opt_states(
    layout: StateLayout,
    offloaded: OffloadedArrays,
    replica_arrays: Sequence[Sequence[jax.Array]],
) -> list[list[Any]]:
    """The leaves of the initial optimizer state of each local replica.

    Sharded parameters are gathered if the state depends on their values.
    """
    model, host = layout.model, layout.reducer.host
    places = [k for k, trained in enumerate(model.is_trained) if trained]
    params: list[list[Any]] = [[arrays[k] for k in places] for arrays in replica_arrays]
    shared = [t for t, k in enumerate(places) if layout.is_sharded(k)]
    read = layout.optimizer.reads(model.trained) if shared else ()
    for t in shared:
        whole: Any = None
        if layout.zero is not None and t in read:
            parts = [on_device(arrays[places[t]]) for arrays in replica_arrays]
            whole = host.whole(layout.zero.evenly(places[t], parts))
        for arrays, replica in zip(params, layout.reducer.local, strict=True):
            spec, padding = layout.specs.params[places[t]], layout.paddings[places[t]]
            arrays[t] = None if whole is None else replica.put(padding.pad(whole), spec)
    initial = InitialOptState(
        layout.optimizer,
        jax.tree.structure(model.trained),
        [layout.shapes[k] for k in places],
        layout.shapes[layout.first_state :],
        layout.specs.padding.of_trained,
    )
    start, specs = layout.first_state, layout.shard_specs[layout.first_state :]

    def lowered(chosen: Sequence[int], i: int) -> Any:
        def init(arrays: Sequence[Any], first: jax.Array) -> list[jax.Array]:
            leaves = initial.leaves(arrays)
            return [layout.shard(i, start + k, leaves[k], first) for k in chosen]

        chosen_specs = [specs[k] for k in chosen]
        return layout.jit(i, init, chosen_specs).lower(params[i], np.int32(0))

    states: list[list[Any]] = [[None] * len(specs) for _ in replica_arrays]
    for chosen in initial.groups(bool(offloaded.buffers)):
        lowered_chosen: Callable[[int], Any] = functools.partial(lowered, chosen)
        inits = for_each(layout.reducer.local, lowered_chosen, layout.program_key)
        for i, init in enumerate(inits):
            new = init(params[i], layout.first_granule(i))
            for k, x in zip(chosen, new, strict=True):
                states[i][k] = offloaded.put(i, start + k, x)
    return states


class InitialOptState:
    """Makes the optimizer's initial state.

    Args:
        tree: Structure of the trained parameters.
        state: Shapes of the leaves of the state.
        paddings: Padding of each trained parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tree: Any,
        params: Sequence[Any],
        state: Sequence[Any],
        paddings: Sequence[Padding],
    ):
        self._optimizer, self._tree, self._params = optimizer, tree, list(params)
        self._sizes = [x.size * x.dtype.itemsize for x in state]
        self._paddings = list(paddings)

    def leaves(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """All leaves of the state, without padding.

        Args:
            arrays: The parameters, padded; None where only a shape is needed.
        """
        plain = [
            jax.numpy.zeros(s.shape, s.dtype) if x is None else padding.unpad(x)
            for x, s, padding in zip(arrays, self._params, self._paddings, strict=True)
        ]
        return jax.tree.leaves(self._optimizer.init(jax.tree.unflatten(self._tree, plain)))

    def groups(self, in_groups: bool) -> list[list[int]]:
        """Groups of leaves, each of which one program makes.

        Args:
            in_groups: Whether leaves are offloaded, so that few may be on a device at once.
        """
        if not self._sizes:
            return []
        if not in_groups:
            return [[*range(len(self._sizes))]]
        groups: list[list[int]] = [[]]
        room = most = most_at_once(sum(self._sizes))
        for k, size in enumerate(self._sizes):
            if size > room and groups[-1]:
                groups.append([])
                room = most
            groups[-1].append(k)
            room -= size
        return groups
