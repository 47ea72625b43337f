"""The one owner of training's state: where every array lies, and how it gets there.

Nothing is ever whole on a device unless the plan says so. Arrays are made in their places, or
placed one after another from the host; copies of the model that differ take over the first one's
arrays, one after another; a checkpoint gets every process's own shards.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from .._core._types import PyTree
from .._model._functional import Functional, leaf_names
from .._model._optimizer import Optimizer
from .._plan._plan_parts import SumsForm
from .._weights._weights import Gather, Read, filled
from ._options import update_options
from ._own_state import OwnState
from ._padding import StatePadding, even_spec, padded, unpadded
from ._per_kind import first_of_kind, for_each
from ._replica import Replica
from ._state import State
from ._sum import Reducer
from ._words import Words


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpecs:
    """PartitionSpecs of a state over the devices of a copy of the model.

    Attributes:
        params: Of each parameter.
        aux: Of each other variable.
        opt_state: Tree like the optimizer's state.
        padding: Of all of them.
    """

    params: list[P]
    aux: list[P]
    opt_state: PyTree
    padding: StatePadding

    def leaves(self) -> list[P]:
        """In the order of `Held.leaves`."""
        opt_state = jax.tree.leaves(self.opt_state, is_leaf=lambda s: isinstance(s, P))
        return [*self.params, *self.aux, *opt_state]


@dataclasses.dataclass
class Held:
    """The arrays of one local copy of the model; the next step replaces them."""

    params: list[jax.Array]
    aux: list[jax.Array]
    opt_state: PyTree

    def leaves(self) -> list[jax.Array]:
        """All of them."""
        return [*self.params, *self.aux, *jax.tree.leaves(self.opt_state)]


class Store:
    """Holds the state of training on the local devices.

    Args:
        model: The model as pure functions, its arrays or their shapes.
        optimizer: The user's own.
        reducer: Knows all devices.
        specs: Where everything lies.
        sums: The plan's.
        own: Where what each copy has a part of is; None: all copies have everything.
    """

    def __init__(
        self,
        model: Functional,
        optimizer: Optimizer,
        reducer: Reducer,
        specs: StateSpecs,
        sums: SumsForm,
        own: OwnState | None = None,
    ):
        self._model, self._optimizer, self._reducer = model, optimizer, reducer
        self._specs, self._own = specs, own
        # No more than one array is to be whole at a time where each copy has a part of it.
        self._options = update_options(reducer.local[0].devices[0].platform, sums)
        self._param_def = jax.tree.structure(model.params)
        self._aux_def = jax.tree.structure(model.aux)
        self._is_trained = model.is_trained
        self._trained_def = jax.tree.structure(model.trained)
        self._opt_shapes = jax.eval_shape(optimizer.init, model.trained)
        self._shapes = [
            *jax.tree.leaves(model.params),
            *jax.tree.leaves(model.aux),
            *jax.tree.leaves(self._opt_shapes),
        ]
        num_tensors = sum(self._is_trained) + sum(
            jax.numpy.issubdtype(x.dtype, jax.numpy.floating) for x in jax.tree.leaves(model.aux)
        )
        self.exponents = np.zeros(num_tensors, np.int32)
        self.held: list[Held] = []
        self._checksums: list[Any] = []
        self._changes: dict[tuple[str, int], Any] = {}
        sizes = dict(reducer.replicas[0].axes)
        #: How arrays lie without their padding.
        self._even = [
            even_spec(x.shape, spec, padding, sizes)
            for x, spec, padding in zip(
                self._shapes, specs.leaves(), specs.padding.leaves(), strict=True
            )
        ]

    # -- how it begins ---------------------------------------------------------------------------

    def initialise(self, gather: Gather, weights: Sequence[Read | None] | None = None) -> None:
        """Put the model's arrays in their places, or make them there, and the optimizer's state.

        Args:
            gather: Name and text to the texts of all processes.
            weights: For each array what reads it from a file; None for one that is the model's own.
        """
        specs = [*self._specs.params, *self._specs.aux]
        given = list(weights) if weights is not None else [None] * len(specs)
        if None not in given:
            own: list[list[Any]] = [[None] * len(specs) for _ in self._reducer.local]
        elif self._model.initialise is not None:
            own = self._made(given)
        else:
            own = self._placed(gather, given)
        for replica, arrays in zip(self._reducer.local, own, strict=True):
            for i, (spec, read) in enumerate(zip(specs, given, strict=True)):
                if read is not None:
                    arrays[i] = self._filled(i, replica, spec, read)
                    if self._own is not None and self._is_own(i):
                        on_host = np.asarray(arrays[i])
                        arrays[i] = replica.put(
                            self._own.take_on_host(i, on_host, replica.index), spec
                        )
        num = len(self._specs.params)
        self.held = [
            Held(params=arrays[:num], aux=arrays[num:], opt_state=state)
            for arrays, state in zip(own, self._initial_opt_states(own), strict=True)
        ]
        self._agree()

    def _initial_opt_states(self, own: Sequence[Sequence[jax.Array]]) -> list[PyTree]:
        """Of each local copy, from its parameters, those of which each copy has a part of its own
        whole where the state is made of their values."""
        padding, local = self._specs.padding, self._reducer.local
        places = [k for k, trained in enumerate(self._is_trained) if trained]
        first_leaf = len(self._specs.params) + len(self._specs.aux)
        given: list[list[Any]] = [[arrays[k] for k in places] for arrays in own]
        shared = [t for t, k in enumerate(places) if self._is_own(k)]
        read = self._optimizer.reads(self._model.trained) if shared else ()
        for t in shared:
            whole: Any = None
            if self._own is not None and t in read:
                whole = self._own.evenly(places[t], [arrays[places[t]] for arrays in own])
                whole = self._reducer.whole(whole)
            for arrays, replica in zip(given, local, strict=True):
                arrays[t] = None if whole is None else replica.put(whole)

        def lowered(i: int) -> Any:
            copy = local[i].index

            def init(arrays: Sequence[Any], first: jax.Array) -> PyTree:
                shapes = (self._shapes[k] for k in places)
                filled = [
                    jax.numpy.zeros(s.shape, s.dtype) if x is None else x
                    for x, s in zip(arrays, shapes, strict=True)
                ]
                tree = jax.tree.unflatten(self._trained_def, filled)
                found = padded(
                    self._optimizer.init(unpadded(tree, padding.of_trained)), padding.of_opt_state
                )
                leaves, treedef = jax.tree.flatten(found)
                taken = [self._taken(first_leaf + k, x, copy, first) for k, x in enumerate(leaves)]
                return jax.tree.unflatten(treedef, taken)

            return self._jit(i, init, self._specs.opt_state).lower(given[i], np.int32(0))

        inits = for_each(local, lowered, self._kind)
        return [init(given[i], self._first(i)) for i, init in enumerate(inits)]

    @property
    def _kind(self) -> Any:
        """What programs depend on besides the kinds of devices."""
        return None if self._own is None else self._own.own.program_key

    def _first(self, i: int) -> np.int32:
        """The first granule of a local copy."""
        if self._own is None:
            return np.int32(0)
        return np.int32(self._own.own.shares.firsts[self._reducer.local[i].index])

    def _taken(self, k: int, x: jax.Array, copy: int, first: Any) -> jax.Array:
        """What a copy has of a whole array of `Held.leaves`."""
        return x if self._own is None else self._own.take(k, x, copy, first)

    def _filled(self, i: int, replica: Replica, spec: P, read: Read) -> jax.Array:
        """An array from a file, in its place."""
        shape, padding = self._shapes[i].shape, self._specs.padding.leaves()[i]
        if padding.is_none:
            return filled(shape, replica.sharding(spec), read)
        plain = filled(shape, replica.sharding(self._even[i]), read)
        return jax.jit(padding.pad, out_shardings=replica.sharding(spec))(plain)

    def _jit(self, i: int, function: Callable[..., Any], specs: PyTree) -> Any:
        """A function whose results lie on a local replica as specs say."""
        shardings = _shardings(self._reducer.local[i], specs)
        return jax.jit(function, out_shardings=shardings, compiler_options=self._options)

    def _made(self, given: Sequence[Read | None]) -> list[list[Any]]:
        """The model's own arrays, each made where it lies; None where there is another."""
        arguments = self._model.init_arguments
        paddings = [*self._specs.padding.params, *self._specs.padding.aux]

        def own(leaves: Sequence[Any]) -> list[Any]:
            return [None if read else x for x, read in zip(leaves, given, strict=True)]

        specs = own([*self._specs.params, *self._specs.aux])

        def lowered(i: int) -> Any:
            copy = self._reducer.local[i].index

            def run(first: jax.Array, *arguments: Any) -> Any:
                assert self._model.initialise is not None
                made = jax.tree.leaves(self._model.initialise(*arguments))
                full = [p.pad(x) for p, x in zip(paddings, made, strict=True)]
                return own([self._taken(k, x, copy, first) for k, x in enumerate(full)])

            return self._jit(i, run, specs).lower(np.int32(0), *arguments)

        inits = for_each(self._reducer.local, lowered, self._kind)
        return [list(init(self._first(i), *arguments)) for i, init in enumerate(inits)]

    def _placed(self, gather: Gather, given: Sequence[Read | None]) -> list[list[Any]]:
        """The user's arrays, one after another; all processes take those of process 0."""
        leaves = [*jax.tree.leaves(self._model.params), *jax.tree.leaves(self._model.aux)]
        own = [None if read else x for x, read in zip(leaves, given, strict=True)]
        digests = " ".join("-" if x is None else f"{zlib.crc32(_bytes(x)):08x}" for x in own)
        found = [text.split() for text in gather("initial arrays", digests)]
        specs = [*self._specs.params, *self._specs.aux]
        paddings = self._specs.padding.leaves()
        placed: list[list[Any]] = [[] for _ in self._reducer.local]
        for i, (x, spec) in enumerate(zip(own, specs, strict=True)):
            host = None
            if x is not None:
                # A true copy: steps donate their buffers, and the user's arrays must stay alive.
                host = np.array(x, copy=True, order="C")
                if any(row[i] != found[0][i] for row in found):
                    host = self._from_first_process(host)
            for arrays, replica in zip(placed, self._reducer.local, strict=True):
                own_part = host if host is None else paddings[i].pad(host)
                if own_part is not None and self._own is not None:
                    own_part = self._own.take_on_host(i, own_part, replica.index)
                arrays.append(None if own_part is None else replica.put(own_part, spec))
        return placed

    def _from_first_process(self, host: np.ndarray) -> np.ndarray:
        if jax.process_index():
            host = np.zeros_like(host)
        return self._reducer.exchange_bits(host)

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
            host = self._reducer.of_first(leaves[0][i])
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
        own = [_bytes(leaves[0][k]) for k in places]
        host = np.concatenate([*own, np.zeros(0, np.uint8)])
        host = self._reducer.exchange_bits(host * self._reducer.replicas[0].is_local)
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
                self._reducer.local, lambda i: jax.jit(_checksums).lower(leaves[i])
            )
        for i, replica in enumerate(self._reducer.local):
            checksums = np.asarray(self._checksums[i](leaves[i]))
            if replica.is_led_here:
                rows[replica.index, alike] = checksums
        return self._reducer.exchange(rows)

    def _is_own(self, k: int) -> bool:
        """Whether each copy has a part of its own of an array of `Held.leaves`."""
        return self._own is not None and not self._own.is_common[k]

    def leaf_names(self) -> tuple[str, ...]:
        """Of the arrays of `Held.leaves`, in words."""
        names = leaf_names(self._model.params), leaf_names(self._model.aux)
        of_optimizer = (f"optimizer state {n}" for n in leaf_names(self._opt_shapes))
        return *names[0], *names[1], *of_optimizer

    def _held(self, leaves: Sequence[jax.Array]) -> Held:
        num, end = len(self._specs.params), len(self._specs.params) + len(self._specs.aux)
        opt_state = jax.tree.unflatten(jax.tree.structure(self._opt_shapes), leaves[end:])
        return Held(params=list(leaves[:num]), aux=list(leaves[num:end]), opt_state=opt_state)

    # -- as it lies ------------------------------------------------------------------------------

    def state(self, step: int) -> State:
        """The state as it lies on the first local copy of the model, without padding.

        Every process calls this where arrays are padded or copies have parts of their own.
        """
        held = self._held(self._unshared(self._unpadded(0)))
        return State(
            step=step,
            params=jax.tree.unflatten(self._param_def, held.params),
            aux=jax.tree.unflatten(self._aux_def, held.aux),
            opt_state=held.opt_state,
            exponents=self.exponents,
        )

    def gather(self, tree: PyTree) -> PyTree:
        """Whole arrays in host memory, one after another; every process must call this."""
        return jax.tree.map(self._reducer.whole, tree)

    def num_bytes(self) -> int:
        """Bytes of one device's part of the state."""
        return sum(x.addressable_shards[0].data.nbytes for x in self.held[0].leaves())

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
        return [
            self._own.evenly(k, [held.leaves()[k] for held in self.held]) if self._is_own(k) else x
            for k, x in enumerate(arrays)
        ]

    def wanted(self) -> PyTree:
        """Shapes and places of what `load` takes."""
        specs = [
            self._own.spec(k) if self._own is not None and self._is_own(k) else s
            for k, s in enumerate(self._even)
        ]
        arrays = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(s))
            for x, s in zip(self._shapes, specs, strict=True)
        ]
        return self._tree(arrays)

    def load(self, tree: PyTree) -> None:
        """Take over a state in the form of `wanted`."""
        self.exponents = np.asarray(tree["exponents"], np.int32)
        arrays = jax.tree.leaves((tree["params"], tree["aux"], tree["opt_state"]))
        if self._is_alone:
            self.held = [self._held(self._padded(0, arrays))]
            return
        parts = [
            self._own.shared(k, x)
            if self._own is not None and self._is_own(k)
            else self._reducer.arrays.local_parts(x, s)
            for k, (x, s) in enumerate(zip(arrays, self._even, strict=True))
        ]
        each = enumerate(zip(*parts, strict=True))
        self.held = [self._held(self._padded(i, own)) for i, own in each]

    def _unpadded(self, i: int) -> list[jax.Array]:
        """The arrays of a local copy as the user has them."""
        return self._changed(i, "unpad", self.held[i].leaves(), self._even)

    def _padded(self, i: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The user's arrays as a local copy holds them."""
        return self._changed(i, "pad", list(arrays), self._specs.leaves())

    def _changed(
        self, i: int, how: str, arrays: list[jax.Array], specs: Sequence[P]
    ) -> list[jax.Array]:
        paddings = self._specs.padding.leaves()
        places = [k for k, p in enumerate(paddings) if not p.is_none]
        if not places:
            return arrays
        if (how, i) not in self._changes:

            def run(own: list[jax.Array]) -> list[jax.Array]:
                changes = [getattr(paddings[k], how) for k in places]
                return [change(x) for change, x in zip(changes, own, strict=True)]

            self._changes[how, i] = self._jit(i, run, [specs[k] for k in places])
        found = self._changes[how, i]([arrays[k] for k in places])
        for k, x in zip(places, found, strict=True):
            arrays[k] = x
        return arrays

    @property
    def _is_alone(self) -> bool:
        return len(self._reducer.replicas) == 1

    def _sharding(self, spec: P) -> Any:
        if self._is_alone:
            return self._reducer.replicas[0].sharding(spec)
        return self._reducer.arrays.sharding(spec)

    def _tree(self, arrays: Sequence[Any]) -> PyTree:
        held = self._held(arrays)
        return {
            "params": jax.tree.unflatten(self._param_def, held.params),
            "aux": jax.tree.unflatten(self._aux_def, held.aux),
            "opt_state": held.opt_state,
            "exponents": self.exponents,
        }


def _bytes(x: Any) -> Any:
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def _checksums(leaves: Sequence[jax.Array]) -> jax.Array:
    """uint32[leaves]: the sum of each array's bits, the same in any order of addition."""
    return jax.numpy.stack([Words.like([x]).pack([x]).sum() for x in leaves])


def _shardings(replica: Replica, specs: PyTree) -> PyTree:
    return jax.tree.map(replica.sharding, specs, is_leaf=lambda s: isinstance(s, P))


def of_opt_state(optimizer: Optimizer, params: PyTree, each: Sequence[Any], other: Any) -> PyTree:
    """Leaves of the optimizer's state lie as the parameter of their shape that they belong to.

    A leaf belongs to the parameter with whose path its own path ends; of several, to the one with
    the longest path.

    Args:
        optimizer: The user's own.
        params: Arrays or shapes.
        each: What is said of each parameter: its PartitionSpec, its padding.
        other: What is said of a leaf that belongs to none.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    own = {path: (x.shape, said) for (path, x), said in zip(leaves, each, strict=True)}

    def said_of(path: tuple[Any, ...], x: Any) -> Any:
        ends = (path[i:] for i in range(len(path) + 1))
        shape, said = next((own[end] for end in ends if end in own), (None, other))
        return said if x.shape == shape else other

    return jax.tree_util.tree_map_with_path(said_of, jax.eval_shape(optimizer.init, params))
