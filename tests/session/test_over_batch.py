"""Losses of the whole batch by two passes: those of plain JAX, and the same bits on any spread."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.jax_settings import in_force
from support.launched import end_of, start
from support.tiers import rows

pytestmark = pytest.mark.usefixtures("every_program_is_cached")

BATCH, SIZE, WIDTH, STEPS = 16, 4, 8, 3


def data(num=2 * BATCH):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(num, 6)).astype(np.float32),
        "y": rng.normal(size=(num, 5)).astype(np.float32),
        "class": rng.integers(0, 10, num),
        "mask": rng.integers(0, 2, num).astype(np.float32),
    }


class Towers(nnx.Module):
    """Two towers, a learned temperature, and Dropout whose numbers the embeddings show."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.x1, self.x2 = nnx.Linear(6, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)
        self.y = nnx.Linear(5, 4, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(0.5))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, batch, kept):
        x = self.x2(jnp.tanh(self.x1(batch["x"])) * kept)
        return x * jnp.exp(self.scale[...]), self.y(batch["y"])


BITS = 2.0 ** np.arange(WIDTH)


def drawn(model, batch):
    """Of Dropout, for each example."""
    return model.dropout(jnp.ones((len(batch["x"]), WIDTH)))


def embed(model, batch):
    kept = drawn(model, batch)
    x, y = model(batch, kept)
    return {"x": x, "y": y, "drawn": jax.lax.stop_gradient((kept > 0) @ jnp.float32(BITS))}


def contrast(embeddings, batch):
    """InfoNCE in both directions; another example of the class is no negative."""
    logits = embeddings["x"] @ embeddings["y"].T
    labels = jnp.arange(len(logits))
    is_alike = batch["class"][:, None] == batch["class"][None]
    logits -= 100 * (is_alike & ~jnp.eye(len(logits), dtype=bool))
    entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = (entropy(logits, labels) + entropy(logits.T, labels)) / 2
    metrics = {
        "accuracy": (logits.argmax(1) == labels).astype(jnp.float32),
        "drawn": hxla.metric(embeddings["drawn"], "concat"),
        "largest": hxla.metric(logits.max(), "max"),
        "alike": hxla.metric(is_alike.sum(), "sum"),
    }
    return losses, metrics


def whole(x, y, batch):
    """The loss of a batch in plain JAX, and its metrics."""
    found, metrics = contrast({"x": x, "y": y, "drawn": jnp.zeros(len(x))}, batch)
    metrics = {name: getattr(m, "value", m).mean() for name, m in metrics.items()}
    return found.mean(), metrics


def job(devices=1, model=None, loss=None, optimizer=None, config=None, **options):
    config = {"cluster": {"visible_devices": list(range(devices))}} | (config or {})
    return hxla.Job(
        model or Towers(),
        options.pop("data", data()),
        loss or hxla.over_batch(embed, contrast),
        optimizer or optax.adamw(1e-2),
        batch_size=BATCH,
        shuffle=False,
        config=config,
        **options,
    )


