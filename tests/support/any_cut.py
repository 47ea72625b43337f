"""Jobs whose bits depend on no cut, and their plans for described devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla

BATCH, MICRO, STEPS = 8, 2, 3
VOCABULARY, WIDTH, HEADS, GROUPS, LENGTH = 16, 32, 8, 4, 12


class Mlp(nnx.Module):
    """Columns and rows, biases, norms and dropout; one feature is so small that others hide it."""

    def __init__(self, rngs):
        self.first = nnx.Linear(5, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 48, rngs=rngs), nnx.Linear(48, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm(x)), approximate=False)))
        return self.last(x)


class Block(nnx.Module):
    """Attention with grouped queries and rotated positions, and a gated MLP."""

    def __init__(self, rngs):
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        size = WIDTH // HEADS * GROUPS
        self.norm, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query, self.key, self.value = (
            dense(WIDTH, WIDTH),
            dense(WIDTH, size),
            dense(WIDTH, size),
        )
        self.attention = nnx.Dict(out=dense(WIDTH, WIDTH))
        self.gate, self.up, self.down = dense(WIDTH, 64), dense(WIDTH, 64), dense(64, WIDTH)

    def __call__(self, x_BTD):
        split = lambda y, n: y.reshape(*y.shape[:2], n, -1)  # noqa: E731
        y_BTD = self.norm(x_BTD)
        mixed_BTNH = jax.nn.dot_product_attention(
            split(self.query(y_BTD), HEADS),
            split(self.key(y_BTD), GROUPS),
            split(self.value(y_BTD), GROUPS),
            is_causal=True,
        )
        x_BTD = x_BTD + self.attention["out"](mixed_BTNH.reshape(x_BTD.shape))
        y_BTD = self.norm2(x_BTD)
        return x_BTD + self.down(jax.nn.silu(self.gate(y_BTD)) * self.up(y_BTD))


class Decoder(nnx.Module):
    """The embedding is cut by vocabulary, and tied to the output."""

    def __init__(self, rngs):
        self.tok = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.pos = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(1)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, text_BT):
        x_BTD = self.tok(text_BT) + self.pos(jnp.arange(text_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.tok.attend(self.norm(x_BTD))


@jax.custom_vjp
def gate(x):
    """A logistic function whose gradient has a forward of its own, with other last bits."""
    return jnp.exp(x) / (1 + jnp.exp(x))


def _gate_forward(x):
    y = 1 / (1 + jnp.exp(-x))
    return y, y


gate.defvjp(_gate_forward, lambda y, g: (g * y * (1 - y),))


class Tied(nnx.Module):
    """Three operations read the embedding, and all blocks the same first values."""

    def __init__(self, rngs):
        self.tok = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, text_BT):
        x_BTD = first_BTD = self.tok(text_BT)
        # Its slope is infinite at 0, but no gradient comes back to it.
        root_BTD = jnp.sqrt(jnp.abs(first_BTD) * jnp.arange(WIDTH))
        for block in self.blocks:
            x_BTD = x_BTD + jnp.tanh(block(gate(x_BTD)) * first_BTD)
        return self.tok.attend(x_BTD + jax.lax.stop_gradient(root_BTD)) + self.tok.attend(first_BTD)


def mlp_loss(model, batch):
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return errors, batch["weight"]


def decoder_loss(model, batch):
    logits = model(batch["text"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"][:, 1:])


def mlp_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 5)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(5, 3))).astype(np.float32)
    weight = rng.uniform(0.5, 2, len(x)).astype(np.float32)
    return {"x": x * np.array([1, 1e-2, 1e-4, 1, 1], np.float32), "y": y, "weight": weight}


def text():
    rows = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH * STEPS, LENGTH + 1))
    return {"text": rows.astype(np.int32)}


MODELS = {
    "mlp": (Mlp, mlp_loss, mlp_data),
    "decoder": (Decoder, decoder_loss, text),
    "tied": (Tied, decoder_loss, text),
}


def job(
    name,
    cut="any",
    granules=4,
    clip=0.5,
    optimizer=None,
    pipeline=None,
    cluster=None,
    precision=None,
    **memory,
):
    model, loss, data = MODELS[name]
    numerics = {"cut": cut, "granules": granules} if cut == "any" else {}
    return hxla.Job(
        lambda: model(nnx.Rngs(0)),
        data(),
        loss,
        optimizer or optax.adam(1e-2),
        batch_size=BATCH,
        shuffle=False,
        precision=precision,
        config={
            "memory": memory,
            "communication": {"clip_norm": clip},
            "numerics": numerics,
            "pipeline": pipeline or {},
            "cluster": cluster or {},
        },
    )


#: For `Tied`; the other models have the names of a decoder's parameters.
TIED = hxla.RuleSet(
    name="tied",
    rules=(
        hxla.Rule(path="tok/embedding", axes=(("tensor",), ())),
        hxla.Rule(path="blocks/0/kernel", axes=((), ("tensor",))),
        hxla.Rule(path="blocks/1/kernel", axes=(("tensor",), ())),
    ),
)


def planned(own, mesh, **options):
    """A plan over described CPU devices, as many as the mesh has."""
    return _planned(own, int(np.prod([*mesh.values()])), mesh=mesh, **options)


def planned_stages(own, stages, copies=1, **options):
    """The same for tables of stages: of one form in each copy, or a list for each replica."""
    tables = [x for y in stages for x in y] if isinstance(stages[0], list) else stages
    num = copies * sum(table.get("tensor", 1) for table in tables)
    return _planned(own, num, stages=stages, **options)


def _planned(own, num, **options):
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * num)
    return own.plan(cluster, **{"microbatch_size": MICRO, "rules": "decoder", **options})


def trained(own, plan):
    """The result of all steps."""
    with own.open(plan, steps=STEPS) as session:
        for _ in session:
            pass
        return session.result()
