"""The GPT of 124 million parameters by `precision="bf16"` and `"fp16"`, beside casts by hand.

The contenders take turns on the card: hxla by a word on the unmodified model, exact sums and, for
float16, a dynamic loss scale; plain Flax under `jax.jit`, whose user casts the model to bfloat16;
and hxla in float32, for what a low precision gains.
"""

import pathlib
import sys

from contest import compare, contest, gpt_options, microbatch_size
from report import Report, arguments

HERE = pathlib.Path(__file__).parent
args = arguments()
report = Report(args.out)
ROUNDS, STEPS, SECONDS = (2, 1, 900) if args.tiny else (5, 4, 110)
KINDS = {"plain": "plain", "fp32 exact": "fp32", "bf16 exact": "bf16", "fp16 exact": "fp16"}
SEQUENCES = microbatch_size(args.gib, len(KINDS), is_tiny=args.tiny)

options = gpt_options(SEQUENCES, ROUNDS, STEPS, is_tiny=args.tiny)
run = [sys.executable, str(HERE / "gpt_run.py")]
found = contest(
    report,
    {name: [*run, kind, *options] for name, kind in KINDS.items()},
    ROUNDS,
    SECONDS,
    quiet=["plain"],
)
low = ("bf16 exact", "fp16 exact")
compare(report, found, [(own, other) for own in low for other in ("plain", "fp32 exact")])
report.row("microbatches of", f"{SEQUENCES} sequences")
