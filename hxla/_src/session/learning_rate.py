"""The learning rate of a step, for its record.

It is computed before the update, from scalars that the last update has left, and by a program of
its own. So it costs no wait, and no program that trains is another one for it.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..core.errors import ConfigError
from ..core.types import PyTree
from ..jax.jaxpr import ClosedJaxpr, as_function, inlined, part
from ..lower.lower import Programs
from ..lower.store import Store

_PLACE = ("hyperparams", "learning_rate")  # in the state of optax.inject_hyperparams


class LearningRate:
    """Reads the learning rate of the next update.

    Args:
        given: A number, or an optax schedule; None: that of `optax.inject_hyperparams`, if the
            optimizer has one.

    Raises:
        ConfigError: If it is given and in the optimizer too.
    """

    def __init__(
        self, programs: Programs, store: Store, given: float | Callable[[int], Any] | None
    ):
        training = programs.training
        self._store, self._given = store, given
        self._read: tuple[int, ...] = ()
        self._program: Callable[..., Any] | None = None
        state = training.optimizer.state_shapes(training.model.trained)
        shapes, places = jax.tree.leaves(state), _places(state)
        if places and given is not None:
            raise ConfigError(
                "logged_learning_rate is for optimizers whose state has no learning rate; that of "
                "optax.inject_hyperparams is logged without it"
            )
        if len(places) == 1:  # of several no one is the learning rate
            closed, (updates, _) = training.optimizer.traced(training.model.trained)
            num = len(jax.tree.leaves(updates)), len(shapes)
            self._read, function = _from_state(closed, num, places[0])
            scalars = [shapes[k] for k in self._read]
            if function is not None and all(x.size == 1 for x in scalars):
                self._program = jax.jit(function).lower(*scalars).compile()

    def of_step(self, step: int) -> float | None:
        """The learning rate of a step, called before its update; None if it is unknown."""
        if callable(self._given):
            return float(self._given(step))
        if self._program is None:
            return self._given
        leaves = jax.tree.leaves(self._store.held[0].opt_state)
        scalars = [np.asarray(leaves[k].addressable_data(0)) for k in self._read]
        return float(np.asarray(self._program(*scalars)))


def _places(state: PyTree) -> list[int]:
    """The leaves of an optimizer's state that are learning rates."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    keys = [tuple(getattr(k, "name", getattr(k, "key", None)) for k in path[-2:]) for path in paths]
    return [place for place, names in enumerate(keys) if names == _PLACE]


def _from_state(
    closed: ClosedJaxpr, num: tuple[int, int], place: int
) -> tuple[tuple[int, ...], Callable[..., Any] | None]:
    """A leaf of the state after an update as a function of leaves before it.

    Args:
        closed: The update of gradients, state, parameters and loss.
        num: Arrays of the gradients, and leaves of the state.

    Returns:
        The leaves that it depends on, and the function; None: it depends on more than the state.
    """
    flat = inlined(closed)
    program = part(flat.jaxpr, [flat.jaxpr.outvars[num[0] + place]])
    state = flat.jaxpr.invars[num[0] : num[0] + num[1]]
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    read = tuple(k for k, v in enumerate(state) if v in program.invars)
    if len(read) + sum(v in constants for v in program.invars) < len(program.invars):
        return (), None
    run = as_function(ClosedJaxpr(program, ()))

    def function(*scalars: Any) -> Any:
        values = constants | dict(zip([state[k] for k in read], scalars, strict=True))
        [rate] = run(*[values[v] for v in program.invars])
        return rate

    return read, function
