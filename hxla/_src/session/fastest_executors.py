"""Find the fastest number of executors for the local replica."""

import math
import os

import numpy as np

from ..choose.microbatch_counts import pooled, shared_numbers, with_executors
from ..core.config import Config
from ..core.types import PyTree
from ..lower.lower import Programs
from ..plan.plan import Plan
from .step import Stepper

_REPEATS = 5
_MOST_OF_WORK = 1 / 20  # largest share of the remaining work for trials
_LONG_SECONDS = 0.1  # of a run in which adding the sums of executors is negligible


def with_fastest_executors(
    stepper: Stepper,
    programs: Programs,
    plan: Plan,
    batch: PyTree,
    seconds: list[float],
    min_gain: float,
    num_steps: int,
) -> tuple[Plan, list[float]]:
    """Double the executors of the local replica while microbatches become faster.

    Every process of a job must call this. A plan with several executors stays.

    Args:
        stepper: A warm one, which then uses the fastest number.
        seconds: Of a microbatch on each local replica.
        min_gain: Relative gain in seconds that a doubling must reach.
        num_steps: Remaining steps; trials take at most a twentieth of their work.

    Returns:
        The plan with the fastest number of executors on each replica, and their seconds.
    """
    if any(r.executors > 1 for r in plan.replicas):
        return plan, seconds
    best, most, num = plan, _most_executors(programs), 1
    budget = _MOST_OF_WORK * num_steps * max(plan.counts)
    min_microbatches = math.ceil(_LONG_SECONDS / max(seconds[0], 1e-9))
    while 2 * num <= most:
        num *= 2
        at_once = min(max(2 * num, min_microbatches), max(plan.counts))
        budget -= 2 * _REPEATS * at_once
        if budget < 0:
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
    executors = shared_numbers(programs.reducer, [best.replicas[r.index].executors for r in local])
    return with_executors(plan, tuple(map(int, executors))), seconds


def seconds_of_replicas(
    stepper: Stepper,
    programs: Programs,
    plan: Plan,
    batch: PyTree,
    seconds: list[float],
    settings: Config,
    num_steps: int | None,
) -> tuple[Plan, tuple[float, ...]]:
    """The plan with the executors of the settings, and seconds of a microbatch on each replica.

    Args:
        seconds: Of a microbatch on each local replica.
        num_steps: Remaining steps; None: not known.
    """
    if settings.cluster.executors == "auto" and num_steps is not None:
        gain = settings.balance.min_gain
        plan, seconds = with_fastest_executors(
            stepper, programs, plan, batch, seconds, gain, num_steps
        )
    return plan, pooled(shared_numbers(programs.reducer, seconds), plan)


def _most_executors(programs: Programs) -> int:
    """The largest useful number of executors: the cores of a single CPU device.

    A GPU runs the programs of a process one after another.
    """
    plan, local = programs.plan, programs.reducer.local
    has_others = plan.axes or plan.chain is not None or plan.placement.zero > 1
    if len(local) != 1 or has_others or plan.sums.kind != "exact":
        return 1
    if local[0].devices[0].platform != "cpu":
        return 1
    return min(len(os.sched_getaffinity(0)), max(plan.counts))
