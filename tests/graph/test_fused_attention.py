"""cuDNN's attention in plans for devices that are not here, and where it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import pallas as pl

import hxla
from support.inside.graph import class_of, leaves
from support.precision_programs import every_equation, gradient_program

LENGTH, HEADS = 16, 4
DATA = {"t": jax.ShapeDtypeStruct((64, LENGTH + 1), np.int32)}
H100 = hxla.Device(kind="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30)
NODE = hxla.Cluster(name="node", devices=(H100,) * 4)


class Net(nnx.Module):
    """A block of attention; `form` says how it is called."""

    def __init__(self, form="causal", head_dim=8, dtype=jnp.float32):
        rngs, width = nnx.Rngs(0), HEADS * head_dim
        self.form, self.dtype = form, dtype
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, 32, rngs=rngs)

    def __call__(self, t):
        B, T = t.shape
        qkv = self.qkv(self.embed(t)).reshape(B, T, 3, HEADS, -1).astype(self.dtype)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        how = {
            "causal": {"is_causal": True},
            "mask": {"mask": jnp.tril(jnp.ones((1, 1, T, T), bool))},
            "bias": {"bias": jnp.ones((1, HEADS, T, T), q.dtype)},
            "lengths": {"query_seq_lengths": jnp.full(B, T - 1, jnp.int32)},
            "window": {"is_causal": True, "local_window_size": (4, 0)},
        }[self.form]
        mixed = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)
        return self.out(mixed.reshape(B, T, -1).astype(jnp.float32))


def loss(model, batch):
    logits = model(batch["t"][:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["t"][:, 1:])
    return each.mean(-1)


def job(precision="bf16", **arguments):
    model = nnx.eval_shape(lambda: Net(**arguments))
    return hxla.Job(model, DATA, loss, optax.adam(1e-3), batch_size=16, precision=precision)


@pytest.mark.parametrize("form", ["causal", "mask", "bias", "lengths", "window"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_float32_model_has_low_attention_forward_and_backward(form, precision):
    graph = job(precision, form=form).graph(2)
    assert not graph.mixes
    low = jnp.dtype({"bf16": "bfloat16", "fp16": "float16"}[precision])
    backward, *_ = gradient_program(graph)
    seen = set()
    for eqn in every_equation(backward.jaxpr):
        if "dot_product_attention" in eqn.primitive.name:
            seen.add(eqn.primitive.name)
            assert class_of(eqn) == "low"
            assert {v.aval.dtype for v in eqn.invars[:3]} == {low}
            # The statistics of the softmax, which the backward reads.
            wide = {v.aval.ndim for v in (*eqn.invars, *eqn.outvars) if v.aval.dtype == jnp.float32}
            assert wide == {3}
    assert len(seen) == 2
    assert {v.aval.dtype.name for v in backward.jaxpr.outvars} == {"float32"}


def test_outside_of_hxla_jax_checks_as_before():
    job().graph(2)
    q = jax.ShapeDtypeStruct((2, 8, 4, 8), jnp.float32)

    def run(q):
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    with pytest.raises((NotImplementedError, RuntimeError), match=r"Q must be|cuDNN is not"):
        jax.make_jaxpr(run)(q)


@pytest.mark.parametrize("precision", [None, "fp32", "tf32"])
def test_attention_in_float32_is_refused_with_its_line(precision):
    with pytest.raises(hxla.LossError, match=r"in float32 \(.*test_fused_attention.py:\d+\).*bf16"):
        job(precision).graph(2)


def test_a_model_that_casts_by_hand_needs_no_precision():
    plan = job(None, dtype=jnp.bfloat16).plan(NODE, mesh={"data": 4})
    assert sum(plan.counts) == 8


def test_it_is_cut_by_examples_and_heads_and_its_work_is_counted():
    [op] = [op for op in leaves(job().graph(2).ops) if "attention" in op.name]
    assert [factor.name for factor in op.factors] == ["batch", "heads"]
    assert [factor.operands[:3] for factor in op.factors] == [(0, 0, 0), (2, 2, 2)]
    # Two products of half the positions, as in the unfused form without its masked half.
    assert op.flops == 2 * 2 * (2 * HEADS * LENGTH * LENGTH * 8) // 2


@pytest.mark.parametrize(
    "wishes",
    [
        {"mesh": {"data": 4}},
        {"mesh": {"stage": 2, "data": 2}},
        {"mesh": {"tensor": 4}, "rules": "decoder"},
    ],
)
def test_a_machine_without_cudnn_plans_for_a_node_of_h100(wishes):
    plan = job().plan(NODE, microbatch_size=2, **wishes)
    assert len(plan.devices) == 4


def test_a_search_plans_it_too():
    assert job().plan("workstation-a100-h100").prediction.step_seconds > 0


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("whale-8v100-8p100", "Tesla V100-SXM2-32GB, Tesla P100"),
        ("cpu-4-equal", "unlike cpu: leave"),
        (None, "unlike cpu"),
    ],
)
def test_devices_without_it_are_refused_by_name(cluster, words):
    with pytest.raises(hxla.PlanError, match=rf"cuDNN's, with heads of 8.*8\.0 or more.*{words}"):
        job("fp16").plan(cluster)


def test_large_heads_need_hopper():
    with pytest.raises(hxla.PlanError, match=r"heads of 256.*9\.0 or more, unlike NVIDIA A100"):
        job(head_dim=256).plan("workstation-a100-h100")
    job(head_dim=256).plan(NODE, mesh={"data": 4})


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, t):
        x = nn.Embed(32, 32)(t)
        q, k, v = jnp.split(nn.Dense(96)(x).reshape(*t.shape, HEADS, 24), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return nn.Dense(32)(mixed.reshape(*t.shape, 32))


def test_a_linen_model_is_initialised_and_planned():
    linen = hxla.Job(LinenNet(), DATA, loss, optax.adam(1e-3), batch_size=16, precision="bf16")
    assert linen.plan(NODE, mesh={"data": 4}).parameters


def scaled(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0


class Kernel(nnx.Module):
    """With a kernel in Pallas."""

    def __init__(self):
        self.embed = nnx.Embed(32, 32, rngs=nnx.Rngs(0))

    def __call__(self, t):
        x = self.embed(t)

        @jax.custom_vjp
        def double(x):
            return pl.pallas_call(scaled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

        double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))
        return double(x)


def test_a_model_with_a_pallas_kernel_plans_anywhere():
    model = nnx.eval_shape(Kernel)
    for cluster in (NODE, "whale-8v100-8p100"):
        kernel = hxla.Job(model, DATA, loss, optax.adam(1e-3), batch_size=64, precision="fp16")
        assert kernel.plan(cluster, auto=False).devices
