"""More executors on the copy of the model that is here, while they pay."""

import math
import os

import numpy as np

from ..choose.microbatch_counts import shared_numbers, with_executors
from ..core.types import PyTree
from ..lower.lower import Programs
from ..plan.plan import Plan
from .step import Stepper

_REPEATS = 5
_MOST_OF_WORK = 1 / 20  # that trials may take
_LONG_SECONDS = 0.1  # of a run beside which adding up the sums of executors is little


def with_fastest_executors(
    stepper: Stepper,
    programs: Programs,
    plan: Plan,
    batch: PyTree,
    seconds: list[float],
    min_gain: float,
    num_steps: int,
) -> tuple[Plan, list[float]]:
    """Try more and more executors on this process's copy of the model, while they pay.

    Every process of a job calls it.

    Args:
        stepper: That is warm; it uses the fastest number from then on.
        plan: Of them; where it has several executors, or calls of several microbatches, it stays.
        seconds: Of a microbatch on each local replica, one after another.
        min_gain: The share of its time by which a microbatch must be faster.
        num_steps: Steps to come; where trials would take more than a twentieth of their work there
            is none.

    Returns:
        The plan with the fastest number of executors on each copy, and the seconds with them.
    """
    if plan.microbatches_per_call > 1 or any(r.executors > 1 for r in plan.replicas):
        return plan, seconds
    best, most, num = plan, _most_executors(programs), 1
    left = _MOST_OF_WORK * num_steps * max(plan.counts)
    long = math.ceil(_LONG_SECONDS / max(seconds[0], 1e-9))
    while 2 * num <= most:
        num *= 2
        at_once = min(max(2 * num, long), max(plan.counts))
        left -= 2 * _REPEATS * at_once
        if left < 0:
            break
        more = with_executors(plan, (num,) * len(plan.replicas))
        before = stepper.seconds_of_microbatches(0, batch, at_once, repeats=_REPEATS)
        stepper.use_executors(more.replicas)
        after = stepper.seconds_of_microbatches(0, batch, at_once, repeats=_REPEATS)
        if not np.median(after) < (1 - min_gain) * np.median(before):
            stepper.use_executors(best.replicas)
            break
        best, seconds = more, [float(np.median(after))]
    local = programs.reducer.local
    found = shared_numbers(programs.reducer, [best.replicas[r.index].executors for r in local])
    return with_executors(plan, tuple(map(int, found))), seconds


def _most_executors(programs: Programs) -> int:
    """Executors that could pay here: the cores of an only device.

    A GPU runs the programs of a process one after another, in the order of their calls.
    """
    plan, local = programs.plan, programs.reducer.local
    has_others = plan.axes or plan.chain is not None or plan.placement.zero > 1
    if len(local) != 1 or has_others or plan.sums.kind != "exact":
        return 1
    if local[0].devices[0].platform != "cpu":
        return 1
    return min(len(os.sched_getaffinity(0)), max(plan.counts))
