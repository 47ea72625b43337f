"""The input of plans: a traced job, the measurements of plans, and the options of a search.

A job's loss and optimizer are traced for one microbatch size. A session implements the
measurements.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from ..cluster.cluster import Cluster
from ..core.config import Config
from ..graph.graph import Graph
from ..model.functional import Functional
from ..plan.ownership import Ownership, TracedUpdate, ownership
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..plan.precision import Precision
from ..profile.profile import Profile
from ..schedule.replay import Timeline

#: Operations of a microbatch over those of its forward: the backward has twice as many.
FLOPS_OF_FORWARD = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A job at one microbatch size.

    Attributes:
        input_bytes: The bytes of a microbatch.
        optimizer_bytes: The bytes of the optimizer's state for the whole model.
        trace_update: Traces the optimizer's update of the whole model, which takes time.
    """

    settings: Config
    batch_size: int
    microbatch_size: int
    graph: Graph
    model: Functional
    input_bytes: int
    optimizer_bytes: int
    trace_update: Callable[[], TracedUpdate]

    @property
    def arithmetic(self) -> str:
        """The arithmetic of its products, by the names of devices' rates."""
        precision = self.graph.precision
        return (precision if isinstance(precision, Precision) else Precision()).arithmetic

    @property
    def microbatch_flops(self) -> float:
        """Operations of a microbatch, forward and backward."""
        return FLOPS_OF_FORWARD * self.graph.flops

    def device_optimizer_bytes(self, plan: Plan) -> float:
        """Bytes of an unsharded replica's optimizer state on each of its devices."""
        whole = sum(math.prod(x.shape) for x in jax.tree.leaves(self.model.trained))
        shapes = plan.device_shapes
        on_device = sum(math.prod(shapes[p]) for p in self.model.trained_places)
        return self.optimizer_bytes * on_device / max(whole, 1)

    def ownership(self, granules: tuple[int, ...]) -> Ownership:
        """The owner of each update in a group of replicas with these granules."""
        return ownership(self.trace_update(), granules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workloads:
    """A job at every microbatch size.

    Attributes:
        at: Traces the job for a size, once.
    """

    settings: Config
    batch_size: int
    at: Callable[[int], Workload]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedSizes:
    """The result of a trial of a plan's sizes.

    Attributes:
        shares: A clearly better ratio; empty: the plan's ratio is as good as any.
        reason: A line for the plan.
    """

    shares: tuple[int, ...]
    reason: str


class Measure(Protocol):
    """A job on the devices that are here; every process of the job takes part in every call."""

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the job, by rank."""
        ...

    def microbatch_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Seconds of a microbatch on each replica, measured in some steps of training."""
        ...

    def split_sizes(self, plan: Plan) -> TriedSizes | None:
        """Sizes of a split by the seconds of its devices.

        Returns:
            The same on every process; None if devices cannot measure work without waiting.
        """
        ...

    def segment_seconds(
        self, cluster: Cluster, size: int, num_segments: int, sums: SumsForm
    ) -> Mapping[int, np.ndarray]:
        """[2, L] Seconds of the segments' forwards and backwards on each device, by rank."""
        ...

    def profile(
        self, cluster: Cluster, sizes: Sequence[int], num_segments: int, sums: SumsForm
    ) -> Profile:
        """Times of the job's segments, of its training as replicas, and of the links."""
        ...

    def compiled_lack(self, plan: Plan, cluster: Cluster) -> float:
        """The most bytes that a device lacks for the compiled programs and their inputs."""
        ...

    def agree(self, plan: Plan) -> None:
        """Refuse different plans on different processes.

        Raises:
            LaunchError: With every difference.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        microbatch_sizes: Sizes to try; empty: those of the profile, or some by the cluster.
        num_segments: Most segments of the chain without a profile; None: 8 if they are measured,
            otherwise two for each device, from 8 to 96.
        max_stages: Most stages of a plan; None: any number.
        tensors: Sizes of tensor-parallel groups to try besides 1, also over links that are not
            described; empty: powers of two up to the equal devices of a node.
        recompute: Whether to try plans that run forwards again.
    """

    microbatch_sizes: tuple[int, ...] = ()
    num_segments: int | None = None
    max_stages: int | None = None
    tensors: tuple[int, ...] = ()
    recompute: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan, and its replay by the search.

    Attributes:
        timelines: By the first replica of each sort, its number to its timeline; empty: no search.
    """

    plan: Plan
    timelines: Mapping[int, Timeline] = dataclasses.field(default_factory=dict)
