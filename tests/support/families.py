"""Small models of the families that rule sets are for, with the names that people give them."""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla
from support.paths import EXAMPLES

WIDTH, HEADS, VOCABULARY, LENGTH = 256, 8, 512, 16


def example(name):
    sys.path.insert(0, str(EXAMPLES))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def token_loss(model, batch):
    logits = model(batch["text"][:, :-1].astype(jnp.int32))
    labels = batch["text"][:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def image_loss(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def text(vocabulary=VOCABULARY):
    rows = np.random.default_rng(0).integers(0, vocabulary, (16, LENGTH + 1))
    return {"text": rows.astype(np.int32)}


def pairs():
    return {"source": text()["text"], "target": text()["text"][:, ::-1]}


def images(size):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(16, size, size, 3)).astype(np.float32)
    return {"image": image, "label": np.arange(16, dtype=np.int32)}


def gpt():
    model = example("gpt").GPT(nnx.Rngs(0), layers=1, length=LENGTH)
    return model, token_loss, text(256)


def gpt_job(batch_size, optimizer, config=None, *, length, **sizes):
    """Of a GPT of these sizes, on a batch of zeros."""
    module = example("gpt")
    return hxla.Job(
        module.GPT(nnx.Rngs(0), length=length, **sizes),
        {"text": np.zeros((batch_size, length + 1), np.uint8)},
        module.loss,
        optimizer,
        batch_size=batch_size,
        config=config,
    )


def bert():
    module = example("bert")
    return module.Bert(nnx.Rngs(0), layers=1), module.loss, text(256)


def resnet():
    module = example("resnet")
    return module.ResNet((1, 1), 32, 3, VOCABULARY, nnx.Rngs(0)), image_loss, images(16)


def t5():
    module = example("t5")
    size = {"vocabulary": VOCABULARY, "width": WIDTH, "hidden": 4 * WIDTH, "heads": HEADS}
    return module.T5(nnx.Rngs(0), layers=1, **size), module.loss, pairs()


def lstm():
    module = example("lstm")
    model = module.Translator(nnx.Rngs(0), vocabulary=VOCABULARY, width=WIDTH, layers=2)
    return model, module.loss, pairs()


def vit():
    module = example("vit")
    size = {"image": 16, "channels": 3, "patch": 4, "classes": VOCABULARY}
    size |= {"width": WIDTH, "hidden": 4 * WIDTH, "heads": HEADS, "layers": 1}
    return module.VisionTransformer(nnx.Rngs(0), **size), module.loss, images(16)


def experts():
    module = example("experts")
    size = module.Size(model=WIDTH, hidden=4 * WIDTH, heads=HEADS, layers=1)
    return module.Decoder(size, nnx.Rngs(0)), token_loss, text(256)


#: Rule set to a function that makes a model, its loss and a batch.
FAMILIES = {
    "decoder": gpt,
    "encoder": bert,
    "encoder_decoder": t5,
    "resnet": resnet,
    "vit": vit,
    "moe": experts,
    "lstm": lstm,
}


def shapes_only(name):
    """A family's model without arrays, its loss and a batch: nothing is compiled."""
    rest = []

    def make():
        model, *rest[:] = FAMILIES[name]()
        return model

    return nnx.eval_shape(make), *rest
