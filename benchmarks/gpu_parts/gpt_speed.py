"""A GPT of 124 million parameters: hxla beside plain Flax under `jax.jit` and `torch.compile`.

All of them have fused attention; attention.py has the unfused form.

Eight microbatches a step, as large as lets all contenders onto the card: they stay there and take
turns, so that its clock's drift meets all of them. Exact sums ask XLA for deterministic operations
and untimed kernels; float sums compiled so show which part of the difference that is.
"""

import pathlib
import sys

from contest import compare, contest, gpt_options, microbatch_size, torch_command
from report import Report, arguments

HERE = pathlib.Path(__file__).parent
AS_EXACT = (
    "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0 "
    "--xla_gpu_enable_triton_gemm=false"
)
args = arguments()
report = Report(args.out)
ROUNDS, STEPS, SECONDS = (2, 1, 900) if args.tiny else (4, 4, 150)
MORE = ("hxla float", "hxla bf16 by a word")
QUIET = ("plain", "hxla float", "torch.compile")
SEQUENCES = microbatch_size(args.gib, 6, is_tiny=args.tiny)


def commands() -> dict[str, list[str]]:
    """Of the contenders, those first that time their kernels."""
    options = gpt_options(SEQUENCES, ROUNDS, STEPS, is_tiny=args.tiny, attention="fused")
    of_jax = [sys.executable, str(HERE / "gpt_run.py")]
    found = {"plain": [*of_jax, "plain", *options], "hxla float": [*of_jax, "float", *options]}
    if torch := torch_command(report, args.torch, is_tiny=args.tiny):
        found["torch.compile"] = [*torch, *options]
    found["hxla exact"] = [*of_jax, "exact", *options]
    found["hxla bf16 by a word"] = [*of_jax, "bf16", *options]
    if not args.tiny:
        found["hxla float, compiled as exact"] = ["env", f"XLA_FLAGS={AS_EXACT}", *of_jax, "float"]
        found["hxla float, compiled as exact"] += options
    return found


def main() -> None:
    found = contest(report, commands(), ROUNDS, SECONDS, QUIET)
    pairs = [("hxla exact", other) for other in found if other != "hxla exact"]
    pairs += [(own, other) for own in MORE for other in ("plain", "torch.compile")]
    compare(report, found, pairs)
    report.row("microbatches of", f"{SEQUENCES} sequences")


main()
