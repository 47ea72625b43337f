"""What a call writes into parameters or Python attributes is refused by name, and nothing else."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import hxla

SHAPES = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}


class Model(nnx.Module):
    """A layer with statistics and dropout, and what a call does besides."""

    def __init__(self, call):
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
        self.code = nnx.Param(jnp.ones(8))
        self.turn = nnx.Param(jnp.ones(8, jnp.complex64))
        self.calls, self.is_ready, self.call = 0, False, call

    def __call__(self, x):
        return self.call(self, x)

    def usual(self, x):
        y = self.dropout(self.norm(self.layer(x))) * self.code[...]
        return (y * self.turn[...]).real


def graph(model, **more):
    job = hxla.Job(
        model,
        SHAPES,
        lambda model, batch: (model(batch["x"]) ** 2).mean(-1),
        optax.sgd(0.1),
        batch_size=16,
        **more,
    )
    return job.graph(4)


def counts(self, x):
    self.calls += 1
    return self.usual(x)


def waits(self, x):
    y = self.usual(x) if self.is_ready else self.layer(x)
    self.is_ready = True
    return y


def moves(self, x):
    self.code[...] = 0.9 * self.code[...] + 0.1 * x.mean(0)
    return self.usual(x)


def moves_inside(self, x):
    nnx.jit(lambda model: model.code.set_value(model.code[...] * 0.5))(self)
    return self.usual(x)


def normalises(wrap):
    layer = wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))

    class Normalised(nnx.Module):
        def __init__(self):
            self.inner = layer

        def __call__(self, x):
            return self.inner(x)

    return Normalised()


REFUSED = {
    "a count of calls": (lambda: Model(counts), "the attribute calls: 0 before, 1 after a call"),
    "a first call": (lambda: Model(waits), "the attribute is_ready: False before, True after"),
    "a parameter": (lambda: Model(moves), "the parameter code"),
    "one inside nnx.jit": (lambda: Model(moves_inside), "the parameter code"),
    "nnx.SpectralNorm": (
        lambda: normalises(nnx.SpectralNorm),
        "the parameter inner/layer_instance/kernel",
    ),
    "nnx.WeightNorm": (
        lambda: normalises(nnx.WeightNorm),
        "the parameter inner/layer_instance/kernel",
    ),
}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused_by_name(case, precision):
    make, told = REFUSED[case]
    with pytest.raises(hxla.LossError, match=f"the loss changes\n  {told}") as error:
        graph(make(), precision=precision)
    assert "nnx.Variable" in str(error.value)


def in_train_mode(self, x):
    self.train()
    return self.usual(x)


def with_itself(self, x):
    self.code[...] = self.code[...] + 0 * 0 if self.calls else self.code[...]
    self.size = x.shape[1]
    return self.usual(x)


TAKEN = {
    "train() in a call": in_train_mode,
    "what it is already": with_itself,
    "nnx.jit": lambda self, x: nnx.jit(lambda model, x: model.usual(x))(self, x),
    "nnx.remat": lambda self, x: nnx.remat(lambda model, x: model.usual(x))(self, x),
    "nnx.cond": lambda self, x: nnx.cond(
        self.layer.bias[0] > -1,
        lambda model, x: model.usual(x),
        lambda model, x: model.layer(x),
        self,
        x,
    ),
    "a copy": lambda self, x: nnx.clone(self).usual(x),
}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("case", TAKEN)
def test_what_stays_as_it_is_is_taken(case, precision):
    model = Model(TAKEN[case])
    if case == "train() in a call":
        model.eval()
    assert len(graph(model, precision=precision).merges) == 2


@pytest.mark.parametrize("kind", ["nnx", "linen", "linen, a later layer"])
def test_variables_whose_gradient_is_their_next_value_are_refused(kind):
    linen = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)

    def make():
        return nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(jnp.ones((4, 8)))

    models = {"nnx": make, "linen": linen}
    model = models.get(kind, nn.Sequential([nn.Dense(8), linen]))
    with pytest.raises(hxla.ConfigError, match=r"input_amax_history.*pass precision='fp8'"):
        graph(model)
