"""A small job to which a fault happens at a known place: `CHAOS` says which, see chaos.py."""

import json
import os
import pathlib
import random
import resource
import signal
import sys
import threading
import time

FAULT = json.loads(os.environ["CHAOS"])
FOLDER = pathlib.Path(os.environ["CHAOS_FOLDER"])
RANK = int(os.environ.get("HXLA_PROCESS_ID", "0"))
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
latest, is_full = -1, False


def note(step):
    """When the fault happened, and at which step."""
    path = FOLDER / "fault.json"
    path.with_suffix(".new").write_text(json.dumps({"at": time.monotonic(), "step": step}))
    path.with_suffix(".new").rename(path)


def happen(step):
    kind = FAULT["kind"]
    note(step)
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind == "raise":
        raise ValueError("a fault of the user's own")
    elif kind == "exit":
        sys.exit(FAULT["code"])
    elif kind == "vanish":
        os._exit(FAULT["code"])


def is_here(place, step=-1):
    return (FAULT["rank"], FAULT["place"], FAULT["step"]) == (RANK, place, step)


if is_here("script"):
    happen(-1)
if FAULT["kind"] == "wait in the script":
    (FOLDER / f"waiting-{RANK}").touch()
    while True:
        signal.pause()

import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import hxla  # noqa: E402

STEPS, BATCH, WIDTH = 14, 12, 6


def batches():
    """Global batches, read by one process for all, or by every process."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        if is_here("data", step):
            happen(step)
        yield {"x": rng.normal(size=(BATCH, WIDTH)).astype(np.float32)}


def later(step):
    """At any moment of the next steps."""
    time.sleep(random.Random(FAULT["seed"]).uniform(0.0, 0.2))
    happen(latest)


def callback(record, session):
    global latest, is_full
    latest = step = record.step - 1
    print(f"step {record.step} is done", flush=True)  # nobody may read it any more
    if not is_full:
        (FOLDER / f"step-{RANK}").write_text(str(step))
    if is_here("callback", step):
        happen(step)
    if is_here("any", step):
        threading.Thread(target=later, args=(step,), daemon=True).start()
    if is_here("disk", step):
        note(step)
        is_full = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    time.sleep(0.05)


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean(-1)


result = hxla.train(
    hxla.Job(
        nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0)),
        batches(),
        loss,
        optax.adam(1e-2),
        batch_size=BATCH,
        config={"data": {"share": FAULT["place"] != "data"}},
    ),
    microbatch_size=2,
    steps=STEPS,
    counts="even",
    checkpoint_dir=FOLDER / "checkpoints" if FAULT["saves"] else None,
    checkpoint_every=2 if FAULT["saves"] else None,
    callbacks=[callback],
)
if RANK == 0:
    (FOLDER / "sha256").write_text(result.sha256)
