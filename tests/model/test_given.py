"""What is no model and no optimizer is refused with what to write instead."""

import types

import optax
import pytest
from flax import nnx

import hxla
from support import lowering, models


def dense():
    return models.Dense(nnx.Rngs(0))


def needs_rngs(rngs):
    return models.Dense(rngs)


def generator():
    yield dense()


RNGS = nnx.Rngs(0)
STATE = types.SimpleNamespace(apply_fn=None, params={}, tx=optax.sgd(0.1))
MODELS = {
    "a class of nnx": (lambda: models.Dense, r"class Dense.*call it, Dense\(\.\.\., rngs="),
    "a class of Linen": (lambda: models.LinenNet, r"class LinenNet.*call it, LinenNet\(\.\.\.\)$"),
    "another class": (lambda: dict, "class dict, not a Flax module: "),
    "a bound module": (lambda: models.LinenNet().bind({}), r"bound Linen module.*model.unbind\(\)"),
    "a wrapper": (
        lambda: types.SimpleNamespace(module=models.LinenNet()),
        "a wrapper around a Linen module: pass model.module",
    ),
    "a TrainState": (lambda: STATE, "a TrainState: pass its module"),
    "an optimizer": (
        lambda: nnx.Optimizer(dense(), optax.sgd(0.1), wrt=nnx.Param),
        "an nnx.Optimizer: pass the module as model",
    ),
    "a split module": (lambda: nnx.split(dense()), "what nnx.split returned"),
    "a state": (lambda: nnx.state(dense()), "a tree of parameters"),
    "parameters": (lambda: {"params": {}}, "a tree of parameters"),
    "a method": (lambda: dense().__call__, "the method __call__ of Dense: pass the module itself"),
    "a generator": (lambda: generator, "a generator function"),
    "a number": (lambda: 3, "int, not a Flax module"),
    "a function with arguments": (
        lambda: needs_rngs,
        r"needs_rngs, that cannot be called without arguments .*'rngs'",
    ),
    "a function that uses what was made outside": (
        lambda: lambda: models.Dense(RNGS),
        "uses an object made outside it",
    ),
    "a function that makes a Linen module": (
        lambda: lambda: models.LinenNet(),
        "makes a Linen module: pass the module itself",
    ),
    "a function that makes something else": (lambda: lambda: 3, "returns int, not an nnx.Module"),
}
OPTIMIZERS = {
    "an optimizer of nnx": (
        lambda: nnx.Optimizer(dense(), optax.sgd(0.1), wrt=nnx.Param),
        "pass optimizer.tx",
    ),
    "a name": (lambda: "adam", "the name 'adam': pass an optax transformation"),
    "a function of optax": (lambda: optax.adam, r"optax.adam, not called: call it, optax.adam\("),
    "a TrainState": (lambda: STATE, "a TrainState: pass state.tx"),
    "a number": (lambda: 0.1, "the number 0.1"),
    "several": (lambda: [optax.adam(0.1)], r"a list: make one of them, optax.chain\("),
    "a schedule": (lambda: optax.constant_schedule(0.1), r"goes into one, optax.adam\(schedule\)"),
    "something else": (lambda: object(), "object: pass an optax transformation"),
}


def planned(model, optimizer):
    job = hxla.Job(model, models.regression(), models.squared_error, optimizer, batch_size=8)
    return job.plan(lowering.cpus(1), mesh={"data": 1}, microbatch_size=8)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_model_is_refused(name):
    make, words = MODELS[name]
    with pytest.raises(hxla.ConfigError, match="(?s)^model is .*" + words):
        planned(make(), optax.sgd(0.1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_no_optimizer_is_refused(name):
    make, words = OPTIMIZERS[name]
    with pytest.raises(hxla.ConfigError, match="(?s)^optimizer is .*" + words):
        planned(dense, make())


def test_a_module_and_a_function_that_makes_it_have_the_same_plan():
    for model in (dense(), dense):
        names = [(p.name, p.shape) for p in planned(model, optax.sgd(0.1)).parameters]
        assert names == [("layer/bias", (3,)), ("layer/kernel", (6, 3))]
