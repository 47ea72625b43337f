"""Times of a chain's layers on a device: measured where a profile has them, else estimated."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from .._cluster._cluster import Device, Link
from .._core._errors import PlanError
from .._profile._profile import LayerSize, Profile, Setting

_BACKWARD_FLOPS = 2.0  # a layer's backward is two products for each of its forward's


@dataclasses.dataclass(frozen=True, order=True)
class Alternative:
    """What changes the chain itself.

    Attributes:
        microbatch_size: Examples.
        tensor: Devices of a tensor-parallel group, all of one kind and in one node.
        recompute: Whether a segment keeps its inputs only and runs forward again in its backward.
    """

    microbatch_size: int
    tensor: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        parts = [f"microbatches of {self.microbatch_size}"]
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}")
        if self.recompute:
            parts.append("recomputed")
        return ", ".join(parts)


def layer_times(
    device: Device,
    alternative: Alternative,
    sizes: Sequence[LayerSize],
    profile: Profile | None,
    *,
    state_factor: float = 1.0,
    sent_bytes: Sequence[float] = (),
    link: Link | None = None,
) -> tuple[np.ndarray, str]:
    """[3, L] Seconds of every layer's forward, backward and update; how they are known, in words.

    A tensor-parallel group that was not measured takes its share of what one device was measured
    to take, and what its collectives take on the node's link, half of it in the forward.

    Args:
        device: Of the group.
        alternative: Microbatch size, tensor parallelism, recomputation.
        sizes: Of the layers on one device of the group.
        profile: Measured times, if there are any.
        state_factor: Bytes kept per byte of parameters.
        sent_bytes: Per layer, what one device of the group sends in a forward and backward; empty:
            nothing.
        link: Between the devices of the group.

    Raises:
        PlanError: If there are neither times nor a rate.

    References:
        Williams et al., "Roofline", CACM 2009.
    """
    size, tensor = alternative.microbatch_size, alternative.tensor
    own, alone = Setting(device.label, size, tensor), Setting(device.label, size)
    known = profile.times if profile is not None else {}
    found, how = known.get(own), "measured"
    if found is None and alone in known:
        found, how = known[alone], f"measured alone, shared by {tensor}"
    if found is None:
        seconds, how = _roofline(device, alternative, sizes, state_factor)
    else:
        seconds = np.array([(t.forward, t.backward, t.update) for t in found]).T
    if own not in known:
        seconds /= tensor if found is not None else 1
        if link is not None and len(sent_bytes):
            seconds[:2] += np.array(sent_bytes) / 2 / link.bytes_per_second
    if alternative.recompute:
        seconds[1] += seconds[0]
    return seconds, f"{device.label}: {how}"


def _roofline(
    device: Device, alternative: Alternative, sizes: Sequence[LayerSize], state_factor: float
) -> tuple[np.ndarray, str]:
    rate = device.rate("tensorfloat32") or device.rate("float32")
    if rate is None:
        raise PlanError(
            f"device kind {device.label!r}: the profile has no times for {alternative}, "
            "and the mesh file gives no rate to estimate them from: measure with hxla profile, or "
            "add [device.rates] float32 to the mesh file"
        )
    bandwidth = device.memory_bytes_per_second or math.inf
    rows = [(s.flops, s.parameter_bytes, s.stash_bytes) for s in sizes]
    flops, parameter_bytes, stash_bytes = np.array(rows, float).T
    forward = np.maximum(flops / rate.flops_per_second, (parameter_bytes + stash_bytes) / bandwidth)
    update = (state_factor + 1) * parameter_bytes / bandwidth
    origin = "measured" if rate.measured else "data-sheet"
    how = f"not measured, estimated from FLOPs at the {origin} rate of {rate.dtype}"
    return np.stack([forward, _BACKWARD_FLOPS * forward, update]), how
