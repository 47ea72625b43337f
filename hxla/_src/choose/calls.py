"""How many microbatches one call of a program runs.

A call and each array from the host cost 50 to 350 microseconds, so several microbatches run in a
loop inside one program. Its rounding need not be that of a program for one, and every device runs
the same program. So the number follows from the batch alone, and no bit depends on the devices.
"""

from ..cluster.cluster import Cluster
from ..core.format import num_bytes
from ..plan.plan import Plan
from .workload import Workload

#: The most inputs of a call. A device with fewer microbatches than a call takes gets padding, which
#: crosses a PCIe link of 25 GB/s in less than a millisecond.
_MOST_BYTES = 16 << 20
_MOST_OF_MEMORY = 1 / 64  # the part of a device's memory that the inputs of a call may take
_MOST = 4096


def with_calls(work: Workload, plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the microbatches of a call, where the settings leave them open."""
    if work.settings.cluster.microbatches_per_call != "auto" or plan.num_microbatches == 1:
        return plan
    if plan.axes or plan.num_segments > 1:  # a microbatch is several programs or has collectives
        return plan
    if work.graph.program.effects:
        return _with_reason(plan, "a call for each microbatch: the loss calls Python")
    each = max(work.input_bytes, 1)
    num = min(plan.num_microbatches, _MOST_BYTES // each, _MOST)
    if num < 2:
        why = f"two would have inputs of {num_bytes(2 * each)}, of {num_bytes(_MOST_BYTES)} at most"
        return _with_reason(plan, f"a call for each microbatch: {why}")
    known = [b for d in plan.devices if (b := cluster.devices[d.rank].memory_bytes)]
    room = int(min(known, default=1 << 62) * _MOST_OF_MEMORY)
    if num * each > room:
        why = f"{num} have inputs of {num_bytes(num * each)}, and a device has room for "
        return _with_reason(plan, f"a call for each microbatch: {why}{num_bytes(room)} of inputs")
    plan = plan.replaced(microbatches_per_call=num)
    if num == plan.num_microbatches:
        return plan
    return _with_reason(plan, f"one call runs up to {num} microbatches: {num_bytes(num * each)}")


def _with_reason(plan: Plan, reason: str) -> Plan:
    return plan.replaced(reasons=(*plan.reasons, reason))
