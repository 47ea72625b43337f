"""Where the optimizer's state is: whole on every copy of the model, or shared out between them."""

import math
from collections.abc import Sequence

import jax

from .._cluster._cluster import Cluster
from .._cluster._libraries import are_unlike, in_words
from .._core._errors import PlanError
from .._model._functional import leaf_names
from .._model._optimizer import Optimizer
from .._plan._ownership import Ownership, ownership
from .._plan._plan import Plan
from .._planner._complete import placement_for
from .._planner._inner_split import described_speed
from .._planner._split_sizes import SplitDevice, best_sizes
from .._planner._state_bytes import STAGES
from ._segments_of_job import param_bytes
from ._traced_job import TracedJob

_GRANULES_OF_A_COPY = 12  # shares are as fine as a twelfth of an even one


def with_shared_state(job: TracedJob, plan: Plan, cluster: Cluster, stage: int) -> Plan:
    """The plan with the optimizer's state shared out, as all stages of ZeRO but 0 have it.

    Args:
        job: That is planned.
        plan: Of it, with the state whole on every copy.
        cluster: Its devices.
        stage: Of ZeRO; that of the plan is 1, until it has the segments that others need.

    Raises:
        PlanError: If the settings ask for shares that these copies cannot have.
    """
    if not stage:
        memory = job.settings.memory
        if memory.shares not in ("auto", "even"):
            raise PlanError("memory.shares needs memory.zero of 1 to 3: set it, or leave them out")
        return plan
    model = job.functional(plan.microbatch_size)
    params = jax.eval_shape(lambda tree: tree, model.trained)
    shares = _shares(job, plan, cluster, stage) if could_share(plan) else ()
    common = math.gcd(*shares) if shares else 1
    shares = tuple(n // max(common, 1) for n in shares)
    shares = () if len(set(shares)) <= 1 else shares
    own = ownership(
        Optimizer(job.optimizer), params, shares or (1,) * len(plan.replicas), _clip_norm(job)
    )
    names = leaf_names(model.trained)
    whole = tuple(n for n, owner in zip(names, own.shares.owners, strict=True) if owner is not None)
    optimizer_bytes = job.optimizer_bytes(plan.microbatch_size)
    largest = max(shares, default=1) / sum(shares or (1,) * len(plan.replicas))
    placement = placement_for(
        plan.parameters,
        plan.axis_sizes,
        plan.sums,
        optimizer_bytes * largest,
        [cluster.devices[d.rank] for d in plan.devices],
    ).model_copy(update={"zero": 1, "shares": shares, "whole": whole})
    said = _words(own, whole, names, shares, stage)
    if job.settings.optimizer.num_apply_groups > 1:
        said.append("optimizer.num_apply_groups: not used, a copy updates only what it owns")
    return plan.replaced(placement=placement, reasons=(*plan.reasons, *said))


def _clip_norm(job: TracedJob) -> float | None:
    communication = job.settings.communication
    return None if communication.clip == "before" else communication.clip_norm


def could_share(plan: Plan) -> bool:
    """Whether there are copies of one device, all of whose gradients travel whole."""
    return len(plan.replicas) > 1 and not plan.axes and not plan.sums.sparse


def stages_to_try(job: TracedJob, plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The stage of ZeRO that the settings ask for, or those whose state the described memory holds.

    Where no stage does, it is the last. Unlike devices have at least the first; over the host there
    is no third.

    Args:
        job: That is planned.
        plan: Of it, with the state whole on every copy.
        cluster: Its devices.

    Raises:
        PlanError: If unlike devices are to update everything each.
    """
    asked, kinds = job.settings.memory.zero, [device.kind for device in plan.devices]
    least = int(are_unlike(kinds))
    if least and asked == 0:
        raise PlanError(
            f"memory.zero=0: {in_words(kinds)} would each round the whole update in its own way, "
            "and the copies of the model drift apart: leave it out or set it to 1"
        )
    if asked is not None or not could_share(plan):
        return (asked or least,)
    sizes = [cluster.devices[d.rank].memory_bytes for d in plan.devices]
    known = [own for own in sizes if own is not None]
    if len(known) < len(sizes):  # the others may have any share
        fixed, _ = _state_bytes(job, plan, 0)
        return (max(least, int(any(fixed > own for own in known))),)
    stages = STAGES[least:] if plan.sums.over == "device" else STAGES[least:-1]
    found = []
    for stage in stages:
        fixed, shared = _state_bytes(job, plan, stage)
        if all(fixed <= own for own in known) and shared <= sum(own - fixed for own in known):
            found.append(stage)
    return tuple(found) or stages[-1:]


def _state_bytes(job: TracedJob, plan: Plan, stage: int) -> tuple[int, float]:
    """Bytes of the state that each copy has whole, and of what all copies have together."""
    each, parts = plan.parameter_bytes, plan.sums.num_parts
    state = job.optimizer_bytes(plan.microbatch_size)
    if stage < 2:  # parameters, gradients and sums
        fixed = each * (2 + parts)
        return (fixed, state) if stage else (fixed + int(state), 0)
    [most, *_] = sorted(param_bytes(job, plan.microbatch_size), reverse=True)
    # The totals of sums are of one word, those of a segment of all, and its parameters are whole.
    if stage == 2:
        return each + most * parts, each + state
    return most * (1 + parts), 2 * each + state


def _shares(job: TracedJob, plan: Plan, cluster: Cluster, stage: int) -> tuple[int, ...]:
    memory, num = job.settings.memory, len(plan.replicas)
    if memory.shares == "even":
        return (1,) * num
    if memory.shares != "auto":
        return tuple(memory.shares)
    devices = [cluster.devices[r.devices[0]] for r in plan.replicas]
    speeds = [described_speed(device) for device in devices]
    total = _GRANULES_OF_A_COPY * num
    fixed, state = _state_bytes(job, plan, stage)
    own = [
        SplitDevice(
            name=f"device {replica.devices[0]} ({device.label})",
            unit_seconds=1 / speed if all(speeds) else 1.0,
            memory_bytes=device.memory_bytes,
            fixed_bytes=fixed,
        )
        for replica, device, speed in zip(plan.replicas, devices, speeds, strict=True)
    ]
    return best_sizes(total, own, own_bytes=state / total)


def _words(
    own: Ownership, whole: Sequence[str], names: Sequence[str], shares: Sequence[int], stage: int
) -> list[str]:
    ratio = ":".join(map(str, shares)) if shares else "even shares"
    what = ("", ", the sums of gradients", ", the sums of gradients and the parameters")[stage - 1]
    said = [f"ZeRO stage {stage}: each copy has its share of the optimizer's state{what}, {ratio}"]
    domains = own.update.domain_of[: own.num_params]
    if len(names) > 1 and len(set(domains)) == 1 and whole:
        said.append(
            "the optimizer ties all parameters together, as one that branches over all of them "
            "does, so one copy owns all of its state"
        )
    elif whole:
        shown = ", ".join(whole[:4]) + (f" and {len(whole) - 4} more" if len(whole) > 4 else "")
        said.append(f"the optimizer treats these as a whole, each has one owner: {shown}")
    return said
