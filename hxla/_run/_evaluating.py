"""An evaluation of the present parameters, shared out as the work of a step is."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from .._lower._sum import Reducer
from .._plan._plan import Plan
from .._report._history import EvalRecord
from ._agreement import facts_of_data
from ._counts_of_plan import own_ids, share_of
from ._data import eval_batches
from ._step import Stepper
from ._traced_job import TracedJob


def evaluated(
    job: TracedJob,
    stepper: Stepper,
    reducer: Reducer,
    plan: Plan,
    data: Any,
    step: int,
    beat: Callable[[str], object],
) -> EvalRecord:
    """The mean loss and metrics over a data set, the same for every spread of the work.

    Args:
        job: That is trained.
        stepper: Runs microbatches.
        reducer: Knows the copies of the model.
        plan: That runs.
        data: Of any kind that a job takes but an unbounded one.
        step: Updates done.
        beat: Called with the phase that begins.

    Raises:
        DataError: If the data is empty or of no known kind.
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
