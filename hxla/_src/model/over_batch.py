"""A loss of the whole batch in two passes: embeddings first, then their gradients.

The first pass embeds each microbatch and keeps only the embeddings. From those of the whole batch
follow the losses and the gradient of each embedding. The second pass runs each microbatch again and
applies the chain rule to its rows of both: an ordinary loss with a known value and gradient.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError, LossError
from ..core.types import PyTree
from ..jax.jaxpr import naming_axes, read_arguments, with_axes
from .loss import KnownGradient, Metric, as_sums
from .plain_arrays import root_key
from .variables import CallWrites

_Call = Callable[[PyTree, PyTree, jax.Array, Any], tuple[Any, PyTree]]
_DTYPES = ("float32", "bfloat16", "float64")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToEmbed:
    """A microbatch of the first pass: the loss returns its embeddings."""

    batch: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithGradients:
    """A microbatch of the second pass.

    Attributes:
        out: Its rows of the results of `contrast`, see `OverBatch.outputs`.
        gradients: The gradient of the batch's sum of losses for each of its embeddings.
    """

    batch: PyTree
    out: PyTree
    gradients: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class OverBatch:
    """See `over_batch`. Called like a loss, it takes a whole batch."""

    embed: Callable[..., Any]
    contrast: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: PyTree, **key: jax.Array) -> Any:
        return self.contrast(self.embed(model, batch, **key), batch)

    def in_passes(self, embed: Callable[[Any, Any, jax.Array], Any]) -> Callable[..., Any]:
        """The loss as the programs call it; its result depends on the type of the batch.

        Args:
            embed: `self.embed` as hxla calls it.
        """

        def run(model: Any, batch: Any, key: jax.Array) -> Any:
            if isinstance(batch, ToEmbed):
                return _checked(embed(model, batch.batch, key), batch.batch)
            if not isinstance(batch, WithGradients):
                return self.contrast(embed(model, batch, key), batch)
            embeddings = _checked(embed(model, batch.batch, key), batch.batch)
            each = jax.tree.map(_zero, batch.gradients, embeddings)
            return KnownGradient(batch.out, sum(jax.tree.leaves(each)))

        return run

    def outputs(self, embeddings: PyTree, batch: PyTree) -> PyTree:
        """The results of `contrast` for the whole batch, with a row for each example.

        Raises:
            LossError: If it returns a value of no form of a loss.
        """
        num = len(jax.tree.leaves(embeddings)[0])
        out = self.contrast(embeddings, batch)
        try:
            as_sums(out, num)
        except LossError as error:
            raise LossError(
                f"contrast of hxla.over_batch is the loss, and its microbatch the whole batch of "
                f"{num}: {error}"
            ) from error
        return _as_rows(out, num)


def over_batch(
    embed: Callable[..., PyTree], contrast: Callable[[PyTree, PyTree], Any]
) -> Callable[..., Any]:
    """Make a loss in which examples of the whole batch read each other, whatever the microbatch.

    A contrastive loss, statistics of the batch or a maximum over it then refer to the global batch,
    for every microbatch size. Each step has two passes. The first embeds all microbatches and keeps
    only the embeddings; `contrast` turns those of the whole batch into losses, on each process, and
    gives the gradient for every embedding. The second pass embeds each microbatch again, with the
    same random numbers, and propagates these gradients to the parameters. So a step costs one more
    forward, and needs the memory of one microbatch besides that of `contrast`.

    Args:
        embed: A function `embed(model, batch)`, or `embed(model, batch, key)` as for `Loss`, from a
            microbatch to its embeddings: a tree of float arrays of shape `[microbatch, ...]`. An
            example's row may not depend on the others. The embeddings contain all that `contrast`
            needs from the model, such as a learned temperature as a factor or a row per example.
        contrast: A function `contrast(embeddings, batch)` of the embeddings and the examples of the
            whole batch, `[batch, ...]`, in order. It returns a loss: losses of the examples,
            `float32[batch]`, the losses with weights, or a scalar, their mean; each optionally with
            a dictionary of metrics. It computes in its written dtypes, under a precision policy
            too, and reads nothing of the model.

    Returns:
        The loss, for `Job` and its `eval_loss`. Evaluation takes consecutive batches of
        `batch_size` examples, the last of which may be shorter. Called as `loss(model, batch)` it
        is the loss of that batch, which plain JAX differentiates.

    Raises:
        ConfigError: If `contrast` cannot be called with two arguments.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.eye(8, dtype=np.float32)[::-1]}
        >>> def embed(model, batch):
        ...     return {"x": model(batch["x"]), "y": model(batch["y"])}
        >>> def contrast(embeddings, batch):
        ...     logits = embeddings["x"] @ embeddings["y"].T  # of every pair of the batch
        ...     return optax.softmax_cross_entropy_with_integer_labels(logits, np.arange(8))
        >>> loss = hxla.over_batch(embed, contrast)
        >>> model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        >>> whole = float(loss(model, data).mean())
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> result = hxla.train(job, microbatch_size=2, steps=3)
        >>> abs(result.history.steps[0].loss - whole) < 1e-5
        True

    References:
        Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
        RepL4NLP 2021, section 3 (the gradient cache).
    """
    try:
        inspect.signature(contrast).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"contrast={contrast!r} is no function of two arguments ({error}): it is called as "
            "contrast(embeddings, batch)"
        ) from error
    except ValueError:  # a function that is not written in Python
        pass
    return OverBatch(embed, contrast)


@jax.custom_jvp
def _zero(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """Zero for each row, with `gradient` as its gradient; a sum of products could be NaN."""
    gradient, x = gradient.astype(jnp.float32), x.astype(jnp.float32)
    finite = jnp.where(jnp.isfinite(gradient) & jnp.isfinite(x), x, 0)
    return jnp.sum(finite * 0, axis=range(1, x.ndim))


@_zero.defjvp
def _zero_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    gradient, change = primals[0].astype(jnp.float32), tangents[1].astype(jnp.float32)
    return _zero(*primals), jnp.sum(gradient * change, axis=range(1, change.ndim))


def _checked(embeddings: Any, batch: PyTree) -> Any:
    """The result of `embed`, if it is a tree of valid embeddings."""
    num = jax.tree.leaves(batch)[0].shape[0]
    wrong = []
    for path, x in jax.tree_util.tree_leaves_with_path(embeddings):
        name = f"embeddings{jax.tree_util.keystr(path)}"
        if not hasattr(x, "dtype"):
            wrong.append(f"{name} is {type(x).__name__}, no array")
        elif str(x.dtype) not in _DTYPES:
            cast = " (cast it: gradients of float16 would be lost)" if x.dtype == "float16" else ""
            wrong.append(f"{name} is {x.dtype}, not one of {', '.join(_DTYPES)}{cast}")
        elif not x.shape or x.shape[0] != num:
            wrong.append(f"{name} has shape {list(x.shape)}, not [{num}, ...]")
    if not jax.tree.leaves(embeddings):
        wrong.append("there are none")
    if wrong:
        raise LossError(
            "embed of hxla.over_batch returns a tree of float arrays with a row for each example "
            "of its microbatch; labels are read from contrast's batch:\n  " + "\n  ".join(wrong)
        )
    return embeddings


def _as_rows(out: Any, num: int) -> Any:
    """The result of a loss, with a row for each of `num` examples instead of scalars."""
    metrics: Mapping[str, Any] = {}
    parts = out if isinstance(out, tuple) else (out,)
    if len(parts) > 1 and isinstance(parts[-1], Mapping):
        metrics, parts = parts[-1], parts[:-1]
    values, *weights = map(jnp.asarray, parts)
    if not values.ndim:
        values = jnp.broadcast_to(values, (num,))

    def rows(metric: Any) -> Metric:
        asked = metric if isinstance(metric, Metric) else Metric(metric)
        value = jnp.asarray(asked.value)
        if not value.ndim and asked.how == "sum":
            value = jnp.zeros(values.shape, value.dtype).at[(0,) * values.ndim].set(value)
        return Metric(jnp.broadcast_to(value, values.shape), asked.how, asked.over)

    return (values, *weights, {name: rows(x) for name, x in metrics.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedOverBatch:
    """A loss over the batch, and the shapes of its batch and embeddings.

    Attributes:
        batch_size: Examples of a global batch.
        batch: The shapes of a microbatch.
        embeddings: The shapes of its embeddings.
    """

    loss: OverBatch
    batch_size: int
    batch: PyTree
    embeddings: PyTree

    @property
    def size(self) -> int:
        """Examples of a microbatch."""
        return int(jax.tree.leaves(self.batch)[0].shape[0])

    @functools.cached_property
    def program(self) -> Any:
        """`OverBatch.outputs` traced for the whole batch, and the shapes of its results."""
        num = self.batch_size
        shapes = _with_num_examples(self.embeddings, num), _with_num_examples(self.batch, num)
        return jax.make_jaxpr(self.loss.outputs, return_shape=True)(*shapes)

    def second(self) -> WithGradients:
        """The shapes of a microbatch of the second pass."""
        out = _with_num_examples(self.program[1], self.size)
        return WithGradients(self.batch, out, self.embeddings)

    @functools.cached_property
    def _reads(self) -> tuple[int, ...]:
        """The indices of the batch's arrays that `contrast` reads."""
        closed, first = self.program[0], len(jax.tree.leaves(self.embeddings))
        return tuple(sorted(i - first for i in read_arguments(closed) if i >= first))

    def read_of(self, batch: PyTree) -> list[np.ndarray]:
        """The arrays of a microbatch that `contrast` reads."""
        leaves, shapes = jax.tree.leaves(batch), jax.tree.leaves(self.batch)
        return [np.asarray(leaves[i], shapes[i].dtype) for i in self._reads]

    def operands(self, num_examples: int) -> list[jax.ShapeDtypeStruct]:
        """The shapes of embeddings and of the arrays that `contrast` reads, for `num_examples`."""
        batch = jax.tree.leaves(self.batch)
        shapes = [*jax.tree.leaves(self.embeddings), *(batch[i] for i in self._reads)]
        return _with_num_examples(shapes, num_examples)

    def arguments(self, operands: Sequence[jax.Array]) -> tuple[PyTree, PyTree]:
        """The embeddings and the batch for `contrast`; arrays that it does not read are zero."""
        num, num_embeddings = len(operands[0]), len(jax.tree.leaves(self.embeddings))
        leaves, treedef = jax.tree.flatten(_with_num_examples(self.batch, num))
        read = dict(zip(self._reads, operands[num_embeddings:], strict=True))
        filled = [read.get(i, jnp.zeros(x.shape, x.dtype)) for i, x in enumerate(leaves)]
        embeddings_treedef = jax.tree.structure(self.embeddings)
        return jax.tree.unflatten(
            embeddings_treedef, operands[:num_embeddings]
        ), jax.tree.unflatten(treedef, filled)


