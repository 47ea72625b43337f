"""What only training on the devices can tell of a plan: a session does it for those who plan."""

import dataclasses
from typing import Protocol

import jax

from ..job.context import JobContext
from ..plan.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedSizes:
    """What a trial told of a plan's sizes.

    Attributes:
        shares: A ratio that is clearly better; empty: the plan's own are as good as any.
        reason: What to say of it in the plan.
    """

    shares: tuple[int, ...]
    reason: str


class Measure(Protocol):
    """Trains some steps of a plan on its devices; every process of the job takes part."""

    def microbatch_seconds(
        self, job: JobContext, plan: Plan, devices: tuple[jax.Device, ...]
    ) -> tuple[float, ...]:
        """Seconds of a microbatch on each replica."""
        ...

    def split_sizes(
        self, job: JobContext, plan: Plan, devices: tuple[jax.Device, ...]
    ) -> TriedSizes | None:
        """Sizes of a split by how long its devices work.

        Returns:
            The same on every process; None where devices have no clock that tells work from
            waiting.
        """
        ...
