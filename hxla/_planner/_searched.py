"""What a search finds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._core._errors import PlanError
from ._chain import Staging


class NothingFitsError(PlanError):
    """No alternative that was searched has a plan; finer ones may have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A plan and where it comes from.

    Attributes:
        alternative: Key of the chain.
        staging: The plan; its bound is that of its own chain.
    """

    alternative: Any
    staging: Staging


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search found.

    Attributes:
        ranked: Plans, the fastest first: at most one for each alternative and number of stages, and
            none of those that were seen early to be no better.
        bound_seconds: No plan of any alternative is faster.
        exhausted: Whether time ran out: the plans and the bound hold, but more time may better
            them, and another run may find others.
        infeasible: Alternatives that no plan fits, and why.
    """

    ranked: tuple[Found, ...]
    bound_seconds: float
    exhausted: bool
    infeasible: Mapping[Any, str]

    @property
    def gap(self) -> float:
        """Certified distance from the optimum: the best plan's step over the bound, minus one."""
        return self.ranked[0].staging.step_seconds / self.bound_seconds - 1
