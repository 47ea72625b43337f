"""The result of a loss as sums over one microbatch.

The gradient is that of the mean over the *global* batch, so a microbatch contributes a sum and a
weight, never its mean.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import LossError

_ACCEPTED = (
    "a loss returns one of\n"
    "  loss                      a scalar: the mean over its microbatch\n"
    "  values                    per-example losses, shape [microbatch, ...]\n"
    "  (values, weights)         per-example losses with weights or a mask of the same shape\n"
    "each optionally followed by a dictionary of metrics: (loss, {...}), (values, weights, {...})"
)


_NO_GRADIENT = "what jax.value_and_grad returns is no loss, for hxla takes the gradient itself"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricColumns:
    """The place of a metric in the sums of a microbatch.

    Attributes:
        name: The user's name of the metric.
        how: The rule by which it is merged, see `metric`.
        over: The microbatches that count, see `metric`.
        width: The number of columns. The column of a mean is weighted by the microbatch's weight.
    """

    name: str
    how: str
    over: str
    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchSums:
    """One microbatch's part of the global means.

    Attributes:
        loss: float32 scalar, sum of weighted losses.
        weight: float32 scalar, sum of weights.
        columns: For each metric float32[width], the microbatch's contribution.
        metrics: The metric of each entry of `columns`.
        num_losses: The number of losses in the sum; 1: the loss is a mean already.
    """

    loss: jax.Array
    weight: jax.Array
    columns: tuple[jax.Array, ...]
    metrics: tuple[MetricColumns, ...]
    num_losses: int

    @property
    def row(self) -> jax.Array:
        """float32[2 + columns]: loss, weight, metrics."""
        return jnp.concatenate([jnp.stack([self.loss, self.weight]), *self.columns])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KnownGradient:
    """A microbatch's part of a loss with a known gradient.

    Attributes:
        out: The result of a loss, independent of the parameters.
        zeros: float32[microbatch], zeros whose gradient is that of the sum of weighted losses.
    """

    out: Any
    zeros: Any


_HOW = ("mean", "sum", "max", "min", "concat")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric with the way its microbatches are merged, as `metric` returns it.

    Attributes:
        value: A scalar, or an array of the shape of the per-example losses.
        how: The rule: `mean`, `sum`, `max`, `min` or `concat`.
        over: The microbatches that count: `global` or `local`.
    """

    value: Any
    how: str = dataclasses.field(default="mean", metadata={"static": True})
    over: str = dataclasses.field(default="global", metadata={"static": True})


def metric(
    value: Any,
    how: Literal["mean", "sum", "max", "min", "concat"] = "mean",
    *,
    over: Literal["global", "local"] = "global",
) -> Metric:
    """Say how a metric that a loss returns is merged over microbatches and replicas.

    Args:
        value: A scalar, or an array of the shape of the per-example losses.
        how: The rule. `mean` weighs with the losses' weights; `sum`, `max` and `min` take every
            entry; `concat` keeps one number for each example, in the order of the global batch.
        over: The microbatches that count. `global` takes those of the whole batch, `local` those of
            the first replica of the process that writes the history.

    Returns:
        The value to put into the loss's dictionary of metrics.

    Raises:
        LossError: If `how` or `over` is another name.

    Example:
        >>> import hxla, jax.numpy as jnp
        >>> def loss(model, batch):
        ...     values, mask = model(batch["x"]), batch["mask"]
        ...     return (values, mask), {"tokens": hxla.metric(mask.sum(), "sum")}
        >>> batch = {"x": jnp.ones(4), "mask": jnp.array([1.0, 1.0, 0.0, 1.0])}
        >>> loss(jnp.square, batch)[1]["tokens"].how
        'sum'

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.1 (outputs merged over replicas);
        EasyParallelLibrary, `epl.add_to_collection`.
    """
    if how not in _HOW or over not in ("global", "local"):
        raise LossError(
            f"hxla.metric(..., {how!r}, over={over!r}): how is one of {', '.join(_HOW)}, "
            "over is global or local"
        )
    return Metric(value, how, over)


def num_columns(metrics: Sequence[MetricColumns]) -> int:
    """The columns of a row of sums: loss, weight and metrics."""
    return 2 + sum(metric.width for metric in metrics)


def means(
    rows_MS: np.ndarray, metrics: Sequence[MetricColumns], local: Sequence[int]
) -> tuple[float, float, dict[str, float | tuple[float, ...]]]:
    """Loss, weight and metrics of a batch from those of its microbatches, added in order.

    Args:
        rows_MS: float32, the `row` of each microbatch.
        local: Microbatches of the local replica.
    """
    losses_M, weights_M = rows_MS[:, 0], rows_MS[:, 1]
    weight = math.fsum(weights_M) if np.isfinite(weights_M).all() else math.nan
    loss = math.fsum(losses_M) if np.isfinite(losses_M).all() else math.nan
    merged = {}
    start = 2
    for metric in metrics:
        columns = rows_MS[:, start : start + metric.width]
        merged[metric.name] = _merge(metric, columns, weights_M, local)
        start += metric.width
    return loss / weight if weight else math.nan, weight, merged


def _merge(
    metric: MetricColumns, rows_MK: np.ndarray, weights_M: np.ndarray, local: Sequence[int]
) -> float | tuple[float, ...]:
    if metric.over == "local":
        rows_MK, weights_M = rows_MK[list(local)], weights_M[list(local)]
    if not len(rows_MK):
        return () if metric.how == "concat" else math.nan
    if metric.how == "concat":
        return tuple(float(x) for x in rows_MK.reshape(-1) if not np.isnan(x))
    column = rows_MK[:, 0]
    if metric.how in ("max", "min"):
        return float(column.max() if metric.how == "max" else column.min())
    total = math.fsum(column) if np.isfinite(column).all() else math.nan
    if metric.how == "sum":
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


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | float | int) or hasattr(x, "dtype")


