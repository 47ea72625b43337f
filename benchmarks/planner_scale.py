"""Time and certified gap of the planner's search, on one core.

    OMP_NUM_THREADS=1 python benchmarks/planner_scale.py [--instances 2]

Writes benchmarks/results/planner_scale.json. Seconds are those that the processor spent on it, the
budget's too, so that other work on the machine does not decide what is found. Speeds and memory are
like those of an A100-80G, an A100-40G at a lower clock and a V100-32G; the head's share of the work
differs between kinds.
"""

import argparse
import json
import pathlib
import sys
import time
import types

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from test_search import gpt  # noqa: E402

from hxla._planner import _deadline  # noqa: E402
from hxla._planner._search import search  # noqa: E402

MIXED = {"memory": (80, 40, 32), "speeds": (1.0, 0.6, 0.35)}
SINGLE = {"devices": (256, 256, 256), "microbatches": 4096, **MIXED}
FEW = {"devices": (3, 3, 2), "layers": 24, "microbatches": 64, **MIXED}
GROUPS = {"devices": (32, 32, 32), "microbatches": 1536, **MIXED}


def sizes(parameters, width, stash_copies, tensor=1):
    """Bytes of one of 96 layers on one device of a tensor-parallel group, in bf16."""
    return {
        "parameters": parameters / 96 * 2 / tensor,
        "stash": width * 2048 * 2.0 * stash_copies / tensor,
    }


INSTANCES = {
    "8 devices, 24 layers": FEW | sizes(1.3e9, 1024, 4),
    "768 devices, 1.3e9 parameters": SINGLE | sizes(1.3e9, 1024, 1),
    "768 devices, 2.7e9 parameters": SINGLE | sizes(2.7e9, 2560, 2),
    "768 devices, 6.7e9 parameters": SINGLE | sizes(6.7e9, 4096, 4),
    "768 devices, 13e9 parameters": SINGLE | sizes(13e9, 5120, 8),
    "96 groups of 8, 20e9 parameters": GROUPS | sizes(20e9, 6144, 1, 8),
    "96 groups of 8, 173e9 parameters": GROUPS | sizes(173e9, 12288, 3, 8),
}

parser = argparse.ArgumentParser()
parser.add_argument("--instances", type=int, default=len(INSTANCES), help="the first so many")
parser.add_argument(
    "--out", type=pathlib.Path, default=ROOT / "benchmarks/results/planner_scale.json"
)
args = parser.parse_args()

rows = {}
_deadline.time = types.SimpleNamespace(monotonic=time.process_time)
search({"warm": gpt(**INSTANCES["8 devices, 24 layers"])})  # loads the solver
for name, instance in list(INSTANCES.items())[: args.instances]:
    chain = gpt(**instance)
    began = time.process_time()
    found = search({"only": chain}, time_budget_seconds=10, good_enough=0.0199)
    best = found.ranked[0].staging
    rows[name] = {
        "seconds": round(time.process_time() - began, 2),
        "gap": round(found.gap, 4),
        "time ran out": found.exhausted,
        "stages": len(best.cuts),
        "step_seconds": round(best.step_seconds, 3),
        "bound_seconds": round(found.bound_seconds, 3),
    }
    print(name, rows[name], flush=True)
args.out.write_text(json.dumps(rows, indent=2) + "\n")
