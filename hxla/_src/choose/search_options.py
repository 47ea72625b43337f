"""What a search of plans is asked, and what it gives."""

import dataclasses
from collections.abc import Mapping

from ..plan.plan import Plan
from ..schedule.replay import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What is searched.

    Attributes:
        microbatch_sizes: To try; empty: those of the profile, or some that suit the cluster.
        num_segments: Most segments of the chain, where no profile says; None: 8 if they are
            measured, otherwise two for each device, from 8 to 96.
        seconds: Time budget of the search.
        most_seconds: Up to which it may take as long as half a step of the plan.
        max_stages: Most stages of a plan; None: any number.
        tensors: Sizes of tensor-parallel groups to try besides 1, also over links that are not
            described; empty: powers of two that a node has like devices for.
        recompute: Whether to try plans that run forwards again.
    """

    microbatch_sizes: tuple[int, ...] = ()
    num_segments: int | None = None
    seconds: float = 10.0
    most_seconds: float = 40.0
    max_stages: int | None = None
    tensors: tuple[int, ...] = ()
    recompute: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan, and what a search knows of it.

    Attributes:
        timelines: Its replayed step, of the first copy of the model of each sort.
    """

    plan: Plan
    timelines: Mapping[int, Timeline] = dataclasses.field(default_factory=dict)
