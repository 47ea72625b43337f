"""Where the optimizer's state is: whole on every copy of the model, or shared out between them."""

import math
from collections.abc import Sequence

import jax

from .._cluster._cluster import Cluster
from .._core._config import MemoryConfig
from .._core._errors import PlanError
from .._model._functional import leaf_names
from .._model._optimizer import Optimizer
from .._plan._ownership import Ownership, ownership
from .._plan._plan import Plan
from .._planner._complete import placement_for
from .._planner._inner_split import described_speed
from .._planner._split_sizes import SplitDevice, best_sizes
from ._traced_job import TracedJob

_GRANULES_OF_A_COPY = 12  # shares are as fine as a twelfth of an even one


def with_shared_state(job: TracedJob, plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the stage of ZeRO that the settings ask for, or that the memory asks for.

    Args:
        job: That is planned.
        plan: Of it, with the state whole on every copy.
        cluster: Its devices.

    Raises:
        PlanError: If the settings ask for shares that these copies cannot have.
    """
    memory = job.settings.memory
    shares_it = bool(memory.zero)  # segments of the microbatch, which stages 2 and 3 need, follow
    if memory.zero is None:
        shares_it = _could_share(plan) and not _fits_whole(job, plan, cluster)
    if not shares_it:
        if memory.shares not in ("auto", "even"):
            raise PlanError("memory.shares needs memory.zero of 1 to 3: set it, or leave them out")
        return plan
    model = job.functional(plan.microbatch_size)
    params = jax.eval_shape(lambda tree: tree, model.trained)
    shares = _shares(job, plan, cluster, memory) if _could_share(plan) else ()
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
    said = _words(own, whole, names, shares, memory.zero or 1)
    if job.settings.optimizer.num_apply_groups > 1:
        said.append("optimizer.num_apply_groups: not used, a copy updates only what it owns")
    return plan.replaced(placement=placement, reasons=(*plan.reasons, *said))


def _clip_norm(job: TracedJob) -> float | None:
    communication = job.settings.communication
    return None if communication.clip == "before" else communication.clip_norm


def _could_share(plan: Plan) -> bool:
    return len(plan.replicas) > 1 and not plan.axes and not plan.sums.sparse


def _fits_whole(job: TracedJob, plan: Plan, cluster: Cluster) -> bool:
    """Whether every device holds the parameters, their sums and gradients, and the whole state."""
    known = [cluster.devices[d.rank].memory_bytes for d in plan.devices]
    state = job.optimizer_bytes(plan.microbatch_size)
    needed = plan.parameter_bytes * (2 + plan.sums.num_parts) + state
    return all(needed <= own for own in known if own is not None)


def _shares(job: TracedJob, plan: Plan, cluster: Cluster, memory: MemoryConfig) -> tuple[int, ...]:
    num = len(plan.replicas)
    if memory.shares == "even":
        return (1,) * num
    if memory.shares != "auto":
        return tuple(memory.shares)
    devices = [cluster.devices[r.devices[0]] for r in plan.replicas]
    speeds = [described_speed(device) for device in devices]
    total = _GRANULES_OF_A_COPY * num
    stage, each = memory.zero or 1, plan.parameter_bytes
    # Parameters, gradients and sums, as far as they are whole; the totals of sums are of one word.
    fixed = {1: each * (2 + plan.sums.num_parts), 2: each, 3: 0}[stage]
    state = job.optimizer_bytes(plan.microbatch_size) + {1: 0, 2: each, 3: 2 * each}[stage]
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
