"""Precision as a policy on the traced graph: which dtype each operation computes in."""

import collections
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import lowering
from support.inside.graph import PrecisionCalls, class_of
from support.inside.jax import as_function
from support.inside.model import functional
from support.inside.plan import as_precision, deciding
from support.precision_programs import (
    MODELS,
    every_equation,
    gradient_program,
    shapes_only,
    under,
)
from support.tiers import rows

BF16, FP16 = jnp.bfloat16, jnp.float16
#: Rounded where the program says so, and compiled quickly, for programs that run once.
EXACT = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


def float_dtypes(eqn):
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return {
        jnp.dtype(a.dtype).name
        for a in avals
        if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating)
    }


LOW = {"bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(
    "case", rows(itertools.product(MODELS, LOW), ("decoder", "bf16"), ("vit", "fp16"))
)
def test_products_are_low_and_statistics_float32_forward_and_backward(case):
    name, word = case
    _, graph = under(*shapes_only(name), word)
    backward, *_ = gradient_program(graph)
    products = collections.Counter()
    for eqn in every_equation(backward.jaxpr):
        dtypes, op_class = float_dtypes(eqn), class_of(eqn)
        if op_class == "low":
            products[frozenset(dtypes)] += 1
        elif op_class == "float32" and dtypes:
            assert dtypes == {"float32"}, eqn
    assert set(products) == {frozenset({LOW[word]})}
    assert products[frozenset({LOW[word]})] > 5
    assert {v.aval.dtype.name for v in backward.jaxpr.outvars} == {"float32"}


def test_the_lowered_program_has_low_products_only():
    """XLA's CPU back end may widen them later, so they are counted before it optimizes."""
    _, graph = under(*shapes_only("decoder", rows=1), "bf16")
    _, gradient, shapes, num = gradient_program(graph)
    text = jax.jit(gradient).lower(shapes[:num], *shapes[num:]).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 21
    assert all("xbf16>" in p.split("->")[1] and "xf32>" not in p for p in products)


class Block(nn.Module):
    dtype: object = None
    norm: bool = True

    @nn.compact
    def __call__(self, x):
        if self.norm:
            x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.gelu(nn.Dense(64, dtype=self.dtype)(x))
        return nn.Dense(16, dtype=self.dtype)(x)


def outputs(module, x, precision="model", **options):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    variables = jax.tree_util.tree_map_with_path(
        lambda path, own: {"bias": np.zeros, "scale": np.ones}.get(
            path[-1].key, lambda shape, dtype: rng.normal(size=shape).astype(dtype) * 0.3
        )(own.shape, own.dtype),
        shapes,
    )
    loss = lambda model, batch: model(batch["x"]).astype(jnp.float32).mean(-1)  # noqa: E731
    plain = functional(module, loss, loss, variables=variables, seed=0, example={"x": x})
    plain = lowering.with_arrays(plain)
    calls = PrecisionCalls(plain, as_precision(precision)).model

    def run(params):
        return calls.train(params, plain.aux, jax.random.key(0), {"x": x})[0]

    jitted = jax.jit(run, compiler_options=EXACT)
    return jitted(plain.params)


@pytest.mark.parametrize("word", rows(["bf16", "fp16"], "bf16"))
def test_outputs_are_those_of_flax_in_that_dtype(word):
    dtype = {"bf16": BF16, "fp16": FP16}[word]
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    ours = outputs(Block(norm=False), x, word)
    np.testing.assert_array_equal(ours, outputs(Block(dtype=dtype, norm=False), x))
    ours, theirs = outputs(Block(), x, word), outputs(Block(dtype=dtype), x)
    exact = outputs(Block(), x)
    unit = float(jnp.finfo(dtype).eps) * np.abs(exact).max()
    assert np.abs(ours - theirs).max() <= 2 * unit
    assert 0 < np.abs(ours - exact).max() <= 2 * unit


def test_gradients_are_those_of_casts_by_hand():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8, n)).astype(np.float32) for n in (16, 4))
    model = nnx.eval_shape(lambda: nnx.Linear(16, 4, rngs=nnx.Rngs(0)))

    def loss(model, batch):
        return (model(batch["x"]) - batch["y"]) ** 2

    _, graph = under(model, loss, {"x": x, "y": y}, "bf16")
    _, gradient, *_ = gradient_program(graph)
    params = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in graph.param_shapes]
    key = jax.random.key(0)
    ours = jax.jit(gradient, compiler_options=EXACT)(params, key, x, y)

    def by_hand(params):
        bias, kernel = params
        product = x.astype(BF16) @ kernel.astype(BF16)
        # Only the error reads the outputs, so what follows the product is not rounded.
        return ((product.astype(jnp.float32) + bias - y) ** 2).sum()

    theirs = jax.jit(jax.grad(by_hand), compiler_options=EXACT)(params)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def dtypes_of(model, batch, precision, name="dot_general"):
    _, graph = under(model, lambda m, b: m(b["x"]).mean(-1), batch, precision)
    return [
        float_dtypes(e) for e in every_equation(graph.program.jaxpr) if e.primitive.name == name
    ]


