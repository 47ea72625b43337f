"""Models of more families for unlike stages: experts, a large classifier, groups of heads, T5."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hxla
from support import families
from support.tensor_gpt import BATCH, STEPS, VOCABULARY, text

WIDTH, CLASSES = 32, 500


class Experts(nnx.Module):
    """Each token goes to its best expert of four."""

    def __init__(self, rngs):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        self.gate = nnx.Linear(WIDTH, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (4, WIDTH, 48)))
        self.down = nnx.Param(init(rngs.params(), (4, 48, WIDTH)))

    def __call__(self, x):
        gates = jax.nn.softmax(self.gate(x))
        best = jax.nn.one_hot(gates.argmax(-1), 4)
        hidden = jax.nn.gelu(jnp.einsum("bse,bsm,emh->ebsh", best, x, self.up[...]))
        return jnp.einsum("ebsh,ehm,bse->bsm", hidden, self.down[...], best * gates)


class Heads(nnx.Module):
    """Causal attention of four heads, of which two share keys and values."""

    def __init__(self, rngs):
        def dense(num):
            return nnx.Linear(WIDTH, 8 * num, use_bias=False, rngs=rngs)

        self.query, self.key, self.value, self.out = dense(4), dense(2), dense(2), dense(4)

    def __call__(self, x):
        num, length, _ = x.shape
        q = self.query(x).reshape(num, length, 2, 2, 8)
        k, v = (f(x).reshape(num, length, 2, 8) for f in (self.key, self.value))
        scores = jnp.einsum("btghd,bsgd->bghts", q, k) / np.sqrt(8).astype(np.float32)
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bghts,bsgd->btghd", jax.nn.softmax(scores), v)
        return self.out(mixed.reshape(x.shape))


class Gated(nnx.Module):
    def __init__(self, rngs):
        def dense(a, b):
            return nnx.Linear(a, b, use_bias=False, rngs=rngs)

        self.gate_proj, self.up_proj = dense(WIDTH, 48), dense(WIDTH, 48)
        self.down_proj = dense(48, WIDTH)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Decoder(nnx.Module):
    """Layers with residuals between one embedding that does for both ends."""

    def __init__(self, rngs, *kinds):
        self.tok = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([kind(rngs) for kind in kinds])
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in (*kinds, None)])

    def __call__(self, tokens):
        x = self.tok(tokens)
        *norms, last = self.norms
        for norm, layer in zip(norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.tok.attend(last(x))


class Pictures(nnx.Module):
    """Convolutions, and a classifier that has most of the parameters."""

    def __init__(self, rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.features = nnx.Linear(64, WIDTH, rngs=rngs)
        self.classes = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for conv in (self.first, self.second):
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), (2, 2))
        return self.classes(nnx.relu(self.features(x.reshape(len(x), -1))))


def pictures():
    rng = np.random.default_rng(0)
    image = rng.normal(size=(STEPS * BATCH, 8, 8, 3)).astype(np.float32)
    label = rng.integers(0, CLASSES, len(image)).astype(np.int32)
    return {"image": image, "label": label}


def pairs():
    rows = text()["text"]
    return {"source": rows, "target": rows[:, ::-1].copy()}


def t5():
    size = {"vocabulary": VOCABULARY, "width": WIDTH, "hidden": 64, "heads": 4}
    return families.example("t5").T5(nnx.Rngs(0), layers=1, **size)


def rules(name, **axes):
    return hxla.RuleSet(
        name=name, rules=tuple(hxla.Rule(path=f"{k}$", axes=v) for k, v in axes.items())
    )


EXPERTS = rules(
    "experts",
    **{"layers/./up": ("expert", "", "tensor"), "layers/./down": ("expert", "tensor", "")},
)
CLASSIFIER = rules("classifier", **{"classes/kernel": ("", "tensor"), "classes/bias": ("tensor",)})
#: For each family a function that makes the model, its loss, data and rules.
MODELS = {
    "experts": (lambda: Decoder(nnx.Rngs(0), Experts, Experts), families.token_loss, text, EXPERTS),
    "groups": (
        lambda: Decoder(nnx.Rngs(0), Heads, Gated, Heads, Gated),
        families.token_loss,
        text,
        "decoder",
    ),
    "pictures": (lambda: Pictures(nnx.Rngs(0)), families.image_loss, pictures, CLASSIFIER),
    "t5": (t5, lambda *given: families.example("t5").loss(*given), pairs, "encoder_decoder"),
}