def ended(made, steps=STEPS, folder=None, evaluated=None, **asked):
    with made.open(
        made.plan(microbatch_size=SIZE, **asked), steps=steps, checkpoint_dir=folder
    ) as s:
        for _ in s:
            pass
        if evaluated is not None:
            s.evaluate(evaluated)
        return s.result()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The job on one device, with a checkpoint after its second step."""
    folder = tmp_path_factory.mktemp("alone") / "checkpoints"
    ended(job(), STEPS - 1, folder)
    return ended(job(), folder=folder, evaluated=data(BATCH + 6)), ended(job()), folder


def by_jax(loss, model, optimizer):
    """The losses of the steps in plain JAX, and the parameters after them."""
    state = optimizer.init(params := nnx.state(model, nnx.Param))
    losses, of_batch = [], nnx.jit(nnx.value_and_grad(loss))
    for step in range(STEPS):
        start = step * BATCH % (2 * BATCH)
        batch = {name: x[start : start + BATCH] for name, x in data().items()}
        value, gradient = of_batch(model, batch, step)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        nnx.update(model, params)
        losses.append(float(value))
    return losses, params


def check_params(found, wanted, rtol=1e-5):
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def test_a_contrastive_loss_over_the_batch_is_that_of_plain_jax(alone):
    """Dropout draws once for both passes: plain JAX is given what it drew."""
    result, through, _ = alone
    steps = through.history.steps
    drawn = np.array([step.metrics["drawn"] for step in steps], np.int64)
    kept = 2.0 * ((drawn[..., None] & BITS.astype(np.int64)) > 0)
    assert 0.3 < kept.mean() / 2 < 0.7

    def loss(model, batch, step):
        return whole(*model(batch, jnp.float32(kept)[step]), batch)[0]

    losses, params = by_jax(loss, Towers(), optax.adamw(1e-2))
    np.testing.assert_allclose([step.loss for step in steps], losses, rtol=1e-5)
    check_params(nnx.state(through.model, nnx.Param), params)
    assert result.sha256 == through.sha256


def test_metrics_of_the_batch_are_told_as_contrast_says(alone):
    [first, *_] = alone[1].history.steps
    batch = {name: x[:BATCH] for name, x in data().items()}
    assert first.metrics["alike"] == (batch["class"][:, None] == batch["class"]).sum()
    assert len(first.metrics["drawn"]) == BATCH
    assert first.metrics["accuracy"] * BATCH == round(first.metrics["accuracy"] * BATCH)


def test_an_evaluation_takes_batches_in_order(alone):
    [evaluation] = alone[0].history.evaluations
    ends = [(0, BATCH), (BATCH, BATCH + 6)]
    batches = [{name: x[a:b] for name, x in data(BATCH + 6).items()} for a, b in ends]
    model = alone[0].model
    of_batch = nnx.jit(lambda model, batch: whole(*model(batch, 1), batch))
    found = [of_batch(model, batch) for batch in batches]
    weights = [len(batch["x"]) for batch in batches]
    loss = np.average([loss for loss, _ in found], weights=weights)
    np.testing.assert_allclose(evaluation.loss, loss, rtol=1e-5)
    each = [metrics["accuracy"] for _, metrics in found]
    np.testing.assert_allclose(evaluation.metrics["accuracy"], np.average(each, weights=weights))
    largest = max(metrics["largest"] for _, metrics in found)
    np.testing.assert_allclose(evaluation.metrics["largest"], largest, rtol=1e-5)
    assert len(evaluation.metrics["drawn"]) == BATCH + 6


RULES = hxla.RuleSet(
    name="towers",
    rules=(
        hxla.Rule(path="x1/kernel", axes=((), ("tensor",))),
        hxla.Rule(path="x2/kernel", axes=(("tensor",), ())),
    ),
)
#: Devices, settings, what is asked of the plan, and whether it is another arithmetic.
FORMS = {
    "uneven counts": (3, {}, {"counts": (1, 0, 3)}, False),
    "zero 1": (2, {"memory": {"zero": 1}}, {"counts": (3, 1)}, False),
    "zero 3": (2, {"memory": {"zero": 3}}, {"counts": (1, 3)}, False),
    "executors": (1, {"cluster": {"visible_devices": [0], "executors": 2}}, {}, False),
    "calls of two": (
        1,
        {"cluster": {"visible_devices": [0], "microbatches_per_call": 2}},
        {},
        True,
    ),
    "tensor": (2, {}, {"mesh": {"data": 1, "tensor": 2}, "rules": RULES}, True),
    "tensor, two copies": (4, {}, {"mesh": {"data": 2, "tensor": 2}, "rules": RULES}, True),
    "uneven tensor": (2, {}, {"mesh": {"data": 1, "tensor": (5, 3)}, "rules": RULES}, True),
    "pipeline": (2, {}, {"stages": 2}, True),
    "float sums": (2, {}, {"reduction": "float"}, True),
}


@pytest.mark.parametrize("name", rows(FORMS, "uneven counts"))
def test_no_form_and_no_spread_moves_what_is_trained(alone, name):
    devices, config, asked, is_other = FORMS[name]
    _, through, _ = alone
    asked = {"counts": "even"} | asked
    result = ended(job(devices, config=config), **asked)
    check_params(nnx.state(result.model, nnx.Param), nnx.state(through.model, nnx.Param), 1e-4)
    wanted = [step.metrics["drawn"] for step in through.history.steps]
    assert [step.metrics["drawn"] for step in result.history.steps] == wanted
    if not is_other:
        assert result.sha256 == through.sha256
        losses = [step.loss for step in through.history.steps]
        assert [step.loss for step in result.history.steps] == losses


def test_another_contrast_is_another_run(alone):
    def cold(embeddings, batch):
        losses, metrics = contrast(embeddings, batch)
        return losses * 2, metrics

    with pytest.raises(hxla.CheckpointError, match="traced loss"):
        ended(job(loss=hxla.over_batch(embed, cold)), STEPS + 1, alone[2])


# Other losses: each as `contrast`, and as plain JAX has the mean over the whole batch.


def normalised(embeddings, batch):
    """Statistics of the batch in a loss for each example, as a scalar."""
    x = embeddings["x"]
    x = (x - x.mean(0)) / (x.std(0) + 0.1)
    return ((x - embeddings["y"]) ** 2).sum(-1).mean()


def hardest(embeddings, batch):
    """The largest distance of the batch, and a mask."""
    distances = ((embeddings["x"] - embeddings["y"]) ** 2).sum(-1)
    return distances / distances.max(), batch["mask"]


def mean_of(out, batch):
    return (out[0] * out[1]).sum() / out[1].sum() if isinstance(out, tuple) else out.mean()


def towers(model, batch):
    x, y = model(batch, 1)
    return {"x": x, "y": y}


OTHERS = {"statistics": normalised, "a maximum and a mask": hardest}


@pytest.mark.parametrize("name", rows(OTHERS, "a maximum and a mask"))
def test_statistics_and_maxima_are_those_of_the_batch(name):
    over, optimizer = OTHERS[name], optax.sgd(0.1)
    result = ended(job(loss=hxla.over_batch(towers, over), optimizer=optimizer), counts="even")

    def loss(model, batch, step):
        return mean_of(over(towers(model, batch), batch), batch)

    losses, params = by_jax(loss, Towers(), optimizer)
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    check_params(nnx.state(result.model, nnx.Param), params)


class LinenTower(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.Dropout(0.0, deterministic=False)(x))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_linen_and_low_precision(precision):
    policy = {"preset": precision, "initial_scale": 2.0**10}

    def pairs(embeddings, batch):
        logits = embeddings @ batch["y"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))

    tower, batch = LinenTower(), {name: x[:BATCH] for name, x in data().items()}
    loss = hxla.over_batch(lambda model, batch: model(batch["x"]), pairs)
    variables = tower.init(jax.random.key(1), batch["x"])
    made = job(1, tower, loss, optax.sgd(0.1), variables=variables, precision=policy)
    result = ended(made, 1)

    def mean(variables):
        return pairs(tower.apply(variables, batch["x"], rngs={"dropout": jax.random.key(0)}), batch)

    gradient = jax.grad(lambda v: mean(v).mean())(variables)
    wanted = jax.tree.map(lambda x, g: x - 0.1 * g, variables, gradient)
    tolerance = 1e-5 if precision == "fp32" else 3e-3
    for a, b in zip(*map(jax.tree.leaves, (result.state, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    made = job(1, tower, loss, optax.sgd(0.1))
    assert np.isfinite(ended(made, 1).history.steps[0].loss)  # initialised without contrast


SCRIPT = """
import sys, hxla
from session.test_over_batch import SIZE, STEPS, data, ended, job
import optax

