"""The one owner of training's state: where every array lies, and how it gets there.

Nothing is ever whole on a device unless the plan says so. Arrays are made in their places, or
placed one after another from the host; copies of the model that differ take over the first one's
arrays, one after another; a checkpoint gets every process's own shards.
"""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.heap import trim_heap
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
    MakeShelf,
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
    """Holds the state of training on the local devices.

    Args:
        model: The model as pure functions, its arrays or their shapes.
        own: Where what each copy has a part of is; None: all copies have everything.
        make_shelf: Makes what holds the optimizer's state of a copy elsewhere; None: devices do.
        params_on_host: Whether the own part of parameters that each copy has waits on the host.
    """

    def __init__(
        self,
        model: Functional,
        optimizer: Optimizer,
        reducer: Reducer,
        specs: StateSpecs,
        sums: SumsForm,
        own: ZeroState | None = None,
        make_shelf: MakeShelf | None = None,
        params_on_host: bool = False,
    ):
        self._model, self._optimizer, self._reducer = model, optimizer, reducer
        self._specs, self._own, self.is_shared = specs, own, own is not None
        # No more than one array is to be whole at a time where each copy has a part of it.
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
        #: How what each copy has of each leaf lies on its devices.
        self._lie = specs.leaves() if own is None else own.held_specs
        places = range(self._first_leaf, len(self._shapes))
        self._elsewhere = OffloadedArrays(
            own, reducer.local, len(specs.params), places, make_shelf, params_on_host
        )
        self.exponents = np.zeros(reducer.num_tensors, np.int32)
        self.loss_scale = loss_scale.initial_scale(model.aux)
        self.held: list[ReplicaArrays] = []
        self._checksums: list[Any] = []
        self._changes: dict[tuple[str, int], Callable[[list[Any]], list[Any]]] = {}
        sizes = dict(reducer.replicas[0].axes)
        each = zip(self._shapes, specs.leaves(), specs.padding.leaves(), strict=True)
        #: How arrays lie without their padding.
        self._even = [even_spec(x.shape, spec, padding, sizes) for x, spec, padding in each]

    # -- how it begins ---------------------------------------------------------------------------

    def initialise(self, gather: Gather, weights: Sequence[Read | None] | None = None) -> None:
        """Put the model's arrays in their places, or make them there, and the optimizer's state.

        Args:
            gather: Name and text to the texts of all processes.
            weights: For each array what reads it from a file; None for one that is the model's own.
        """
        specs = self._lie[: self._first_leaf]
        given = list(weights) if weights is not None else [None] * len(specs)
        if None not in given:
            own: list[list[Any]] = [[None] * len(specs) for _ in self._reducer.local]
        elif self._model.initialise is not None:
            own = self._made(given)
        else:
            own = self._placed(gather, given)
        for i, (replica, arrays) in enumerate(zip(self._reducer.local, own, strict=True)):
            for k, (spec, read) in enumerate(zip(specs, given, strict=True)):
                if read is not None:
                    arrays[k] = self.put(i, k, self._filled(k, replica, spec, read))
        num = len(self._specs.params)
        self.held = [
            ReplicaArrays(params=arrays[:num], aux=arrays[num:], opt_state=state)
            for arrays, state in zip(own, self._initial_opt_states(own), strict=True)
        ]
        trim_heap()
        gather("state in its places", "")  # Gloo waits for slower compilers half a minute only
        self._agree()

    def _initial_opt_states(self, own: Sequence[Sequence[jax.Array]]) -> list[PyTree]:
        """Of each local copy, from its parameters, those of which each copy has a part of its own
        whole where the state is made of their values."""
        places = [k for k, trained in enumerate(self._is_trained) if trained]
        given: list[list[Any]] = [[arrays[k] for k in places] for arrays in own]
        shared = [t for t, k in enumerate(places) if self._is_own(k)]
        read = self._optimizer.reads(self._model.trained) if shared else ()
        for t in shared:
            whole: Any = None
            if self._own is not None and t in read:
                parts = [on_device(arrays[places[t]]) for arrays in own]
                whole = self._own.evenly(places[t], parts)
                whole = self._reducer.host.whole(whole)
            for arrays, replica in zip(given, self._reducer.local, strict=True):
                spec = self._specs.params[places[t]]
                arrays[t] = None if whole is None else replica.put(whole, spec)
        initial = InitialOptState(
            self._optimizer,
            self._trained_def,
            [self._shapes[k] for k in places],
            self._shapes[self._first_leaf :],
            self._specs.padding,
        )
        specs = self._lie[self._first_leaf :]

        def lowered(chosen: Sequence[int], i: int) -> Any:
            copy = self._reducer.local[i].index

            def init(arrays: Sequence[Any], first: jax.Array) -> list[jax.Array]:
                leaves = initial.leaves(arrays)
                return [self._taken(self._first_leaf + k, leaves[k], copy, first) for k in chosen]

            own = [specs[k] for k in chosen]
            return self._jit(i, init, own).lower(given[i], np.int32(0))

        states: list[list[Any]] = [[None] * len(specs) for _ in own]
        for chosen in initial.together(bool(self._elsewhere.shelves)):
            inits = for_each(self._reducer.local, functools.partial(lowered, chosen), self._kind)
            for i, init in enumerate(inits):
                found = init(given[i], self._first(i))
                for k, x in zip(chosen, found, strict=True):
                    states[i][k] = self.put(i, self._first_leaf + k, x)
        treedef = jax.tree.structure(self._opt_shapes)
        return [jax.tree.unflatten(treedef, state) for state in states]

    def put(self, i: int, k: int, x: jax.Array) -> Any:
        """What a local copy has of an array of `ReplicaArrays.leaves`, where it waits."""
        return self._elsewhere.put(i, k, x)

    def close(self) -> None:
        """Let go of what is not on devices."""
        self._elsewhere.close()

    @property
    def _kind(self) -> Any:
        """What programs depend on besides the kinds of devices."""
        return None if self._own is None else self._own.own.program_key

    def _first(self, i: int) -> np.int32:
        """The first granule of a local copy."""
        if self._own is None:
            return np.int32(0)
        return np.int32(self._own.own.first(self._reducer.local[i].index))

    def _taken(self, k: int, x: jax.Array, copy: int, first: Any) -> jax.Array:
        """What a copy has of a whole array of `ReplicaArrays.leaves`."""
        return x if self._own is None else self._own.take(k, x, copy, first)

    def _owner(self, k: int) -> Any:
        """Which copies have what of an array of `ReplicaArrays.leaves`."""
        return None if self._own is None else self._own.owner(k)

    def _filled(self, i: int, replica: Replica, spec: P, read: Read) -> jax.Array:
        """An array from a file, in its place."""
        shape, padding = self._shapes[i].shape, self._specs.padding.leaves()[i]
        plain = filled(shape, replica.sharding(self._even[i]), read)
        if self._own is not None and self._is_own(i):
            own, copy = self._own, replica.index
            if not replica.axes:
                return replica.put(own.take_on_host(i, np.asarray(plain), copy), spec)
            where = replica.sharding(spec)
            take = jax.jit(lambda x, first: own.take(i, x, copy, first), out_shardings=where)
            return take(plain, np.int32(own.own.first(copy)))  # type: ignore[no-any-return]
        if padding.is_none:
            return plain
        return jax.jit(padding.pad, out_shardings=replica.sharding(spec))(plain)

    def _jit(self, i: int, function: Callable[..., Any], specs: PyTree) -> Any:
        """A function whose results lie on a local replica as specs say."""
        of, is_spec = self._reducer.local[i], lambda s: isinstance(s, P)
        where = jax.tree.map(of.sharding, specs, is_leaf=is_spec)
        return jax.jit(function, out_shardings=where, compiler_options=self._options)

    def _made(self, given: Sequence[Read | None]) -> list[list[Any]]:
        """The model's own arrays, each made where it lies; None where there is another."""
        specs = self._lie[: self._first_leaf]
        paddings = self._specs.padding.leaves()
        own: list[list[Any]] = [[None] * len(specs) for _ in self._reducer.local]
        inits: dict[Any, list[Any]] = {}
        for group in self._model.made_apart([k for k, read in enumerate(given) if read is None]):

            def lowered(i: int, group: ResultGroup = group) -> Any:
                copy = self._reducer.local[i].index

                def run(first: jax.Array, operands: Sequence[Any]) -> list[jax.Array]:
                    made = zip(group.places, group.run(operands), strict=True)
                    return [self._taken(k, paddings[k].pad(x), copy, first) for k, x in made]

                lie = [specs[k] for k in group.places]
                return self._jit(i, run, lie).lower(np.int32(0), group.operands)

            like = group.like, str([(specs[k], paddings[k], self._owner(k)) for k in group.places])
            if like not in inits:
                inits[like] = for_each(self._reducer.local, lowered, self._kind)
            for i, init in enumerate(inits[like]):
                # One group after another: what it has whole is let go before the next begins.
                found = jax.block_until_ready(init(self._first(i), group.operands))
                for k, x in zip(group.places, found, strict=True):
                    own[i][k] = self.put(i, k, x)
        return own

    def _placed(self, gather: Gather, given: Sequence[Read | None]) -> list[list[Any]]:
        """The user's arrays, one after another; all processes take those of process 0."""
        leaves = [*jax.tree.leaves(self._model.params), *jax.tree.leaves(self._model.aux)]
        own = [None if read else x for x, read in zip(leaves, given, strict=True)]
        digests = " ".join("-" if x is None else f"{zlib.crc32(array_bytes(x)):08x}" for x in own)
        found = [text.split() for text in gather("initial arrays", digests)]
        placed: list[list[Any]] = [[] for _ in self._reducer.local]
        for i, x in enumerate(own):
            if x is None:
                for arrays in placed:
                    arrays.append(None)
                continue
            # A true copy: steps donate their buffers, and the user's arrays must stay alive.
            host = np.array(x, copy=True, order="C")
            if any(row[i] != found[0][i] for row in found):
                host = self._from_first_process(host)
            for n, arrays in enumerate(placed):
                arrays.append(self._put_own(n, i, host))
        return placed

    def _put_own(self, i: int, k: int, host: np.ndarray) -> Any:
        """What a local copy has of an array that is whole in host memory, in its place."""
        part, replica = self._specs.padding.leaves()[k].pad(host), self._reducer.local[i]
        if self._own is not None:
            part = self._own.take_on_host(k, part, replica.index)
        return self.put(i, k, replica.put(part, self._lie[k]))

    def replace(self, arrays: Mapping[int, np.ndarray]) -> None:
        """Take over other arrays, whole in host memory, by number in `ReplicaArrays.leaves`."""
        for i, held in enumerate(self.held):
            new = {k: self._put_own(i, k, x) for k, x in arrays.items()}
            self.held[i] = self._held([new.get(k, x) for k, x in enumerate(held.leaves())])

    def _from_first_process(self, host: np.ndarray) -> np.ndarray:
        if jax.process_index():
            host = np.zeros_like(host)
        return self._reducer.host.exchange_bits(host)

    def _agree(self) -> None:
        """Every copy of the model takes over what of the first one differs, bit for bit.

        Like copies of one process were made by one program from the same arrays, as all later steps
        are.
        """
        local = self._reducer.local
        is_one_kind = len(set(first_of_kind(local))) == 1
        if (len(local) == len(self._reducer.replicas) and is_one_kind) or not self._shapes:
            return
        rows = self.checksums()
        different = np.flatnonzero((rows != rows[0]).any(axis=0))
        specs = self._specs.leaves()
        leaves = [held.leaves() for held in self.held]
        for i in different:
            host = self._reducer.host.of_first(leaves[0][i])
            for own, replica in zip(leaves, self._reducer.local, strict=True):
                own[i] = replica.put(host, specs[i])
        if different.size:
            self.held = [self._held(own) for own in leaves]

    def hand_on(self) -> None:
        """All take over what each updates by itself from the first copy; every process calls this.

        That is all but parameters and what has an owner.
        """
        num, leaves = len(self._specs.params), [held.leaves() for held in self.held]
        places = [k for k in range(num, len(self._shapes)) if not self._is_own(k)]
        own = [array_bytes(leaves[0][k]) for k in places]
        host = np.concatenate([*own, np.zeros(0, np.uint8)])
        host = self._reducer.host.exchange_bits(host * self._reducer.replicas[0].is_local)
        parts = np.split(host, np.cumsum([len(x) for x in own]))
        for held, replica in zip(leaves, self._reducer.local, strict=True):
            for k, part in zip(places, parts, strict=False):
                held[k] = replica.put(part.view(held[k].dtype).reshape(held[k].shape))
        self.held = [self._held(held) for held in leaves]

    def checksums(self) -> np.ndarray:
        """uint32[copies, leaves]: sums of all bits of each copy's arrays, known to every process.

        Every process calls this, and waits for its devices. Arrays that a copy has cut are summed
        over its devices; for those of which each has a part of its own there is a zero.
        """
        rows = np.zeros((len(self._reducer.replicas), len(self._shapes)), np.uint32)
        # What is added up inside a copy must not meet what is under way.
        jax.block_until_ready([held.leaves() for held in self.held])
        alike = [k for k in range(len(self._shapes)) if not self._is_own(k)]
        if not alike:
            return rows
        leaves = [[x for k, x in enumerate(h.leaves()) if k in alike] for h in self.held]
        if not self._checksums:
            self._checksums = for_each(
                self._reducer.local, lambda i: jax.jit(leaf_checksums).lower(leaves[i])
            )
        for i, replica in enumerate(self._reducer.local):
            checksums = np.asarray(self._checksums[i](leaves[i]))
            if replica.is_led_here:
                rows[replica.index, alike] = checksums
        return self._reducer.host.exchange(rows)

    def _is_own(self, k: int) -> bool:
        """Whether each copy has a part of its own of an array of `ReplicaArrays.leaves`."""
        return self._own is not None and not self._own.is_common[k]

    def leaf_names(self) -> tuple[str, ...]:
        """Of the arrays of `ReplicaArrays.leaves`, in words."""
        names = leaf_names(self._model.params), leaf_names(self._model.aux)
        of_optimizer = (f"optimizer state {n}" for n in leaf_names(self._opt_shapes))
        return *names[0], *names[1], *of_optimizer

    def _held(self, leaves: Sequence[jax.Array]) -> ReplicaArrays:
        num, end = len(self._specs.params), len(self._specs.params) + len(self._specs.aux)
        opt_state = jax.tree.unflatten(jax.tree.structure(self._opt_shapes), leaves[end:])
        return ReplicaArrays(
            params=list(leaves[:num]), aux=list(leaves[num:end]), opt_state=opt_state
        )

    # -- as it lies ------------------------------------------------------------------------------

    def state(self, step: int) -> State:
        """The state as it lies on the first local copy of the model, without padding.

        Every process calls this where arrays are padded or copies have parts of their own.
        """
        held = self._held(self._unshared(self._unpadded(0)))
        return State(
            step=step,
            params=jax.tree.unflatten(self._param_def, held.params),
            aux=loss_scale.own_variables(jax.tree.unflatten(self._aux_def, held.aux)),
            opt_state=held.opt_state,
            exponents=self.exponents,
            loss_scale=self.loss_scale,
        )

    def gather(self, tree: PyTree) -> PyTree:
        """Whole arrays in host memory, one after another; every process must call this."""
        return jax.tree.map(self._reducer.host.whole, tree)

    def here(self, tree: PyTree) -> PyTree:
        """Arrays of a state on their devices, where a user's programs read them."""
        return jax.tree.map(on_device, tree)

    def num_bytes(self) -> int:
        """Bytes of one device's part of the state."""
        here = [
            x for x in self.held[0].leaves() if not (isinstance(x, OffloadedLeaf) or is_on_host(x))
        ]
        return sum(x.addressable_shards[0].data.nbytes for x in here)

    # -- checkpoints -----------------------------------------------------------------------------

    def saved(self) -> PyTree:
        """The state over all devices, as a checkpoint takes it; nothing is moved."""
        specs = self._even
        columns = zip(*(self._unpadded(i) for i in range(len(self.held))), strict=True)
        arrays: list[Any] = [
            x[0] if self._is_alone or self._is_own(k) else self._reducer.arrays.over_all(x, s)
            for k, (x, s) in enumerate(zip(columns, specs, strict=True))
        ]
        return self._tree(self._unshared(arrays))

    def _unshared(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """With those of which each copy has a part of its own over all copies."""
        if self._own is None:
            return list(arrays)
        jax.block_until_ready([held.leaves() for held in self.held])
        columns = zip(*(held.leaves() for held in self.held), strict=True)
        return [
            self._evenly(k, own) if self._is_own(k) else x
            for k, (x, own) in enumerate(zip(arrays, columns, strict=True))
        ]

    def _evenly(self, k: int, parts: Sequence[Any]) -> jax.Array:
        """An array of which each copy has a part, over all; in host memory, if the parts wait
        elsewhere."""
        assert self._own is not None
        found = self._own.evenly(k, [on_device(x) for x in parts])
        if not self._elsewhere.waits(k):
            return found
        return jax.block_until_ready(jax.device_put(found, in_memory(found.sharding, HOST)))

    def wanted(self) -> PyTree:
        """Shapes and places of what `load` takes."""
        specs = [
            self._own.spec(k) if self._own is not None and self._is_own(k) else s
            for k, s in enumerate(self._even)
        ]
        where = [self._sharding(s, self._elsewhere.waits(k)) for k, s in enumerate(specs)]
        pairs = zip(self._shapes, where, strict=True)
        return self._tree([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w) for x, w in pairs])

    def load(self, tree: PyTree) -> None:
        """Take over a state in the form of `wanted`."""
        self.exponents = np.asarray(tree["exponents"], np.int32)
        self.loss_scale = loss_scale.restored_scale(tree)
        arrays = jax.tree.leaves((tree["params"], tree["aux"], tree["opt_state"]))
        if self._is_alone and self._own is None:
            self.held = [self._held(self._padded(0, arrays))]
            return
        parts = [
            self._shared(k, x) if self._is_own(k) else self._reducer.arrays.local_parts(x, s)
            for k, (x, s) in enumerate(zip(arrays, self._even, strict=True))
        ]
        each = enumerate(zip(*parts, strict=True))
        self.held = [self._held(self._padded(i, own)) for i, own in each]

    def _shared(self, k: int, x: jax.Array) -> list[Any]:
        """What the local copies have of an array in the form of `wanted`."""
        assert self._own is not None
        if not self._elsewhere.waits(k):
            return self._own.shared(k, x)
        here = jax.device_put(x, in_memory(x.sharding, DEVICE))
        return [self.put(i, k, part) for i, part in enumerate(self._own.shared(k, here))]

    def _unpadded(self, i: int) -> list[jax.Array]:
        """The arrays of a local copy as the user has them."""
        return self._changed(i, "unpad", self.held[i].leaves(), self._even)

    def _padded(self, i: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The user's arrays as a local copy holds them."""
        return self._changed(i, "pad", list(arrays), self._specs.leaves())

    def _changed(
        self, i: int, how: Literal["pad", "unpad"], arrays: list[jax.Array], specs: Sequence[P]
    ) -> list[jax.Array]:
        if (how, i) not in self._changes:
            jit = functools.partial(self._jit, i)
            self._changes[how, i] = changing(self._specs.padding.leaves(), how, jit, specs)
        return self._changes[how, i](arrays)

    @property
    def _is_alone(self) -> bool:
        return len(self._reducer.replicas) == 1

    def _sharding(self, spec: P, waits: bool) -> Any:
        of = self._reducer.replicas[0] if self._is_alone else self._reducer.arrays
        found = of.sharding(spec)
        return in_memory(found, HOST) if waits else found

    def _tree(self, arrays: Sequence[Any]) -> PyTree:
        held = self._held(arrays)
        return {
            "params": jax.tree.unflatten(self._param_def, held.params),
            "aux": jax.tree.unflatten(self._aux_def, held.aux),
            "opt_state": held.opt_state,
            "exponents": self.exponents,
            **loss_scale.saved_scale(self.loss_scale),
        }

    def rescale(self, state: loss_scale.ScaleState) -> None:
        """Take over another state of the loss scaling, and put the scale where programs read it."""
        if self.loss_scale is None or state.exponent != self.loss_scale.exponent:
            for held, replica in zip(self.held, self._reducer.local, strict=True):
                held.aux[-1] = replica.put(np.asarray(state.exponent, np.int32))
        self.loss_scale = state
