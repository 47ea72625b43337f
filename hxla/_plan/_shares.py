"""Whole units in a stated ratio."""

import itertools
from collections.abc import Sequence

import numpy as np

from .._core._errors import PlanError


def in_shares(num_units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Sizes as near to a stated ratio as whole units are, at least one each.

    Largest remainders (Hamilton): the sizes are the shares rounded down, and the units that are
    left go to the largest remainders, the first device first.

    Args:
        num_units: Units to hand out.
        shares: Of each device, positive, in any unit.

    Raises:
        PlanError: If there are fewer units than devices.
    """
    n = len(shares)
    if num_units < n:
        raise PlanError(
            f"{num_units} units cannot be split over {n} devices with at least one each: use "
            "fewer devices, or leave this out of the split"
        )
    exact = np.array(shares) * (num_units / float(sum(shares)))
    sizes = np.maximum(np.floor(exact + 1e-9), 1).astype(int)
    while sizes.sum() > num_units:  # those that were raised to one
        sizes[np.argmax(np.where(sizes > 1, sizes - exact, -np.inf))] -= 1
    order = np.argsort(-np.round(exact - sizes, 9), kind="stable")
    for d in itertools.islice(itertools.cycle(order), int(num_units - sizes.sum())):
        sizes[d] += 1
    return tuple(int(size) for size in sizes)