made = job(config={"cluster": {}})
with made.open(made.plan(microbatch_size=SIZE, counts=eval(sys.argv[1])), steps=STEPS) as session:
    for _ in session:
        pass
    loss = session.evaluate(data(22)).loss
    print("ended", session.result().sha256, repr(loss))
"""


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["(3, 1)", "(4, 0)"])
def test_two_processes_end_with_the_bits_of_one(alone, tmp_path, counts):
    script = SCRIPT.replace("eval(sys.argv[1])", counts)
    out, err = end_of(start(tmp_path, script, "-n", "2"))
    ends = [line.split("ended ")[1].split() for line in out.splitlines() if "ended" in line]
    [evaluation] = alone[0].history.evaluations
    assert ends == [[alone[1].sha256, repr(evaluation.loss)]] * 2, err


@pytest.mark.slow
def test_a_size_of_microbatches_is_measured(alone):
    made = job(2)
    with made.open(made.plan(microbatch_size="measured"), steps=1) as session:
        [record] = session
    np.testing.assert_allclose(record.metrics["alike"], alone[1].history.steps[0].metrics["alike"])


def shared(model, batch):
    found = model.y(batch["y"])
    return {"x": found - found.mean(0), "y": found, "drawn": batch["mask"]}


KEY = jax.random.key(0)
TOWERS = Towers()
#: Each with what the error says.
REFUSED = {
    "an embedding that mixes": (shared, contrast, "mixes examples.*result of embed.*over_batch"),
    "no row for each": (
        lambda model, batch: {"x": model.x1(batch["x"]).sum(0)},
        contrast,
        r"embeddings\['x'\] has shape \[8\], not \[4, ...\]",
    ),
    "labels": (lambda m, b: (m.x1(b["x"]), b["class"]), contrast, r"embeddings\[1\] is int32"),
    "float16": (lambda m, b: m.x1(b["x"]).astype("float16"), contrast, "float16.*cast it"),
    "no embeddings": (lambda model, batch: {}, contrast, "there are none"),
    "no array": (lambda model, batch: {"x": model}, contrast, "over_batch|embeddings"),
    "too few losses": (
        towers,
        lambda embeddings, batch: embeddings["x"][:3, 0],
        "contrast of hxla.over_batch.*16",
    ),
    "no loss": (towers, lambda embeddings, batch: None, "lacks a return"),
    "a key of its own": (
        towers,
        lambda embeddings, batch: embeddings["x"] * jax.random.uniform(KEY),
        "contrast closes over 'KEY', a random key",
    ),
    "the model outside": (
        towers,
        lambda embeddings, batch: embeddings["x"] * TOWERS.scale[...],
        "contrast closes over 'TOWERS', the model itself",
    ),
    "nothing of the model": (
        lambda model, batch: {"x": batch["x"] + 0.0},
        lambda embeddings, batch: embeddings["x"],
        "does not depend on any parameter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_loss_is_refused(name):
    embed, contrast, words = REFUSED[name]
    with pytest.raises(hxla.LossError, match=f"(?s){words}"):
        job(model=TOWERS, loss=hxla.over_batch(embed, contrast)).graph(SIZE)


def test_both_passes_draw_the_same_numbers_or_it_is_refused():
    with in_force(jax_default_prng_impl="rbg"):
        made = job(2)
        plan = made.plan(microbatch_size=SIZE, mesh={"data": 1, "tensor": 2}, rules=RULES)
        with pytest.raises(hxla.ConfigError, match=r"'rbg'.*over_batch.*'threefry2x32'"):
            made.open(plan)


def test_contrast_takes_embeddings_and_batch():
    with pytest.raises(hxla.ConfigError, match=r"contrast\(embeddings, batch\)"):
        hxla.over_batch(embed, lambda embeddings: embeddings["x"])
    with pytest.raises(hxla.ConfigError, match="embed"):
        job(loss=hxla.over_batch(lambda model: model, contrast))


def test_a_loss_that_mixes_examples_is_told_of_it():
    def loss(model, batch):
        return mean_of(normalised(towers(model, batch), batch), batch)

    with pytest.raises(hxla.LossError, match=r"pass hxla\.over_batch\(embed, contrast\)"):
        job(loss=loss).graph(SIZE)
