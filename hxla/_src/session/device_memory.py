"""What the programs of a session need of each device, beside the memory that it has."""

import json
import math
from collections.abc import Mapping

from ..cluster.cluster import Cluster
from ..core.errors import PlanError
from ..core.format import num_bytes
from ..job.context import JobContext
from ..lower.lower import Programs
from ..lower.stage_chain import StageChain
from ..plan.plan import Plan
from .opening import Opened


def needed_bytes(
    programs: Programs, plan: Plan, state_bytes: int, input_bytes: int
) -> dict[int, int]:
    """The bytes that each local device needs, by rank.

    Args:
        state_bytes: Of a device between steps.
        input_bytes: Of a microbatch.
    """
    needed = {}
    for replica, runner in zip(programs.reducer.local, programs.runners, strict=True):
        stages = runner.stage_bytes() if isinstance(runner, StageChain) else {}
        for rank, device in zip(plan.replicas[replica.index].devices, replica.devices, strict=True):
            if stages and device not in stages:
                continue  # of another process
            beside = programs.most_inputs * input_bytes
            needed[rank] = beside + programs.memory_bytes(state_bytes, stages.get(device))
    return needed


def largest_lack(needed: Mapping[int, int], cluster: Cluster) -> tuple[float, int]:
    """The most bytes that a device lacks, and its rank; at most 0: all have enough."""
    return max((num - _room(cluster, rank), rank) for rank, num in needed.items())


def stage_bytes(opened: Opened, job: JobContext) -> dict[int, int]:
    """The bytes that each device of unlike stages needs, by rank; every process calls this.

    Raises:
        PlanError: On every process, with the device and the missing bytes, if one has too few.
    """
    plan, cluster = opened.plan, opened.cluster
    inputs = job.batch_bytes(plan.microbatch_size)
    here = needed_bytes(opened.programs, plan, opened.store.num_bytes(), inputs)
    pairs = [json.loads(x) for x in job.gather("bytes of stages", json.dumps(list(here.items())))]
    needed = {rank: num for each in pairs for rank, num in each}
    lack, rank = largest_lack(needed, cluster)
    if lack > 0:
        raise PlanError(
            f"device {rank} has {num_bytes(needed[rank] - lack)}, and its stage needs "
            f"{num_bytes(needed[rank])}: {num_bytes(lack)} are missing; give it fewer parts "
            "(work=... of its stage), use a smaller microbatch_size, or "
            "memory.recompute='boundaries'"
        )
    return needed


def _room(cluster: Cluster, rank: int) -> float:
    known = cluster.devices[rank].memory_bytes
    return math.inf if known is None else known
