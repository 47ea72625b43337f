"""Devices that were granted and not taken yet: a grant that is not taken in time lapses."""

import dataclasses
from collections.abc import Sequence

from ._waste import Nums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grant:
    """More devices for a job.

    Attributes:
        name: The job.
        nums: How many more of each kind.
        until_seconds: When it lapses.
    """

    name: str
    nums: Nums
    until_seconds: float


def taken(grants: Sequence[Grant], name: str, at_seconds: float) -> tuple[Grant, ...]:
    """Those that a job takes at a time, all of its own that have not lapsed."""
    return tuple(g for g in grants if g.name == name and at_seconds <= g.until_seconds)


def pending(grants: Sequence[Grant], at_seconds: float) -> tuple[Grant, ...]:
    """Those that still hold their devices; the devices of the others are free again."""
    return tuple(g for g in grants if at_seconds <= g.until_seconds)
