"""What a GPU's backend tells of it that `jax.Device` does not document."""

import jax

_GPUS = ("gpu", "cuda", "rocm")


def multiprocessors(device: jax.Device) -> int | None:
    """The streaming multiprocessors of a GPU; None for others, and where the backend does not tell.

    Args:
        device: Of any backend.
    """
    # An attribute that backends of GPUs set; on a TPU it counts something else.
    return getattr(device, "core_count", None) if device.platform in _GPUS else None
