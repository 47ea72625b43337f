"""The arrays of a copy of the model between steps, and how they lie on its devices."""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P

from .._core._types import PyTree
from ._padding import StatePadding


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
