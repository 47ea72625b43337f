"""A small model, trained in each form."""

import optax
from flax import nnx

import hxla
from support import models
from support.training import train_with

ONE, TWO = {"mesh": {"data": 1}}, {"mesh": {"data": 2}}
COLUMNS = hxla.RuleSet(
    name="columns",
    rules=(
        hxla.Rule(path="layers/0/kernel$", axes=("", "tensor")),
        hxla.Rule(path="layers/0/bias$", axes=("tensor",)),
        hxla.Rule(path="layers/1/kernel$", axes=("tensor", "")),
    ),
)
TENSOR = {"mesh": {"data": 1, "tensor": 2}, "rules": COLUMNS}


def settings(room, **values):
    return {"config": {room: values}}


def on(num, **options):
    return {"config": {"cluster": {"visible_devices": list(range(num))}}, **options}


FORMS = {
    "one": ONE,
    "a call each": ONE | settings("cluster", microbatches_per_call=1),
    "executors": ONE | settings("cluster", executors=2),
    "replicas": TWO | {"counts": (3, 1)},
    "over the host": TWO | settings("communication", over="host"),
    "clipped": TWO | settings("communication", clip_norm=0.1),
    "clipped before": TWO | settings("communication", clip_norm=0.1, clip="before"),
    "zero 1": TWO | settings("memory", zero=1),
    "zero 2": TWO | settings("memory", zero=2),
    "zero 3": TWO | settings("memory", zero=3),
    "offload": TWO | settings("memory", offload={"optimizer": "host"}),
    "segments": TWO | settings("memory", recompute="boundaries"),
    "islands": TWO | settings("islands", every=3),
    "fp16": TWO | {"precision": "fp16"},
    "bf16": TWO | {"precision": "bf16"},
    "float sums": TWO | {"reduction": "float"},
    "tensor": TENSOR,
    "any cut": TENSOR | settings("numerics", cut="any"),
    "uneven tensor": on(2, mesh={"data": 1, "tensor": (3, 1)}, rules=COLUMNS),
    "stages": on(2, stages=2),
    "interleaved": on(2, stages=2) | {"schedule": "interleaved"},
    "unlike stages": on(3, stages=[{"devices": 1}, {"tensor": 2}], rules=COLUMNS),
    "unlike replicas": on(3, stages=[[{"devices": 1}], [{"devices": 1}] * 2], counts=(3, 1)),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        sizes = ((6, 16), (16, 16), (16, 3))
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

    def __call__(self, x):
        *inner, last = self.layers
        for layer in inner:
            x = nnx.tanh(layer(x))
        return last(x)


def trained(form, **more):
    """The result of three steps in a form, with other arguments of `train_with`."""
    options = FORMS[form] | more
    config = options.pop("config", {})
    if schedule := options.pop("schedule", None):
        config = config | {"pipeline": {"schedule": schedule}}
    if "mesh" in options and "visible_devices" not in config.get("cluster", {}):
        options["mesh"] = models.mesh(**options["mesh"])
    return train_with(
        Net(nnx.Rngs(0)),
        models.regression(48),
        models.squared_error,
        optax.adam(1e-2),
        batch_size=16,
        microbatch_size=4,
        steps=3,
        config=config,
        **{"counts": "even"} | options,
    )
