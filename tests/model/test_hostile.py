"""Uses of the two primitives that cannot work: one error each, with scope, parameter and remedy."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.core import as_config
from support.training import train_with

X = {"x": np.ones((16, 6), np.float32)}


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean(-1)


class Net(nnx.Module):
    """Calls `run(self, x)`; holds layers of several widths."""

    def __init__(self, run, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.run = run
        self.a = nnx.Linear(6, 8, rngs=rngs)
        self.b = nnx.Linear(8, 8, rngs=rngs)
        self.odd = nnx.Linear(7, 5, use_bias=False, rngs=rngs)
        self.embed = nnx.Embed(7, 5, rngs=rngs)

    def __call__(self, x):
        return self.run(self, x)


def fit(run, **options):
    return train_with(
        lambda: Net(run),
        X,
        loss,
        optax.sgd(1e-2),
        **{"batch_size": 16, "microbatch_size": 8, "steps": 1} | options,
    )


def scoped(*scopes):
    """Layers a and b under scopes that are all open at once."""

    def run(net, x):
        x = net.a(x)
        for scope in scopes:
            scope.__enter__()
        x = net.b(x)
        for scope in scopes[::-1]:
            scope.__exit__(None, None, None)
        return x

    return run


def odd_split(net, x):
    with hxla.split():
        return net.odd(jax.numpy.pad(x, ((0, 0), (0, 1))))


def two_stages(first, second):
    def run(net, x):
        with first:
            x = net.a(x)
        with second:
            return net.b(x)

    return run


R, S = hxla.replicate, hxla.split
HOSTILE = {
    "split in split": (
        lambda: fit(scoped(S(2), S(2))),
        hxla.AnnotationError,
        r"hxla.split\(2\) inside hxla.split\(2\).*close the outer scope",
    ),
    "replicate in replicate": (
        lambda: fit(scoped(R(2), R(2))),
        hxla.AnnotationError,
        r"hxla.replicate\(2\) inside hxla.replicate\(2\)",
    ),
    "replicate in split": (
        lambda: fit(scoped(S(2), R(2))),
        hxla.AnnotationError,
        r"hxla.replicate\(2\) inside hxla.split\(2\)",
    ),
    "three scopes": (
        lambda: fit(scoped(R(2), S(2), S(2))),
        hxla.AnnotationError,
        r"inside hxla.split\(2\) inside hxla.replicate\(2\)",
    ),
    "copies without a number": (
        lambda: fit(scoped(R(), S(2))),
        hxla.AnnotationError,
        r"say how many replicas",
    ),
    "count of zero": (lambda: S(0), hxla.AnnotationError, r"split\(0\).*at least 1"),
    "count that is no number": (lambda: R("two"), hxla.AnnotationError, r"replicate\('two'\)"),
    "count that is a boolean": (lambda: R(True), hxla.AnnotationError, r"whole number"),
    "decorator without parentheses": (lambda: S(Net), hxla.AnnotationError, r"@hxla.split\(\)"),
    "a class that is no module": (
        lambda: S()(dict),
        hxla.AnnotationError,
        r"not the class dict",
    ),
    "something that is not callable": (lambda: S()(3), hxla.AnnotationError, r"cannot decorate 3"),
    "a module without __call__": (
        lambda: S()(nnx.Module()),
        hxla.AnnotationError,
        r"has no __call__",
    ),
    "a linen module without __call__": (
        lambda: S()(nn.Module),
        hxla.AnnotationError,
        r"has no __call__",
    ),
    "default that is no strategy": (
        lambda: fit(lambda net, x: net.b(net.a(x)), default="split"),
        hxla.AnnotationError,
        r"pass hxla.replicate",
    ),
    "a count that does not divide the devices": (
        lambda: fit(scoped(S(3))),
        hxla.PlanError,
        r"8 devices do not fit.*use 3, 6, 9, 12",
    ),
    "more devices than there are": (
        lambda: fit(scoped(S(16))),
        hxla.PlanError,
        r"split\(16\).*use 16, 32",
    ),
    "counts that add up to too many": (
        lambda: fit(two_stages(R(8), S(8))),
        hxla.PlanError,
        r"need 16 one after another.*share_devices",
    ),
    "shared counts that do not divide one another": (
        lambda: fit(
            two_stages(S(2), S(3)),
            mesh=models.mesh(data=6),
            config={"cluster": {"share_devices": True}},
            microbatch_size=4,
        ),
        hxla.PlanError,
        r"splits over 2 and 3 devices.*divide one another",
    ),
    "a split of an odd dimension": (
        lambda: fit(odd_split),
        hxla.AnnotationError,
        r"hxla.split\(\).*odd/kernel \[7, 5\] cannot be cut into 8.*multiple of 8",
    ),
    "a microbatch that does not divide over a replicate": (
        lambda: fit(two_stages(R(), S()), microbatch_size=4),
        hxla.PlanError,
        r"hxla.replicate\(\).*4 examples do not divide over 8.*multiple of 8",
    ),
    "an inner axis that nothing explains": (
        lambda: fit(lambda net, x: net.b(net.a(x)), mesh=models.mesh(data=2, tensor=2)),
        hxla.PlanError,
        r"axis 'tensor'.*rules=",
    ),
    "a mesh that splits over another number": (
        lambda: fit(two_stages(R(), S(4)), mesh=models.mesh(data=2, tensor=2)),
        hxla.PlanError,
        r"hxla.split\(4\) at .*asks for 4 devices.*tensor=2",
    ),
    "rules without a mesh": (
        lambda: fit(lambda net, x: net.b(net.a(x)), rules="decoder"),
        hxla.ConfigError,
        r"need a mesh",
    ),
    "rules that do not exist": (
        lambda: fit(lambda net, x: net.b(net.a(x)), rules="decodr"),
        hxla.ConfigError,
        r"did you mean 'decoder'",
    ),
    "an unknown section of the config": (
        lambda: as_config({"clustr": {}}, {}),
        hxla.ConfigError,
        r"did you mean 'cluster'",
    ),
    "an unknown key of the config": (
        lambda: as_config({"cluster": {"share_device": True}}, {}),
        hxla.ConfigError,
        r"did you mean 'share_devices'",
    ),
    "an unknown variable": (
        lambda: as_config(None, {"HXLA_CLUSTER_SHARE": "1"}),
        hxla.ConfigError,
        r"did you mean HXLA_CLUSTER_SHARE_DEVICES",
    ),
    "a variable of the wrong type": (
        lambda: as_config(None, {"HXLA_PIPELINE_NUM_MICRO_BATCH": "many"}),
        hxla.ConfigError,
        r"num_micro_batch \(from HXLA_PIPELINE_NUM_MICRO_BATCH\)",
    ),
    "a device that is not there": (
        lambda: fit(
            lambda net, x: net.b(net.a(x)), config={"cluster": {"visible_devices": [0, 9]}}
        ),
        hxla.MeshError,
        r"visible_devices=\[0, 9\] names \[9\], there are devices 0 to 7",
    ),
    "two sizes of a microbatch": (
        lambda: fit(lambda net, x: net.b(net.a(x)), config={"pipeline": {"num_micro_batch": 4}}),
        hxla.ConfigError,
        r"disagree.*give one",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_use_gives_one_error_with_its_remedy(name):
    use, error, message = HOSTILE[name]
    with pytest.raises(error, match="(?s)" + message):
        use()
