"""The update of everything on each copy of the model, by the arithmetic of shared updates.

Each product is rounded by itself and sums over whole arrays are made of integers, as where copies
share the state out: so whether they do changes no bit. Arrays keep their own shapes; only the few
whose arithmetic a compiler would treat as that of single numbers are flat and padded, as granules
are.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core._types import PyTree
from .._jax._grouping import balanced, in_groups
from .._jax._independent import Independent, Part
from .._plan._ownership import LEAST_GRANULE
from ._options import update_options
from ._own_update import mean_of
from ._replica import Replica
from ._update import Given, UpdateSpec, new_aux, whole_sums


class WholePart(Part):
    """All of an update's arrays.

    Args:
        update: Traced.
    """

    def __init__(self, update: Independent):
        self._update = update
        self._sizes = {
            d: math.prod(v.aval.shape)
            for v, d in zip(update.closed.jaxpr.outvars, update.domain_of, strict=False)
            if d is not None
        }

    def owns(self, domain: int) -> bool:
        """Every domain."""
        return True

    def has_whole(self, domain: int) -> bool:
        """Whether its arrays keep their shapes: those of too few elements are flat and padded."""
        return not self._update.slices[domain] or self._sizes[domain] >= LEAST_GRANULE

    def piece(self, domain: int, x: Any) -> Any:
        """The whole array, as it is run."""
        return x if self.has_whole(domain) else _flat(x)

    def own(self, domain: int, x: Any) -> Any:
        """The same with zeros where it is padding."""
        if self.has_whole(domain):
            return x
        return jnp.where(jnp.arange(x.size) < self._sizes[domain], x, jnp.zeros((), x.dtype))

    def of(self, k: int, x: Any) -> Any:
        """One of the update's arrays, as it is run."""
        domain = self._update.domain_of[k]
        return x if domain is None else self.piece(domain, x)


def _flat(x: jax.Array) -> jax.Array:
    return jnp.pad(x.reshape(-1), (0, LEAST_GRANULE - x.size))


def whole_arguments(
    spec: UpdateSpec,
    update: Independent,
    params: Sequence[jax.Array],
    opt_state: PyTree,
    given: Given,
) -> tuple[list[Any], WholePart]:
    """Those of the traced update.

    Args:
        spec: What the update is made from.
        update: Traced.
        params: The trained parameters.
        opt_state: The optimizer's state.
        given: What else is read.
    """
    found, part = whole_sums(spec, given), WholePart(update)
    leaves, num = jax.tree.leaves(opt_state), len(params)
    means = [mean_of(x, given).astype(p.dtype) for x, p in zip(found[:num], params, strict=True)]
    arrays = [*params, *leaves, *means]
    return [*(part.of(k, x) for k, x in enumerate(arrays)), given.value], part


def whole_update_program(spec: UpdateSpec, update: Independent, replica: Replica) -> Any:
    """The program of an update, whose first three arguments are donated; see `update_program`.

    Args:
        spec: What the update is made from.
        update: Traced.
        replica: The copy, of one device.
    """
    num = len(spec.tensors.params)

    def hxla_update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        given: Given,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        arguments, part = whole_arguments(spec, update, params, opt_state, given)
        leaves, state_tree = jax.tree.flatten(opt_state)
        results = [
            new if new.shape == x.shape else new[: x.size].reshape(x.shape)
            for new, x in zip(
                update.run(arguments, part, given.where[1], given.sums),
                (*params, *leaves),
                strict=True,
            )
        ]
        others = whole_sums(spec, given)[num:]
        state = jax.tree.unflatten(state_tree, results[num:])
        return results[:num], state, new_aux(spec, aux, others, given.words), given.weight + 0

    run: Any = hxla_update
    if spec.num_groups > 1:
        sizes = [x.size * x.dtype.itemsize for x in spec.tensors.params]
        run = in_groups(run, balanced(sizes, spec.num_groups))
    return jax.jit(
        run,
        donate_argnums=(0, 1, 2),
        compiler_options=update_options(replica.devices[0].platform, spec.contribution.form),
    )
