"""What a loss may return, brought to sums over one microbatch.

The gradient is that of the mean over the *global* batch, so a microbatch contributes a sum and a
weight, never a mean of its own.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from .._core._errors import LossError

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
        metrics: Name to what this microbatch adds.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: "dict[str, Part]"


How = Literal["mean", "sum", "max", "min", "concat"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Merged:
    """A metric with the way its microbatches are merged: see `merge`."""

    value: Any
    how: str = dataclasses.field(default="mean", metadata={"static": True})
    over: str = dataclasses.field(default="global", metadata={"static": True})


def merge(value: Any, how: How = "mean", *, over: Literal["global", "local"] = "global") -> Merged:
    """Say how a metric that a loss returns is merged over microbatches and replicas.

    Args:
        value: A scalar, or an array of the shape of the per-example losses.
        how: `mean` weighs with the losses' weights; `sum`, `max` and `min` take every entry;
            `concat` keeps one number for each example, in the order of the global batch.
        over: `global` takes every microbatch of the batch, `local` those of the first replica of
            the process that writes the history.

    Returns:
        What to put into the dictionary of metrics.

    Raises:
        LossError: For another name.

    Example:
        >>> return loss, {"tokens": hxla.merge(mask.sum(), "sum")}

    References:
        Whale's merged outputs; EasyParallelLibrary, `epl.add_to_collection`.
    """
    if how not in get_args(How) or over not in ("global", "local"):
        raise LossError(
            f"hxla.merge(..., {how!r}, over={over!r}): how is one of {', '.join(get_args(How))}, "
            "over is global or local"
        )
    return Merged(value, how, over)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One microbatch's part of a metric.

    Attributes:
        how: As for `merge`.
        over: As for `merge`.
        columns: float32[k]; a mean is multiplied by the microbatch's weight already.
    """

    how: str
    over: str
    columns: jax.Array

    @property
    def width(self) -> int:
        """k."""
        return self.columns.shape[0]


def merge_parts(
    part: Part, rows_MK: np.ndarray, weights_M: np.ndarray, own: Sequence[int]
) -> float | tuple[float, ...]:
    """Bring a metric's columns of all microbatches together, in the order of microbatches.

    Args:
        part: How.
        rows_MK: float32, one row for each microbatch.
        weights_M: Their weights.
        own: Microbatches of the local replica.
    """
    if part.over == "local":
        rows_MK, weights_M = rows_MK[list(own)], weights_M[list(own)]
    if not len(rows_MK):
        return () if part.how == "concat" else math.nan
    if part.how == "concat":
        return tuple(float(x) for x in rows_MK.reshape(-1) if not np.isnan(x))
    column = rows_MK[:, 0]
    if part.how in ("max", "min"):
        return float(column.max() if part.how == "max" else column.min())
    total = math.fsum(column) if np.isfinite(column).all() else math.nan
    if part.how == "sum":
        return total
    weight = math.fsum(weights_M)
    return total / weight if weight else math.nan


def _describe(out: Any) -> str:
    if isinstance(out, tuple):
        return "(" + ", ".join(_describe(x) for x in out) + ")"
    if isinstance(out, Mapping):
        return "{" + ", ".join(map(str, out)) + "}"
    if hasattr(out, "shape"):
        return f"{out.dtype}{list(out.shape)}"
    return type(out).__name__


def as_sums(
    out: Any, num_examples: int, *, mean_weight: float = 1, num_columns: int | None = None
) -> Sums:
    """Read what the user's loss returned.

    Args:
        out: See the message of the error.
        num_examples: Examples in the microbatch.
        mean_weight: Weight of a microbatch whose loss is a mean already: 1 where all have the same
            size, else its number of examples.
        num_columns: Length that a `concat` is padded to with NaN; None: `num_examples`.

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

    def metric(name: str, given: Any) -> Part:
        merged = given if isinstance(given, Merged) else Merged(given)
        value = jax.lax.stop_gradient(jnp.asarray(merged.value)).astype(jnp.float32)
        if value.ndim and value.shape != weights.shape:
            raise wrong(
                f"metric {name!r} has shape {list(value.shape)}: metrics are scalars (means over "
                "the microbatch) or have the shape of the values"
            )
        if merged.how == "concat":
            if value.ndim != 1:
                raise wrong(
                    f"metric {name!r} of shape {list(value.shape)} cannot be concatenated: give "
                    "one number for each example"
                )
            missing = (num_columns or num_examples) - num_examples
            columns = jnp.pad(value, (0, missing), constant_values=jnp.nan)
        elif merged.how == "mean":
            every = weights if value.ndim else weight
            columns = jnp.sum(jnp.where(every != 0, value, 0) * every)[None]
        else:
            reduce: Any = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[merged.how]
            columns = reduce(value)[None]
        return Part(how=merged.how, over=merged.over, columns=columns)

    return Sums(
        loss=loss,
        weight=weight,
        metrics={str(k): metric(k, v) for k, v in sorted(metrics.items())},
    )
