"""The one place that knows jax's program representation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.inside.jax import (
    Literal,
    checkpoint_like,
    inner_jaxpr,
    read_arguments,
    run_equation,
    scan_counts,
)


def programs():
    w = np.ones((3, 3), np.float32)

    def scan(x):
        def body(carry, xs):
            (c, n), (a, b, _) = carry, xs
            return (c @ w + a, n * 2 + c.sum()), b

        xs = jnp.stack([x] * 5)
        return jax.lax.scan(body, (x, x.sum()), (xs, xs, xs))

    return {
        "scan": scan,
        "jit": jax.jit(lambda x: x * 2 + x),
        "custom_jvp": lambda x: jax.nn.relu(x) * jax.nn.silu(x),
        "custom_vjp": lambda x: jax.nn.relu6(x) + jax.numpy.linalg.norm(x),
        "remat": jax.checkpoint(lambda x: jnp.sin(x) @ x.T),
        "cond": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        "while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x),
        "random": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
    }


@pytest.mark.parametrize("name", programs())
def test_equations_run_again_give_the_same_values_and_gradients(name):
    function = programs()[name]
    x = np.random.default_rng(0).uniform(0.1, 1, (2, 3)).astype(np.float32)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(x)

    def again(x):
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars, [x], strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else env[v]  # noqa: E731
        for eqn in closed.jaxpr.eqns:
            results = run_equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return jax.tree.unflatten(jax.tree.structure(shape), map(read, closed.jaxpr.outvars))

    for a, b in zip(jax.tree.leaves(again(x)), jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_array_equal(a, b)
    if name != "while":
        total = lambda f: lambda x: sum(y.sum() for y in jax.tree.leaves(f(x)))  # noqa: E731
        ours, theirs = (jax.jit(jax.grad(total(f)))(x) for f in (again, function))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_the_operands_of_a_scan_are_told_apart():
    x = np.ones((2, 3), np.float32)
    (eqn,) = [e for e in jax.make_jaxpr(programs()["scan"])(x).eqns if e.primitive.name == "scan"]
    num_consts, num_carry = scan_counts(eqn)
    inner = inner_jaxpr(eqn)
    rest = [v.aval.shape for v in inner.jaxpr.invars[num_consts + num_carry :]]
    carried = [v.aval.shape for v in inner.jaxpr.invars[num_consts:][:num_carry]]
    assert carried == [(2, 3), ()]
    assert rest
    assert set(rest) == {(2, 3)}


def test_checkpoint_keeps_its_policy():
    function = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.everything_saveable)
    (eqn,) = jax.make_jaxpr(function)(1.0).eqns
    again = jax.make_jaxpr(checkpoint_like(eqn, jnp.sin))(1.0).eqns[0]
    assert again.params["policy"] is eqn.params["policy"]


def test_an_argument_of_which_no_result_is_made_is_not_read():
    def run(a, b, c, d):
        return a + len(b), jax.jit(lambda x, y: x)(c, d)

    assert read_arguments(jax.make_jaxpr(run)(*[np.ones(3)] * 4)) == {0, 2}
