"""Models whose stages or replicas are unlike, and plain JAX's result for each."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla
from support import families, models
from support.tensor_gpt import BATCH, MICRO, STEPS, gpt, text
from support.training import train_with
from support.unlike_models import MODELS

OPTIMIZER = optax.sgd(0.3, momentum=0.9)
ONE, TWO, DATA = {"devices": 1}, {"tensor": 2}, {"data": 2}
UNEVEN = {"tensor": (2, 1)}
EXPERT, TOKENS = {"expert": 2}, {"sequence": 2}


class Net(nnx.Module):
    """Three parts, each in a scope each; sizes that three devices do not divide."""

    def __init__(self, rngs, scopes=()):
        sizes = (6, 32, 16, 64, 3)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.scopes = tuple(scopes)

    def __call__(self, x):
        first, second, third, last = self.layers
        parts = (
            lambda x: jnp.tanh(first(x)),
            lambda x: jnp.tanh(second(x)),
            lambda x: last(jnp.tanh(third(x))),
        )
        for part, scope in zip(parts, self.scopes or (None,) * 3, strict=True):
            if scope is None:
                x = part(x)
            else:
                with scope():
                    x = part(x)
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its devices.

    Attributes:
        num_devices: Of the whole job.
        options: Of `train_with`.
        most: The largest error of a parameter, relative to the largest element of its kind. Where
            a ReLU's input is almost zero, its gradient may be another one after rounding.
    """

    num_devices: int
    options: Mapping[str, Any]
    make: Callable[[], nnx.Module] = lambda: Net(nnx.Rngs(0))
    loss: Any = models.squared_error
    data: Callable[[], Any] = lambda: models.regression(STEPS * BATCH)
    most: float = 2e-5


def _gpt(num_devices: int, *stages: Any, **more: Any) -> Case:
    return Case(
        num_devices=num_devices,
        options={"stages": list(stages), "rules": "decoder", **more},
        make=gpt,
        loss=families.token_loss,
        data=text,
    )


def _net(num_devices: int, *stages: Any, **more: Any) -> Case:
    return Case(num_devices=num_devices, options={"stages": list(stages), **more})


def _annotated(num_devices: int, *scopes: Callable[[], Any]) -> Case:
    return Case(num_devices=num_devices, options={}, make=lambda: Net(nnx.Rngs(0), scopes))


def _of(name: str, num_devices: int, *stages: Any, **more: Any) -> Case:
    make, loss, data, rules = MODELS[name]
    options = {"stages": list(stages), "rules": rules} | more
    most = 1e-4 if name == "t5" else 2e-5
    return Case(
        num_devices=num_devices, options=options, make=make, loss=loss, data=data, most=most
    )


def _recomputing(case: Case) -> Case:
    return dataclasses.replace(
        case, options=case.options | {"config": {"memory": {"recompute": "boundaries"}}}
    )


