"""Checks of the user's model and optimizer, whose errors say what to write instead."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import optax
from flax import errors as flax_errors
from flax import nnx

from ..core.errors import ConfigError
from ..core.types import PyTree
from ..jax.tracing import brief_absence

_TAKES = "pass an nnx.Module instance, a function that makes one, or an unbound flax.linen.Module"


def check_model(model: Any) -> None:
    """Refuse an object that is no model and makes none.

    Raises:
        ConfigError: With a remedy, if the type of the object is known.
    """
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise ConfigError(
                "model is a bound Linen module: pass the module itself and its variables, "
                "variables=..., as module, variables = model.unbind() gives them"
            )
        return
    if isinstance(model, nnx.Module):
        return
    if isinstance(model, type):
        raise ConfigError(
            f"model is the class {model.__name__}, not a Flax module: {_how_to_make(model)}"
        )
    if remedy := _remedy(model):
        raise ConfigError(f"model is {remedy}")
    if not callable(model):
        raise ConfigError(f"model is {type(model).__name__}, not a Flax module: {_TAKES}")


def given_bytes(variables: PyTree, device: jax.Device) -> int:
    """Bytes in a device's memory of the user's arrays that stay there while a model trains.

    Args:
        variables: The variables of a Linen module, or None. Those of NNX leave the device.
    """
    memory, total = device.default_memory().kind, 0
    for x in jax.tree.leaves(variables):
        is_here = isinstance(x, jax.Array) and not x.is_deleted()
        if is_here and x.sharding.memory_kind in (None, memory):
            total += sum(s.data.nbytes for s in x.addressable_shards if s.device == device)
    return total


def _how_to_make(model: type) -> str:
    """How to make an instance of a class, in words."""
    name = model.__name__
    if issubclass(model, nnx.Module):
        return f"call it, {name}(..., rngs=nnx.Rngs(0)), or pass lambda: {name}(...)"
    if issubclass(model, nn.Module):
        return f"call it, {name}(...)"
    return _TAKES


def _remedy(model: Any) -> str | None:
    """The type of an object of Flax or another library, and what to write, in words; or None."""
    module = getattr(model, "module", None)
    if isinstance(module, nn.Module):  # Hugging Face's FlaxPreTrainedModel
        return (
            f"{type(model).__name__}, a wrapper around a Linen module: pass model.module, with "
            "variables={'params': model.params}; the loss calls it with the module's own arguments"
        )
    if hasattr(model, "apply_fn") and hasattr(model, "params"):
        return (
            "a TrainState: pass its module, with variables={'params': state.params}, and "
            "state.tx as the optimizer; hxla keeps parameters and optimizer state itself"
        )
    if isinstance(model, nnx.Optimizer):
        return "an nnx.Optimizer: pass the module as model and optimizer.tx as the optimizer"
    if isinstance(model, tuple) and model and isinstance(model[0], nnx.GraphDef):
        return "what nnx.split returned: pass the module, nnx.merge(graphdef, state)"
    if isinstance(model, nnx.State | Mapping):
        return (
            "a tree of parameters: pass the module; a Linen module's parameters go beside it, "
            "variables={'params': params}"
        )
    bases = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "torch" in bases:
        return f"{type(model).__name__}, a PyTorch module: {_TAKES}"
    if bases & {"equinox", "haiku", "keras"}:
        return f"{type(model).__name__}, not a Flax module: {_TAKES}"
    owner = getattr(model, "__self__", None)
    if isinstance(owner, nn.Module | nnx.Module):
        return f"the method {model.__name__} of {type(owner).__name__}: pass the module itself"
    if inspect.isgeneratorfunction(model):
        return f"a generator function: {_TAKES}"
    return None


def as_module(model: Any) -> tuple[nnx.Module, Callable[[], nnx.Module] | None]:
    """An NNX module, and the function that makes it if its arrays are only shapes.

    Args:
        model: A module, or a function without arguments that returns one; see `check_model`.

    Raises:
        ConfigError: If the function takes arguments or returns something else.
    """
    if isinstance(model, nnx.Module):
        return model, None
    name = getattr(model, "__name__", "model")
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model is a function, {name}, that cannot be called without arguments ({error}): "
            f"{_TAKES}, such as lambda: Net(rngs=nnx.Rngs(0))"
        ) from error
    made: list[Any] = []

    def run() -> Any:
        made[:] = [model()]
        return made[0] if isinstance(made[0], nnx.Module) else None

    try:
        with brief_absence():
            shapes = nnx.eval_shape(run)
    except flax_errors.TraceContextError as error:
        raise ConfigError(
            f"model is a function, {name}, that uses an object made outside it ({error}): make "
            "its nnx.Rngs inside, as in lambda: Net(rngs=nnx.Rngs(0))"
        ) from error
    if shapes is None:
        if isinstance(made[0], nn.Module):
            raise ConfigError(
                f"model is a function, {name}, that makes a Linen module: pass the module itself, "
                "which holds no arrays"
            )
        raise ConfigError(
            f"model is a function, {name}, that returns {type(made[0]).__name__}, not an "
            f"nnx.Module: {_TAKES}"
        )
    return shapes, model


def check_optimizer(optimizer: Any) -> None:
    """Refuse an object that is no optax transformation.

    Raises:
        ConfigError: With a remedy, if the type of the object is known.
    """
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    takes = "pass an optax transformation, such as optax.adam(1e-3)"
    name = getattr(optimizer, "__name__", None)
    if isinstance(optimizer, nnx.Optimizer):
        remedy = "an nnx.Optimizer, which holds a model and its state: pass optimizer.tx"
    elif isinstance(optimizer, str):
        remedy = f"the name {optimizer!r}: {takes}"
    elif name and getattr(optax, name, None) is optimizer:
        remedy = f"the function optax.{name}, not called: call it, optax.{name}(learning_rate)"
    elif hasattr(optimizer, "apply_fn") and hasattr(optimizer, "tx"):
        remedy = "a TrainState: pass state.tx"
    elif isinstance(optimizer, int | float | jax.Array):
        remedy = f"the number {optimizer}: {takes}"
    elif isinstance(optimizer, list | tuple):
        remedy = f"a {type(optimizer).__name__}: make one of them, optax.chain(...)"
    elif callable(optimizer):
        remedy = (
            f"a function, {name or type(optimizer).__name__}: {takes}; a schedule of learning "
            "rates goes into one, optax.adam(schedule)"
        )
    else:
        remedy = f"{type(optimizer).__name__}: {takes}"
    raise ConfigError(f"optimizer is {remedy}")
