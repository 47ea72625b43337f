"""The README's first example, word for word."""

import re
import time

from report import ROOT, Report, arguments

args = arguments()
report = Report(args.out)
readme = (ROOT / "README.md").read_text()
code = re.search(r"```python\n(import hxla.*?)```", readme, re.DOTALL)
assert code, "the README has no example"
begun = time.perf_counter()
scope: dict = {}
exec(code[1], scope)
seconds = time.perf_counter() - begun
result = scope["result"]
losses = [step.loss for step in result.history.steps]
platform = next(iter(result.plan.devices)).kind
report.row(f"loss of the README's example on {platform}", f"{losses[0]:.3f} -> {losses[-1]:.3f}")
report.row("imports, compilation and training", f"{seconds:.1f} s")
report.detail("sha256", result.sha256)
report.detail("seconds_per_step", [step.seconds for step in result.history.steps][-10:])
assert losses[-1] < losses[0] / 2, losses
