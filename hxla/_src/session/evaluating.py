"""Evaluation of the present parameters, distributed like the work of a step."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from ..choose.microbatch_counts import own_ids, share_of
from ..data.data import eval_batches
from ..job.agreement import facts_of_data
from ..job.context import JobContext
from ..lower.sum import Reducer
from ..plan.plan import Plan
from ..report.history import EvalRecord
from .step import Stepper


def evaluated(
    job: JobContext,
    stepper: Stepper,
    reducer: Reducer,
    plan: Plan,
    data: Any,
    step: int,
    beat: Callable[[str], object],
) -> EvalRecord:
    """The mean loss and metrics over a data set, equal for every placement of the work.

    Args:
        data: Any kind of data of a job except an unbounded one.
        beat: Called with the phase that begins.

    Raises:
        DataError: If the data is empty or of an unknown kind.
    """
    began = time.perf_counter()
    size, fetch = eval_batches(data, plan.microbatch_size)
    facts = {"examples of the evaluation": str(size)}
    job.agree("evaluation", lambda: facts | facts_of_data(fetch(0), "evaluation: "))
    num = math.ceil(size / plan.microbatch_size)
    ids = own_ids(share_of(num, plan.counts), reducer)
    on_reduce = functools.partial(beat, "evaluation's sum")
    loss, metrics = stepper.forwards.evaluate(num, ids, fetch, on_reduce=on_reduce)
    seconds = time.perf_counter() - began
    return EvalRecord(step=step, loss=loss, metrics=metrics, num_examples=size, seconds=seconds)
