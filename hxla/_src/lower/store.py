"""The one owner of training's state: every array between steps, saved and restored.

No array is ever whole on a device unless the plan says so; `StateLayout` says how each is sharded.
Replicas that differ get the first one's arrays, one after another. A checkpoint gets the shards of
every process.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.devices import trim_heap
from ..model import loss_scale
from ..weights.weights import Gather, Read
from .bitcast_packing import array_bytes, leaf_checksums
from .compile import first_of_kind, for_each
from .initial_state import State, initial_state
from .islands import Meetings, OuterState
from .offload import (
    DEVICE,
    HOST,
    MakeBuffer,
    OffloadedArrays,
    OffloadedLeaf,
    in_memory,
    is_on_host,
    on_device,
)
from .padding import NOT_PADDED, changing
from .replica import ReplicaArrays
from .state_layout import StateLayout


class Store:
    """The state of training on the local devices.

    Args:
        make_buffer: Makes a replica's buffer of offloaded optimizer state; None: devices keep it.
        params_on_host: Whether each replica's shard of the parameters is offloaded to the host.
        meetings: Of islands, whose momentum is part of the state; None: there are none.
    """

    def __init__(
        self,
        layout: StateLayout,
        make_buffer: MakeBuffer | None = None,
        params_on_host: bool = False,
        meetings: Meetings | None = None,
    ):
        self._meetings, self.outer = meetings, OuterState()
        self.layout, self._reducer, self._zero = layout, layout.reducer, layout.zero
        self._offloaded = OffloadedArrays(layout, make_buffer, params_on_host)
        self.exponents = np.zeros(self._reducer.layout.num_tensors, np.int32)
        self.loss_scale = loss_scale.initial_scale(layout.model.aux)
        self.held: list[ReplicaArrays] = []
        self._checksums: list[Any] = []
        self._changes: dict[tuple[str, int], Callable[[list[Any]], list[Any]]] = {}

    # -- initialisation --------------------------------------------------------------------------

    def initialise(self, gather: Gather, weights: Sequence[Read | None] | None = None) -> None:
        """Place the model's arrays, or make them sharded, and make the optimizer's state.

        Args:
            gather: From a name and a text to the texts of all processes.
            weights: For each array a reader from a file; None: the model's initial value.
        """
        self.held = initial_state(self.layout, self._offloaded, gather, weights)
        trim_heap()
        gather("state in its places", "")  # Gloo waits only half a minute for slower compilers
        self._synchronize()

    @property
    def is_shared(self) -> bool:
        """Whether a part of the state is sharded over replicas."""
        return self._zero is not None

    def put(self, i: int, k: int, x: jax.Array) -> Any:
        """A local replica's shard of an array of `ReplicaArrays.leaves`, offloaded if planned."""
        return self._offloaded.put(i, k, x)

    def close(self) -> None:
        """Free the offloaded state."""
        self._offloaded.close()

    def replace(self, arrays: Mapping[int, np.ndarray]) -> None:
        """Replace arrays by others, whole in host memory, by number in `ReplicaArrays.leaves`."""
        for i, old in enumerate(self.held):
            changed = {k: self.put(i, k, self.layout.put(i, k, x)) for k, x in arrays.items()}
            self.held[i] = self.layout.replica_arrays(
                [changed.get(k, x) for k, x in enumerate(old.leaves())]
            )

    def _synchronize(self) -> None:
        """Give every replica the first one's arrays where bits differ.

        Like replicas of one process need no check: one program made them from the same arrays.
        """
        local = self._reducer.local
        is_one_kind = len(set(first_of_kind(local))) == 1
        if (len(local) == len(self._reducer.replicas) and is_one_kind) or not self.layout.shapes:
            return
        rows = self.checksums()
        different = np.flatnonzero((rows != rows[0]).any(axis=0))
        specs = self.layout.specs.leaves()
        leaves = [arrays.leaves() for arrays in self.held]
        for i in different:
            host = self._reducer.host.of_first(leaves[0][i])
            for arrays, replica in zip(leaves, self._reducer.local, strict=True):
                arrays[i] = replica.put(host, specs[i])
        if different.size:
            self.held = [self.layout.replica_arrays(arrays) for arrays in leaves]

    def hand_on(self) -> None:
        """Broadcast from the first replica the state that each replica updates by itself.

        That is the state besides parameters and sharded arrays. Every process calls this.
        """
        num, leaves = len(self.layout.specs.params), [arrays.leaves() for arrays in self.held]
        places = [k for k in range(num, len(self.layout.shapes)) if not self.layout.is_sharded(k)]
        first = [array_bytes(leaves[0][k]) for k in places]
        host = np.concatenate([*first, np.zeros(0, np.uint8)])
        host = self._reducer.host.exchange_bits(host * self._reducer.replicas[0].is_local)
        parts = np.split(host, np.cumsum([len(x) for x in first]))
        for arrays, replica in zip(leaves, self._reducer.local, strict=True):
            for k, part in zip(places, parts, strict=False):
                arrays[k] = replica.put(part.view(arrays[k].dtype).reshape(arrays[k].shape))
        self.held = [self.layout.replica_arrays(arrays) for arrays in leaves]

    def checksums(self) -> np.ndarray:
        """uint32[replicas, leaves]: checksums of each replica's arrays, known to every process.

        Every process calls this, and blocks on its devices. Arrays that are sharded inside a
        replica are summed over its devices; arrays that are sharded over replicas have a zero.
        """
        rows = np.zeros((len(self._reducer.replicas), len(self.layout.shapes)), np.uint32)
        # Sums inside a replica must not run beside collectives of a step.
        jax.block_until_ready([arrays.leaves() for arrays in self.held])
        replicated = [k for k in range(len(self.layout.shapes)) if not self.layout.is_sharded(k)]
        if not replicated:
            return rows
        leaves = [[x for k, x in enumerate(h.leaves()) if k in replicated] for h in self.held]
        if not self._checksums:
            self._checksums = for_each(
                self._reducer.local, lambda i: jax.jit(leaf_checksums).lower(leaves[i])
            )
        for i, replica in enumerate(self._reducer.local):
            checksums = np.asarray(self._checksums[i](leaves[i]))
            if replica.is_led_here:
                rows[replica.index, replicated] = checksums
        return self._reducer.host.exchange(rows)

    # -- the user's view -------------------------------------------------------------------------

    def state(self, step: int) -> State:
        """The state of the first local replica, without padding.

        Every process calls this if arrays are padded or sharded over replicas.
        """
        arrays = self.layout.replica_arrays(self._with_even_cuts(self._unpadded(0)))
        return State(
            step=step,
            params=self._as_in(self.layout.model.params, arrays.params),
            aux=loss_scale.own_variables(self._as_in(self.layout.model.aux, arrays.aux)),
            opt_state=arrays.opt_state,
            exponents=self.exponents,
            loss_scale=self.loss_scale,
        )

    def gather(self, tree: PyTree) -> PyTree:
        """Whole arrays in host memory, gathered one after another; every process must call this."""
        return jax.tree.map(self._reducer.host.whole, tree)

    def here(self, tree: PyTree) -> PyTree:
        """Arrays of a state on their devices, for a user's programs."""
        return jax.tree.map(on_device, tree)

    def num_bytes(self) -> int:
        """Bytes of one device's shards of the state."""
        arrays = [
            x for x in self.held[0].leaves() if not (isinstance(x, OffloadedLeaf) or is_on_host(x))
        ]
        return self.outer.num_bytes() + sum(x.addressable_shards[0].data.nbytes for x in arrays)

    # -- checkpoints -----------------------------------------------------------------------------

    def saved(self) -> PyTree:
        """The state as global arrays, for a checkpoint."""
        specs = self.layout.even_specs
        columns = zip(*(self._unpadded(i) for i in range(len(self.held))), strict=True)
        arrays: list[Any] = [
            x[0]
            if self._is_alone or self.layout.is_sharded(k)
            else self._reducer.arrays.over_all(x, s)
            for k, (x, s) in enumerate(zip(columns, specs, strict=True))
        ]
        momenta = [] if self._meetings is None else self._meetings.saved(self.outer)
        return self._tree(self._with_even_cuts(arrays), momenta)

    def _with_even_cuts(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays, with those sharded over replicas as global arrays in an even cut."""
        if self._zero is None:
            return list(arrays)
        jax.block_until_ready([arrays.leaves() for arrays in self.held])
        columns = zip(*(arrays.leaves() for arrays in self.held), strict=True)
        return [
            self._even_cut(k, shards) if self.layout.is_sharded(k) else x
            for k, (x, shards) in enumerate(zip(arrays, columns, strict=True))
        ]

    def _even_cut(self, k: int, parts: Sequence[Any]) -> jax.Array:
        """A global array in an even cut, from the replicas' shards; in host memory if offloaded."""
        assert self._zero is not None
        even = self._zero.evenly(k, [on_device(x) for x in parts])
        if not self._offloaded.is_offloaded(k):
            return even
        return jax.block_until_ready(jax.device_put(even, in_memory(even.sharding, HOST)))

    def wanted(self) -> PyTree:
        """Shapes and shardings of the argument of `load`."""
        specs = [
            self._zero.spec(k) if self._zero is not None and self.layout.is_sharded(k) else s
            for k, s in enumerate(self.layout.even_specs)
        ]
        shardings = [
            self._sharding(s, self._offloaded.is_offloaded(k)) for k, s in enumerate(specs)
        ]
        pairs = zip(self.layout.shapes, shardings, strict=True)
        momenta = [] if self._meetings is None else self._meetings.wanted()
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w) for x, w in pairs]
        return self._tree(arrays, momenta)

    def load(self, tree: PyTree) -> None:
        """Replace the state by another in the form of `wanted`."""
        self.exponents = np.asarray(tree["exponents"], np.int32)
        self.loss_scale = loss_scale.restored_scale(tree)
        if self._meetings is not None:
            self._meetings.load(self.outer, tree.get("outer_momentum", ()))
        arrays = jax.tree.leaves((tree["params"], tree["aux"], tree["opt_state"]))
        if self._is_alone and self._zero is None:
            self.held = [self.layout.replica_arrays(self._padded(0, arrays))]
            return
        parts = [
            self._shards_of(k, x)
            if self.layout.is_sharded(k)
            else self._reducer.arrays.local_parts(x, s)
            for k, (x, s) in enumerate(zip(arrays, self.layout.even_specs, strict=True))
        ]
        each = enumerate(zip(*parts, strict=True))
        self.held = [self.layout.replica_arrays(self._padded(i, shards)) for i, shards in each]

    def _shards_of(self, k: int, x: jax.Array) -> list[Any]:
        """The local replicas' shards of an array in the form of `wanted`."""
        assert self._zero is not None
        if not self._offloaded.is_offloaded(k):
            return self._zero.shared(k, x)
        fetched = jax.device_put(x, in_memory(x.sharding, DEVICE))
        return [self.put(i, k, part) for i, part in enumerate(self._zero.shared(k, fetched))]

    def _unpadded(self, i: int) -> list[jax.Array]:
        """The arrays of a local replica, without padding where they are whole."""
        return self._repadded(i, "unpad", self.held[i].leaves(), self.layout.even_specs)

    def _padded(self, i: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays with the padding of a local replica, where they are whole."""
        return self._repadded(i, "pad", list(arrays), self.layout.specs.leaves())

    def _repadded(
        self, i: int, how: Literal["pad", "unpad"], arrays: list[jax.Array], specs: Sequence[P]
    ) -> list[jax.Array]:
        if (how, i) not in self._changes:
            jit, layout = functools.partial(self.layout.jit, i), self.layout
            whole = [
                NOT_PADDED if layout.is_sharded(k) else p for k, p in enumerate(layout.paddings)
            ]
            self._changes[how, i] = changing(whole, how, jit, specs)
        return self._changes[how, i](arrays)

    @property
    def _is_alone(self) -> bool:
        return len(self._reducer.replicas) == 1

    def _sharding(self, spec: P, is_offloaded: bool) -> Any:
        owner = self._reducer.replicas[0] if self._is_alone else self._reducer.arrays
        sharding = owner.sharding(spec)
        return in_memory(sharding, HOST) if is_offloaded else sharding

    @staticmethod
    def _as_in(tree: PyTree, leaves: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def _tree(self, arrays: Sequence[Any], momenta: Sequence[Any]) -> PyTree:
        state = self.layout.replica_arrays(arrays)
        return {
            "params": self._as_in(self.layout.model.params, state.params),
            "aux": self._as_in(self.layout.model.aux, state.aux),
            "opt_state": state.opt_state,
            "exponents": self.exponents,
            **loss_scale.saved_scale(self.loss_scale),
            **({"outer_momentum": list(momenta)} if momenta else {}),
        }

    def rescale(self, state: loss_scale.ScaleState) -> None:
        """Replace the state of the loss scaling, and place the scale for programs to read."""
        if self.loss_scale is None or state.exponent != self.loss_scale.exponent:
            for arrays, replica in zip(self.held, self._reducer.local, strict=True):
                arrays.aux[-1] = replica.put(np.asarray(state.exponent, np.int32))
        self.loss_scale = state
