"""Trains the model of examples/gpt.py in turns of a step: what several benchmarks start.

It runs with hxla 0.1.0 too, so that two commits can be compared.
"""

import argparse
import functools
import inspect
import json
import os
import pathlib
import sys

import jax

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--microbatch-size", type=int, default=2, help="0: as hxla chooses")
parser.add_argument("--counts", default="measured", help="measured, or even")
parser.add_argument("--reduction", default="exact")
parser.add_argument("--tensor", type=int, help="cut the model over so many devices, by rules")
parser.add_argument("--shares", help="cut the model over as many devices in this ratio: 2,1")
parser.add_argument("--scanned", action="store_true", help="with its layers as one scan")
parser.add_argument("--stages", help="of a pipeline: their number, or shares such as 1,1")
parser.add_argument("--core", type=int, help="to run on, where a job of its own runs on another")
args = parser.parse_args()
if args.core is not None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {args.core})
if args.tensor:
    jax.config.update("jax_num_cpu_devices", args.tensor)

import optax  # noqa: E402
from flax import nnx  # noqa: E402
from gpt import GPT, library, loss  # noqa: E402
from scanned_gpt import ScannedGPT  # noqa: E402
from turns import forget_peak, peak_resident_bytes, take_turn  # noqa: E402

import hxla  # noqa: E402

peaks: list[int] = []
live: list[int] = []


def largest_temporary_bytes() -> int:
    """What the hungriest compiled program needs on a device beside its arguments and results."""
    programs = jax.local_devices()[0].client.live_executables()
    return max(p.get_compiled_memory_stats().temp_size_in_bytes for p in programs)


def wait_for_turn(record, seen):
    """After a step, once its update is done, on every copy of the model.

    `Session.state` would bring state that is shared out into the form that users see.
    """
    jax.block_until_ready(jax.live_arrays())
    if not peaks:
        forget_peak()
    peaks.append(peak_resident_bytes())
    live.append(sum(array.nbytes for array in jax.live_arrays()))
    take_turn(args.folder, jax.process_index())


known = inspect.signature(hxla.train).parameters  # of the commit that is measured
options = {"counts" if "counts" in known else "split": args.counts}
if args.tensor:
    axes = (jax.sharding.AxisType.Auto,) * 2
    options["mesh"] = jax.make_mesh((1, args.tensor), ("data", "tensor"), axis_types=axes)
    options["rules"] = "decoder"
if args.shares:
    options["mesh"] = {"data": 1, "tensor": tuple(map(int, args.shares.split(",")))}
    options["rules"] = "decoder"
if args.stages:
    shares = [float(x) for x in args.stages.split(",")]
    options["stages"] = shares if len(shares) > 1 else int(shares[0])
model = (ScannedGPT if args.scanned else GPT)(nnx.Rngs(0))
given = model, library(), loss, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
if "job" in known:
    train = functools.partial(hxla.train, hxla.Job(*given, batch_size=args.batch_size))
else:
    train = functools.partial(hxla.train, *given, batch_size=args.batch_size)
result = train(
    microbatch_size=args.microbatch_size or None,
    steps=args.turns + 1,
    reduction=args.reduction,
    callbacks=[wait_for_turn],
    **options,
)
if jax.process_index() == 0:
    prediction = getattr(result.plan, "prediction", None)
    told = {
        "hxla": hxla.__file__,
        "sha256": result.sha256,
        "losses": [round(step.loss, 4) for step in result.history.steps],
        "microbatch_size": getattr(result.plan, "microbatch_size", args.microbatch_size),
        "counts": [step.counts for step in result.history.steps],
        "reasons": result.plan.reasons,
        "predicted_seconds": prediction.step_seconds if prediction else 0.0,
        "bound_seconds": prediction.bound_seconds if prediction else 0.0,
        "resident_bytes": peaks[-1],
        "live_bytes": live[-1],
        "temporary_bytes": largest_temporary_bytes(),
        "memory_bytes": max((d.memory_bytes for d in prediction.devices), default=0)
        if prediction
        else 0,
    }
    print("RESULT " + json.dumps(told))
