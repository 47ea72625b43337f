"""The bits of a model's pipeline for each place at which its two stages can be cut.

    PYTHONPATH=tests python tests/jobs/cut_bits.py mlp

prints a line for each cut: the equation at which the second stage begins, and the SHA-256 of the
parameters, the optimizer's state and the other variables after four steps.
"""

import os
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from support import random_plans  # after the flag


def main(model, *wanted):
    form = random_plans.Form(model=model, size=2, stages=2)
    for first in map(int, wanted) if wanted else form.firsts:
        pipeline = form.cut(form.usual.pipeline, [first], [first], "1f1b")
        plan = form.usual.replaced(pipeline=pipeline, prediction=None)
        outcome = random_plans.run(form, random_plans.Trial(plan=plan))
        print(first, outcome.sha256, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
