"""Wrong calls as a new user makes them: each is one error that says what to write instead."""

import functools
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import hxla
from support import models
from support.training import train_with

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X.sum(axis=1)
DATA = {"x": X, "y": Y}
KEY, STREAMS = jax.random.key(0), nnx.Rngs(0)
LINEN = nn.Dense(1)
VARIABLES = jax.tree.map(np.asarray, LINEN.init(jax.random.key(0), X[:1]))
PARAMS = VARIABLES["params"]
STATE = TrainState.create(apply_fn=LINEN.apply, params=PARAMS, tx=optax.sgd(0.1))
NNX = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
GRAPHDEF, NNX_STATE = nnx.split(NNX)
SEEN = nnx.metrics.Average()


def squares(model, batch):
    return (model(batch["x"]).reshape(-1) - batch["y"]) ** 2


def train(**given):
    """A call that works, with some of its arguments replaced."""
    arguments = {
        "model": nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
        "data": DATA,
        "loss": squares,
        "optimizer": optax.sgd(0.1),
        "batch_size": 16,
        "microbatch_size": 4,
        "steps": 1,
        "mesh": models.mesh(data=1),
        "counts": "even",
    }
    return train_with(**(arguments | given))


def batches():
    yield DATA


def mean(model, batch):
    return squares(model, batch).mean()


def of_params(params, batch):
    return ((LINEN.apply({"params": params}, batch["x"])[:, 0] - batch["y"]) ** 2).mean()


def of_graphdef(params, batch):
    return mean(nnx.merge(GRAPHDEF, params), batch)


def of_state(state, batch):
    return state.apply_fn({"params": state.params}, batch["x"]).mean()


def swapped(batch, model):
    return squares(model, batch)


def with_aux(model, batch):
    return mean(model, batch), model(batch["x"])


def with_state(model, batch):
    return mean(model, batch), {"batch_stats": {"mean": jnp.zeros(3)}}


def forgotten(model, batch):
    mean(model, batch)


def branching(model, batch):
    loss = mean(model, batch)
    return loss if loss > 1 else 2 * loss


def counting(model, batch):
    SEEN.update(values=squares(model, batch))
    return mean(model, batch)


def applying(model, batch):
    return model.apply({"params": PARAMS}, batch["x"]).mean()


class Integers(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.zeros((4,), jnp.int32))


def wrapper():
    """As transformers' FlaxPreTrainedModel: no module, but it has one, and parameters."""
    return types.SimpleNamespace(module=LINEN, params=PARAMS, config={})


CONFIG, DATAS, LOSS, PLAN = hxla.ConfigError, hxla.DataError, hxla.LossError, hxla.PlanError

