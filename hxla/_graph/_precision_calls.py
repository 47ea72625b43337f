"""A model whose loss computes under a precision policy: what traces it gets the casts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core._errors import ConfigError
from .._core._types import PyTree
from .._jax._jaxpr import ClosedJaxpr, run_as
from .._jax._result_sources import sources
from .._model._functional import Functional, leaf_names
from ._casts import Cast, CastPolicy, Casts

_Call = Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree]]


class PrecisionCalls:
    """Makes the calls of a model compute under a policy.

    Args:
        model: As pure functions.
        policy: The dtypes.
    """

    def __init__(self, model: Functional, policy: CastPolicy):
        self._policy = policy
        self._names = leaf_names(model.params)
        self._num_aux = len(jax.tree.leaves(model.aux))
        self.model = model
        self._casts: Casts | None = None
        if not policy.is_own:
            self._casts = Casts(policy)
            train, evaluate = self._under(model.train), self._under(model.evaluate)
            self.model = dataclasses.replace(model, train=train, evaluate=evaluate)

    def _under(self, call: _Call) -> _Call:
        return run_as(call, self._run)

    def _run(self, closed: ClosedJaxpr, arguments: list[Any]) -> list[Any]:
        assert self._casts is not None
        num, num_aux = len(self._names), self._num_aux
        casts = [Cast(x) for x in arguments]
        for i, name in enumerate(self._names):
            casts[i] = Cast(_rounded(arguments[i], self._policy.params), path=name)
        for i in range(num, num + num_aux):
            casts[i] = Cast(_rounded(arguments[i], self._policy.buffers))
        outs = closed.jaxpr.outvars
        found = self._casts.run(closed, casts, [True] * len(outs), "")
        arrays = [
            c.to(v.aval.dtype) if jnp.issubdtype(v.aval.dtype, jnp.floating) else c.x
            for c, v in zip(found, outs, strict=True)
        ]
        num_out = len(arrays) - num_aux
        arrays[:num_out] = [_rounded(x, self._policy.output) for x in arrays[:num_out]]
        # What a call leaves as it is was rounded where it is read, and nowhere else.
        known = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for i, source in enumerate(sources(closed)):
            if source is not None:
                arrays[i] = known.setdefault(source, arrays[i])
        return arrays

    def check_used(self) -> None:
        """Refuse exceptions that no operation of the calls so far matched.

        Raises:
            ConfigError: With each of them, and what there is.
        """
        used = set() if self._casts is None else self._casts.used
        idle = [str(e) for i, e in enumerate(self._policy.exceptions) if i not in used]
        if idle:
            shown = ", ".join(self._names[:6]) + ", ..." * (len(self._names) > 6)
            raise ConfigError(
                f"precision.exceptions: no operation matches {'; '.join(idle)}. A path must be "
                f"found in that of a parameter ({shown}), a scope in the names of jax.named_scope, "
                "TaskGraphs or Linen modules; leave out what is for another model"
            )


def _rounded(x: Any, dtype: str) -> Any:
    """An array rounded to a dtype, in its own."""
    if dtype in ("model", "float32") or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if x.dtype.itemsize <= jnp.dtype(dtype).itemsize:
        return x
    return jax.lax.convert_element_type(jax.lax.convert_element_type(x, dtype), x.dtype)
