"""A GPT of 124 million parameters: hxla beside plain Flax under `jax.jit` and `torch.compile`.

GPT-2 small with a vocabulary padded to 50304; 64 sequences of 1024 tokens a step in eight
microbatches; all contenders in turns on one card.
"""

import pathlib
import statistics
import subprocess
import sys

from contest import contest
from report import Report, arguments

HERE = pathlib.Path(__file__).parent
args = arguments()
report = Report(args.out)
size, rounds, steps = ("tiny", 2, 1) if args.dry else ("124m", 5, 4)


def jax_job(kind: str) -> list[str]:
    own = [sys.executable, str(HERE / "gpt_run.py"), kind, "--size", size, "--steps", str(steps)]
    return [*own, *(["--dtype", "float32"] if args.dry else [])]


commands = {name: jax_job(name) for name in ("plain", "hxla-exact", "hxla-float")}
has_torch = subprocess.run(
    [args.torch, "-c", "import torch; assert torch.cuda.is_available()"],
    check=False,
    capture_output=True,
)
if has_torch.returncode == 0:
    own = [args.torch, str(HERE / "torch_run.py"), "--size", size, "--steps", str(steps)]
    commands["torch"] = own
else:
    report.row("beside torch.compile", "left out", f"{args.torch} has no torch that sees the card")
found = contest(commands, report, rounds=rounds, seconds=900 if args.dry else 190)


def rate(name: str) -> float:
    """Tokens per second, the median of the turns after the first."""
    told = found[name]
    return told["tokens_per_step"] / statistics.median(told["seconds_per_step"][1:])


def peak(name: str) -> str:
    held = found[name]["peak_bytes"]
    return "?" if held is None else f"{held / 2**30:.2f} GiB"


for ours in ("hxla-exact", "hxla-float"):
    for other, title in (("plain", "plain JAX"), ("torch", "torch.compile")):
        if ours in found and other in found:
            report.row(
                f"{ours} beside {title}: tokens per second",
                f"{rate(ours):.0f}",
                f"{rate(other):.0f}",
                f"{rate(ours) / rate(other):.3f}x",
            )
            report.row(f"{ours} beside {title}: peak memory", peak(ours), peak(other))
for name, told in found.items():
    losses = told["losses"]
    ready = f"{told['seconds_to_first_step']:.0f} s to the first step"
    report.row(f"{name}: loss of the first and last step", f"{losses[0]:.4f} -> {losses[-1]:.4f}", ready)
if not {"hxla-exact", "plain"} <= found.keys():
    sys.exit(1)
