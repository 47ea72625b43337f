"""Whether a plan is for this job, these devices and these versions."""

from .._cluster._cluster import Cluster
from .._cluster._job_devices import Devices
from .._core._errors import PlanError
from .._plan._plan import Plan
from .._planner._complete import versions_for


def check_runnable(plan: Plan, cluster: Cluster, batch_size: int, devices: Devices) -> None:
    """Refuse a plan for something else.

    Raises:
        PlanError: With every difference: batch, devices, versions.
    """
    faults = []
    if plan.batch_size != batch_size:
        faults.append(f"batch_size: {plan.batch_size} in the plan, {batch_size} in the job")
    for device in plan.devices:
        if device.rank >= len(cluster.devices):
            faults.append(
                f"devices: the plan uses device {device.rank}, there are {len(cluster.devices)}"
            )
        elif cluster.devices[device.rank].label != device.kind:
            own = cluster.devices[device.rank].label
            faults.append(f"devices.{device.rank}: {device.kind} in the plan, {own} here")
    here = versions_for(cluster)
    for name in ("hxla", "jax", "jaxlib", "processor"):
        planned, own = getattr(plan.made_with, name), getattr(here, name)
        if planned != own:
            faults.append(f"made_with.{name}: {planned} in the plan, {own} here")
    planned = {d.rank for d in plan.devices}
    started = {i: d for i, d in enumerate(devices) if d is not None}
    missing = sorted(planned - started.keys())
    if missing and not faults:
        faults.append(f"devices: no process was started for {missing}")
    used = {d.process_index for i, d in started.items() if i in planned}
    idle = sorted({d.process_index for d in started.values()} - used)
    if idle and not faults:
        faults.append(
            f"devices: processes {idle} have no part in the plan; hxla run --plan starts only "
            "those that have"
        )
    if faults:
        raise PlanError(
            "the plan is for something else:\n"
            + "\n".join(f"  {fault}" for fault in faults)
            + "\nmake a plan for this, with hxla plan or Job.plan, or edit these fields"
        )