class Net(nnx.Module):
    """Calls `function(x, kernel)`."""

    def __init__(self, function):
        self.function = function
        self.kernel = nnx.Param(jnp.eye(4) * 0.5)

    def __call__(self, x):
        return self.function(x, self.kernel[...])


BATCH = {"x": np.ones((3, 4), np.float32)}


def test_what_a_model_says_itself_stays():
    def own(x, kernel):
        low = x.astype(BF16) @ kernel.astype(BF16)
        return (low.astype(jnp.float32) * 2) @ kernel

    assert dtypes_of(Net(own), BATCH, "fp16") == [{"bfloat16"}, {"float16"}]


def test_an_operation_that_is_in_no_list_computes_as_it_was_traced():
    def solved(x, kernel):
        low = x @ kernel
        return jax.lax.linalg.triangular_solve(kernel, low, left_side=False) @ kernel

    net = Net(solved)
    assert dtypes_of(net, BATCH, "bf16", "triangular_solve") == [{"float32"}]
    assert dtypes_of(net, BATCH, "bf16") == [{"bfloat16"}] * 2


def test_rules_of_gradients_are_kept():
    @jax.custom_vjp
    def doubled(x, times):
        return x * times

    doubled.defvjp(
        lambda x, times: (x * times, (jnp.exp(x), times)), lambda kept, g: (7 * g * kept[0], None)
    )

    @jax.custom_jvp
    def tripled(x):
        return 3 * x

    tripled.defjvp(lambda primals, tangents: (3 * primals[0], 5 * tangents[0]))

    def run(x, kernel):
        return tripled(doubled(x @ kernel, 2))

    _, graph = under(Net(run), lambda m, b: m(b["x"]).sum(-1), BATCH, "bf16")
    _, gradient, *_ = gradient_program(graph)
    run = jax.jit(gradient, compiler_options=EXACT)
    [found] = run([jnp.eye(4) * 0.5], jax.random.key(0), BATCH["x"])
    # exp(0.5) and each product are rounded to 8 bits.
    np.testing.assert_allclose(found, np.full((4, 4), 3 * 5 * 7 * np.exp(0.5)), rtol=2**-7)
    assert found.dtype == jnp.float32


def test_loops_and_branches_are_walked_into():
    def run(x, kernel):
        def layer(carry, _):
            x, total = carry
            x = x + jax.nn.relu(x @ kernel)
            return (x, total + x.sum(-1)), None

        (x, total), _ = jax.lax.scan(layer, (x, jnp.zeros(3)), None, length=2)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ kernel, lambda x: x, x)
        x = jax.lax.fori_loop(0, 3, lambda _, x: x @ kernel, x)
        return jax.checkpoint(lambda x: x @ kernel)(x) + total[:, None]

    net = Net(run)
    assert dtypes_of(net, BATCH, "bf16") == [{"bfloat16"}] * 4
    _, graph = under(net, lambda m, b: m(b["x"]).mean(-1), BATCH, "bf16")
    scan, *_ = [e for e in graph.program.jaxpr.eqns if e.primitive.name == "scan"]
    carried = {v.aval.dtype.name for v in scan.outvars}
    assert carried == {"bfloat16", "float32"}  # the activations, and what is added up


def test_a_constant_that_a_low_dtype_cannot_hold_is_not_rounded_away():
    def run(x, kernel):
        y = x @ kernel
        return (y * 1e-9) * 1e9 + jnp.where(y > 9, y, -1e6) * 0

    value = functools.partial(under, Net(run), lambda m, b: m(b["x"]).mean(-1), BATCH)
    _, graph = value("fp16")
    run = jax.jit(as_function(graph.program), compiler_options=EXACT)
    found = run(jnp.eye(4) * 0.5, jax.random.key(0), BATCH["x"])[0]
    assert found == pytest.approx(1.5)


