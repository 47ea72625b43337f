"""Which replicas are an island, as the settings say."""

import itertools

from ..cluster.cluster import Cluster
from ..core.config import Config, IslandsConfig
from ..core.errors import ConfigError
from ..plan.parts import Islands
from ..plan.plan import Plan


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
