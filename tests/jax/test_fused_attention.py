"""jax's names of cuDNN's attention, and hxla's answers to what jax asks while it traces."""

import jax
import jax.numpy as jnp
import pytest

from support.inside.jax import attention

B, T, S, N, H = 2, 8, 6, 4, 16


def attend(q, k, v, **how):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)


def gradient(dtype, **how):
    shapes = [jax.ShapeDtypeStruct((B, n, N, H), dtype) for n in (T, S, S)]

    def run(q, k, v):
        out, pull = jax.vjp(lambda *xs: attend(*xs, **how), q, k, v)
        return pull(out)

    with attention.traced_anywhere():
        return jax.make_jaxpr(run)(*shapes).jaxpr


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_both_primitives_are_known(dtype, is_masked):
    how = {"mask": jnp.ones((1, 1, T, S), bool)} if is_masked else {}
    eqns = [e for e in gradient(dtype, **how).eqns if "dot_product" in e.primitive.name]
    assert [e.primitive.name for e in eqns] == sorted(attention.PRIMITIVES, reverse=True)
    assert eqns[0].primitive.name == attention.FORWARD
    of = attention.attention_shape([v.aval.shape for v in eqns[0].invars], eqns[0].params)
    assert (of.batch, of.heads, of.queries, of.keys, of.head_dim) == (B, N, T, S, H)
    assert not of.is_causal
    assert of.flops == 2 * 2 * B * N * T * S * H


def test_the_statistics_of_the_softmax_are_known_by_their_shape():
    forward, backward = [e for e in gradient(jnp.bfloat16).eqns if len(e.invars) > 9]
    for variables in (forward.outvars, backward.invars):
        [statistic] = [v for v in variables if attention.is_statistic(v.aval.shape)]
        assert statistic.aval.dtype == jnp.float32
        assert statistic.aval.shape == (B, N, T)


def test_operands_and_results_are_cut_alike():
    for eqn in gradient(jnp.bfloat16, is_causal=True).eqns:
        if eqn.primitive.name in attention.PRIMITIVES:
            ins, outs = ([v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars))
            batch, heads = attention.split_dims(ins, outs, eqn.params)
            assert batch[1][:3] == (0, 0, 0)
            assert heads[1][:3] == (2, 2, 2)
            assert [heads[2][i] for i in range(len(outs))] == [
                1 if len(x) == 3 else 2 for x in outs
            ]


def test_all_heads_of_queries_need_keys_of_their_own_to_be_cut():
    q, kv = (jax.ShapeDtypeStruct((B, T, n, H), jnp.bfloat16) for n in (4, 2))
    with attention.traced_anywhere():
        [eqn] = jax.make_jaxpr(lambda *xs: attend(*xs))(q, kv, kv).jaxpr.eqns[-1:]
    shapes = [v.aval.shape for v in eqn.invars]
    params = eqn.params["call_jaxpr"].eqns[-1].params
    names = [name for name, *_ in attention.split_dims(shapes, [q.shape], params)]
    assert names == ["batch"]
