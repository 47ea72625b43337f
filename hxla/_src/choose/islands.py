"""Which replicas are an island, as the settings say, and when to ask for islands."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

from ..cluster.cluster import Cluster
from ..core.config import Config, IslandsConfig
from ..core.errors import ConfigError, PlanError
from ..core.format import span
from ..launch.channel import own_member
from ..plan.parts import Islands
from ..plan.plan import Plan
from ..profile.profile import Profile
from .memory_model import travel_of
from .proposals import ChainWork, Proposal, propose


def settings_of_islands(settings: Config) -> Config:
    """The settings, with the whole state on each replica where there are islands."""
    if settings.islands.every is None or settings.memory.zero is not None:
        return settings
    memory = settings.memory.model_copy(update={"zero": 0})
    return settings.model_copy(update={"memory": memory})


def with_islands(plan: Plan, settings: IslandsConfig, cluster: Cluster) -> Plan:
    """The plan with the islands of the settings, if they ask for any.

    Raises:
        ConfigError: If there is one replica, the replicas of a node are not consecutive, or there
            are settings of islands and no period.
        PlanError: If the plan cannot run in islands, with every fault.
    """
    if settings.every is None:
        if settings.model_fields_set - {"every"}:
            raise ConfigError("islands: there are none without islands.every: set it, or no other")
        return plan
    num = len(plan.replicas)
    if num < 2:
        raise ConfigError(
            "islands.every: one replica is one island, and has no other to meet: use more devices, "
            "or leave islands out"
        )
    sizes = settings.replicas
    if isinstance(sizes, str):
        nodes = [
            tuple(sorted({cluster.devices[rank].node for rank in replica.devices}))
            for replica in plan.replicas
        ]
        groups = [(node, len([*each])) for node, each in itertools.groupby(nodes)]
        if len(groups) > len({node for node, _ in groups}):
            raise ConfigError(
                "islands.replicas: the replicas of a node are not consecutive: give the number of "
                "replicas of each island, such as [2, 1]"
            )
        sizes = [size for _, size in groups] if len(groups) > 1 else [1] * num
    islands = Islands(
        every=settings.every,
        replicas=tuple(sizes),
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
    )
    return plan.replaced(islands=islands)


_MOST_OF_STEP = 0.05  # that meetings take
_MOST_STEPS = 500  # between two meetings, as in DiLoCo
_LEAST_GAIN = 1.25  # of a step over the plan's
_LEAST_SUMS = 0.2  # of a step, if all devices are in the plan
_MOST_SECONDS = 2.0  # for the search of the note
_KEPT = 1  # float32 for each parameter: that of the last meeting


def note_of_islands(
    plan: Plan,
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    complete: Callable[[Proposal], Plan],
    merges: Iterable[str],
    *,
    state_bytes: float,
    seconds: float,
) -> str:
    """A line about islands where the network makes a searched plan slow; else empty.

    Args:
        complete: Makes a plan of replicas of one device each.
        merges: See `Graph.merges`.
        state_bytes: Bytes of the optimizer's state for each byte of parameters.
        seconds: Time budget of a search.
    """
    known, num = plan.prediction, len(cluster.devices)
    num_nodes = len({device.node for device in cluster.devices})
    if known is None or not known.step_seconds or num_nodes < 2:
        return ""
    if set(merges) - {"same"} or plan.precision.loss_scale or own_member() is not None:
        return ""  # islands do not go with these
    sums = max((device.reduction_seconds for device in known.devices), default=0.0)
    if len(plan.devices) == num and sums < _LEAST_SUMS * known.step_seconds:
        return ""
    apart = dataclasses.replace(
        work,
        sizes={key: layers for key, layers in work.sizes.items() if key[1] == 1},
        state_factor=work.state_factor + _KEPT,
        reduce_factor=0.0,
    )
    times = None if profile is None else dataclasses.replace(profile, reductions={})
    try:
        proposal, _ = propose(
            apart,
            cluster,
            times,
            max_stages=1,
            recompute=(False,),
            all_devices=True,
            time_budget_seconds=min(seconds, _MOST_SECONDS),
        )
    except PlanError:  # they do not fit
        return ""
    step = proposal.prediction.step_seconds
    ring = travel_of(complete(proposal), cluster, 1).all_copies / (1 - 1 / num)
    meeting = 2 * (1 + state_bytes) * ring * (1 - 1 / num_nodes)
    every = min(10 * max(1, math.ceil(meeting / (_MOST_OF_STEP * step) / 10)), _MOST_STEPS)
    each = step + meeting / every
    if not meeting or _LEAST_GAIN * each > known.step_seconds:
        return ""
    return (
        f"islands.every = {every} with mesh={{'data': {num}}}: nodes that train apart for {every} "
        f"steps would take about {span(each)} a step on all {num} devices, the meeting of "
        f"{span(meeting)} included; other bits, and often a little more loss"
    )
