"""Experts without a capacity: tokens travel, experts stay, training is as on one device."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.dropless import HIDDEN, ROUTERS, RULES, WIDTH, Dropless, LinenDropless, loss, tokens
from support.inside.lower import Padding, padded, sharded_of, uneven_of
from support.tiers import rows

EXPERTS, TOKENS = 4, 12


class Cut:
    """A loss on one device, and on devices that have some experts each, without sessions."""

    def __init__(self, router, shares, model=Dropless):
        self.batch = jax.tree.leaves(batch := tokens(TOKENS))
        if model is Dropless:
            made = Dropless(nnx.Rngs(0), router, EXPERTS)
            self.params = jax.tree.leaves(nnx.state(made, nnx.Param))
            self.graph = hxla.trace(made, loss, batch)
        else:
            made = LinenDropless(router, EXPERTS)
            variables = made.init(jax.random.key(0), batch["x"])
            self.params = jax.tree.leaves(variables)
            self.graph = hxla.trace(made, loss, batch, variables=variables)
        rules = None if model is Dropless else RULES
        shares = shares[0] if len({*shares}) == 1 and len(shares) == 1 else shares
        self.plan = hxla.make_plan(self.graph, mesh={"expert": shares}, rules=rules)
        self.sharded = sharded_of(self.graph, self.plan)
        self.padding = [Padding(layout.sizes) for layout in self.plan.parameters]
        self.mesh = models.mesh(expert=self.plan.axes[0].size)

    @functools.cached_property
    def on_one(self):
        program = jax.extend.core.jaxpr_as_fun(self.graph.program)
        return jax.jit(jax.value_and_grad(lambda p: program(*p, jax.random.key(0), *self.batch)[0]))

    @functools.cached_property
    def on_all(self):
        key = jax.random.key(0)
        if self.plan.is_uneven:
            places = range(len(self.padding))
            gradient = uneven_of(self.sharded, self.plan).gradient(self.mesh, places, on_cpu=True)

            def run(params):
                (value, _), grads = gradient(params, [], key, self.batch)
                return value, grads

            return jax.jit(run)
        specs = self.sharded.param_specs()
        placed = [jax.sharding.NamedSharding(self.mesh, spec) for spec in specs]
        run = self.sharded.function(self.mesh)
        gradient = jax.value_and_grad(lambda p: run(p, [], key, self.batch)[0])
        return jax.jit(gradient, in_shardings=(placed,), out_shardings=(None, placed))

    def compare(self, steps=3):
        one, others = self.params, padded(self.params, self.padding)
        for _ in range(steps):
            value, grads = self.on_one(one)
            other_value, other_grads = self.on_all(others)
            np.testing.assert_allclose(value, other_value, rtol=5e-6)
            for a, b, padding in zip(grads, other_grads, self.padding, strict=True):
                np.testing.assert_allclose(a, padding.unpad(np.asarray(b)), rtol=1e-5, atol=2e-6)
            one = [np.asarray(p) - 0.1 * np.asarray(g) for p, g in zip(one, grads, strict=True)]
            others = [
                np.asarray(p) - 0.1 * np.asarray(g)
                for p, g in zip(others, other_grads, strict=True)
            ]

    def collectives(self):
        text = self.on_all.lower(padded(self.params, self.padding)).compile().as_text()
        return hxla.inspect(text).main.select(None)


SHARES = {"even": (2,), "uneven": (3, 1), "three": (2, 1, 1)}
CASES = [(r, s, m) for r in ROUTERS for s in SHARES for m in ("nnx", "linen")]
QUICK = (
    *(("top 1", "even", "nnx"), ("top 2", "uneven", "nnx"), ("top 2 back", "even", "linen")),
    *(("expert choice", "three", "nnx"), ("scattered", "uneven", "linen")),
)


@functools.cache
def cut(router, shares, model):
    return Cut(router, SHARES[shares], {"nnx": Dropless, "linen": LinenDropless}[model])


@pytest.mark.parametrize("case", rows(CASES, *QUICK))
def test_experts_on_devices_train_as_on_one(case):
    run = cut(*case)
    assert not [reason for reason in run.plan.reasons if "gathered whole" in reason]
    by_name = {layout.name: layout for layout in run.plan.parameters}
    assert {by_name[name].spec[0] for name in ("up", "down")} == {("expert",)}
    run.compare()


@pytest.mark.parametrize("case", rows(CASES, *QUICK))
def test_no_expert_is_gathered(case):
    matrices = (f"{WIDTH},{HIDDEN}]", f"{HIDDEN},{WIDTH}]")
    for collective in cut(*case).collectives():
        assert not [array for array in collective.arrays if array.endswith(matrices)]


@pytest.mark.parametrize("shares", ["even", "uneven"])
@pytest.mark.parametrize("router", rows(["top 1", "top 2", "top 2 back"], "top 2"))
def test_as_many_bytes_are_sent_as_the_plan_says(router, shares):
    """Forward the sum of tokens, backward the gradients of tokens and of their weights."""
    run = cut(router, shares, "linen")
    found = run.collectives()
    assert {c.kind for c in found} == {"all-reduce"}
    # Over two devices an all-reduce sends as many bytes as its array has.
    [axis] = run.sharded.axes.values()
    tokens_of_order = 4 * len(found) * (shares == "uneven")  # see `uneven_collectives`
    assert sum(c.num_bytes for c in found) == pytest.approx(axis.sent_bytes + tokens_of_order)
    if router == "top 2":
        assert axis.sent_bytes == pytest.approx(4 * (2 * TOKENS * WIDTH + 2 * TOKENS))


def trained(mesh, **config):
    """The result of two steps."""
    num = int(np.prod([len(n) if isinstance(n, tuple) else n for n in mesh.values()]))
    job = hxla.Job(
        lambda: Dropless(nnx.Rngs(0), "top 2", EXPERTS),
        tokens(32),
        loss,
        optax.adam(1e-2),
        batch_size=16,
        mixes_examples=True,
        config={"cluster": {"visible_devices": list(range(num))}, **config},
    )
    rules = RULES if "expert" in mesh else None
    plan = job.plan(microbatch_size=8, mesh=mesh, rules=rules, counts="even")
    with job.open(plan, steps=2) as session:
        for _ in session:
            pass
        return session.result()


BESIDE = {
    "nothing": {},
    "ZeRO": {"memory": {"zero": 2}},
    "ZeRO 3": {"memory": {"zero": 3}},
    "recomputation": {"memory": {"recompute": "boundaries"}},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("beside", rows(BESIDE))
def test_bits_do_not_depend_on_replicas(beside):
    config = BESIDE[beside]
    runs = [trained({"data": 2, "expert": 2}, **config)]
    if "zero" not in config.get("memory", {}):
        runs.append(trained({"data": 1, "expert": 2}, **config))
        assert runs[0].plan.numerics == runs[1].plan.numerics
        assert runs[0].sha256 == runs[1].sha256
    rounding = 2e-5 if beside != "bf16" else 2e-2
    one = trained({"data": 1}, **({} if beside != "bf16" else config))
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(runs[0].state), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=rounding)


@pytest.mark.slow
def test_bits_of_uneven_experts_do_not_depend_on_replicas():
    one, two = (trained({"data": n, "expert": (3, 1)}) for n in (1, 2))
    assert one.plan.numerics == two.plan.numerics
    assert one.sha256 == two.sha256
