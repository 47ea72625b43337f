"""State that is no parameter is after each step what one call with the whole batch makes of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from support import state_models
from support.inside.lower import _state_sums
from support.tiers import rows
from support.training import train_with

FORMS = {
    "copies": {},
    "float": {"reduction": "float"},
    "several a call": {"config": {"cluster": {"microbatches_per_call": 2}}},
    "chain": {"config": {"memory": {"recompute": "boundaries", "segments": 2}}},
    "pipeline": {"stages": 2},
    "tensor": {"mesh": {"data": 1, "tensor": 2}, "rules": "decoder"},
    "zero 1": {"config": {"memory": {"zero": 1}}},
    "zero 3": {"config": {"memory": {"zero": 3, "segments": 2}}},
}


def trained(model, form, **more):
    settings = {**FORMS[form], **more}
    config = {"cluster": {}, **settings.pop("config", {})}
    config["cluster"] = {"visible_devices": [0, 1], **config["cluster"]}
    return train_with(
        model,
        state_models.DATA,
        state_models.loss,
        optax.sgd(0.01),
        batch_size=state_models.BATCH,
        microbatch_size=4,
        steps=state_models.STEPS,
        shuffle=False,
        merge=state_models.MERGE,
        config=config,
        **settings,
    )


@pytest.mark.parametrize("form", rows(FORMS, "pipeline"))
def test_every_kind_of_state_is_that_of_plain_nnx(form):
    result = trained(state_models.InNnx(nnx.Rngs(0)), form)
    losses, right = state_models.by_plain_nnx(state_models.InNnx(nnx.Rngs(0)))
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    own = {name: getattr(result.model, name)[...] for name in state_models.INITIAL}
    state_models.check(own, right)


@pytest.mark.parametrize("form", rows(FORMS, "copies"))
def test_every_kind_of_state_is_that_of_plain_linen(form):
    module, first = state_models.InLinen(), state_models.batches()[0]
    variables = module.init(jax.random.key(0), first["x"], first["id"])
    result = trained(module, form, variables=variables)
    losses, right = state_models.by_plain_linen(module, variables)
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    state_models.check(result.state["kept"], right)


# -- how it travels ------------------------------------------------------------------------------

DTYPES = {
    "bool": [False, True],
    "int4": [-8, -1, 0, 7],
    "uint4": [0, 15],
    "int8": [-128, -1, 0, 127],
    "uint8": [0, 255],
    "int16": [-(2**15), 0, 2**15 - 1],
    "int32": [-(2**31), -1, 0, 2**31 - 1],
    "uint32": [0, 2**31, 2**32 - 1],
    "float8_e4m3fn": [-448, -0.0, 0.0, 2**-9],
    "float8_e5m2": [-np.inf, 0.0, np.inf, np.nan],
    "bfloat16": [-np.inf, -1e-40, -0.0, 3.0, np.nan],
    "float16": [-np.inf, -6e-8, 1.5, np.nan],
    "float32": [-np.inf, -1e-40, -0.0, 0.0, 1e38, np.inf, np.nan],
    "complex64": [1 - 2j, complex(np.nan, -0.0)],
    "int64": [-(2**63), -1, 2**32, 2**63 - 1],
    "uint64": [0, 2**63, 2**64 - 1],
    "float64": [-np.inf, 1e300, -0.0, np.nan],
    "complex128": [1e300 - 1e-300j],
}


def arrays(name):
    return [jnp.array([x], jnp.dtype(name)) for x in DTYPES[name]]


def after(rule, old, each):
    """What a variable is after microbatches that some devices ran, which no order moves."""
    words = [
        _state_sums.own_words(rule, old, new, jnp.int32(i), len(each)) for i, new in enumerate(each)
    ]
    results = set()
    for own in itertools.islice(itertools.permutations(words), 6):
        total = jnp.zeros_like(own[0])  # a device that ran none
        for x in own:
            total = _state_sums.joined(rule, total, x)
        results.add(np.asarray(_state_sums.decided(rule, old, total)).tobytes())
    [found] = results
    return found


QUICK = ["bool", "int4", "float8_e5m2", "bfloat16", "float32", "complex64", "int64"]


@pytest.mark.parametrize("name", rows(DTYPES, *QUICK))
def test_a_variable_of_any_dtype_travels_bit_for_bit(name):
    with jax.enable_x64():
        each = arrays(name)
        for rule, right in (("first", each[0]), ("last", each[-1])):
            assert after(rule, each[0], each) == np.asarray(right).tobytes()


ORDERED = [n for n in DTYPES if "64" not in n and "128" not in n]
INTEGERS = [n for n in DTYPES if "int" in n]


@pytest.mark.parametrize("name", rows(ORDERED, "bool", "int8", "uint32", "bfloat16"))
def test_maxima_and_minima_are_those_of_numpy(name):
    old, *_ = each = arrays(name)
    for rule, best in (("max", np.maximum), ("min", np.minimum)):
        found = np.frombuffer(after(rule, old, each), np.asarray(old).dtype)
        with np.errstate(invalid="ignore"):  # of NaN
            right = best.reduce([np.asarray(x) for x in each])
        np.testing.assert_array_equal(found.astype(np.float32), right.astype(np.float32))


@pytest.mark.parametrize("name", rows(INTEGERS, "int4", "uint32", "int64"))
def test_sums_of_integers_wrap_as_the_dtype_does(name):
    with jax.enable_x64():
        old, *_ = each = arrays(name)
        right = old
        for new in each:
            right = right + (new - old)
        assert after("sum", old, each) == np.asarray(right).tobytes()


def test_a_change_of_what_is_infinite_and_stays_so_is_zero():
    old = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])
    new = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 3.0])
    delta = _state_sums.change(old, new)
    np.testing.assert_array_equal(delta, [0, 0, 0, 2])
    np.testing.assert_array_equal(_state_sums.changed(old, delta / 2), [np.inf, -np.inf, np.nan, 2])
