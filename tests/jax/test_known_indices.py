"""What is known of indices before a program runs is true of the program's arrays."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.inside.jax import Literal, constant, results_of, unknown
from support.tiers import examples

SHAPE = (3, 4)


def check(known, x):
    """Hold that what is known of an array is true."""
    x = np.asarray(x).astype(np.int64)
    assert known.low <= x.min()
    assert x.max() <= known.high
    for d in set(range(x.ndim)) - known.varies:
        assert (np.diff(x, axis=d) == 0).all()
    for d, given in known.rules:
        for a, b in itertools.combinations(np.ndindex(x.shape), 2):
            if x[a] == x[b] and all(a[g] == b[g] for g in given):
                assert a[d] == b[d], (known, x)


def of_one(f):
    return lambda rng, xs: f(xs[rng.integers(0, len(xs))])


def of_two(f):
    return lambda rng, xs: f(*(xs[i] for i in rng.integers(0, len(xs), 2)))


#: Steps of a random program, from its arrays so far to one more.
STEPS = {
    "number": lambda rng, xs: jnp.full(SHAPE, int(rng.integers(-3, 4))),
    "iota": lambda rng, xs: lax.broadcasted_iota(np.int32, SHAPE, int(rng.integers(0, 2))),
    "add": of_two(lambda a, b: a + b),
    "sub": of_two(lambda a, b: a - b),
    "mul": of_two(lambda a, b: a * b),
    "max": of_two(jnp.maximum),
    "min": of_two(jnp.minimum),
    "select": of_two(lambda a, b: jnp.where(a < b, a, b + 1)),
    "wrapped": of_one(lambda a: jnp.where(a < 0, a + 4, a)),
    "clamp": of_one(lambda a: jnp.clip(a, -1, 3)),
    "sort": of_one(lambda a: jnp.sort(a, axis=1)),
    "sorted by": of_two(lambda a, b: lax.sort((a * a % 3, b), dimension=0, num_keys=1)[1]),
    "reversed": of_one(lambda a: a[::-1]),
    "reshaped": of_one(lambda a: a.T.reshape(SHAPE)),
    "flat": of_one(lambda a: a.reshape(12)[::-1].reshape(SHAPE)),
    "one row": of_one(lambda a: jnp.broadcast_to(a[1:2], SHAPE)),
    "joined": of_one(lambda a: jnp.concatenate([a[1:], a[:1]], axis=0)),
    "a byte": of_one(lambda a: a.astype(np.int8).astype(np.int32)),
    "stacked": of_two(lambda a, b: jnp.stack([a, b], axis=-1)[..., 0]),
}


def walk(closed, arguments, known):
    """The results of a program, what is known of them, and the number of rules that were true."""
    jaxpr, num_rules = closed.jaxpr, 0
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    facts = {v: constant(v.aval, x) for v, x in values.items()}
    values |= dict(zip(jaxpr.invars, arguments, strict=True))
    facts |= dict(zip(jaxpr.invars, known, strict=True))

    def read(v):
        if isinstance(v, Literal):
            return v.val, constant(v.aval, v.val)
        return values[v], facts[v]

    for eqn in jaxpr.eqns:
        operands, known = zip(*map(read, eqn.invars), strict=True) if eqn.invars else ((), ())
        if "jaxpr" in eqn.params:
            results, found, inner = walk(eqn.params["jaxpr"], operands, known)
            num_rules += inner
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
            found = results_of(eqn, known)
            for fact, x in zip(found, results, strict=True):
                check(fact, x)
                num_rules += len(fact.rules)
        values.update(zip(eqn.outvars, results, strict=True))
        facts.update(zip(eqn.outvars, found, strict=True))
    results, found = zip(*map(read, jaxpr.outvars), strict=True)
    return results, found, num_rules


@pytest.mark.parametrize("seed", range(examples(3, 40)))
def test_what_is_known_of_a_random_program_is_true(seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-4, 5, SHAPE), jnp.int32)
    names = rng.choice(list(STEPS), 12)

    def run(x):
        xs = [x, *(lax.broadcasted_iota(np.int32, SHAPE, d) for d in (0, 1))]
        for name in names:
            xs.append(STEPS[name](rng, xs))
        return xs

    closed = jax.make_jaxpr(run)(x)
    [argument] = closed.jaxpr.invars
    assert walk(closed, [x], [unknown(argument.aval)])[-1] >= 2
