"""The one owner of training's state: how every array is sharded, initialised and restored.

No array is ever whole on a device unless the plan says so. Arrays are made as they are sharded, or
placed one after another from the host. Replicas that differ get the first one's arrays, one after
another. A checkpoint gets the shards of every process.
"""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.devices import trim_heap
from ..jax.program_parts import ResultGroup
from ..model import loss_scale
from ..model.functional import Functional, leaf_names
from ..model.optimizer import Optimizer
from ..plan.parts import SumsForm
from ..weights.weights import Gather, Read, filled
from .bitcast_packing import array_bytes, leaf_checksums
from .compile import first_of_kind, for_each, update_options
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
from .padding import changing, even_spec
from .replica import Replica, ReplicaArrays, StateSpecs
from .state import InitialOptState, State
from .sum import Reducer
from .zero_state import ZeroState


class Store:
    """The state of training on the local devices.

    Args:
        model: The model as pure functions, with its arrays or their shapes.
        zero: The state that is sharded over replicas; None: every replica has all of it.
        make_buffer: Makes a replica's buffer of offloaded optimizer state; None: devices keep it.
        params_on_host: Whether each replica's shard of the parameters is offloaded to the host.
    """

    def __init__(
        self,
        model: Functional,
        optimizer: Optimizer,
        reducer: Reducer,
        specs: StateSpecs,
        sums: SumsForm,
        zero: ZeroState | None = None,
        make_buffer: MakeBuffer | None = None,
        params_on_host: bool = False,
    ):
        self._model, self._optimizer, self._reducer = model, optimizer, reducer
        self._specs, self._zero, self.is_shared = specs, zero, zero is not None
        # At most one sharded array may be whole at a time.
        self._options = update_options(reducer.local[0].devices[0].platform, sums)
        self._param_def = jax.tree.structure(model.params)
        self._aux_def = jax.tree.structure(model.aux)
        self._is_trained = model.is_trained
        self._trained_def = jax.tree.structure(model.trained)
        self._opt_shapes = optimizer.state_shapes(model.trained)
        self._shapes = [
            *jax.tree.leaves(model.params),
            *jax.tree.leaves(model.aux),
            *jax.tree.leaves(self._opt_shapes),
        ]
        self._first_leaf = len(specs.params) + len(specs.aux)  # of the optimizer's state
        #: PartitionSpec of each replica's shard of each leaf.
        self._shard_specs = specs.leaves() if zero is None else zero.shard_specs
        places = range(self._first_leaf, len(self._shapes))
        self._offloaded = OffloadedArrays(
            zero, reducer.local, len(specs.params), places, make_buffer, params_on_host
        )
        self.exponents = np.zeros(reducer.num_tensors, np.int32)
        self.loss_scale = loss_scale.initial_scale(model.aux)
        self.held: list[ReplicaArrays] = []
        self._checksums: list[Any] = []
        self._changes: dict[tuple[str, int], Callable[[list[Any]], list[Any]]] = {}
        sizes = dict(reducer.replicas[0].axes)
        each = zip(self._shapes, specs.leaves(), specs.padding.leaves(), strict=True)
        #: PartitionSpecs of arrays without their padding.
        self._even = [even_spec(x.shape, spec, padding, sizes) for x, spec, padding in each]

    # -- initialisation --------------------------------------------------------------------------

    def initialise(self, gather: Gather, weights: Sequence[Read | None] | None = None) -> None:
        """Place the model's arrays, or make them sharded, and make the optimizer's state.

        Args:
            gather: From a name and a text to the texts of all processes.
            weights: For each array a reader from a file; None: the model's initial value.
        """
        specs = self._shard_specs[: self._first_leaf]
        readers = list(weights) if weights is not None else [None] * len(specs)
        if None not in readers:
            placed: list[list[Any]] = [[None] * len(specs) for _ in self._reducer.local]
        elif self._model.initialise is not None:
            placed = self._make_model(readers)
        else:
            placed = self._place_model(gather, readers)
        for i, (replica, arrays) in enumerate(zip(self._reducer.local, placed, strict=True)):
            for k, (spec, read) in enumerate(zip(specs, readers, strict=True)):
                if read is not None:
                    arrays[k] = self.put(i, k, self._read_weights(k, replica, spec, read))
        num = len(self._specs.params)
        self.held = [
            ReplicaArrays(params=arrays[:num], aux=arrays[num:], opt_state=state)
            for arrays, state in zip(placed, self._initial_opt_states(placed), strict=True)
        ]
        trim_heap()
        gather("state in its places", "")  # Gloo waits only half a minute for slower compilers
        self._synchronize()

    def _initial_opt_states(self, replica_arrays: Sequence[Sequence[jax.Array]]) -> list[PyTree]:
        """The initial optimizer state of each local replica.

        Sharded parameters are gathered if the state depends on their values.
        """
        places = [k for k, trained in enumerate(self._is_trained) if trained]
        params: list[list[Any]] = [[arrays[k] for k in places] for arrays in replica_arrays]
        shared = [t for t, k in enumerate(places) if self._is_sharded(k)]
        read = self._optimizer.reads(self._model.trained) if shared else ()
        for t in shared:
            whole: Any = None
            if self._zero is not None and t in read:
                parts = [on_device(arrays[places[t]]) for arrays in replica_arrays]
                whole = self._zero.evenly(places[t], parts)
                whole = self._reducer.host.whole(whole)
            for arrays, replica in zip(params, self._reducer.local, strict=True):
                spec = self._specs.params[places[t]]
                arrays[t] = None if whole is None else replica.put(whole, spec)
        initial = InitialOptState(
            self._optimizer,
            self._trained_def,
            [self._shapes[k] for k in places],
            self._shapes[self._first_leaf :],
            self._specs.padding,
        )
        specs = self._shard_specs[self._first_leaf :]

        def lowered(chosen: Sequence[int], i: int) -> Any:
            index = self._reducer.local[i].index

            def init(arrays: Sequence[Any], first: jax.Array) -> list[jax.Array]:
                leaves = initial.leaves(arrays)
                return [self._shard(self._first_leaf + k, leaves[k], index, first) for k in chosen]

            chosen_specs = [specs[k] for k in chosen]
            return self._jit(i, init, chosen_specs).lower(params[i], np.int32(0))

        states: list[list[Any]] = [[None] * len(specs) for _ in replica_arrays]
        for chosen in initial.groups(bool(self._offloaded.buffers)):
            inits = for_each(self._reducer.local, functools.partial(lowered, chosen), self._kind)
            for i, init in enumerate(inits):
                new = init(params[i], self._first(i))
                for k, x in zip(chosen, new, strict=True):
                    states[i][k] = self.put(i, self._first_leaf + k, x)
        treedef = jax.tree.structure(self._opt_shapes)
        return [jax.tree.unflatten(treedef, state) for state in states]

    def put(self, i: int, k: int, x: jax.Array) -> Any:
        """A local replica's shard of an array of `ReplicaArrays.leaves`, offloaded if planned."""
        return self._offloaded.put(i, k, x)

    def close(self) -> None:
        """Free the offloaded state."""
        self._offloaded.close()

    @property
    def _kind(self) -> Any:
        """The key of programs, besides the kinds of devices."""
        return None if self._zero is None else self._zero.ownership.program_key

    def _first(self, i: int) -> np.int32:
        """The first granule of a local replica."""
        if self._zero is None:
            return np.int32(0)
        return np.int32(self._zero.ownership.first(self._reducer.local[i].index))

    def _shard(self, k: int, x: jax.Array, index: int, first: Any) -> jax.Array:
        """A replica's shard of a whole array of `ReplicaArrays.leaves`."""
        return x if self._zero is None else self._zero.take(k, x, index, first)

    def _owner(self, k: int) -> Any:
        """How an array of `ReplicaArrays.leaves` is sharded over replicas."""
        return None if self._zero is None else self._zero.owner(k)

    def _read_weights(self, k: int, replica: Replica, spec: P, read: Read) -> jax.Array:
        """An array from a file, sharded on a replica."""
        shape, padding = self._shapes[k].shape, self._specs.padding.leaves()[k]
        plain = filled(shape, replica.sharding(self._even[k]), read)
        if self._zero is not None and self._is_sharded(k):
            zero, index = self._zero, replica.index
            if not replica.axes:
                return replica.put(zero.take_on_host(k, np.asarray(plain), index), spec)
            sharding = replica.sharding(spec)
            take = jax.jit(lambda x, first: zero.take(k, x, index, first), out_shardings=sharding)
            return take(plain, np.int32(zero.ownership.first(index)))  # type: ignore[no-any-return]
        if padding.is_none:
            return plain
        return jax.jit(padding.pad, out_shardings=replica.sharding(spec))(plain)

    def _jit(self, i: int, function: Callable[..., Any], specs: PyTree) -> Any:
        """`jax.jit` of a function whose results have PartitionSpecs on a local replica."""
        replica, is_spec = self._reducer.local[i], lambda s: isinstance(s, P)
        shardings = jax.tree.map(replica.sharding, specs, is_leaf=is_spec)
        return jax.jit(function, out_shardings=shardings, compiler_options=self._options)

    def _make_model(self, readers: Sequence[Read | None]) -> list[list[Any]]:
        """The model's initial arrays, each made as it is sharded; None where weights are read."""
        specs = self._shard_specs[: self._first_leaf]
        paddings = self._specs.padding.leaves()
        placed: list[list[Any]] = [[None] * len(specs) for _ in self._reducer.local]
        inits: dict[Any, list[Any]] = {}
        for group in self._model.made_apart([k for k, read in enumerate(readers) if read is None]):

            def lowered(i: int, group: ResultGroup = group) -> Any:
                index = self._reducer.local[i].index

                def run(first: jax.Array, operands: Sequence[Any]) -> list[jax.Array]:
                    made = zip(group.places, group.run(operands), strict=True)
                    return [self._shard(k, paddings[k].pad(x), index, first) for k, x in made]

                group_specs = [specs[k] for k in group.places]
                return self._jit(i, run, group_specs).lower(np.int32(0), group.operands)

            like = group.like, str([(specs[k], paddings[k], self._owner(k)) for k in group.places])
            if like not in inits:
                inits[like] = for_each(self._reducer.local, lowered, self._kind)
            for i, init in enumerate(inits[like]):
                # One group after another: its whole arrays are freed before the next begins.
                new = jax.block_until_ready(init(self._first(i), group.operands))
                for k, x in zip(group.places, new, strict=True):
                    placed[i][k] = self.put(i, k, x)
        return placed

    def _place_model(self, gather: Gather, readers: Sequence[Read | None]) -> list[list[Any]]:
        """The user's arrays, placed one after another; all processes use those of process 0."""
        leaves = jax.tree.leaves(self._model.arrays)
        initial = [None if read else x for x, read in zip(leaves, readers, strict=True)]
        digests = " ".join(
            "-" if x is None else f"{zlib.crc32(array_bytes(x)):08x}" for x in initial
        )
        by_process = [text.split() for text in gather("initial arrays", digests)]
        placed: list[list[Any]] = [[] for _ in self._reducer.local]
        for i, x in enumerate(initial):
            if x is None:
                for arrays in placed:
                    arrays.append(None)
                continue
            # A real copy: steps donate their buffers, and the user's arrays must stay alive.
            host = np.array(x, copy=True, order="C")
            if any(row[i] != by_process[0][i] for row in by_process):
                host = self._from_first_process(host)
            for n, arrays in enumerate(placed):
                arrays.append(self._put_shard(n, i, host))
        return placed

    def _put_shard(self, i: int, k: int, host: np.ndarray) -> Any:
        """Place a local replica's shard of an array that is whole in host memory."""
        shard, replica = self._specs.padding.leaves()[k].pad(host), self._reducer.local[i]
        if self._zero is not None:
            shard = self._zero.take_on_host(k, shard, replica.index)
        return self.put(i, k, replica.put(shard, self._shard_specs[k]))

    def replace(self, arrays: Mapping[int, np.ndarray]) -> None:
        """Replace arrays by others, whole in host memory, by number in `ReplicaArrays.leaves`."""
        for i, old in enumerate(self.held):
            changed = {k: self._put_shard(i, k, x) for k, x in arrays.items()}
            self.held[i] = self._replica_arrays(
                [changed.get(k, x) for k, x in enumerate(old.leaves())]
            )

    def _from_first_process(self, host: np.ndarray) -> np.ndarray:
        if jax.process_index():
            host = np.zeros_like(host)
        return self._reducer.host.exchange_bits(host)

    def _synchronize(self) -> None:
        """Give every replica the first one's arrays where bits differ.

        Like replicas of one process need no check: one program made them from the same arrays.
        """
        local = self._reducer.local
        is_one_kind = len(set(first_of_kind(local))) == 1
        if (len(local) == len(self._reducer.replicas) and is_one_kind) or not self._shapes:
            return
        rows = self.checksums()
        different = np.flatnonzero((rows != rows[0]).any(axis=0))
        specs = self._specs.leaves()
        leaves = [arrays.leaves() for arrays in self.held]
        for i in different:
            host = self._reducer.host.of_first(leaves[0][i])
            for arrays, replica in zip(leaves, self._reducer.local, strict=True):
                arrays[i] = replica.put(host, specs[i])
        if different.size:
            self.held = [self._replica_arrays(arrays) for arrays in leaves]

    def hand_on(self) -> None:
        """Broadcast from the first replica the state that each replica updates by itself.

        That is the state besides parameters and sharded arrays. Every process calls this.
        """
        num, leaves = len(self._specs.params), [arrays.leaves() for arrays in self.held]
        places = [k for k in range(num, len(self._shapes)) if not self._is_sharded(k)]
        first = [array_bytes(leaves[0][k]) for k in places]
        host = np.concatenate([*first, np.zeros(0, np.uint8)])
        host = self._reducer.host.exchange_bits(host * self._reducer.replicas[0].is_local)
        parts = np.split(host, np.cumsum([len(x) for x in first]))
        for arrays, replica in zip(leaves, self._reducer.local, strict=True):
            for k, part in zip(places, parts, strict=False):
                arrays[k] = replica.put(part.view(arrays[k].dtype).reshape(arrays[k].shape))
        self.held = [self._replica_arrays(arrays) for arrays in leaves]

    def checksums(self) -> np.ndarray:
        """uint32[replicas, leaves]: checksums of each replica's arrays, known to every process.

        Every process calls this, and blocks on its devices. Arrays that are sharded inside a
        replica are summed over its devices; arrays that are sharded over replicas have a zero.
        """
        rows = np.zeros((len(self._reducer.replicas), len(self._shapes)), np.uint32)
        # Sums inside a replica must not run beside collectives of a step.
        jax.block_until_ready([arrays.leaves() for arrays in self.held])
        replicated = [k for k in range(len(self._shapes)) if not self._is_sharded(k)]
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

    def _is_sharded(self, k: int) -> bool:
        """Whether an array of `ReplicaArrays.leaves` is sharded over replicas."""
        return self._zero is not None and not self._zero.is_common[k]

    def leaf_names(self) -> tuple[str, ...]:
        """Names of the arrays of `ReplicaArrays.leaves`, for messages."""
        names = leaf_names(self._model.params), leaf_names(self._model.aux)
        of_optimizer = (f"optimizer state {n}" for n in leaf_names(self._opt_shapes))
        return *names[0], *names[1], *of_optimizer

    def _replica_arrays(self, leaves: Sequence[jax.Array]) -> ReplicaArrays:
        num, end = len(self._specs.params), len(self._specs.params) + len(self._specs.aux)
        opt_state = jax.tree.unflatten(jax.tree.structure(self._opt_shapes), leaves[end:])
        return ReplicaArrays(
            params=list(leaves[:num]), aux=list(leaves[num:end]), opt_state=opt_state
        )

    # -- the user's view -------------------------------------------------------------------------

    def state(self, step: int) -> State:
        """The state of the first local replica, without padding.

        Every process calls this if arrays are padded or sharded over replicas.
        """
        arrays = self._replica_arrays(self._with_even_cuts(self._unpadded(0)))
        return State(
            step=step,
            params=jax.tree.unflatten(self._param_def, arrays.params),
            aux=loss_scale.own_variables(jax.tree.unflatten(self._aux_def, arrays.aux)),
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
        return sum(x.addressable_shards[0].data.nbytes for x in arrays)

    # -- checkpoints -----------------------------------------------------------------------------

    def saved(self) -> PyTree:
        """The state as global arrays, for a checkpoint."""
        specs = self._even
        columns = zip(*(self._unpadded(i) for i in range(len(self.held))), strict=True)
        arrays: list[Any] = [
            x[0] if self._is_alone or self._is_sharded(k) else self._reducer.arrays.over_all(x, s)
            for k, (x, s) in enumerate(zip(columns, specs, strict=True))
        ]
        return self._tree(self._with_even_cuts(arrays))

    def _with_even_cuts(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays, with those sharded over replicas as global arrays in an even cut."""
        if self._zero is None:
            return list(arrays)
        jax.block_until_ready([arrays.leaves() for arrays in self.held])
        columns = zip(*(arrays.leaves() for arrays in self.held), strict=True)
        return [
            self._even_cut(k, shards) if self._is_sharded(k) else x
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
            self._zero.spec(k) if self._zero is not None and self._is_sharded(k) else s
            for k, s in enumerate(self._even)
        ]
        shardings = [
            self._sharding(s, self._offloaded.is_offloaded(k)) for k, s in enumerate(specs)
        ]
        pairs = zip(self._shapes, shardings, strict=True)
        return self._tree([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w) for x, w in pairs])

    def load(self, tree: PyTree) -> None:
        """Replace the state by another in the form of `wanted`."""
        self.exponents = np.asarray(tree["exponents"], np.int32)
        self.loss_scale = loss_scale.restored_scale(tree)
        arrays = jax.tree.leaves((tree["params"], tree["aux"], tree["opt_state"]))
        if self._is_alone and self._zero is None:
            self.held = [self._replica_arrays(self._padded(0, arrays))]
            return
        parts = [
            self._shards_of(k, x) if self._is_sharded(k) else self._reducer.arrays.local_parts(x, s)
            for k, (x, s) in enumerate(zip(arrays, self._even, strict=True))
        ]
        each = enumerate(zip(*parts, strict=True))
        self.held = [self._replica_arrays(self._padded(i, shards)) for i, shards in each]

    def _shards_of(self, k: int, x: jax.Array) -> list[Any]:
        """The local replicas' shards of an array in the form of `wanted`."""
        assert self._zero is not None
        if not self._offloaded.is_offloaded(k):
            return self._zero.shared(k, x)
        fetched = jax.device_put(x, in_memory(x.sharding, DEVICE))
        return [self.put(i, k, part) for i, part in enumerate(self._zero.shared(k, fetched))]

    def _unpadded(self, i: int) -> list[jax.Array]:
        """The arrays of a local replica without padding."""
        return self._repadded(i, "unpad", self.held[i].leaves(), self._even)

    def _padded(self, i: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays with the padding of a local replica."""
        return self._repadded(i, "pad", list(arrays), self._specs.leaves())

    def _repadded(
        self, i: int, how: Literal["pad", "unpad"], arrays: list[jax.Array], specs: Sequence[P]
    ) -> list[jax.Array]:
        if (how, i) not in self._changes:
            jit = functools.partial(self._jit, i)
            self._changes[how, i] = changing(self._specs.padding.leaves(), how, jit, specs)
        return self._changes[how, i](arrays)

    @property
    def _is_alone(self) -> bool:
        return len(self._reducer.replicas) == 1

    def _sharding(self, spec: P, is_offloaded: bool) -> Any:
        owner = self._reducer.replicas[0] if self._is_alone else self._reducer.arrays
        sharding = owner.sharding(spec)
        return in_memory(sharding, HOST) if is_offloaded else sharding

    def _tree(self, arrays: Sequence[Any]) -> PyTree:
        state = self._replica_arrays(arrays)
        return {
            "params": jax.tree.unflatten(self._param_def, state.params),
            "aux": jax.tree.unflatten(self._aux_def, state.aux),
            "opt_state": state.opt_state,
            "exponents": self.exponents,
            **loss_scale.saved_scale(self.loss_scale),
        }

    def rescale(self, state: loss_scale.ScaleState) -> None:
        """Replace the state of the loss scaling, and place the scale for programs to read."""
        if self.loss_scale is None or state.exponent != self.loss_scale.exponent:
            for arrays, replica in zip(self.held, self._reducer.local, strict=True):
                arrays.aux[-1] = replica.put(np.asarray(state.exponent, np.int32))
        self.loss_scale = state
