"""Where the copies of the model meet: in collectives of their devices, or of their hosts."""

from .._cluster._libraries import are_unlike, in_words
from .._core._errors import PlanError
from .._plan._plan import Plan
from ._traced_job import TracedJob


def with_sums_over(job: TracedJob, plan: Plan) -> Plan:
    """The plan with the sums where the settings ask for, or where its devices can meet.

    Args:
        job: That is planned.
        plan: Of it, with the sums over the devices.

    Raises:
        PlanError: If its devices share no library for collectives and are to meet in one.
    """
    asked, kinds = job.settings.communication.over, [device.kind for device in plan.devices]
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
            f"{why}, where copies of one device meet, and the axes {axes} need collectives inside "
            "a copy: leave out mesh, rules, stages and splits, or "
            + ("use devices of one sort" if unlike else "set communication.over to 'device'")
        )
    said = ("sums over the host: devices take part in no collective",)
    if unlike:
        said = (
            f"sums over the host, for {in_words(kinds)} share no library for collectives. Each "
            "kind rounds its microbatches in its own way, so bits depend on who runs which, and "
            "the numerics with them; what is updated is updated on one device and handed to all, "
            "so the copies of the state are alike to the bit",
        )
    sums = plan.sums.model_copy(update={"over": "host"})
    return plan.replaced(sums=sums, reasons=(*plan.reasons, *said))
