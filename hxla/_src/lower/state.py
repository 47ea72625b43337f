"""The state of training as a value, and how the optimizer's part of it begins."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..core.types import PyTree
from ..model.loss_scale import ScaleState
from ..model.optimizer import Optimizer
from .padding import StatePadding, padded, unpadded
from .units import most_at_once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that a step of training reads and writes, as it lies.

    The arrays live on the devices of the first copy of the model that this process has a part of,
    and the next step overwrites them: copy what you keep. Where several processes share a copy (a
    pipeline, rules), each has a part only: `Session.gather` gives the whole. Where the devices of a
    copy have parts of unlike sizes, the arrays are made without their padding for whoever asks for
    the state: then every process must ask. State that waits in host memory or on a disk is given in
    host memory.

    Attributes:
        step: The updates done.
        params: The parameters in the user's own tree.
        aux: The other variables (BatchNorm statistics) in the user's own tree.
        opt_state: The state of the optimizer, as optax makes it. Random keys, here and in `aux`,
            are their data.
        loss_scale: The loss scale and how many good steps it has had; None: the loss is not scaled.
        exponents: int32[T], the scales of the exact sums of T tensors, as powers of two.
    """

    step: int
    params: PyTree
    aux: PyTree
    opt_state: PyTree
    exponents: np.ndarray
    loss_scale: ScaleState | None = dataclasses.field(default=None, metadata={"static": True})


class InitialOptState:
    """Makes the state that training begins with.

    Args:
        tree: Structure of the trained parameters.
        state: Shapes of the leaves of the state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tree: Any,
        params: Sequence[Any],
        state: Sequence[Any],
        padding: StatePadding,
    ):
        self._optimizer, self._tree, self._params = optimizer, tree, list(params)
        self._sizes = [x.size * x.dtype.itemsize for x in state]
        self._padding = padding

    def leaves(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """All leaves of the state.

        Args:
            arrays: The parameters; None for those of which it needs only the shapes.
        """
        filled = [
            jax.numpy.zeros(s.shape, s.dtype) if x is None else x
            for x, s in zip(arrays, self._params, strict=True)
        ]
        tree = unpadded(jax.tree.unflatten(self._tree, filled), self._padding.of_trained)
        return jax.tree.leaves(padded(self._optimizer.init(tree), self._padding.of_opt_state))

    def together(self, in_groups: bool) -> list[list[int]]:
        """Numbers of the leaves that one program makes.

        Args:
            in_groups: Whether few are to be on a device at once, for they wait elsewhere.
        """
        if not self._sizes:
            return []
        if not in_groups:
            return [[*range(len(self._sizes))]]
        found: list[list[int]] = [[]]
        room = most = most_at_once(sum(self._sizes))
        for k, size in enumerate(self._sizes):
            if size > room and found[-1]:
                found.append([])
                room = most
            found[-1].append(k)
            room -= size
        return found


def of_opt_state(optimizer: Optimizer, params: PyTree, each: Sequence[Any], other: Any) -> PyTree:
    """Leaves of the optimizer's state lie as the parameter of their shape that they belong to.

    A leaf belongs to the parameter with whose path its own path ends; of several, to the one with
    the longest path.

    Args:
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

    return jax.tree_util.tree_map_with_path(said_of, optimizer.state_shapes(params))
