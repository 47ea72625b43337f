"""The GPT of 124 million parameters with unfused attention, beside cuDNN's, plain Flax and PyTorch.

Unfused attention writes its scores to memory. In fused attention they never leave the chip.
"""

import pathlib
import sys

from contest import compare, contest, gpt_options, microbatch_size, torch_command
from report import Report, arguments

HERE = pathlib.Path(__file__).parent
args = arguments()
report = Report(args.out)
ROUNDS, STEPS, SECONDS = (2, 1, 900) if args.tiny else (3, 4, 75)
SEQUENCES = microbatch_size(args.gib, 4, is_tiny=args.tiny)
OURS, FUSED, PLAIN = "hxla exact, unfused", "hxla exact, fused", "plain, unfused"
TORCH = "torch.compile, unfused"

fused, unfused = (
    gpt_options(SEQUENCES, ROUNDS, STEPS, is_tiny=args.tiny, attention=attention)
    for attention in ("fused", "unfused")
)
of_jax = [sys.executable, str(HERE / "gpt_run.py")]
commands = {
    PLAIN: [*of_jax, "plain", *unfused],
    OURS: [*of_jax, "exact", *unfused],
    FUSED: [*of_jax, "exact", *fused],
}
if torch := torch_command(report, args.torch, is_tiny=args.tiny):
    commands[TORCH] = [*torch, *unfused]
found = contest(report, commands, ROUNDS, SECONDS, quiet=[PLAIN])
compare(report, found, [(FUSED, OURS), (OURS, PLAIN), (OURS, TORCH)])
report.row("microbatches of", f"{SEQUENCES} sequences")
