"""What a kind is, and the small model around one: a layer between two linear ones."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

LENGTH, WIDTH = 4, 8

#: Of a layer: from random streams to a function of activations, `[examples, LENGTH, WIDTH]`.
Make = Callable[[nnx.Rngs], Callable[[jax.Array], jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Something that a user's model may call.

    Attributes:
        loss: From the outputs of the model and the batch to a loss for each example; None: squares.
        by_microbatch: Whether a microbatch's gradient is no mean over its examples, as with
            BatchNorm, random keys and gradients that are rounded to few bits.
        axis_name: The axis that nothing in the model binds.
        most: The largest relative error of a change of a parameter. That of a loss is a tenth.
        refused: From a form that cannot train it to words of the refusal.
    """

    make: Make
    loss: Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array] | None = None
    by_microbatch: bool = False
    axis_name: str = ""
    most: float = 1e-4
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


#: Name to kind, filled by the decorators below.
KINDS: dict[str, Kind] = {}


class Call(nnx.Module):
    """A function of activations and of one parameter, or of activations alone."""

    def __init__(self, function, shape, rngs):
        self.function = function
        self.w = None if shape is None else nnx.Param(0.3 * rngs.params.normal(shape))

    def __call__(self, x):
        return self.function(x) if self.w is None else self.function(x, self.w[...])


def _add(function: Callable[..., Any], make: Make, facts: dict[str, Any]) -> None:
    name = function.__name__.replace("_", " ").strip()
    assert name not in KINDS, f"{name} is a kind already"
    KINDS[name] = Kind(make=make, **facts)


def layer(*, w: tuple[int, ...] | None = None, **facts: Any) -> Callable[[Any], Any]:
    """A kind from a function of activations, and of a parameter of shape `w` if that is given."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _add(function, lambda rngs: Call(function, w, rngs), facts)
        return function

    return add


def module(**facts: Any) -> Callable[[Make], Make]:
    """A kind from a function of random streams that makes a layer."""

    def add(make: Make) -> Make:
        _add(make, make, facts)
        return make

    return add


def loss(**facts: Any) -> Callable[[Any], Any]:
    """A kind from a loss of outputs and batch, for each example."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _add(function, lambda rngs: Call(jnp.tanh, None, rngs), facts | {"loss": function})
        return function

    return add


class Net(nnx.Module):
    """Kinds one after another, each in a residual connection that bounds it."""

    def __init__(self, kinds):
        rngs = nnx.Rngs(0, noise=1)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([kind.make(rngs) for kind in kinds])
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for each in self.layers:
            y = each(jnp.tanh(x))
            largest = jax.lax.stop_gradient(jnp.abs(y).max((1, 2), keepdims=True))
            x = x + y / (1 + largest)
        return self.last(x)


def squares(y, batch):
    return ((y - batch["y"]) ** 2).mean((1, 2))
