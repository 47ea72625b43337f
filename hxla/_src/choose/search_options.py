"""Options of a search for plans, and its result."""

import dataclasses
from collections.abc import Mapping

from ..plan.plan import Plan
from ..schedule.replay import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        microbatch_sizes: Sizes to try; empty: those of the profile, or some by the cluster.
        num_segments: Most segments of the chain without a profile; None: 8 if they are measured,
            otherwise two for each device, from 8 to 96.
        seconds: Time budget of the search.
        most_seconds: The budget grows to half a step of the plan, up to this limit.
        max_stages: Most stages of a plan; None: any number.
        tensors: Sizes of tensor-parallel groups to try besides 1, also over links that are not
            described; empty: powers of two up to the equal devices of a node.
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
class PlanResult:
    """A plan, and its replay by the search.

    Attributes:
        timelines: By the first replica of each sort, its number to its timeline; empty: no search.
    """

    plan: Plan
    timelines: Mapping[int, Timeline] = dataclasses.field(default_factory=dict)
