"""A loss that is scaled by a power of two before it is differentiated, as float16 needs.

The exponent is stored beside the model's other variables, so every program of a microbatch has it
as an argument. Gradients come out scaled; the exact sums subtract the exponent from theirs, without
rounding.

References:
    Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2 (loss scaling).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..core.types import PyTree
from .functional import Functional

Exponent = TypeVar("Exponent", int, jax.Array)


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """The state of dynamic loss scaling.

    Attributes:
        exponent: The scale of a microbatch's mean loss is 2**exponent.
        good_steps: The steps since it changed, or since an overflow.
    """

    exponent: int
    good_steps: int = 0

    @property
    def scale(self) -> float:
        """The factor of the loss."""
        return 2.0**self.exponent

    def after(self, *, overflowed: bool, growth_steps: int, most: int) -> "ScaleState":
        """The state after a step.

        Args:
            overflowed: Whether some gradient was not finite: the scale is halved.
            growth_steps: The steps without an overflow after which it doubles.
            most: The largest exponent.
        """
        if overflowed:
            return ScaleState(self.exponent - 1)
        if self.good_steps + 1 < growth_steps:
            return ScaleState(self.exponent, self.good_steps + 1)
        return ScaleState(min(self.exponent + 1, most))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class ScaledAux:
    """Other variables of a model whose loss is scaled.

    Attributes:
        exponent: int32 scalar.
    """

    variables: PyTree
    exponent: Any

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """The variables keep their names, for `value` is no part of a path."""
        keys = map(jax.tree_util.GetAttrKey, ("value", "loss_scale"))
        return tuple(zip(keys, (self.variables, self.exponent), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "ScaledAux":
        """Inverse of `tree_flatten_with_keys`."""
        return cls(*children)


def own_variables(aux: PyTree) -> PyTree:
    """Other variables without the loss scale."""
    return aux.variables if isinstance(aux, ScaledAux) else aux


def initial_scale(aux: PyTree) -> ScaleState | None:
    """The initial state of loss scaling; None: the loss is not scaled."""
    return ScaleState(int(aux.exponent)) if isinstance(aux, ScaledAux) else None


def saved_scale(state: ScaleState | None) -> dict[str, np.ndarray]:
    """The state of loss scaling as arrays of a checkpoint."""
    return {} if state is None else {"loss_scale": np.array(dataclasses.astuple(state), np.int32)}


def restored_scale(tree: Mapping[str, Any]) -> ScaleState | None:
    """Inverse of `saved_scale`."""
    return ScaleState(*np.asarray(tree["loss_scale"]).tolist()) if "loss_scale" in tree else None


def scaled_loss(loss: jax.Array, num_losses: int, aux: PyTree) -> jax.Array:
    """The scaled loss, which is differentiated.

    Args:
        loss: A microbatch's sum of losses.
    """
    if not isinstance(aux, ScaledAux):
        return loss
    return loss * scale_of_sum(aux.exponent, num_losses)


def scale_of_sum(exponent: jax.Array, num_losses: int) -> jax.Array:
    """The scale of a sum of losses, float32, from the exponent of that of their mean."""
    exponent = sum_exponent(exponent, num_losses)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def sum_exponent(exponent: Exponent, num_losses: int) -> Exponent:
    """The exponent of the scale of a sum of losses, from that of their mean.

    The number of losses is rounded down to a power of two, so that scaling is exact.

    Args:
        num_losses: The losses of a microbatch, masked ones included: known when traced, and the
            same for all microbatches.
    """
    return exponent - (num_losses.bit_length() - 1)


def with_loss_scale(model: Functional, exponent: int) -> Functional:
    """A model whose other variables include a loss scale; `finish` takes them without it."""

    def call(run: Any) -> Any:
        def scaled(params: PyTree, aux: Any, key: jax.Array, batch: PyTree) -> Any:
            out, variables = run(params, aux.variables, key, batch)
            return out, ScaledAux(variables, aux.exponent)

        return scaled

    def given() -> tuple[PyTree, PyTree]:
        assert model.given is not None
        params, aux = model.given()
        return params, ScaledAux(aux, np.asarray(exponent, np.int32))

    def initialise(*arguments: Any) -> tuple[PyTree, PyTree]:
        assert model.initialise is not None
        params, aux = model.initialise(*arguments)
        return params, ScaledAux(aux, jnp.int32(exponent))

    return dataclasses.replace(
        model,
        aux=ScaledAux(model.aux, np.asarray(exponent, np.int32)),
        train=call(model.train),
        evaluate=call(model.evaluate),
        given=None if model.given is None else given,
        initialise=None if model.initialise is None else initialise,
    )