# What is wrong with the call, the error, and words that its message has.
CALLS = {
    # the model
    "an nnx class": (dict(model=nnx.Linear), CONFIG, r"class Linear.*call it, Linear\("),
    "a linen class": (dict(model=nn.Dense), CONFIG, r"class Dense.*call it, Dense\("),
    "a bound module": (dict(model=LINEN.bind(VARIABLES)), CONFIG, r"bound.*model\.unbind\(\)"),
    "a train state": (dict(model=STATE), CONFIG, r"TrainState.*variables=.*state\.tx"),
    "a wrapper": (dict(model=wrapper()), CONFIG, r"pass model\.module, with variables="),
    "a split module": (dict(model=nnx.split(NNX)), CONFIG, r"nnx\.merge\(graphdef, state\)"),
    "parameters": (dict(model=PARAMS), CONFIG, "a tree of parameters: pass the module"),
    "an nnx state": (dict(model=NNX_STATE), CONFIG, "a tree of parameters: pass the module"),
    "an nnx optimizer as model": (
        dict(model=nnx.Optimizer(NNX, optax.sgd(0.1), wrt=nnx.Param)),
        CONFIG,
        r"pass the module as model and optimizer\.tx",
    ),
    "no model": (dict(model=None), CONFIG, "NoneType, not a Flax module: pass"),
    "a linen maker": (dict(model=lambda: nn.Dense(1)), CONFIG, "pass the module itself"),
    "a maker with arguments": (
        dict(model=lambda rngs: nnx.Linear(4, 1, rngs=rngs)),
        CONFIG,
        r"cannot be called without arguments.*lambda: Net\(rngs=nnx\.Rngs\(0\)\)",
    ),
    "a maker with streams from outside": (
        dict(model=lambda: nnx.Linear(4, 1, rngs=STREAMS)),
        CONFIG,
        r"make its nnx\.Rngs inside",
    ),
    "a maker of something else": (dict(model=lambda: X), CONFIG, "returns ndarray, not an"),
    "an apply function": (dict(model=LINEN.apply), CONFIG, "method apply of Dense: pass the"),
    "variables of an nnx module": (dict(variables=VARIABLES), CONFIG, "NNX model has its"),
    "parameters as variables": (
        dict(model=LINEN, variables=PARAMS),
        CONFIG,
        r"no 'params': pass what module\.init returned",
    ),
    "no parameters": (dict(model=nnx.Dropout(0.5)), CONFIG, "no trainable parameters"),
    "integer parameters": (dict(model=Integers()), CONFIG, "table: int32.*another variable type"),
    "a stream as a string": (dict(model=LINEN, rngs="dropout"), CONFIG, r"rngs=\('dropout',\)"),
    # the loss
    "a loss of linen parameters": (
        dict(model=LINEN, loss=of_params),
        LOSS,
        r"loss\(params, batch\) failed.*first argument is the model.*write model\(batch\['x'\]\)",
    ),
    "a loss of nnx parameters": (dict(loss=of_graphdef), LOSS, "first argument is the model"),
    "a loss of a train state": (dict(loss=of_state), LOSS, "is the model, not a TrainState"),
    "a loss of batch and model": (dict(loss=swapped), LOSS, "the model comes first"),
    "a loss of the model": (dict(loss=lambda model: 0.0), CONFIG, "takes 1 positional.*hxla calls"),
    "a loss of columns": (dict(loss=lambda m, x, y: 0.0), CONFIG, "asks for y.*x, y = batch"),
    "a loss with a flag": (
        dict(loss=lambda model, batch, train: 0.0),
        CONFIG,
        r"asks for train.*functools\.partial\(loss, train=",
    ),
    "loss and logits": (dict(loss=with_aux), LOSS, r"has_aux.*\(loss, \{'accuracy': accuracy\}\)"),
    "loss and state": (dict(loss=with_state), LOSS, "'batch_stats' is {mean}.*hxla keeps it"),
    "value and gradient": (
        dict(loss=lambda m, b: nnx.value_and_grad(mean)(m, b)),
        LOSS,
        r"jax\.value_and_grad.*hxla takes the gradient itself",
    ),
    "no return": (dict(loss=forgotten), LOSS, "NoneType: it lacks a return"),
    "the name of a loss": (dict(loss="mse"), CONFIG, "loss is str, not a function"),
    "a value of a loss": (dict(loss=jnp.float32(1)), CONFIG, "not a function.*pass the function"),
    "optax's loss": (
        dict(loss=optax.softmax_cross_entropy_with_integer_labels),
        CONFIG,
        r"takes predictions.*lambda model, batch: optax\.softmax_cross",
    ),
    "an accuracy as loss": (
        dict(loss=lambda m, b: jnp.argmax(m(b["x"]), axis=-1)),
        LOSS,
        "must be real and floating, not int32",
    ),
    "a loss of some examples": (
        dict(loss=lambda m, b: squares(m, b)[:2]),
        LOSS,
        "leading dimension of 4",
    ),
    "weights of another shape": (
        dict(loss=lambda m, b: (squares(m, b), jnp.ones(2))),
        LOSS,
        "weights need the shape of the values",
    ),
    "a metric that is a text": (
        dict(loss=lambda m, b: (mean(m, b), {"split": "train"})),
        LOSS,
        "metric 'split' is str: metrics are numbers",
    ),
    "another model": (dict(loss=lambda m, b: mean(NNX, b)), LOSS, "does not depend on any param"),
    "a key from outside": (
        dict(loss=lambda m, b: squares(m, b) * jax.random.uniform(KEY)),
        LOSS,
        r"closes over 'KEY', a random key.*loss\(model, batch, key\)",
    ),
    "streams from outside": (
        dict(loss=lambda m, b: squares(m, b) * jax.random.uniform(STREAMS())),
        LOSS,
        r"closes over 'STREAMS', an nnx\.Rngs",
    ),
    "a generator as loss": (dict(loss=lambda m, b: (yield mean(m, b))), CONFIG, "a generator"),
    "float() in the loss": (
        dict(loss=lambda m, b: float(mean(m, b))),
        LOSS,
        r"traces the loss once.*use jax\.numpy",
    ),
    "if in the loss": (dict(loss=branching), LOSS, r"traces the loss once.*jnp\.where"),
    "numpy in the loss": (
        dict(loss=lambda m, b: np.square(np.asarray(m(b["x"]))).mean()),
        LOSS,
        r"traces the loss once.*use jax\.numpy",
    ),
    "a column that is not there": (
        dict(loss=lambda m, b: m(b["image"]).mean()),
        LOSS,
        "KeyError: 'image'.*data, which has x, y",
    ),
    "a metric from outside": (dict(loss=counting), LOSS, "changes an object that was made outside"),
    "linen's apply of an nnx module": (dict(loss=applying), LOSS, "call it, model"),
    "another width of input": (
        dict(data={"x": X[:, :3], "y": Y}),
        TypeError,
        r"hxla called loss\(model, batch\) with a microbatch of \['x'\] float32\[4, 3\]",
    ),
    "labels that are no classes": (
        dict(loss=lambda m, b: optax.softmax_cross_entropy_with_integer_labels(m(b["x"]), b["y"])),
        Exception,
        r"with a microbatch of .*\['y'\] float32\[4\]",
    ),
    "a wrong eval_loss": (dict(eval_loss=lambda model: 0.0), CONFIG, "eval_loss.*takes 1 pos"),
    # the optimizer
    "an nnx optimizer": (
        dict(optimizer=nnx.Optimizer(NNX, optax.sgd(0.1), wrt=nnx.Param)),
        CONFIG,
        r"an nnx\.Optimizer.*pass optimizer\.tx",
    ),
    "the name of an optimizer": (dict(optimizer="adam"), CONFIG, "the name 'adam': pass an optax"),
    "an optimizer not called": (
        dict(optimizer=optax.adam),
        CONFIG,
        r"optax\.adam, not called: call it, optax\.adam\(learning_rate\)",
    ),
    "a learning rate": (dict(optimizer=1e-3), CONFIG, "the number 0.001: pass an optax"),
    "a schedule": (
        dict(optimizer=optax.cosine_decay_schedule(0.1, 9)),
        CONFIG,
        r"optax\.adam\(schedule",
    ),
    "a train state as optimizer": (dict(optimizer=STATE), CONFIG, r"pass state\.tx"),
    "a list of optimizers": (dict(optimizer=[optax.sgd(1)]), CONFIG, r"optax\.chain"),
    "no optimizer": (dict(optimizer=None), CONFIG, "NoneType: pass an optax transformation"),
    # the data
    "a generator function": (dict(data=batches), DATAS, r"call it, data=batches\(\)"),
    "a list of columns": (dict(data=[X, Y]), DATAS, r"list of 2 arrays.*pass a tuple, \(x, y\)"),
    "lists for arrays": (dict(data={"x": X.tolist()}), DATAS, r"make them arrays, numpy\.asarray"),
    "columns of unlike lengths": (dict(data={"x": X, "y": Y[:9]}), DATAS, "'x'.: 32, .*'y'.: 9"),
    "a path": (dict(data="train.csv"), DATAS, "data is str; data is one of"),
    "no data": (dict(data=None), DATAS, "data is NoneType; data is one of"),
    "too little data": (dict(data={"x": X[:8], "y": Y[:8]}), DATAS, "8 examples, fewer than"),
    "keys in the data": (
        dict(data={"x": X, "key": jax.random.split(KEY, 32)}),
        DATAS,
        r"has random keys.*loss\(model, batch, key\)",
    ),
    "no examples": (dict(data={"x": X[:0], "y": Y[:0]}), DATAS, "0 examples, fewer than"),
    "texts in the data": (dict(data={"x": np.full(32, "a")}), DATAS, "encode it as numbers"),
    "a number among the columns": (dict(data={"x": X, "scale": np.float32(2)}), DATAS, "leading"),
    "a function without an index": (dict(data=lambda: DATA), DATAS, "with the index of an example"),
    "a class of datasets": (dict(data=dict), DATAS, "the class dict: pass an instance"),
    "batches of another size": (
        dict(data=iter([{"x": X[:4], "y": Y[:4]}])),
        DATAS,
        "global batch 0 has 4 examples, batch_size is 16",
    ),
    "too few batches": (
        dict(data=iter([{"x": X[:16], "y": Y[:16]}]), steps=3),
        DATAS,
        "ended after 1 global batches",
    ),
    "a generator function to evaluate": (dict(eval_data=batches), DATAS, r"eval_data=batches\(\)"),
    # numbers and settings
    "a batch size in words": (dict(batch_size="16"), CONFIG, "batch_size='16' is no whole number"),
    "no batch": (dict(batch_size=0), CONFIG, "batch_size=0 must be at least 1"),
    "a microbatch that does not fit": (dict(microbatch_size=5), CONFIG, "not divisible by"),
    "no microbatch": (dict(microbatch_size=0), CONFIG, "microbatch_size=0"),
    "steps and epochs": (dict(epochs=1), CONFIG, "either steps or epochs"),
    "no steps": (dict(steps=0), CONFIG, "steps=0 must be at least 1"),
    "half a step": (dict(steps=2.5), CONFIG, r"steps=2\.5 is no whole number"),
    "a seed in words": (dict(seed="zero"), CONFIG, "seed='zero' is no whole number"),
    "counts that do not add up": (dict(counts=(3,)), CONFIG, "does not hand out 4 microbatches"),
    "a mesh of a number": (dict(mesh=4), CONFIG, r"mesh=4.*\{'data': 4\}"),
    "a mesh too large": (dict(mesh={"data": 99}), PLAN, "takes 99 devices, there are 8"),
    "rules that are not there": (dict(rules="nothing"), CONFIG, "built in: decoder"),
    "stages in words": (dict(stages="two"), CONFIG, "neither a number of stages"),
    "a plan that is not there": (
        dict(plan="no.json", microbatch_size=None, mesh=None, counts=None),
        PLAN,
        r"no\.json",
    ),
    "a form of sums": (dict(reduction="mean"), CONFIG, "use 'exact' or 'float'"),
    "a word for nonfinite": (dict(nonfinite="ignore"), CONFIG, "use 'stop', 'skip' or 'scale'"),
    "a word for precision": (dict(precision="bf61"), CONFIG, r"precision.*bf16"),
    "an axis that is none": (dict(mesh={"date": 8}), PLAN, "axis 'date', but neither rules"),
    "an axis of no rule": (
        dict(mesh={"tensr": 8}, rules="decoder"),
        hxla.AnnotationError,
        "did you mean 'tensor'",
    ),
    "a line for no step": (dict(log_every=0), CONFIG, "log_every=0 must be at least 1"),
    "an argument of others": (dict(num_epochs=1), CONFIG, "num_epochs: did you mean epochs"),
    "a callback of one argument": (
        dict(callbacks=[lambda record: None]),
        CONFIG,
        r"callbacks\[0\].*\(record, session\)",
    ),
    "a callback that is none": (dict(callbacks=["early"]), CONFIG, r"callbacks\[0\]"),
    "one callback": (dict(callbacks=print), CONFIG, r"callbacks=\[.*\]"),
    "evaluation of nothing": (dict(eval_every=1), CONFIG, "needs eval_data"),
    "checkpoints nowhere": (dict(checkpoint_every=1), CONFIG, "needs a checkpoint_dir"),
    "a setting that is none": (dict(config={"balanse": {}}), CONFIG, "did you mean 'balance'"),
    "a file of settings that is not there": (dict(config="no.toml"), CONFIG, r"no\.toml"),
    "an annotation in words": (
        dict(default="replicate"),
        hxla.AnnotationError,
        r"pass hxla\.replicate\(",
    ),
    "tensorboard nowhere": (dict(tensorboard=True), CONFIG, "needs a run_dir"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_to_write_instead(name):
    given, error, words = CALLS[name]
    with pytest.raises(error) as raised:
        train(**given)
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert re.search(words, said, re.S), said


def test_precision_may_be_named_by_its_dtype():
    job = hxla.Job(NNX, DATA, squares, optax.sgd(0.1), batch_size=16, precision="bfloat16")
    assert job.plan(microbatch_size=2).precision.compute == "bfloat16"


def test_a_loss_that_fails_on_its_own_fails_with_its_own_error():
    def loss(model, batch):
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        train(loss=loss)
    with pytest.raises(TypeError, match=r"must be equal|dimension"):
        train(loss=lambda model, batch: model(batch["y"][None, :3]).mean())


@pytest.mark.usefixtures("every_program_is_cached")
def test_losses_of_other_forms_are_taken():
    class Loss:
        def __call__(self, model, batch, scale=2.0):
            return scale * squares(model, batch)

        def method(self, model, batch):
            return squares(model, batch)

    once = (Loss().method, functools.partial(Loss(), scale=1.0), of_anything)
    twice, *others = (
        train(loss=loss, model=LINEN).history.steps[0].loss for loss in (Loss(), *once)
    )
    assert others == pytest.approx([twice / 2] * 3)


def of_anything(*arguments):
    return squares(*arguments)
