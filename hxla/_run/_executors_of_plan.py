"""How many microbatches a device runs at once, or in a call, as asked."""

from .._plan._plan import Plan
from ._traced_job import TracedJob


def with_executors(plan: Plan, executors: tuple[int, ...]) -> Plan:
    """The plan with other numbers of executors on its copies.

    Args:
        plan: Whose counts stay.
        executors: Of each copy.

    Raises:
        PlanError: If its copies cannot have several.
    """
    pairs = zip(plan.replicas, executors, strict=True)
    replicas = tuple(r.model_copy(update={"executors": int(num)}) for r, num in pairs)
    return plan.replaced(replicas=replicas)


def with_asked_calls(job: TracedJob, plan: Plan) -> Plan:
    """The plan with what `cluster` asks of calls: executors, and microbatches of each call.

    Raises:
        PlanError: If its copies cannot have several.
    """
    asked, num = job.settings.cluster.executors, job.settings.cluster.microbatches_per_call
    if num > 1:
        plan = plan.replaced(microbatches_per_call=num)
    return plan if asked == "auto" else with_executors(plan, (asked,) * len(plan.replicas))