def test_exceptions_are_by_the_path_of_a_parameter_or_by_scope():
    class Two(nnx.Module):
        def __init__(self):
            self.body, self.head = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            with jax.named_scope("trunk"):
                x = self.body(x)
            return self.head(x)

    low, full = {"bfloat16"}, {"float32"}
    for exception, wanted in (
        ({"path": "head/"}, [low, full]),
        ({"scope": "trunk"}, [full, low]),
        ({"path": ".*kernel$", "compute": "float16"}, [{"float16"}] * 2),
    ):
        policy = {"preset": "bf16", "exceptions": [exception]}
        assert dtypes_of(nnx.eval_shape(Two), BATCH, policy) == wanted


def test_buffers_and_parameters_are_rounded_where_that_is_asked():
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0), use_running_average=True)
    model.mean[...] = jnp.full(4, 1 + 2**-10)
    model.scale[...] = jnp.full(4, 1 + 2**-10)

    def value(**policy):
        loss = lambda m, b: m(b["x"]).mean(-1)  # noqa: E731
        calls, _ = under(model, loss, BATCH, {"compute": "float32", **policy})
        own = lowering.with_arrays(calls.model)
        run = jax.jit(own.train, compiler_options=EXACT)
        return run(own.params, own.aux, jax.random.key(0), BATCH)[0][0]

    assert value() == pytest.approx(-(2.0**-10), rel=1e-2)
    assert value(buffers="bfloat16") == 0
    with_params = value(params="bfloat16")
    assert 0 > with_params > value()
    assert value(params="bfloat16", buffers="bfloat16") == 0
    x = value(output="bfloat16")
    assert x == x.astype(BF16)


@pytest.mark.parametrize(("word", "wanted"), [("fp32", "HIGHEST"), ("tf32", "HIGH")])
def test_products_of_float32_are_pinned(word, wanted):
    _, graph = under(*shapes_only("decoder"), word)
    products = [
        e.params["precision"]
        for e in every_equation(gradient_program(graph)[0].jaxpr)
        if e.primitive.name == "dot_general"
    ]
    assert {p.name for pair in products for p in pair} == {wanted}


def job(precision, config=None):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(32, 4)).astype(np.float32), "y": np.ones((32, 2), np.float32)}

    def loss(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)

    return hxla.Job(
        lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        data,
        loss,
        optax.adam(0.01),
        batch_size=16,
        precision=precision,
        config=config,
    )


def plan(precision, config=None):
    return job(precision, config).plan(lowering.cpus(8), microbatch_size=2, mesh={"data": 8})


def test_the_plan_says_the_precision_and_its_numerics_know_it():
    plans = {word: plan(word) for word in (None, "fp32", "tf32", "bf16", "fp16")}
    assert len({plan.numerics for plan in plans.values()}) == 5
    assert "computes in bfloat16" in plans["bf16"].explain()
    assert "float32 products: tf32" in plans["tf32"].explain()
    assert "the loss is scaled, at first by 2^24" in plans["fp16"].explain()
    assert "computes in" not in plans[None].explain()
    again = hxla.Plan.from_json(plans["fp16"].to_json())
    assert again.precision == plans["fp16"].precision
    float_sums = plans["bf16"].replaced(sums=hxla.SumsForm(kind="float"))
    assert (deciding(plans["bf16"])["excess_precision"], plans["bf16"].sums.kind) == (
        False,
        "exact",
    )
    assert deciding(float_sums)["excess_precision"]


WAYS_TO_SAY = [
    ("bf16", None),
    (None, {"precision": "bf16"}),
    (None, {"precision": {"preset": "bf16"}}),
    (hxla.Precision(compute="bfloat16", params="float32"), None),
]


def test_the_configuration_and_the_argument_mean_the_same():
    plans = [plan(*way) for way in WAYS_TO_SAY]
    assert len({own.numerics for own in plans[:3]}) == 1
    assert {(own.precision.compute, own.precision.params) for own in plans} == {
        ("bfloat16", "float32")
    }


@pytest.mark.slow
def test_the_configuration_and_the_argument_train_to_the_same_bits():
    def trained(*way):
        own = job(*way)
        with own.open(own.plan(microbatch_size=2, mesh={"data": 8}, counts="even")) as session:
            for _ in range(3):
                session.step()
            return session.result().sha256

    assert len({trained(*way) for way in WAYS_TO_SAY}) == 1
    assert trained(None) != trained("bf16")


def test_a_file_holds_a_policy_as_the_section_does(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(
        '[precision]\npreset = "bf16"\n[[precision.exceptions]]\npath = "kernel$"\n'
        'source = "a paper"\n'
    )
    [exception] = as_precision(str(path)).exceptions
    assert (exception.path, exception.compute, exception.source) == (
        "kernel$",
        "float32",
        "a paper",
    )
