"""The GPT of 124 million parameters with state and stash on the host, and recomputation.

Contenders take turns on the card, in bfloat16 by a word. Those with equal `Plan.numerics` must end
with equal bits; beside the most that each held is what its session says that it needs.
"""

import json
import pathlib
import sys

from contest import compare, contest, gpt_options, microbatch_size
from report import Report, arguments

HERE = pathlib.Path(__file__).parent
args = arguments()
report = Report(args.out)
ROUNDS, STEPS, SECONDS = (2, 1, 900) if args.tiny else (5, 4, 110)
ON_HOST = {"optimizer": "host", "stash": "host"}
FORMS = {
    "whole": {},
    "optimizer on the host": {"zero": 1, "offload": {"optimizer": "host"}},
    "recomputed": {"recompute": "boundaries"},
    "recomputed, all on the host": {"zero": 1, "recompute": "boundaries", "offload": ON_HOST},
}
SEQUENCES = microbatch_size(args.gib, len(FORMS), is_tiny=args.tiny)

options = gpt_options(SEQUENCES, ROUNDS, STEPS, is_tiny=args.tiny)
run = [sys.executable, str(HERE / "gpt_run.py"), "bf16", *options]
found = contest(
    report,
    {name: [*run, "--memory", json.dumps(memory)] for name, memory in FORMS.items()},
    ROUNDS,
    SECONDS,
)
compare(report, found, [(name, "whole") for name in FORMS if name != "whole"])
firsts: dict[str, str] = {}
for name, told in found.items():
    own, peak = told["memory_bytes"], told["peak_bytes"]
    report.row(
        f"{name}: memory as said and as JAX held it",
        f"{own / 2**30:.2f} GiB",
        f"{peak / 2**30:.2f} GiB" if peak else "not told here",
        f"{own / peak - 1:+.1%}" if peak else "",
    )
    first = firsts.setdefault(told["numerics"], name)
    report.bits(f"{name}: bits as of {first}", told["sha256"], found[first]["sha256"])
report.row("microbatches of", f"{SEQUENCES} sequences")
