"""How the state of pipelines, and of copies in unlike parts, lies: nothing there is segments."""

import math
from collections.abc import Mapping

from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..core.errors import PlanError
from ..core.format import num_bytes
from ..job.context import JobContext
from ..plan.parts import ZERO_STAGES, ReplicaWork
from ..plan.plan import Plan
from .inner_split import in_lowest_terms
from .offload_candidates import asked_places
from .zero_placement import cut_copies_may_share, with_shared_state


def of_whole_programs(
    job: JobContext,
    plan: Plan,
    cluster: Cluster,
    devices: Devices | None,
    stage: int,
    groups: int,
) -> Plan:
    """The plan with its state shared out as the settings ask, or as its programs need it.

    Args:
        plan: Of it, with the state whole on every copy.
        devices: By rank, if they are here: then the first of ZeRO's stages whose compiled programs
            they hold is taken, unless the settings name one.
        stage: Of ZeRO, the least that may be.
        groups: Of copies that share state out.

    Raises:
        PlanError: If it cannot be as the settings ask, or its devices hold none of the stages.
    """
    memory = job.settings.memory
    cut = _cut_in_words(plan) + ", in unlike parts" * plan.is_uneven
    if stage > 1 and plan.is_uneven:
        raise PlanError(f"memory.zero={stage}: {cut}, whose state is not shared out: use 0")
    if memory.waves is not None:
        raise PlanError(
            f"memory.waves: {cut}, which run all microbatches of a step in one wave: leave it out"
        )
    if memory.recompute is not None:
        raise PlanError(
            f"memory.recompute: {cut}; there, pipeline.recompute "
            "is the setting of stages, and XLA decides else: leave memory.recompute out"
        )
    check_cut_copies(job, plan)
    check_segments(job)
    is_open = plan.pipeline is not None and memory.zero is None
    is_described = any(cluster.devices[d.rank].memory_bytes is not None for d in plan.devices)
    if devices is None or not (is_open and is_described) or not cut_copies_may_share(plan):
        return _in_stage(job, plan, cluster, stage, groups)
    lacks: dict[int, float] = {}
    for more in ZERO_STAGES[stage:]:
        found = _in_stage(job, plan, cluster, more, groups)
        lack = compiled_lack(job, found, cluster, devices)
        if lack <= 0:
            said = [f"memory.zero={more}: {_lacks_in_words(lacks)}, as compiled"] if lacks else []
            return found.replaced(reasons=(*found.reasons, *said))
        lacks[more] = lack
    raise PlanError(
        f"memory.zero: {_lacks_in_words(lacks)}, as compiled: use more stages or devices, a "
        "smaller microbatch_size, or pipeline.recompute"
    )


def _lacks_in_words(lacks: Mapping[int, float]) -> str:
    each = [f"{num_bytes(int(lack))} with stage {stage}" for stage, lack in lacks.items()]
    return "a device lacks " + ", ".join(each)


def _in_stage(job: JobContext, plan: Plan, cluster: Cluster, stage: int, groups: int) -> Plan:
    """The plan in a stage of ZeRO."""
    asked = job.settings.memory.shares
    shares: tuple[int, ...] = ()
    if stage and not isinstance(asked, str) and len(set(asked)) > 1:
        shares = in_lowest_terms(asked)
    tier = asked_places(job).optimizer
    found = with_shared_state(job, plan, cluster, stage, shares, tier, groups)
    if stage < 2:
        return found
    reasons = found.reasons
    if any(replica.start_seconds for replica in found.replicas):
        said = "copies fill their slots together: none begins later, and cards are shared"
        reasons = (*reasons, f"memory.zero={stage}: {said}")
    return found.replaced(
        placement=found.placement.model_copy(update={"zero": stage}),
        replicas=tuple(x.model_copy(update={"start_seconds": 0.0}) for x in found.replicas),
        reasons=reasons,
    )


def compiled_lack(job: JobContext, plan: Plan, cluster: Cluster, devices: Devices) -> float:
    """Most bytes that a device lacks for the compiled programs, and their inputs; the same in all.

    Args:
        devices: By rank.
    """
    programs = job.programs(plan, devices, lambda _: None, keep=True)
    needed = programs.memory_bytes(programs.state_bytes)
    needed += programs.most_inputs * job.batch_bytes(plan.microbatch_size)
    own = []
    for replica in programs.reducer.local:
        work = plan.replicas[replica.index]
        room = cluster.devices[tightest(cluster, work)].memory_bytes
        own.append(needed - (math.inf if room is None else room))
    return max(map(float, job.gather("bytes of the programs", str(max(own)))))


def tightest(cluster: Cluster, replica: ReplicaWork) -> int:
    """The rank of the device of a copy that has the least memory."""
    return min(replica.devices, key=lambda rank: cluster.devices[rank].memory_bytes or math.inf)


def _cut_in_words(plan: Plan) -> str:
    """What cuts the copies of the model."""
    return f"copies of the model are cut by {', '.join(axis.name for axis in plan.axes)}"


def check_cut_copies(job: JobContext, plan: Plan) -> None:
    """Refuse what copies of several devices cannot have."""
    places = asked_places(job)
    if places.optimizer == "disk":
        raise PlanError(
            f"memory.offload.optimizer='disk': {_cut_in_words(plan)}, whose state goes to no disk: "
            "set 'host', or leave it out"
        )
    if plan.pipeline is None and not plan.is_uneven:
        return
    for name, place in (("stash", places.stash), ("parameters", places.parameters)):
        if place != "device":
            raise PlanError(
                f"memory.offload.{name}={place!r}: {_cut_in_words(plan)}, and it is segments whose "
                f"{name} wait elsewhere: leave it out"
            )


def check_segments(job: JobContext) -> None:
    """Refuse segments where nothing is cut into them."""
    if job.settings.memory.segments is not None:
        raise PlanError(
            "memory.segments needs memory.recompute: set it to 'none', 'boundaries' or 'auto'"
        )
