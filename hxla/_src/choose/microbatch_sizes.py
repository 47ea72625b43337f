"""Microbatch sizes: the default by the batch, candidates to measure, and the best."""

import math
from collections.abc import Mapping, Sequence

from ..core.errors import PlanError
from .counts import best_counts, finish_seconds

_CANDIDATES = 4
_FEWEST_MICROBATCHES = 8


def default_sizes(batch_size: int, num_replicas: int) -> tuple[int, ...]:
    """Default sizes; a job takes the first with which a plan fits.

    They leave at least eight microbatches, and no fewer than the examples of a microbatch, so that
    larger batches can be shared by more devices. No clock decides, nor the number of devices up to
    that many: the same call gives the same bits elsewhere.

    Args:
        batch_size: Examples of a global batch.
        num_replicas: Replicas that share the batch.

    Returns:
        Divisors of the batch, the largest first.
    """
    divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    few = [b for b in divisors if batch_size // b >= max(_FEWEST_MICROBATCHES, b)] or [1]
    return tuple(b for b in reversed(few) if batch_size // b >= num_replicas) or (1,)


def candidate_sizes(batch_size: int, num_devices: int) -> tuple[int, ...]:
    """Divisors of the global batch that give each device enough microbatches to share finely.

    Args:
        batch_size: Examples of a global batch.

    Returns:
        At most four sizes, largest first, spread evenly over the useful divisors. The default size
        is one of them, so that no choice among them is worse than none.

    Raises:
        PlanError: If there are more devices than examples.
    """
    if batch_size < num_devices:
        raise PlanError(
            f"batch_size={batch_size} gives {num_devices} devices less than one example each: "
            "use fewer devices or a larger batch"
        )
    divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    fitting = [b for b in divisors if batch_size // b >= num_devices]
    # Finer than 64 microbatches a device the split gains nothing and each costs a dispatch.
    useful = [b for b in fitting if 4 * num_devices <= batch_size // b <= 64 * num_devices]
    pool = useful or fitting[-1:]
    if num_devices == 1:
        pool = [b for b in fitting if batch_size // b <= 64]
    step = max(1, -(-len(pool) // _CANDIDATES))
    sizes = pool[::-1][::step]
    usual = default_sizes(batch_size, num_devices)[0]
    if usual not in sizes:
        if len(sizes) == _CANDIDATES:
            sizes.remove(min(sizes, key=lambda size: abs(math.log(size / usual))))
        sizes = sorted([*sizes, usual], reverse=True)
    return tuple(sizes)


def best_size(
    batch_size: int, measured: Mapping[int, Sequence[float]]
) -> tuple[int, Mapping[int, float]]:
    """The size whose best integer split is fastest.

    Args:
        batch_size: Examples of a global batch.
        measured: Size to seconds of one microbatch on each device.

    Returns:
        The best size (of those within one per cent the largest) and the predicted seconds of a
        step for each.
    """
    steps = {}
    for size, seconds in measured.items():
        counts = best_counts(batch_size // size, seconds)
        steps[size] = max(finish_seconds(counts, seconds, [0.0] * len(seconds)))
    fastest = min(steps.values())
    return max(size for size, s in steps.items() if s <= 1.01 * fastest), steps
