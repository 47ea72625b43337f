"""The report of a small run on two unlike CPU devices, for the README.

hxla run --mesh cpu-1.0-0.33 docs/pictures/draw_report.py
"""

import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import hxla

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parents[1] / "examples"))
import gpt  # noqa: E402

STEPS, HELD_OUT, WIDTH, HEIGHT = 120, 128, 1280, 1520


def loss(model: gpt.GPT, batch: dict) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean nats per byte, and the share of bytes that are guessed right."""
    text_BT = batch["text"].astype(jnp.int32)
    logits_BTV, wanted_BT = model(text_BT[:, :-1]), text_BT[:, 1:]
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, wanted_BT)
    accuracy = (logits_BTV.argmax(axis=-1) == wanted_BT).mean(dtype=jnp.float32)
    return losses_BT.mean(), {"accuracy": accuracy}


text = gpt.library()["text"]
rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, STEPS // 10, STEPS)
job = hxla.Job(
    gpt.GPT(nnx.Rngs(0), width=64, layers=2),
    {"text": text[:-HELD_OUT]},
    loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(rate)),
    batch_size=32,
)
with tempfile.TemporaryDirectory() as folder:
    run_dir = pathlib.Path(folder) / "gpt"
    hxla.train(
        job,
        steps=STEPS,
        microbatch_size=2,
        eval_data={"text": text[-HELD_OUT:]},
        eval_every=STEPS // 8,
        run_dir=run_dir,
    )
    if jax.process_index() == 0:
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={FOLDER / 'report.png'}"]
        subprocess.run([*command, (run_dir / "report.html").as_uri()], check=True)
