"""Dynamic loss scaling: the same scales and bits on any devices, and what it is for."""

import functools
import json

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import hxla
from hxla import ScaleState
from support import families, models
from support.inside.job import JobContext
from support.inside.plan import MOST_SCALE_EXPONENT
from support.paths import DATA
from support.tiers import examples, rows

STEPS, BATCH, OUTLIER = 6, 16, 70
TINY = {
    "vocabulary": models.VOCABULARY,
    "length": models.LENGTH,
    "width": 32,
    "heads": 2,
    "layers": 2,
}


pytestmark = pytest.mark.usefixtures("every_program_is_cached")


class Mlp(nnx.Module):
    def __init__(self, rngs, *, use_bias=True):
        self.up = nnx.Linear(4, 8, use_bias=use_bias, rngs=rngs)
        self.down = nnx.Linear(8, 2, use_bias=use_bias, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def squared_error(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


@functools.cache
def data():
    """Examples in order; the gradient of one overflows float16, in step 4, on one device."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 4)).astype(np.float32)
    y = np.tanh(x[:, :2])
    y[OUTLIER] = 3e4
    return {"x": x, "y": y}


FP16 = {"preset": "fp16", "initial_scale": 2.0**8, "growth_steps": 2}


@functools.cache
def job(num=1, zero=None, **precision):
    """A job on some devices, which compiles once whatever the counts are."""
    return hxla.Job(
        lambda: Mlp(nnx.Rngs(0)),
        data(),
        squared_error,
        optax.sgd(0.1, momentum=0.9),
        batch_size=BATCH,
        shuffle=False,
        precision=precision or FP16,
        config={"cluster": {"visible_devices": list(range(num))}, "memory": {"zero": zero}},
    )


def train(num=1, counts="even", *, steps=STEPS, checkpoint_dir=None, **options):
    own = job(num, **options)
    plan = own.plan(microbatch_size=1, counts=counts)
    with own.open(plan, steps=steps, checkpoint_dir=checkpoint_dir) as session:
        for _ in session:
            pass
        if checkpoint_dir is not None:
            session.save()
        return session.result()


def ended(result):
    return result.sha256, tuple((r.step, r.loss_scale, r.skipped) for r in result.history.steps)


SPREADS = [
    (2, "even"),
    (2, (16, 0)),
    (2, (3, 13)),
    (3, (1, 5, 10)),
    (5, (7, 1, 1, 0, 7)),
    (8, "even"),
    (8, (1, 2, 3, 4, 0, 4, 1, 1)),
    (8, (0, 9, 0, 1, 1, 1, 1, 3)),
]


QUICK = (2, (3, 13))

alone = functools.cache(train)


@pytest.mark.parametrize("spread", rows(SPREADS, QUICK))
def test_an_overflow_on_one_device_gives_the_same_scales_and_bits_on_any_devices(spread):
    sha256, history = ended(alone())
    assert history == (
        (1, 2.0**8, False),
        (2, 2.0**8, False),
        (3, 2.0**9, False),
        (4, 2.0**9, False),
        (5, 2.0**10, True),
        (6, 2.0**9, False),
    )
    assert ended(train(*spread)) == (sha256, history)


def test_a_resumed_run_goes_on_with_its_scale_and_its_good_steps(tmp_path):
    sha256, history = ended(alone())
    train(1, steps=3, checkpoint_dir=tmp_path)
    assert ended(train(*QUICK, checkpoint_dir=tmp_path)) == (sha256, history[3:])


@pytest.mark.slow
def test_shared_state_scales_as_whole_state_does():
    _, history = ended(train(*QUICK, zero=1))
    assert history == ended(alone())[1]


@pytest.mark.slow
def test_bits_of_shared_state_that_is_scaled_are_the_same_on_any_devices():
    assert ended(train(*QUICK, zero=1)) == ended(train(4, "even", zero=1))


@pytest.mark.slow
def test_bits_in_bfloat16_are_the_same_on_any_devices(tmp_path):
    sha256 = alone(preset="bf16").sha256
    for num, counts in SPREADS:
        assert train(num, counts, preset="bf16").sha256 == sha256, (num, counts)
    own = str(tmp_path / "checkpoints")
    train(3, preset="bf16", steps=2, checkpoint_dir=own)
    assert train(2, preset="bf16", checkpoint_dir=own).sha256 == sha256


def grad_scaler(overflows, scale, growth_interval):
    """The rule of `torch.amp.GradScaler.update` as documented, written for this test.

    The backoff factor is 0.5, the growth factor 2.
    """
    scales, unskipped = [], 0
    for overflow in overflows:
        scales.append(scale)
        if overflow:
            scale, unskipped = scale * 0.5, 0
            continue
        unskipped += 1
        if unskipped == growth_interval:
            scale, unskipped = scale * 2.0, 0
    return scales


@settings(max_examples=examples(30, 300))
@given(st.lists(st.booleans(), max_size=60), st.integers(0, 24), st.integers(1, 6))
def test_scales_are_those_of_grad_scaler_for_the_same_overflows(overflows, exponent, interval):
    state, scales = ScaleState(exponent), []
    for overflowed in overflows:
        scales.append(state.scale)
        state = state.after(
            overflowed=overflowed, growth_steps=interval, most=MOST_SCALE_EXPONENT + 60
        )
    assert scales == grad_scaler(overflows, 2.0**exponent, interval)


def test_scales_are_those_that_a_real_grad_scaler_had():
    """Recorded with PyTorch: gradients set to infinity in some steps, the scale after each."""
    file = DATA / "grad_scaler.json"
    for told in json.loads(file.read_text())["sequences"]:
        assert len(set(told["scales"])) >= 3
        initial = 2.0 ** told["exponent"]
        before = [initial, *told["scales"][:-1]]
        assert before == grad_scaler(told["overflows"], initial, told["interval"])
        state, scales = ScaleState(told["exponent"]), []
        for overflowed in told["overflows"]:
            state = state.after(
                overflowed=bool(overflowed),
                growth_steps=told["interval"],
                most=MOST_SCALE_EXPONENT + 60,
            )
            scales.append(state.scale)
        assert scales == told["scales"]


def test_a_run_has_the_scales_of_grad_scaler_for_its_overflows():
    policy = {"preset": "fp16", "initial_scale": 2.0**24, "growth_steps": 2}
    records = train(**policy).history.steps
    skipped = [r.skipped for r in records]
    assert any(skipped)
    assert [r.loss_scale for r in records] == grad_scaler(skipped, 2.0**24, 2)


#: Where gradients are clipped, and whether a microbatch is a chain of segments.
CLIPS = {
    "after": ("after", {}),
    "before": ("before", {}),
    "before, in segments": ("before", {"recompute": "boundaries", "segments": 2}),
}


@pytest.mark.parametrize("clip", rows(CLIPS, "before"))
def test_the_scale_is_undone_exactly(clip):
    """Of a model in float32 nothing is rounded otherwise, so bits are those without a scale."""
    where, memory = CLIPS[clip]
    communication = {"clip_norm": 0.1, "clip": where}
    cluster = {"visible_devices": [0]}
    x = jax.random.normal(jax.random.key(0), (96, 4))
    tame = {"x": np.asarray(x), "y": np.tanh(np.asarray(x)[:, :2])}

    def run(nonfinite):
        return hxla.train(
            hxla.Job(
                lambda: Mlp(nnx.Rngs(0), use_bias=False),
                tame,
                squared_error,
                optax.sgd(0.1),
                batch_size=BATCH,
                nonfinite=nonfinite,
                config={"communication": communication, "cluster": cluster, "memory": memory},
            ),
            microbatch_size=4,
            steps=3,
            counts="even",
        )

    scaled, plain = run("scale"), run("skip")
    assert scaled.sha256 == plain.sha256
    assert [r.loss_scale for r in scaled.history.steps] == [2.0**24] * 3
    assert plain.history.steps[0].loss_scale is None


@pytest.mark.parametrize("size", rows([1, 4, 8], 4))
def test_the_scale_is_of_a_microbatchs_mean(size):
    """A sum of per-example losses is scaled by as much less as there are of them, rounded down."""

    def means(model, batch):
        return squared_error(model, batch).mean()

    def each(model, batch):
        return jnp.repeat(squared_error(model, batch)[:, None], 3, axis=1)

    def power(loss):
        own = hxla.Job(
            lambda: Mlp(nnx.Rngs(0)),
            data(),
            loss,
            optax.adam(1e-2),
            batch_size=BATCH,
            precision={"preset": "fp16", "initial_scale": 2.0**12},
        )
        graph = own.graph(size)
        model = JobContext(own).functional(size)
        batch = [jnp.asarray(x[:size]) for x in jax.tree.leaves(data())]
        params, aux = model.initialise()
        run = jax.jit(jax.extend.core.jaxpr_as_fun(graph.program))
        scaled, row, *_ = run(*jax.tree.leaves((params, aux)), jax.random.key(0), *batch)
        return float(scaled / row[0])

    assert power(means) == 2.0**12
    assert power(each) == 2.0**12 / 2.0 ** np.floor(np.log2(3 * size))


@pytest.mark.slow
def test_without_a_scale_small_gradients_are_lost_in_float16_and_with_it_the_model_learns():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    task = {"x": x, "y": np.tanh(x[:, :2])}

    def loss(model, batch):
        return 1e-9 * squared_error(model, batch)

    def losses(nonfinite):
        result = hxla.train(
            hxla.Job(
                lambda: Mlp(nnx.Rngs(0), use_bias=False),
                task,
                loss,
                optax.sgd(3e8),
                batch_size=64,
                precision="fp16",
                nonfinite=nonfinite,
                config={"cluster": {"visible_devices": [0]}},
            ),
            microbatch_size=32,
            steps=30,
            counts="even",
        )
        return [r.loss * 1e9 for r in result.history.steps]

    stalled, learned = losses("skip"), losses("scale")
    assert stalled[-1] > 0.98 * stalled[0]
    assert learned[-1] < 0.5 * learned[0]


@pytest.mark.slow
def test_low_precision_learns_as_float32_does():
    def loss(model, batch):
        logits = model(batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])

    def final(precision):
        result = hxla.train(
            hxla.Job(
                lambda: families.example("gpt").GPT(nnx.Rngs(0), **TINY),
                models.tokens(),
                loss,
                optax.adam(1e-3),
                batch_size=16,
                precision=precision,
                config={"cluster": {"visible_devices": [0]}},
            ),
            microbatch_size=16,
            steps=300,
        )
        return np.mean([r.loss for r in result.history.steps[-20:]])

    full = final("fp32")
    assert full < 0.5 * np.log(models.VOCABULARY)  # it has learned
    for word, most in (("bf16", 0.02), ("fp16", 0.02), ("fp8", 0.04)):
        assert abs(final(word) / full - 1) < most, word


def test_state_tells_the_scale_and_keeps_the_users_own_variables():
    own = job(2)
    with own.open(own.plan(microbatch_size=1, counts=QUICK[1])) as session:
        session.step()
        state = session.state
        assert state.loss_scale == ScaleState(8, 1)
        assert jax.tree.leaves(state.aux) == []
        assert session.evaluate(data()).num_examples == len(data()["x"])
        assert session.result().state.keys() == {"up", "down"}
