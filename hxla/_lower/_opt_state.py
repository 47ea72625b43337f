"""The optimizer's state: how its leaves lie, and how it begins."""

from collections.abc import Sequence
from typing import Any

import jax

from .._core._types import PyTree
from .._model._optimizer import Optimizer
from ._padding import StatePadding, padded, unpadded
from ._update_groups import most_at_once


class InitialOptState:
    """Makes the state that training begins with.

    Args:
        optimizer: The user's own.
        tree: Structure of the trained parameters.
        params: Their shapes.
        state: Shapes of the leaves of the state.
        padding: Of both.
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
