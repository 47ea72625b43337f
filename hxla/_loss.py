"""What a loss may return, brought to sums over one microbatch.

The gradient is that of the mean over the *global* batch, so a microbatch contributes a sum and a
weight, never a mean of its own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import LossError

_ACCEPTED = (
    "a loss returns one of\n"
    "  loss                      a scalar: the mean over its microbatch\n"
    "  values                    per-example losses, shape [microbatch, ...]\n"
    "  (values, weights)         per-example losses with weights or a mask of the same shape\n"
    "each optionally followed by a dictionary of metrics: (loss, {...}), (values, weights, {...})"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """One microbatch's part of the global means.

    Attributes:
        loss: float32 scalar, sum of weighted losses.
        weight: float32 scalar, sum of weights.
        metrics: Name to float32 scalar, each times `weight`.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]


def _describe(out: Any) -> str:
    if isinstance(out, tuple):
        return "(" + ", ".join(_describe(x) for x in out) + ")"
    if isinstance(out, Mapping):
        return "{" + ", ".join(map(str, out)) + "}"
    if hasattr(out, "shape"):
        return f"{out.dtype}{list(out.shape)}"
    return type(out).__name__


def as_sums(out: Any, num_examples: int, *, mean_weight: float = 1) -> Sums:
    """Read what the user's loss returned.

    Args:
        out: See the message of the error.
        num_examples: Examples in the microbatch.
        mean_weight: Weight of a microbatch whose loss is a mean already: 1 where all have the same
            size, else its number of examples.

    Returns:
        Sums over the microbatch.

    Raises:
        LossError: If `out` is none of the accepted forms.
    """

    def wrong(why: str) -> LossError:
        return LossError(f"the loss returned {_describe(out)}: {why}\n{_ACCEPTED}")

    metrics: Mapping[str, Any] = {}
    parts = out if isinstance(out, tuple) else (out,)
    if len(parts) > 1 and isinstance(parts[-1], Mapping):
        metrics, parts = parts[-1], parts[:-1]
    if len(parts) not in (1, 2) or not all(
        isinstance(p, jax.Array | float | int) or hasattr(p, "dtype") for p in parts
    ):
        raise wrong("expected one or two arrays")
    values = jnp.asarray(parts[0])
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise wrong(f"a loss must be real and floating, not {values.dtype}")
    if values.ndim == 0:
        if len(parts) == 2:
            raise wrong("a scalar loss is a mean already and takes no weights")
        weights = jnp.float32(mean_weight)
        loss = values.astype(jnp.float32) * weights
    else:
        if values.shape[0] != num_examples:
            raise wrong(
                f"per-example losses need a leading dimension of {num_examples} "
                "(the microbatch), or a scalar"
            )
        weights = jnp.asarray(parts[1]) if len(parts) == 2 else jnp.ones(values.shape, jnp.float32)
        if weights.shape != values.shape:
            raise wrong("weights need the shape of the values")
        weights = weights.astype(jnp.float32)
        # A masked value may be anything, infinite too: it must not reach the sum or its gradient.
        safe = jnp.where(weights != 0, values.astype(jnp.float32), 0)
        loss = jnp.sum(safe * weights)
        weights = jax.lax.stop_gradient(weights)
    weight = jnp.sum(weights)

    def metric(name: str, value: Any) -> jax.Array:
        value = jax.lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
        if value.ndim == 0:
            return value * weight
        if value.shape != weights.shape:
            raise wrong(
                f"metric {name!r} has shape {list(value.shape)}: metrics are scalars (means over "
                "the microbatch) or have the shape of the values"
            )
        return jnp.sum(jnp.where(weights != 0, value, 0) * weights)

    return Sums(
        loss=loss,
        weight=weight,
        metrics={str(k): metric(k, v) for k, v in sorted(metrics.items())},
    )
