"""How many integers the sum of a gradient's element has, chosen by what one of them loses."""

import math

from .._cluster._cluster import Cluster
from .._cluster._job_devices import Devices
from .._graph._parts import graph_at, parts_of
from .._lower._exact import Limbs
from .._lower._num_terms import num_terms
from .._lower._segment_part import direct_parts
from .._plan._plan import Plan
from ._executors_of_plan import with_asked_calls
from ._planned_chain import with_memory
from ._sums_over import with_sums_over
from ._traced_job import TracedJob

#: The most that `communication.limbs = "auto"` lets an element of the mean gradient err, of the
#: largest magnitude of its tensor: with 64 microbatches or fewer.
_MOST_ERROR = 2.0**-16


def with_sums_and_memory(
    job: TracedJob,
    plan: Plan,
    cluster: Cluster,
    devices: Devices | None = None,
    *,
    timed_form: str = "",
) -> Plan:
    """The plan with its sums and its memory as the settings ask, `communication.limbs` among them.

    Args:
        job: That is planned.
        plan: Of it, with the state whole on every copy and the sums over the devices; with one limb
            only if it is asked for.
        cluster: Its devices.
        devices: By rank, if they are here.
        timed_form: As for `with_memory`.

    Raises:
        PlanError: If it cannot be as the settings ask, or does not fit.
    """

    def in_memory(own: Plan) -> Plan:
        return with_memory(job, own, cluster, devices, timed_form=timed_form)

    plan = with_asked_calls(job, with_sums_over(job, plan))
    asked = job.settings.communication.limbs
    if plan.sums.kind != "exact" or asked == 2:
        return in_memory(plan)
    terms = _terms(job, plan)
    if asked == 1 or _mean_error(terms) <= _MOST_ERROR:
        sums = plan.sums.model_copy(update={"limbs": 1})
        one = in_memory(plan.replaced(sums=sums))
        terms = _terms(job, one)  # more, where its cuts part what shares a parameter
    if asked == "auto" and (mean := _mean_error(terms)) > _MOST_ERROR:
        reason = (
            f"two limbs: one would let the mean of {terms} terms err by 2**{_power(mean)} of "
            f"its tensor's largest, more than 2**{_power(_MOST_ERROR)}"
        )
        return in_memory(plan.replaced(reasons=(*plan.reasons, reason)))
    bound = Limbs(1, terms).error_bound
    reason = (
        f"one limb: an element's sum of {terms} terms errs by at most 2**{_power(bound)} of the "
        f"largest magnitude in its tensor, their mean by 2**{_power(bound / terms)}"
    )
    return one.replaced(reasons=(*one.reasons, reason))


def _mean_error(terms: int) -> float:
    """Of the mean of so many terms with one limb, of its tensor's largest magnitude."""
    return Limbs(1, terms).error_bound / terms


def _power(bound: float) -> str:
    return f"{math.log2(bound):.3g}"


def _terms(job: TracedJob, plan: Plan) -> int:
    """The most terms of an element's sum: parts that share a parameter add to it one each."""
    graph, num = job.graph(plan.microbatch_size), plan.num_microbatches
    if plan.pipeline is not None:
        ordered, points = graph_at(graph, plan.pipeline.cut_by, plan.pipeline.points)
        return num_terms(ordered, parts_of(ordered, points), num)
    if plan.chain is not None:
        ordered, points = graph_at(graph, "work", plan.chain.points)
        return num_terms(ordered, direct_parts(ordered, points), num)
    return num
