"""Measurements of plans on a job's devices; a session implements them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from ..cluster.cluster import Cluster
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..profile.profile import Profile


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