def embedding(call: _Call) -> Callable[[PyTree, PyTree, jax.Array, ToEmbed], PyTree]:
    """A call of a model that returns only the embeddings of a microbatch.

    Args:
        call: `(params, aux, key, batch) -> (output of the loss, aux)`.
    """

    def run(params: PyTree, aux: PyTree, key: jax.Array, batch: ToEmbed) -> PyTree:
        out, _ = call(params, aux, key, batch)
        return out.out if isinstance(out, CallWrites) else out

    return run


def trace_over_batch(
    loss: OverBatch, call: _Call, variables: tuple[PyTree, PyTree], batch: PyTree, batch_size: int
) -> TracedOverBatch:
    """Find the shapes of a loss over the batch.

    Args:
        batch: The shapes of a microbatch.
        batch_size: Examples of a global batch.
    """
    axes: list[str] = []
    params, aux = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables)
    arguments = params, aux, jax.eval_shape(root_key, 0), ToEmbed(batch)
    embed = embedding(call)
    shapes = naming_axes(lambda: jax.eval_shape(with_axes(embed, axes), *arguments), axes)
    return TracedOverBatch(loss=loss, batch_size=batch_size, batch=batch, embeddings=shapes)


def _with_num_examples(tree: PyTree, num: int) -> PyTree:
    """Shapes with another number of examples."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype), tree)