def as_sums(
    out: Any, num_examples: int, *, mean_weight: float = 1, padded_size: int | None = None
) -> MicrobatchSums:
    """Read the result of the user's loss.

    Args:
        out: See the message of the error.
        mean_weight: Weight of a microbatch whose loss is a mean: 1 if all microbatches have the
            same size, else its number of examples.
        padded_size: Length that a `concat` is padded to with NaN; None: `num_examples`.

    Raises:
        LossError: If `out` is none of the accepted forms.
    """
    if isinstance(out, KnownGradient):
        sums = as_sums(out.out, num_examples, mean_weight=mean_weight, padded_size=padded_size)
        return dataclasses.replace(sums, loss=sums.loss + jnp.sum(out.zeros))

    metrics: Mapping[str, Any] = {}
    parts = out if isinstance(out, tuple) else (out,)
    if len(parts) > 1 and isinstance(parts[-1], Mapping):
        metrics, parts = parts[-1], parts[:-1]
    if parts == (None,):
        raise _wrong(out, "it lacks a return")
    if len(parts) not in (1, 2) or not all(map(_is_array, parts)):
        raise _wrong(out, f"expected one or two arrays; {_NO_GRADIENT}")
    values = jnp.asarray(parts[0])
    loss, weights = _weighted(out, values, parts[1:], num_examples, mean_weight)
    weight = jnp.sum(weights)
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        raise _wrong(out, f"{', '.join(map(repr, unnamed))} names a metric: names are texts")
    missing = (padded_size or num_examples) - num_examples
    pairs = [
        _columns(out, name, x, weights, weight, missing) for name, x in sorted(metrics.items())
    ]
    return MicrobatchSums(
        loss=loss,
        weight=weight,
        columns=tuple(columns for columns, _ in pairs),
        metrics=tuple(metric for _, metric in pairs),
        num_losses=max(values.size, 1),
    )


def _wrong(out: Any, why: str) -> LossError:
    return LossError(f"the loss returned {_describe(out)}: {why}\n{_ACCEPTED}")


def _weighted(
    out: Any,
    values: jax.Array,
    user_weights: tuple[Any, ...],
    num_examples: int,
    mean_weight: float,
) -> tuple[jax.Array, jax.Array]:
    """The sum of a microbatch's losses, and their weights.

    Args:
        user_weights: The user's weights, if there are any.
    """
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise _wrong(out, f"a loss must be real and floating, not {values.dtype}")
    if values.ndim == 0:
        if user_weights:
            raise _wrong(
                out,
                "a scalar loss is a mean already and takes no weights. If this is (loss, aux), as "
                "for jax.value_and_grad(has_aux=True): numbers to record go into a dictionary, "
                "(loss, {'accuracy': accuracy}), and neither the model's state nor its logits are "
                "returned, for hxla keeps the state itself",
            )
        weights = jnp.float32(mean_weight)
        loss = values.astype(jnp.float32) * weights
    else:
        if values.shape[0] != num_examples:
            raise _wrong(
                out,
                f"per-example losses need a leading dimension of {num_examples} "
                "(the microbatch), or a scalar",
            )
        weights = (
            jnp.asarray(user_weights[0]) if user_weights else jnp.ones(values.shape, jnp.float32)
        )
        if weights.shape != values.shape:
            raise _wrong(out, "weights need the shape of the values")
        weights = weights.astype(jnp.float32)
        # A masked value may be infinite or NaN: it must not reach the sum or its gradient.
        safe = jnp.where(weights != 0, values.astype(jnp.float32), 0)
        loss = jnp.sum(safe * weights)
        weights = jax.lax.stop_gradient(weights)
    return loss, weights


def _columns(
    out: Any, name: str, user_value: Any, weights: jax.Array, weight: jax.Array, missing: int
) -> tuple[jax.Array, MetricColumns]:
    """The columns of a metric, and their description.

    Args:
        missing: The number of examples by which a `concat` is padded.
    """
    asked = user_value if isinstance(user_value, Metric) else Metric(user_value)
    if not _is_array(asked.value):
        raise _wrong(
            out,
            f"metric {name!r} is {_describe(asked.value)}: metrics are numbers by name; the "
            "model's state is not returned, for hxla keeps it itself",
        )
    value = jax.lax.stop_gradient(jnp.asarray(asked.value)).astype(jnp.float32)
    if value.ndim and value.shape != weights.shape:
        raise _wrong(
            out,
            f"metric {name!r} has shape {list(value.shape)}: metrics are scalars (means over "
            f"the microbatch) or have the shape of the values; {_NO_GRADIENT}",
        )
    if asked.how == "concat":
        if value.ndim != 1:
            raise _wrong(
                out,
                f"metric {name!r} of shape {list(value.shape)} cannot be concatenated: give "
                "one number for each example",
            )
        columns = jnp.pad(value, (0, missing), constant_values=jnp.nan)
    elif asked.how == "mean":
        every = weights if value.ndim else weight
        columns = jnp.sum(jnp.where(every != 0, value, 0) * every)[None]
    else:
        reduce: Any = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[asked.how]
        columns = reduce(value)[None]
    width = columns.shape[0]
    return columns, MetricColumns(name=name, how=asked.how, over=asked.over, width=width)
