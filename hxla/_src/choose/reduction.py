"""How gradients are summed: limbs of an element, and collectives of devices or of hosts."""

import math

from ..cluster.cluster import Cluster
from ..cluster.kinds import are_unlike, in_words
from ..core.errors import PlanError
from ..graph.parts import graph_at, parts_of
from ..lower.chain_spec import direct_parts
from ..lower.contribution import num_terms
from ..lower.exact import Limbs
from ..plan.plan import Plan
from .memory import with_memory
from .microbatch_counts import with_asked_calls
from .workload import Measure, Workload


def with_sums_over(work: Workload, plan: Plan) -> Plan:
    """The plan with its reductions over devices or hosts, by the settings or its devices.

    Args:
        plan: With the reductions over devices.

    Raises:
        PlanError: If the settings ask for collectives that its devices do not share.
    """
    asked, kinds = work.settings.communication.over, [device.kind for device in plan.devices]
    unlike = are_unlike(kinds)
    if unlike and asked == "device":
        raise PlanError(
            f"communication.over='device': {in_words(kinds)} share no library for collectives: "
            "leave it out or set it to 'host', or use devices of one sort"
        )
    if not unlike and asked != "host":
        return plan
    if plan.axes:
        axes = ", ".join(axis.name for axis in plan.axes)
        why = f"{in_words(kinds)} meet over the host" if unlike else "communication.over='host'"
        raise PlanError(
            f"{why}, where replicas of one device meet, and the axes {axes} need collectives "
            "inside a replica: leave out mesh, rules, stages and splits, or "
            + ("use devices of one sort" if unlike else "set communication.over to 'device'")
        )
    notes = ("sums over the host: devices take part in no collective",)
    if unlike:
        notes = (
            f"sums over the host, for {in_words(kinds)} share no library for collectives. Each "
            "kind rounds its microbatches in its own way, so bits depend on who runs which, and "
            "the numerics with them; what is updated is updated on one device and handed to all, "
            "so the state of all replicas is equal to the bit",
        )
    sums = plan.sums.model_copy(update={"over": "host"})
    return plan.replaced(sums=sums, reasons=(*plan.reasons, *notes))


#: The largest error of an element of the mean gradient with `communication.limbs = "auto"`, over
#: the largest magnitude of its tensor: met by 64 microbatches or fewer.
_MOST_ERROR = 2.0**-16


def with_sums_and_memory(
    work: Workload,
    plan: Plan,
    cluster: Cluster,
    measure: Measure | None = None,
    *,
    timed_form: str = "",
) -> Plan:
    """The plan with reductions, limbs and memory layout by the settings.

    Args:
        plan: With the state whole on every replica and the reductions over devices; with one limb
            only if asked for.
        measure: See `with_memory`.
        timed_form: See `with_memory`.

    Raises:
        PlanError: If the settings cannot be met, or nothing fits.
    """

    def in_memory(plan: Plan) -> Plan:
        return with_memory(work, plan, cluster, measure, timed_form=timed_form)

    plan = with_asked_calls(work.settings.cluster, with_sums_over(work, plan))
    asked = work.settings.communication.limbs
    if plan.sums.kind != "exact" or asked == 2:
        return in_memory(plan)
    terms = _terms(work, plan)
    if asked == 1 or _mean_error(terms) <= _MOST_ERROR:
        sums = plan.sums.model_copy(update={"limbs": 1})
        one = in_memory(plan.replaced(sums=sums))
        terms = _terms(work, one)  # more, if its segments share a parameter
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
    """The error of the mean of so many terms with one limb, over the largest magnitude."""
    return Limbs(1, terms).error_bound / terms


def _power(bound: float) -> str:
    return f"{math.log2(bound):.3g}"


def _terms(work: Workload, plan: Plan) -> int:
    """The most terms of an element's sum: each part that shares a parameter adds one."""
    graph, num = work.graph, plan.num_microbatches
    if plan.pipeline is not None:
        ordered, points = graph_at(graph, plan.pipeline.cut_by, plan.pipeline.points)
        parts = direct_parts if plan.unlike_stages else parts_of
        return num_terms(ordered, parts(ordered, points), num)
    if plan.chain is not None:
        ordered, points = graph_at(graph, "work", plan.chain.points)
        return num_terms(ordered, direct_parts(ordered, points), num)
    return num
