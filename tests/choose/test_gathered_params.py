"""What a plan says is cut and a program needs whole is told, with bytes."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.tiers import rows

EXPERTS, WIDTH, HIDDEN = 4, 8, 16


class Ragged(nnx.Module):
    """Experts as grouped products, which are cut by experts and in no other way."""

    def __init__(self, rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x):
        sizes = jax.numpy.full(EXPERTS, len(x) // EXPERTS, jax.numpy.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(x, self.up[...], sizes))
        return jax.lax.ragged_dot(hidden, self.down[...], sizes)


class Batched(Ragged):
    """The same as batched products."""

    def __call__(self, x):
        groups = x.reshape(EXPERTS, -1, WIDTH)
        hidden = jax.nn.gelu(jax.numpy.einsum("egw,ewh->egh", groups, self.up[...]))
        return jax.numpy.einsum("egh,ehw->egw", hidden, self.down[...]).reshape(x.shape)


class Normalized(Batched):
    """The same, where each expert's weights are made of all experts'."""

    def __call__(self, x):
        up = self.up[...] / jax.numpy.linalg.norm(self.up[...], axis=1, keepdims=True)
        groups = x.reshape(EXPERTS, -1, WIDTH)
        hidden = jax.nn.gelu(jax.numpy.einsum("egw,ewh->egh", groups, up - up[::-1] / 2))
        return jax.numpy.einsum("egh,ehw->egw", hidden, self.down[...]).reshape(x.shape)


class Blocked(nnx.Module):
    """Two layers; kernels are normalized by columns, and in the first layer then by blocks."""

    def __init__(self, rngs):
        matrix = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape))  # noqa: E731
        self.up1, self.down1 = matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)
        self.up2, self.down2 = matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)

    def __call__(self, x):
        layers = (self.up1, self.down1, True), (self.up2, self.down2, False)
        for up, down, by_blocks in layers:
            with hxla.replicate():
                kernel = up[...] / jax.numpy.linalg.norm(up[...], axis=0, keepdims=True)
                if by_blocks:
                    blocks = kernel.reshape(-1, HIDDEN // 2)
                    norm = jax.numpy.linalg.norm(blocks, axis=1, keepdims=True)
                    kernel = (blocks / norm).reshape(kernel.shape)
                x = jax.numpy.tanh(x @ kernel) @ down[...]
        return x


MATRICES = hxla.RuleSet(
    name="matrices",
    rules=(
        hxla.Rule(path="^up", axes=((), ("tensor",))),
        hxla.Rule(path="^down", axes=(("tensor",), ())),
    ),
)


def rules(dim):
    axes = tuple(("expert",) if d == dim else () for d in range(3))
    return hxla.RuleSet(name="experts", rules=(hxla.Rule(path="^(up|down)$", axes=axes),))


WISHES = {"microbatch_size": 8, "mesh": {"expert": 2}, "rules": rules(0), "counts": "even"}
INSIDE = WISHES | {"rules": rules(1)}


def job(model, num_devices=2, **memory):
    data = {"x": np.ones((16, WIDTH), np.float32)}
    loss = lambda model, batch: (model(batch["x"]) ** 2).mean()  # noqa: E731
    devices = {"cluster": {"visible_devices": list(range(num_devices))}, "memory": memory}
    made = lambda: model(nnx.Rngs(0))  # noqa: E731
    return hxla.Job(made, data, loss, optax.sgd(0.1), batch_size=16, config=devices)


def plan(model, wishes=WISHES):
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 2)
    return job(model).plan(cluster, **wishes)


def gathered(reasons):
    return [reason for reason in reasons if "whole in each microbatch" in reason]


def test_experts_that_are_computed_whole_are_told_with_bytes():
    said = [reason for reason in plan(Ragged, INSIDE).reasons if "gathered whole" in reason]
    half = EXPERTS * WIDTH * HIDDEN * 4 // 2
    assert [words.split(" is cut over")[0] for words in said] == ["parameter up", "parameter down"]
    assert all(f"in each microbatch, {half:,} bytes to a device" in words for words in said)
    assert all("experts at " in w and "test_gathered_params.py:" in w for w in said)


@pytest.mark.parametrize("model", [Ragged, Batched])
def test_experts_that_are_computed_apart_are_not(model):
    assert not [reason for reason in plan(model).reasons if "gathered whole" in reason]


@pytest.mark.usefixtures("every_program_is_cached")
def test_what_xla_gathers_besides_is_told_once_it_is_compiled(capfd):
    """A plan does not foresee gathers of values derived from a parameter; they are told once."""
    own = job(Normalized)
    planned = own.plan(**WISHES)
    assert gathered(planned.reasons) == []
    with own.open(planned) as session:
        [said] = gathered(session.plan.reasons)
    half = EXPERTS * WIDTH * HIDDEN * 4 // 2
    assert said.startswith("parameter up is cut over expert, and the compiled program gathers a")
    assert f"whole in each microbatch, {half:,} bytes to a device: " in said
    assert "test_gathered_params.py:" in said
    assert said in "".join(capfd.readouterr())


@pytest.mark.usefixtures("every_program_is_cached")
def test_nothing_else_is_told_where_the_plan_knows_or_nothing_is_gathered():
    for model, wishes in ((Ragged, INSIDE), (Ragged, WISHES), (Batched, WISHES)):
        own = job(model)
        planned = own.plan(**wishes)
        with own.open(planned) as session:
            assert gathered(session.plan.reasons) == gathered(planned.reasons)


def told_when_opened(own, mesh):
    planned = own.plan(microbatch_size=4, mesh=mesh, rules=MATRICES, counts="even")
    assert gathered(planned.reasons) == []
    with own.open(planned) as session:
        return gathered(session.plan.reasons)


HALF = WIDTH * HIDDEN * 4 // 2
FORMS = {
    # The mesh, the memory, and how often a microbatch gathers the kernel.
    "plain": ({"tensor": 2}, {}, 1),
    "chain": ({"tensor": 2}, {"recompute": "boundaries"}, None),
    "chain of replicas": ({"data": 2, "tensor": 2}, {"recompute": "boundaries"}, None),
    "ZeRO 3": ({"data": 2, "tensor": 2}, {"zero": 3}, None),
    "pipeline": ({"stage": 2, "tensor": 2}, {}, None),
}


@pytest.mark.usefixtures("every_program_is_cached")
@pytest.mark.parametrize("form", rows(FORMS, "chain"))
def test_every_form_tells_it_and_names_no_other_parameter(form):
    """The second layer's kernel stays cut, also where it shares a pipeline's slot."""
    mesh, memory, times = FORMS[form]
    [said] = told_when_opened(job(Blocked, 4 if len(mesh) > 1 else 2, **memory), mesh)
    assert said.startswith("parameter up1 is cut over tensor, and the compiled program gathers a")
    words = said.split(" whole in each microbatch, ")[1]
    num_bytes = int(words.split(" bytes")[0].replace(",", ""))
    assert num_bytes % HALF == 0
    assert 1 <= num_bytes // HALF <= 3
    assert times in (None, num_bytes // HALF)
