"""The state of training as a value, and values for the leaves of the optimizer's state."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..core.types import PyTree
from ..model.loss_scale import ScaleState
from ..model.optimizer import Optimizer


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