CASES = {
    "one and two": _net(3, ONE, TWO),
    "two and one": _net(3, TWO, ONE),
    "one, two, one": _net(4, ONE, TWO, ONE),
    "data and tensor": _net(4, DATA, TWO),
    "both axes": _net(5, ONE, {"data": 2, "tensor": 2}),
    "of unlike shards": _net(3, ONE, UNEVEN),
    "first of unlike shards": _net(4, {"tensor": (1, 2, 1)}, ONE),
    "two pipelines": _net(6, ONE, TWO, counts=(5, 3)),
    "recomputed": _recomputing(_net(3, ONE, TWO)),
    "gpt": _gpt(3, ONE, TWO),
    "gpt, four stages": _gpt(6, TWO, ONE, DATA, ONE),
    "gpt of unlike shards": _gpt(5, UNEVEN, ONE, UNEVEN),
    "recomputed, of unlike shards": _recomputing(_net(5, UNEVEN, {"tensor": (1, 3)}, ONE)),
    "gpt, two pipelines": _gpt(6, TWO, ONE),
    "one beside two": _net(3, [ONE], [ONE, ONE], counts=(5, 3)),
    "two beside one": _net(3, [ONE, ONE], [ONE], counts=(1, 7)),
    "one, two and three": _net(6, [ONE], [ONE, ONE], [ONE, ONE, ONE]),
    "sharded beside stages": _net(5, [TWO], [ONE, TWO]),
    "uneven beside stages": _net(4, [UNEVEN], [ONE, ONE], counts=(6, 2)),
    "by data beside stages": _net(5, [DATA], [ONE, DATA]),
    "recomputed beside stages": _recomputing(_net(5, [ONE], [TWO, ONE, ONE], counts=(4, 4))),
    "gpt, one beside two": _gpt(4, [ONE], [ONE, TWO], counts=(3, 5)),
    "gpt, three replicas": _gpt(6, [TWO], [ONE, ONE], [TWO]),
    "gpt of tokens": _gpt(3, ONE, {"sequence": (3, 1)}),
    "gpt, tokens and tensor": _gpt(5, {"sequence": 2, "tensor": 2}, ONE),
    "gpt, tokens twice": _gpt(4, TOKENS, {"sequence": (1, 2)}, rules=None),
    "groups, tensor": _of("groups", 3, ONE, TWO),
    "groups, uneven": _of("groups", 4, {"tensor": (3, 1)}, TWO),
    "groups, four stages": _of("groups", 6, TWO, ONE, DATA, ONE),
    "groups, tokens": _of("groups", 5, {"sequence": (1, 2, 1)}, {"sequence": (1, 3)}, rules=None),
    "groups, data and tokens": _of("groups", 6, {"data": 2, "sequence": 2}, DATA, rules=None),
    "groups, replicas": _of("groups", 4, [TWO], [ONE, ONE], counts=(6, 2)),
    "groups, replicas of tokens": _of("groups", 4, [ONE], [ONE, TOKENS], counts=(6, 2), rules=None),
    "experts": _of("experts", 3, ONE, EXPERT),
    "experts twice": _of("experts", 4, EXPERT, EXPERT),
    "experts and tensor": _of("experts", 4, EXPERT, TWO),
    "experts in tensor": _of("experts", 5, {"expert": 2, "tensor": 2}, ONE),
    "experts, uneven": _of("experts", 3, {"expert": (3, 1)}, ONE),
    "experts and data": _of("experts", 6, {"data": 2, "expert": 2}, DATA),
    "experts, replicas": _of("experts", 4, [ONE], [ONE, EXPERT]),
    "pictures": _of("pictures", 3, ONE, TWO),
    "pictures by data": _of("pictures", 4, DATA, TWO),
    "pictures, uneven": _of("pictures", 5, DATA, {"tensor": (2, 1, 1)}),
    "pictures, replicas": _of("pictures", 4, [ONE], [ONE, TWO]),
    "pictures, three replicas": _of("pictures", 6, [ONE], [ONE, ONE], [DATA, ONE], rules=None),
    "t5 by data and tensor": _of("t5", 4, DATA, TWO),
    "t5, one and tensor": _of("t5", 3, ONE, TWO),
    "t5, uneven": _of("t5", 5, UNEVEN, {"tensor": (1, 2)}, ONE),
    "t5, tokens": _of("t5", 4, {"sequence": (2, 1)}, {"sequence": (1, 2)}, rules=None),
    "t5, replicas": _of("t5", 4, [ONE], [ONE, TWO], counts=(3, 5)),
    "t5, two and one": _of("t5", 3, [ONE, ONE], [ONE], rules=None),
    "annotated": _annotated(
        4, lambda: hxla.replicate(1), lambda: hxla.split(2), lambda: hxla.replicate(1)
    ),
    "annotated by data": _annotated(
        5, lambda: hxla.replicate(2), lambda: hxla.split(2), lambda: hxla.stage()
    ),
}


def trained(case: Case, *, visible: bool = True, **more: Any) -> hxla.Result:
    """The case trained on its devices.

    Args:
        visible: Whether to leave out the other devices of this process.
    """
    options = dict(case.options) | more
    config = dict(options.pop("config", {}))
    if visible:
        config["cluster"] = {"visible_devices": list(range(case.num_devices))}
    return train_with(
        case.make(),
        case.data(),
        case.loss,
        OPTIMIZER,
        **{
            "batch_size": BATCH,
            "microbatch_size": MICRO,
            "steps": STEPS,
            "shuffle": False,
            "counts": "even",
            "config": config,
            **options,
        },
    )


def reference(case: Case) -> tuple[list[float], list[np.ndarray]]:
    """Plain JAX on one device: losses and parameters."""
    graphdef, params, rest = nnx.split(case.make(), nnx.Param, ...)
    data, state = case.data(), OPTIMIZER.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        mean = lambda p: case.loss(nnx.merge(graphdef, p, rest), batch).mean()  # noqa: E731
        value, grads = jax.value_and_grad(mean)(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    losses = []
    for i in range(STEPS):
        batch = {k: v[i * BATCH : (i + 1) * BATCH] for k, v in data.items()}
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    return losses, list(map(np.asarray, jax.tree.leaves(params)))


def params_of(model: nnx.Module) -> Sequence[np.ndarray]:
    """The parameters of a trained model."""
    return list(map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param))))
