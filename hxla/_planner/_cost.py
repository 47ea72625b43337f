"""What collectives take over a ring.

A link is a function from bytes to seconds, so a line (`latency + bytes / bandwidth`) and a measured
curve are the same thing here.
"""

from collections.abc import Callable

LinkSeconds = Callable[[float], float]  # of a message of so many bytes


def ring_all_reduce_seconds(num_bytes: float, num_devices: int, link: LinkSeconds) -> float:
    """All-reduce over a ring: `2 (n - 1)` steps of one n-th of the bytes.

    Args:
        num_bytes: Of the array that every device holds.
        num_devices: On the ring.
        link: Of the ring's slowest pair.

    References:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009, section 3;
        NCCL computes its bus bandwidth with the same factor 2 (n - 1) / n.
    """
    return 2 * all_gather_seconds(num_bytes, num_devices, link)


def all_gather_seconds(num_bytes: float, num_devices: int, link: LinkSeconds) -> float:
    """All-gather over a ring, or a reduce-scatter: `n - 1` steps of one n-th of the bytes.

    Args:
        num_bytes: Of the whole array.
        num_devices: On the ring.
        link: Of the ring's slowest pair.
    """
    if num_devices <= 1 or num_bytes == 0:
        return 0.0
    return (num_devices - 1) * link(num_bytes / num_devices)
