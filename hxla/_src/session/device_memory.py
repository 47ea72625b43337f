"""What the programs of a session need of each device, beside the memory that it has."""

import json
import math

from ..cluster.cluster import Cluster
from ..core.errors import PlanError
from ..core.format import num_bytes
from ..job.context import JobContext
from ..lower.lower import Programs
from ..lower.stage_chain import StageChain
from ..plan.plan import Plan
from .opening import Opened


def largest_lack(
    programs: Programs, plan: Plan, cluster: Cluster, state_bytes: int, input_bytes: int
) -> tuple[float, int]:
    """The most bytes that a local device lacks, and its rank; at most 0: all have enough.

    Args:
        state_bytes: Of a device between steps.
        input_bytes: Of a microbatch.
    """
    lacks = []
    for replica, runner in zip(programs.reducer.local, programs.runners, strict=True):
        stages = runner.stage_bytes() if isinstance(runner, StageChain) else {}
        for rank, device in zip(plan.replicas[replica.index].devices, replica.devices, strict=True):
            if stages and device not in stages:
                continue  # of another process
            room = cluster.devices[rank].memory_bytes
            needed = programs.memory_bytes(state_bytes, stages.get(device))
            needed += programs.most_inputs * input_bytes
            lacks.append((needed - (math.inf if room is None else room), rank))
    return max(lacks)


def check_stages_fit(opened: Opened, job: JobContext) -> None:
    """Refuse stages that do not fit the memory of their devices; every process calls this.

    Raises:
        PlanError: On every process, with the device and the missing bytes.
    """
    plan, cluster = opened.plan, opened.cluster
    of_plan = opened.programs, plan, cluster, opened.store.num_bytes()
    found = largest_lack(*of_plan, job.batch_bytes(plan.microbatch_size))
    every = [json.loads(text) for text in job.gather("bytes of stages", json.dumps(found))]
    lack, rank = max(every)
    if lack > 0:
        room = cluster.devices[rank].memory_bytes or 0
        raise PlanError(
            f"device {rank} has {num_bytes(room)}, and its stage needs {num_bytes(room + lack)}: "
            f"{num_bytes(lack)} are missing; give it fewer parts (work=... of its stage), use a "
            "smaller microbatch_size, or memory.recompute='boundaries'"
        )
