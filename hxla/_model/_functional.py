"""A Flax model, NNX or Linen, as pure functions over flat lists of arrays.

Both kinds become one `Functional`: parameters, auxiliary state (BatchNorm statistics and other
mutable collections), and a call that runs the user's loss with random keys derived from the
microbatch's own key and from nothing else.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from .._core._errors import ConfigError
from .._core._types import PyTree

Loss = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functional:
    """A model without objects.

    Attributes:
        params: Trainable arrays in the user's own tree; the optimizer sees exactly this.
        aux: Other arrays that the loss may change, in the user's own tree.
        logical: For each parameter the logical names of its dimensions in Flax's metadata.
        train: `(params, aux, key, batch) -> (output of the loss, aux)`.
        evaluate: The same with the model in evaluation mode.
        finish: `(params, aux) -> (model, state)` as `hxla.train` returns them.
    """

    params: PyTree
    aux: PyTree
    logical: tuple[tuple[str | None, ...] | None, ...]
    train: Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree]]
    evaluate: Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree]]
    finish: Callable[[PyTree, PyTree], tuple[Any, PyTree]]


def leaf_names(tree: PyTree) -> tuple[str, ...]:
    """The path of every leaf, as `block/attn/kernel`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(
        "/".join(
            str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))))
            for k in path
            if not (isinstance(k, jax.tree_util.GetAttrKey) and k.name in ("value", "raw_value"))
        )
        for path, _ in paths
    )


def _logical(specs: PyTree) -> tuple[tuple[str | None, ...] | None, ...]:
    """Names of each parameter's dimensions; None where the model gives none."""
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return tuple(tuple(s) if s is not None and any(s) else None for s in leaves)


def _check_params(params: PyTree) -> None:
    if not jax.tree.leaves(params):
        raise ConfigError("model has no trainable parameters: nothing to train")
    wrong = [
        f"  {name}: {leaf.dtype}{list(leaf.shape)}"
        for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True)
        if not jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if wrong:
        raise ConfigError(
            "these parameters are not real floats and have no gradient:\n"
            + "\n".join(wrong)
            + "\nkeep them in another variable type (NNX) or collection (Linen)"
        )


def from_nnx(model: nnx.Module, loss: Loss, eval_loss: Loss) -> Functional:
    """Make an NNX module functional.

    Args:
        model: Left as it is until `finish`, which updates it in place.
        loss: `loss(model, batch)`.
        eval_loss: The same, called on the model in evaluation mode.

    Returns:
        Params are all `nnx.Param` variables; aux is every other variable except random streams
        and `nnx.Intermediate`.
    """
    filters: Any = (nnx.Param, nnx.RngState, nnx.Intermediate, ...)

    def in_mode(mode: str) -> Any:
        clone = nnx.clone(model)
        getattr(clone, mode)()
        return nnx.split(clone, *filters)

    graphdef_train, params, rngs, _, aux = in_mode("train")
    graphdef_eval = in_mode("eval")[0]
    _check_params(params)

    def call(graphdef: Any, loss: Loss) -> Any:
        def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
            module = nnx.merge(graphdef, params, _reseed(rngs, key), aux)
            out = loss(module, batch)
            parts: Any = nnx.split(module, *filters)
            return out, parts[4]

        return run

    def finish(params: PyTree, aux: PyTree) -> tuple[Any, PyTree]:
        nnx.update(model, params, aux)
        return model, nnx.state(model, nnx.Not(nnx.RngState))

    return Functional(
        params=params,
        aux=aux,
        logical=_logical(nnx.get_partition_spec(params)),
        train=call(graphdef_train, loss),
        evaluate=call(graphdef_eval, eval_loss),
        finish=finish,
    )


def _reseed(rngs: PyTree, key: jax.Array) -> PyTree:
    """Every random stream starts anew from `key`; its position in the model tells it apart."""
    leaves, treedef = jax.tree.flatten(rngs)
    fresh = []
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            stream = jax.random.fold_in(key, i)
            stream = jax.random.split(stream, leaf.shape) if leaf.shape else stream
            data = jax.random.key_data(stream)
            fresh.append(jax.random.wrap_key_data(data, impl=_key_impl(leaf)))
        else:
            fresh.append(jnp.zeros_like(leaf))
    return jax.tree.unflatten(treedef, fresh)


def _key_impl(leaf: Any) -> Any:
    """The random algorithm of a key, which may be a shape only."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def from_linen(
    module: nn.Module,
    loss: Loss,
    eval_loss: Loss,
    *,
    variables: PyTree | None,
    seed: int,
    example: PyTree,
) -> Functional:
    """Make a Linen module functional.

    Args:
        module: Unbound module. `loss(model, batch)` gets it bound, so `model(batch["x"])` and
            `model.method(...)` work as inside `nn.apply`.
        loss: `loss(model, batch)`.
        eval_loss: The same, used for evaluation.
        variables: Initial variables, or None to initialise them by running the loss once.
        seed: Seed of the initialisation.
        example: One microbatch, for the shapes of the initialisation.

    Returns:
        Params are the collection `params`; aux is every other collection.
    """
    if variables is None:
        keys = jax.random.split(jax.random.key(seed), 2)
        init = jax.jit(nn.init(_two_arguments(loss), module))
        variables = init({"params": keys[0], "dropout": keys[1]}, example)
    variables = dict(variables)
    if "params" not in variables:
        raise ConfigError(
            f"variables holds the collections {sorted(variables)} but no 'params': pass what "
            "module.init returned"
        )
    params = variables.pop("params")
    _check_params(params)
    mutable = sorted(variables)

    def call(loss: Loss) -> Any:
        apply = nn.apply(_two_arguments(loss), module, mutable=mutable)

        def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
            rngs = {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}
            return apply({"params": params, **aux}, batch, rngs=rngs)

        return run

    return Functional(
        params=params,
        aux=variables,
        logical=_logical(nn.get_partition_spec(params)),
        train=call(loss),
        evaluate=call(eval_loss),
        finish=lambda params, aux: (module, {"params": params, **aux}),
    )


def _two_arguments(loss: Loss) -> Loss:
    # nn.apply inspects nothing, but a callable object or partial has no __name__ for its scope.
    def run(model: Any, batch: Any) -> Any:
        return loss(model, batch)

    return run


def functional(
    model: Any,
    loss: Loss,
    eval_loss: Loss,
    *,
    variables: PyTree | None,
    seed: int,
    example: PyTree,
) -> Functional:
    """Make any Flax model functional: see `from_nnx` and `from_linen`.

    Raises:
        ConfigError: If `model` is no Flax module, or its parameters cannot be trained.
    """
    if isinstance(model, nn.Module):
        return from_linen(model, loss, eval_loss, variables=variables, seed=seed, example=example)
    if isinstance(model, nnx.Module):
        if variables is not None:
            raise ConfigError("variables is for Linen modules: an NNX model holds its own")
        return from_nnx(model, loss, eval_loss)
    raise ConfigError(
        f"model is {type(model).__name__}, not a Flax module: pass an nnx.Module instance or an "
        "unbound flax.linen.Module"
    )


def to_host(tree: PyTree) -> PyTree:
    """Copies of all leaves as numpy arrays that share no memory with device buffers."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)
