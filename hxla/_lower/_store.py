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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._core._types import PyTree
from .._model._functional import Functional
from .._model._optimizer import Optimizer
from .._plan._plan_parts import SumsForm
from ._options import compiler_options
from ._replica import Replica
from ._state import State
from ._sum import Reducer
from ._words import Words

Gather = Callable[[str, str], tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpecs:
    """PartitionSpecs of a state over the devices of a copy of the model.

    Attributes:
        params: Of each parameter.
        aux: Of each other variable.
        opt_state: Tree like the optimizer's state.
    """

    params: list[P]
    aux: list[P]
    opt_state: PyTree

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
    """

    def __init__(
        self,
        model: Functional,
        optimizer: Optimizer,
        reducer: Reducer,
        specs: StateSpecs,
        sums: SumsForm,
    ):
        self._model, self._optimizer, self._reducer = model, optimizer, reducer
        self._specs = specs
        self._options = compiler_options(reducer.devices[0].platform, sums)
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

    # -- how it begins ---------------------------------------------------------------------------

    def initialise(self, gather: Gather) -> None:
        """Put the model's arrays in their places, or make them there, and the optimizer's state.

        Args:
            gather: Name and text to the texts of all processes.
        """
        if self._model.initialise is not None:
            made = [self._made(r) for r in self._reducer.local]
        else:
            made = self._placed(gather)
        self.held = []
        for replica, (params, aux) in zip(self._reducer.local, made, strict=True):
            init = jax.jit(
                self._optimizer.init,
                out_shardings=_shardings(replica, self._specs.opt_state),
                compiler_options=self._options,
            )
            trained = [x for x, own in zip(params, self._is_trained, strict=True) if own]
            opt_state = init(jax.tree.unflatten(self._trained_def, trained))
            self.held.append(Held(params=params, aux=aux, opt_state=opt_state))
        self._agree()

    def _made(self, replica: Replica) -> tuple[list[jax.Array], list[jax.Array]]:
        """Parameters and other variables, each made where it lies."""

        def run(*arguments: Any) -> Any:
            assert self._model.initialise is not None
            params, aux = self._model.initialise(*arguments)
            return jax.tree.leaves(params), jax.tree.leaves(aux)

        shardings = _shardings(replica, (self._specs.params, self._specs.aux))
        init = jax.jit(run, out_shardings=shardings, compiler_options=self._options)
        return init(*self._model.init_arguments)  # type: ignore[no-any-return]

    def _placed(self, gather: Gather) -> list[tuple[list[jax.Array], list[jax.Array]]]:
        """The user's arrays, one after another; all processes take those of process 0."""
        leaves = [*jax.tree.leaves(self._model.params), *jax.tree.leaves(self._model.aux)]
        digests = " ".join(f"{zlib.crc32(_bytes(x)):08x}" for x in leaves)
        found = [text.split() for text in gather("initial arrays", digests)]
        specs = [*self._specs.params, *self._specs.aux]
        placed: list[list[jax.Array]] = [[] for _ in self._reducer.local]
        for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
            # A true copy: steps donate their buffers, and the user's arrays must stay alive.
            host = np.array(x, copy=True, order="C")
            if any(row[i] != found[0][i] for row in found):
                host = self._from_first_process(host)
            for own, replica in zip(placed, self._reducer.local, strict=True):
                own.append(replica.put(host, spec))
        num = len(self._specs.params)
        return [(own[:num], own[num:]) for own in placed]

    def _from_first_process(self, host: np.ndarray) -> np.ndarray:
        if jax.process_index():
            host = np.zeros_like(host)
        return self._reducer.exchange_bits(host)

    def _agree(self) -> None:
        """Every copy of the model takes over what of the first one differs, bit for bit."""
        num = len(self._reducer.replicas)
        if num == 1 or not self._shapes:
            return
        rows = np.zeros((num, len(self._shapes)), np.uint32)
        for replica, held in zip(self._reducer.local, self.held, strict=True):
            checksums = np.asarray(jax.jit(_checksums)(held.leaves()))
            if replica.is_led_here:
                rows[replica.index] = checksums
        rows = self._reducer.exchange(rows)
        different = np.flatnonzero((rows != rows[0]).any(axis=0))
        specs = self._specs.leaves()
        leaves = [held.leaves() for held in self.held]
        for i in different:
            host = self._reducer.whole(leaves[0][i])
            for own, replica in zip(leaves, self._reducer.local, strict=True):
                own[i] = replica.put(host, specs[i])
        if different.size:
            self.held = [self._held(own) for own in leaves]

    def _held(self, leaves: Sequence[jax.Array]) -> Held:
        num, end = len(self._specs.params), len(self._specs.params) + len(self._specs.aux)
        opt_state = jax.tree.unflatten(jax.tree.structure(self._opt_shapes), leaves[end:])
        return Held(params=list(leaves[:num]), aux=list(leaves[num:end]), opt_state=opt_state)

    # -- as it lies ------------------------------------------------------------------------------

    def state(self, step: int) -> State:
        """The state as it lies on the first local copy of the model."""
        held = self.held[0]
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
        specs = self._specs.leaves()
        columns = zip(*(held.leaves() for held in self.held), strict=True)
        arrays = [
            x[0] if self._is_alone else self._reducer.over_all(x, s)
            for x, s in zip(columns, specs, strict=True)
        ]
        return self._tree(arrays)

    def wanted(self) -> PyTree:
        """Shapes and places of what `load` takes."""
        specs = self._specs.leaves()
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
            self.held = [self._held(arrays)]
            return
        specs = self._specs.leaves()
        parts = [self._reducer.local_parts(x, s) for x, s in zip(arrays, specs, strict=True)]
        self.held = [self._held(own) for own in zip(*parts, strict=True)]

    @property
    def _is_alone(self) -> bool:
        return len(self._reducer.replicas) == 1

    def _sharding(self, spec: P) -> Any:
        if self._is_alone:
            return self._reducer.replicas[0].sharding(spec)
        return NamedSharding(self._reducer.mesh, spec)

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


def opt_state_specs(optimizer: Optimizer, params: PyTree, specs: Sequence[P]) -> PyTree:
    """Leaves of the optimizer's state lie as the parameter of their shape that they belong to.

    A leaf belongs to the parameter with whose path its own path ends; of several, to the one with
    the longest path.

    Args:
        optimizer: The user's own.
        params: Arrays or shapes.
        specs: PartitionSpec of each parameter.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    own = {path: (x.shape, spec) for (path, x), spec in zip(leaves, specs, strict=True)}

    def spec_of(path: tuple[Any, ...], x: Any) -> P:
        ends = (path[i:] for i in range(len(path) + 1))
        shape, spec = next((own[end] for end in ends if end in own), (None, P()))
        return spec if x.shape == shape else P()

    return jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(optimizer.init, params))
