"""What a row of the zoo is, and the loop that its author would have written in plain JAX."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

STEPS, BATCH, MICROBATCH, SEED = 3, 16, 2, 3
_LOSS = int.from_bytes(b"loss")  # what sets a loss's own key apart from the model's streams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A model and what trains it.

    Attributes:
        make: Makes an NNX model, or a Linen module.
        loss: `loss(model, batch)`, or with a third argument `key` if `keyed`.
        data: Arrays with 16 examples or more.
        optimizer: Of optax.
        inputs: Of a Linen module's `init`, from the data.
        trainable: As `hxla.train` takes it.
        wrt: The NNX filter or the Linen path of what is trained, in the plain loop.
        keyed: Whether the loss has a third argument.
        sown: Collections of a Linen module that `sow` fills.
        by_microbatch: Whether the loss of a batch is no mean over its examples (BatchNorm, keys,
            negatives within the batch): then the plain loop adds up microbatches, too.
        axis_name: The axis that a model written for `pmap` averages over.
        cut: Patterns of parameters whose last dimension two devices share.
        chain: Why no pipeline makes sense; empty: one of two stages is tried.
        floor: Share of the model's largest parameter below which a tensor's error is not relative
            to the tensor, and why; the default suits biases that began at zero.
    """

    make: Callable[[], Any]
    loss: Callable[..., Any]
    data: Mapping[str, np.ndarray]
    optimizer: Any = dataclasses.field(default_factory=lambda: optax.sgd(0.05, momentum=0.9))
    inputs: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = None
    trainable: Any = None
    wrt: Any = nnx.Param
    keyed: bool = False
    sown: Sequence[str] = ()
    by_microbatch: bool = False
    axis_name: str = ""
    cut: Sequence[str] = ()
    chain: str = ""
    floor: float = 0.1

    @functools.cached_property
    def variables(self) -> Any:
        """Of a Linen module, as its author initialises it."""
        if self.inputs is None:
            return None
        first = {k: x[:MICROBATCH] for k, x in self.data.items()}
        names = ("params", "dropout")
        keys = dict(zip(names, jax.random.split(jax.random.key(1), 2), strict=True))
        made = dict(jax.jit(self.make().init)(keys, *self.inputs(first)))
        return {name: made[name] for name in made if name not in self.sown}


def plain(
    row: Row, *, steps: int = STEPS, batch_size: int = BATCH, microbatch_size: int = MICROBATCH
) -> tuple[list[float], Any]:
    """Losses and trained variables, by jax, flax and optax alone."""
    start, loss, finish = (_plain_linen if row.inputs else _plain_nnx)(row)
    params, rest = start
    optimizer = row.optimizer
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    optimizer = optax.with_extra_args_support(optimizer)
    state = jax.jit(optimizer.init)(params)

    def mean_loss(params: Any, rest: Any, key: Any, batch: Any) -> tuple[Any, Any]:
        out, rest = loss(params, rest, key, batch)
        return _mean(out), rest

    if row.axis_name:
        mean_loss = jax.vmap(
            mean_loss, in_axes=None, out_axes=None, axis_name=row.axis_name, axis_size=1
        )
    as_written = {"xla_allow_excess_precision": False}  # else a low dtype may be left out
    gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True), compiler_options=as_written)

    @jax.jit
    def update(params: Any, state: Any, value: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params, value=value, grad=grads)
        return optax.apply_updates(params, updates), state

    losses = []
    for step in range(steps):
        rows = np.arange(step * batch_size, (step + 1) * batch_size)
        rows = rows % len(jax.tree.leaves(row.data)[0])
        size = microbatch_size if row.by_microbatch else batch_size
        found = []
        for index in range(batch_size // size):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), step), index)
            own = rows[index * size : (index + 1) * size]
            found.append(gradient(params, rest, key, jax.tree.map(lambda x, o=own: x[o], row.data)))
        (value, rest), grads = jax.tree.map(_average, *found)
        params, state = update(params, state, value, grads)
        losses.append(float(value))
    return losses, finish(params, rest)


def _average(*each: Any) -> Any:
    """Of floats the mean; of anything else what the first microbatch left."""
    if jnp.issubdtype(each[0].dtype, jnp.floating) and len(each) > 1:
        return sum(x.astype(jnp.float32) for x in each) / len(each)
    return each[0]


def _mean(out: Any) -> jax.Array:
    """Of what losses return."""
    parts = out if isinstance(out, tuple) else (out,)
    values, *weights = [x for x in parts if not isinstance(x, dict)]
    if not weights:
        return jnp.mean(values)
    return jnp.sum(values * weights[0]) / jnp.sum(weights[0])


def _plain_nnx(row: Row) -> Any:
    graphdef, params, rngs, _, rest = nnx.split(
        row.make(), row.wrt, nnx.RngState, nnx.Intermediate, ...
    )

    def loss(params: Any, rest: Any, key: Any, batch: Any) -> Any:
        leaves, structure = jax.tree.flatten(rngs)
        streams = [
            jax.random.fold_in(key, i) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 0 * x
            for i, x in enumerate(leaves)
        ]
        own = jax.tree.unflatten(structure, streams)
        model = nnx.merge(graphdef, params, own, rest, copy=True)
        out = row.loss(model, batch, *[jax.random.fold_in(key, _LOSS)] * row.keyed)
        return out, nnx.split(model, row.wrt, nnx.RngState, nnx.Intermediate, ...)[4]

    def finish(params: Any, rest: Any) -> Any:
        return nnx.state(nnx.merge(graphdef, params, rngs, rest), nnx.Not(nnx.RngState))

    return (params, rest), loss, finish


def _plain_linen(row: Row) -> Any:
    variables = dict(row.variables)
    params = variables.pop("params")
    trained = {k: v for k, v in params.items() if row.wrt is nnx.Param or k == row.wrt}
    frozen = {k: v for k, v in params.items() if k not in trained}

    def loss(trained: Any, rest: Any, key: Any, batch: Any) -> Any:
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(("params", "dropout"))}
        mutable = [*rest, *row.sown]
        run = nn.apply(lambda model, batch: row.loss(model, batch), row.make(), mutable=mutable)
        out, left = run({"params": {**trained, **frozen}, **rest}, batch, rngs=keys)
        return out, {name: left[name] for name in rest}

    def finish(trained: Any, rest: Any) -> Any:
        return {"params": {**trained, **frozen}, **rest}

    return (trained, variables), loss, finish


def error(ours: Any, theirs: Any, floor: float) -> tuple[float, str]:
    """The largest relative error of any tensor, and its path."""
    pairs = [
        (path, np.asarray(a, np.float64), np.asarray(b, np.float64))
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
        )
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    largest = max(np.abs(b).max() for _, _, b in pairs)
    worst = (
        (np.abs(a - b).max() / max(np.abs(b).max(), floor * largest), jax.tree_util.keystr(path))
        for path, a, b in pairs
    )
    return max(worst)
