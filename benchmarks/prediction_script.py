"""What benchmarks/prediction.py profiles, plans and trains: one of three small models."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import threading
import time

import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import bert
import gpt

import hxla
from hxla._profile import _trial
from hxla._run import _dry
from hxla._run._step import Engine


class Conv(nnx.Module):
    """Four convolutions of digits, eight times enlarged."""

    def __init__(self, rngs):
        widths = [1, 32, 64, 64, 128]
        self.layers = nnx.List(
            [
                nnx.Conv(i, o, (3, 3), strides=1 + (n > 0), rngs=rngs)
                for n, (i, o) in enumerate(itertools.pairwise(widths))
            ]
        )
        self.out = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(x.mean(axis=(1, 2)))


def conv_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["gpt", "bert", "conv"])
parser.add_argument("--folder", type=pathlib.Path, help="profile and run, in turns")
args = parser.parse_args()

MICROBATCH_SIZE = 4


def images():
    from sklearn.datasets import load_digits  # seconds on a third of a core, for one model only

    digits = load_digits()
    return {
        "image": np.repeat(np.repeat(digits.images[..., None] / 16, 8, 1), 8, 2).astype(np.float32),
        "label": digits.target.astype(np.int32),
    }


model, data, loss = {
    "gpt": lambda: (gpt.GPT(nnx.Rngs(0), width=192, layers=3), gpt.library(), gpt.loss),
    "bert": lambda: (bert.Bert(nnx.Rngs(0), width=128, layers=3), gpt.library(), bert.loss),
    "conv": lambda: (Conv(nnx.Rngs(0)), images(), conv_loss),
}[args.model]()


def train(**options):
    return hxla.train(
        model,
        data,
        loss,
        optax.adamw(1e-3),
        batch_size=16 * MICROBATCH_SIZE,
        microbatch_size=MICROBATCH_SIZE,
        **options,
    )


if args.folder is None:
    train(steps=1)
    sys.exit()

FIRST_TURN_STEPS = 6  # the trial's; then the two take turns of a step
FEWEST_STEPS, FEWEST_SECONDS = 40, 12.0  # of the trial, so of the training too


class Turns:
    """Lets two threads run in turns of a step, so that the machine's drift meets both."""

    def __init__(self):
        self.ended = [False, False]
        self._free = [threading.Semaphore(0), threading.Semaphore(0)]

    def wait(self, me):
        self._free[me].acquire()

    def give(self, me):
        """Returns the seconds until it was given back."""
        began = time.perf_counter()
        self._free[1 - me].release()
        if not self.ended[1 - me]:
            self.wait(me)
        return time.perf_counter() - began

    def end(self, me):
        self.ended[me] = True
        self._free[1 - me].release()


turns, trial_counts, trial_seconds = Turns(), [], []
failed, engines, seconds, busy = [], [], [], []
waited = [0.0, 0.0]  # since the last record, and so in the next one's time
observe, close = _trial.Observer.__call__, Engine.close


def observed(observer, record, state):
    # By number alone, the same on every process: they must take turns at the same steps.
    since = len(trial_counts) - FIRST_TURN_STEPS
    own = record.seconds - waited[0]
    trial_counts.append(record.counts)
    trial_seconds.append(own)
    done = observe(observer, dataclasses.replace(record, seconds=own), state)
    done = done and since >= FEWEST_STEPS and sum(trial_seconds[FIRST_TURN_STEPS:]) > FEWEST_SECONDS
    waited[0] = turns.give(0) if since + 1 >= 0 else 0.0
    return done


def profile():
    """What `hxla profile` does, in a process that is there already."""
    try:
        train(steps=1)
    except SystemExit:
        return
    except BaseException as error:
        failed.append(error)
    finally:
        turns.end(0)


def trained(record, state):
    if record.step > 1 and not turns.ended[0]:  # nothing compiles any more
        seconds.append(record.seconds - waited[1])
        busy.append(record.busy_seconds)
    waited[1] = turns.give(1)
    return turns.ended[0]


def closed(engine):
    if threading.current_thread() is threading.main_thread():
        engines.append(engine)  # only it knows the programs that the run compiled
    close(engine)


_trial.Observer.__call__, Engine.close = observed, closed
request = _dry.ProfileRequest(file=str(args.folder / "profile.json"), num_segments=1)
os.environ[_dry.VARIABLE] = request.model_dump_json()
thread = threading.Thread(target=profile)
thread.start()
turns.wait(1)
del os.environ[_dry.VARIABLE]
counts = trial_counts[-1] if trial_counts else ()
if not failed:
    with contextlib.suppress(SystemExit):  # stopped by its callback
        train(steps=400, counts=counts, callbacks=[trained])
turns.end(1)
thread.join()
if failed:
    raise failed[0]
if jax.process_index() == 0:
    [engine] = engines
    batch = sum(x[:MICROBATCH_SIZE].nbytes for x in data.values())
    held = engine.memory_bytes()  # the same on every device: they hold the same programs
    summary = {
        "counts": counts,
        "microbatch_bytes": batch,
        "seconds": seconds,
        "trial_seconds": trial_seconds,
        "busy_seconds": busy,
        "compiled_bytes": [held + count * batch for count in counts],
    }
    (args.folder / "run.json").write_text(json.dumps(summary))
