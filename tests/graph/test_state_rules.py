"""How state merges over microbatches: sure of what is sure, and refused by name where it is not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import hxla

SHAPES = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}


class Counts(nnx.Variable):
    pass


class Keeps(nnx.Module):
    """A linear layer, and one variable that each call changes."""

    def __init__(self, value, change, kind=nnx.Variable):
        self.layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.kept, self.change = kind(value), change

    def __call__(self, x, key):
        self.kept[...] = self.change(self.kept[...], x, key)
        return self.layer(x)


def loss(model, batch, key):
    return (model(batch["x"], key) ** 2).mean(-1)


def graph(value, change, kind=nnx.Variable, size=4, model=None, **more):
    model = Keeps(value, change, kind) if model is None else model
    job = hxla.Job(model, SHAPES, loss, optax.sgd(0.1), batch_size=16, **more)
    return job.graph(size)


def through_scan(old, x, key):
    """Carried, sliced and stacked again, and chosen by a branch, but never changed."""
    carried, _ = jax.lax.scan(lambda c, row: (c, row), old, old.reshape(1, -1))
    same = jax.lax.cond(x.sum() > 0, lambda a: a, lambda a: a, carried)
    start = (jnp.int32(0), same)
    _, same = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1]), start)
    return jax.jit(jax.checkpoint(lambda a: a))(same)


SURE = {
    "only read": (jnp.zeros(4, jnp.complex64), lambda old, x, key: old, "same"),
    "through loops": (jnp.zeros(4), through_scan, "same"),
    "a step's number": (jnp.int32(0), lambda old, x, key: old + 1, "first"),
    "a flag": (jnp.array(False), lambda old, x, key: jnp.array(True), "first"),
    "a decay": (jnp.float32(1), lambda old, x, key: old * 0.9, "first"),
    "a shape's words": (
        jnp.int32(0),
        lambda old, x, key: jax.checkpoint(lambda a, b: (a + 1, b * 2))(old, x)[0],
        "first",
    ),
    "a moving average": (
        jnp.zeros(8),
        lambda old, x, key: old + 0.1 * (x.mean(0) - old),
        "mean",
    ),
}


@pytest.mark.parametrize("case", SURE)
def test_what_is_right_for_the_whole_batch_needs_no_word(case):
    value, change, rule = SURE[case]
    assert graph(value, change).merges == (rule,)


REFUSED = {
    "an integer that counts examples": (
        jnp.int32(0),
        lambda old, x, key: old + len(x),
        "the number of examples",
    ),
    "a float that does": (jnp.zeros(()), lambda old, x, key: old + len(x), "the number of exam"),
    "one as a statistic": (
        jnp.zeros(()),
        lambda old, x, key: old + len(x),
        "the number of examples",
        nnx.BatchStat,
    ),
    "examples seen": (
        jnp.zeros(9, bool),
        lambda old, x, key: old.at[x[:, 0].astype(int)].set(True),
        "the batch",
    ),
    "a maximum": (jnp.zeros(8), lambda old, x, key: jnp.maximum(old, x.max(0)), "the batch"),
    "a maximum by choice": (
        jnp.zeros(8),
        lambda old, x, key: jnp.where(x.max(0) > old, x.max(0), old),
        "the batch",
    ),
    "a total": (jnp.zeros(8), lambda old, x, key: old + x.sum(0), "the batch"),
    "a queue": (
        jnp.zeros((64, 8)),
        lambda old, x, key: jax.lax.dynamic_update_slice(old, x, (0, 0)),
        "the batch",
    ),
    "a queue that rolls": (
        jnp.zeros((64, 8)),
        lambda old, x, key: jnp.concatenate([x, old[: -len(x)]]),
        "the batch",
    ),
    "a draw": (
        jnp.zeros((), jnp.int32),
        lambda old, x, key: jax.random.randint(key, (), 0, 9),
        "the random key",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_be_wrong_is_refused_by_name(case):
    value, change, reason, *kind = REFUSED[case]
    with pytest.raises(hxla.ConfigError, match=f"4 microbatches.*\n  kept: .*{reason}") as error:
        graph(value, change, *kind)
    assert "merge={'kept': 'sum'}" in str(error.value)
    assert "microbatch_size=batch_size" in str(error.value)
    assert graph(value, change, *kind, size=16).merges != ("same",)  # one call sees it all
    assert graph(value, change, *kind, merge={"kept": "last"}).merges == ("last",)


def test_linen_is_told_alike():
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            count = self.variable("counts", "examples", lambda: jnp.int32(0))
            if not self.is_initializing():
                count.value += len(x)
            return nn.Dense(4)(x)

    with pytest.raises(hxla.ConfigError, match=r"counts/examples: int32, .*number of examples"):
        graph(None, None, model=Counts())
    assert graph(None, None, model=Counts(), merge={"counts/": "sum"}).merges == ("sum",)


def test_an_average_that_nobody_asked_for_is_told_in_the_plan():
    change = lambda old, x, key: 0.9 * old + 0.1 * x.mean(0)  # noqa: E731
    for kind, is_told in ((nnx.Variable, True), (nnx.BatchStat, False)):
        job = hxla.Job(
            Keeps(jnp.zeros(8), change, kind), SHAPES, loss, optax.sgd(0.1), batch_size=16
        )
        plan = job.plan(microbatch_size=2)
        assert any("'kept' depends on the batch" in said for said in plan.reasons) is is_told


def test_a_filter_or_a_pattern_says_it_and_the_first_that_fits_decides():
    count = lambda old, x, key: old + len(x)  # noqa: E731
    for merge in ({Counts: "sum"}, {"ke": "sum"}, {"kept": "sum", Counts: "max"}):
        assert graph(jnp.int32(0), count, Counts, merge=merge).merges == ("sum",)


WRONG = {
    "an unknown rule": ({"kept": "average"}, r"'average' is no rule: use mean, sum, max, min"),
    "an unknown variable": ({"kepd": "sum"}, r"'kepd' is no variable .*nearest path is 'kept'"),
    "no mapping": (["kept"], "pass a mapping"),
    "a mean of integers": ({"kept": "mean"}, r"kept: int32, 'mean': a mean is no whole number"),
    "refuse": ({"kept": "refuse"}, "depends on the number of examples"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_word_is_refused(case):
    merge, told = WRONG[case]
    with pytest.raises(hxla.ConfigError, match=told):
        graph(jnp.int32(0), lambda old, x, key: old + len(x), merge=merge)


def test_rules_are_for_dtypes_that_they_suit():
    seen = lambda old, x, key: old | (x[0, 0] > 0)  # noqa: E731
    with pytest.raises(hxla.ConfigError, match=r"bool, 'sum': booleans have no sum"):
        graph(jnp.array(False), seen, merge={"kept": "sum"})
    turn = lambda old, x, key: old * x[0, 0]  # noqa: E731
    with pytest.raises(hxla.ConfigError, match=r"complex64, 'max': complex numbers have no order"):
        graph(jnp.complex64(1), turn, merge={"kept": "max"})
