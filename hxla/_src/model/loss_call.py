"""How the user's loss is called: with a model, a batch and, if it names one, a random key.

A loss that closes over a key is refused: it would draw the same numbers in every step and for every
microbatch.
"""

import dis
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import nnx

from ..core.errors import ConfigError, HxlaError, LossError
from ..jax.fused_attention import traced_anywhere
from ..jax.jaxpr import unbound_axis
from ..jax.tracing import is_placement_error
from .over_batch import OverBatch
from .variables import NEEDED

#: A loss of a model and a batch, `loss(model, batch)`, or also of a random key,
#: `loss(model, batch, key)`, with a result that `hxla.Job` accepts.
Loss = Callable[..., Any]

CalledLoss = Callable[[Any, Any, jax.Array], Any]

_FOLD = 0x6C6F7373  # "loss": differs from the indices of the model's streams
_TAKES = "hxla calls loss(model, batch), or loss(model, batch, key) where it names a key"
_OF_PARAMS = ("params", "parameters", "variables", "weights", "graphdef")
_OF_STATE = ("state", "train_state", "ts")
_OF_LINEN = ("apply", "apply_fn", "init", "params", "tx")
_READS_VALUES = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
_MOST_NAMED = 8
_OF_BATCH = ("batch", "data", "inputs", "x", "examples")


def called(loss: Loss, argument: str = "loss") -> CalledLoss:
    """A loss as hxla calls it, always with three arguments.

    Args:
        argument: The argument's name in messages.

    Raises:
        ConfigError: If it is no loss, or cannot be called with these arguments.
        LossError: If it closes over a random key.
    """
    if isinstance(loss, OverBatch):
        for name, what in _closed_over_keys(loss.contrast):
            raise LossError(
                f"contrast closes over {name!r}, {what}: it would draw the same numbers in every "
                "step; draw in embed(model, batch, key), whose key is another one for each "
                "microbatch of each step, and return the random numbers with the embeddings"
            )
        return loss.in_passes(called(loss.embed, "embed"))
    takes_key = _takes_key(loss, argument)
    for name, what in _closed_over_keys(loss):
        raise LossError(closed_over_key_message(name, what, argument))

    def run(model: Any, batch: Any, key: jax.Array) -> Any:
        keywords = {"key": jax.random.fold_in(key, _FOLD)} if takes_key else {}
        try:
            with traced_anywhere():
                return loss(model, batch, **keywords)
        except HxlaError:
            raise
        except Exception as error:
            message = _explanation(loss, argument, model, batch, error)
            if message is None:
                _name_batch(error, argument, batch)
                raise
            raise LossError(message) from error

    return run


def refuse_model_outside(loss: Any, model: Any) -> None:
    """Refuse a loss over the batch whose `contrast` reads the model, with its initial arrays.

    Raises:
        LossError: If it closes over the model.
    """
    if not isinstance(loss, OverBatch):
        return
    for name, value in closed_over(loss.contrast):
        if value is model:
            raise LossError(
                f"contrast closes over {name!r}, the model itself: it would read the parameters of "
                "the start, and train none; return the values that it needs from embed, such as "
                "a temperature as a factor of the embeddings"
            )


def closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function reads from outside its arguments, with the names it has there."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {i} of a partial", x) for i, x in enumerate(function.args))
        yield from function.keywords.items()
        yield from closed_over(function.func)
        return
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function):
        function = getattr(type(function).__call__, "__func__", type(function).__call__)
    if not inspect.isfunction(function):
        return
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in dict.fromkeys(_globals_of(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _globals_of(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def closed_over_key_message(name: str | None, what: str, argument: str = "loss") -> str:
    """Why a loss may not close over a random key.

    Args:
        name: The variable's name; None: unknown.
    """
    who, shown = f"the {argument}", f"{name!r}, {what}"
    if name is None:
        who, shown = f"the {argument}, or a function that it calls,", what
    return (
        f"{who} closes over {shown}: it would draw the same numbers in every step and "
        "microbatch; let it take a third argument, loss(model, batch, key), which is another key "
        "for each microbatch of each step, and use that, as in model(x, rngs=nnx.Rngs(key)) or "
        "jax.random.normal(key, shape)"
    )


def placement_message(call: str, where: str) -> str:
    """Why a model may not place its arrays itself.

    Args:
        where: The file and line, or an empty string.
    """
    at = f" at {where}" if where else ""
    return (
        f"the model uses {call}{at}: hxla runs a model on the devices of its plan, and places "
        "every array itself; leave the call out, write the model for whole arrays, and shard it "
        "with mesh={'data': 2, 'tensor': 2} and rules=..., or with hxla.split()"
    )


def _user_line(error: BaseException) -> str:
    """The file and line of the user's code that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        f for f in frames if "/site-packages/" not in f.filename and "/hxla/_" not in f.filename
    ]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _closed_over_keys(loss: Loss) -> Iterator[tuple[str, str]]:
    """The random keys that a loss closes over: names, and types in words."""
    for name, value in closed_over(loss):
        if isinstance(value, nnx.Rngs | nnx.RngStream):
            yield name, f"an nnx.{type(value).__name__}"
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            yield name, "a random key"


def _takes_key(loss: Any, argument: str) -> bool:
    """Whether a loss names a key; a loss that cannot be called is refused."""
    if not callable(loss) or isinstance(loss, nnx.Module | type):
        shown = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
        raise ConfigError(f"{argument} is {shown}, not a function: {_TAKES}; pass the function")
    if inspect.isgeneratorfunction(loss) or inspect.iscoroutinefunction(loss):
        raise ConfigError(f"{argument} is a generator or coroutine, not a function that returns")
    if (getattr(loss, "__module__", None) or "").partition(".")[0] == "optax":
        name = getattr(loss, "__name__", "loss")
        raise ConfigError(
            f"{argument} is optax's {name}, which takes predictions: {_TAKES}; write "
            f"lambda model, batch: optax.{name}(model(batch['x']), batch['y'])"
        )
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a function that is not written in Python
        return False
    positional = [
        p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    shown = f"{argument}({', '.join(parameters)})"
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ConfigError(
            f"{shown} takes {len(positional)} positional arguments: {_TAKES}; the batch has the "
            "structure of data, such as batch['x'] and batch['y']"
        )
    key = parameters.get("key")
    if key is not None and (key.kind is key.POSITIONAL_ONLY or key in positional[:2]):
        raise ConfigError(f"{shown}: {_TAKES}; let the key be third and no positional-only one")
    unknown = [
        p.name
        for p in (*positional[2:], *(p for p in parameters.values() if p.kind is p.KEYWORD_ONLY))
        if p.default is p.empty and p.name != "key"
    ]
    if unknown:
        raise ConfigError(
            f"{shown} asks for {', '.join(unknown)}: {_TAKES}. A random key is called key; what "
            "comes from data is taken from the batch, as in x, y = batch; anything else is given "
            f"beforehand, as in functools.partial(loss, {unknown[0]}=...)"
        )
    # A parameter with another default is a setting of the user that is called key.
    return key is not None and (key.default is key.empty or key.default is None)


def _name_batch(error: Exception, argument: str, batch: Any) -> None:
    """Add a note on the batch to an error of the user's model, such as unlike widths."""
    if unbound_axis(error) or isinstance(error, NEEDED) or getattr(error, "__notes__", None):
        return
    arrays, _ = jax.tree.flatten_with_path(batch)
    listed = ", ".join(
        f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in arrays[:_MOST_NAMED]
    )
    more = f" and {len(arrays) - _MOST_NAMED} more" if len(arrays) > _MOST_NAMED else ""
    error.add_note(f"hxla called {argument}(model, batch) with a microbatch of {listed}{more}")


def _explanation(loss: Any, argument: str, model: Any, batch: Any, error: Exception) -> str | None:
    """What to write instead, if an error is typical of a loss for another API; else None."""
    if isinstance(error, flax_errors.TraceContextError):
        return (
            f"the {argument} changes an object that was made outside it ({error}): it may change "
            "the model that it is given and what it makes itself; an nnx.Rngs is made in it from "
            "a third argument, loss(model, batch, key), and metrics and optimizers stay outside"
        )
    if unbound_axis(error) or isinstance(error, NEEDED):  # hxla handles these itself
        return None
    if is_placement_error(error):
        return f"{placement_message('a call that places arrays', _user_line(error))} ({error})"
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return None
    is_apply = isinstance(
        error,
        flax_errors.ApplyScopeInvalidVariablesTypeError
        | flax_errors.ApplyScopeInvalidVariablesStructureError,
    )
    failed = f"{argument}({', '.join(names)}) failed: {type(error).__name__}: {error}\n"
    if isinstance(error, _READS_VALUES):
        return (
            f"{failed}hxla traces the {argument} once for all batches, so float(), .item(), if and "
            "NumPy cannot read its arrays: use jax.numpy, jnp.where or jax.lax.cond, and return "
            "arrays"
        )
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(missing, str) and isinstance(batch, Mapping) and missing not in batch:
        return f"{failed}a batch has the structure of data, which has {', '.join(map(str, batch))}"
    if names[0] in _OF_PARAMS or is_apply:
        return (
            f"{failed}{_TAKES}: the first argument is the model with its present parameters, an "
            "nnx.Module or a bound Linen module, not the parameters; write model(batch['x']) "
            "where this calls apply or nnx.merge"
        )
    if names[0] in _OF_STATE:
        return (
            f"{failed}{_TAKES}: the first argument is the model, not a TrainState; write "
            "model(batch['x']) where this calls state.apply_fn with the parameters"
        )
    if isinstance(error, AttributeError) and error.obj is model and error.name in _OF_LINEN:
        return (
            f"{failed}the model is an NNX module, which holds its parameters: call it, "
            "model(batch['x'])"
        )
    if names[0] in _OF_BATCH and names[1] not in _OF_BATCH:
        return f"{failed}{_TAKES}: the model comes first, then the batch"
    return None
