"""Times of a chain's layers on a device: measured where a profile has them, else estimated."""

import dataclasses
import math
from collections.abc import Sequence

from .._cluster._cluster import Device, Link
from .._core._errors import PlanError
from .._profile._profile import LayerSize, LayerTime, Profile, Setting

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
    sent_bytes: Sequence[float] | None = None,
    link: Link | None = None,
) -> tuple[tuple[LayerTime, ...], str]:
    """Times of every layer, and how they are known, in words.

    A tensor-parallel group that was not measured takes its share of what one device was measured
    to take, and what its collectives take on the node's link, half of it in the forward.

    Args:
        device: Of the group.
        alternative: Microbatch size, tensor parallelism, recomputation.
        sizes: Of the layers on one device of the group.
        profile: Measured times, if there are any.
        state_factor: Bytes kept per byte of parameters.
        sent_bytes: Per layer, what one device of the group sends in a forward and backward; None:
            nothing.
        link: Between the devices of the group.

    Raises:
        PlanError: If there are neither times nor a rate.

    References:
        Williams et al., "Roofline", CACM 2009.
    """
    size, tensor = alternative.microbatch_size, alternative.tensor
    own = Setting(device.label, size, tensor)
    alone = Setting(device.label, size)
    known = profile.times if profile is not None else {}
    if own in known:
        times, how = known[own], "measured"
    else:
        if alone in known:
            times = tuple(_shared(t, tensor) for t in known[alone])
            how = f"measured alone, shared by {tensor}"
        else:
            times, how = _roofline(device, alternative, sizes, state_factor)
        times = tuple(
            _with_transfers(t, sent, link)
            for t, sent in zip(times, sent_bytes or [0.0] * len(times), strict=True)
        )
    if alternative.recompute:
        times = tuple(dataclasses.replace(t, backward=t.backward + t.forward) for t in times)
    return times, f"{device.label}: {how}"


def _shared(time: LayerTime, num: int) -> LayerTime:
    return LayerTime(
        forward=time.forward / num,
        backward=time.backward / num,
        update=time.update / num,
        measured=False,
    )


def _with_transfers(time: LayerTime, sent_bytes: float, link: Link | None) -> LayerTime:
    if link is None or not sent_bytes:
        return time
    half = sent_bytes / 2 / link.bytes_per_second
    return dataclasses.replace(
        time, forward=time.forward + half, backward=time.backward + half, measured=False
    )


def _roofline(
    device: Device, alternative: Alternative, sizes: Sequence[LayerSize], state_factor: float
) -> tuple[tuple[LayerTime, ...], str]:
    rate = device.rate("tensorfloat32") or device.rate("float32")
    if rate is None:
        raise PlanError(
            f"device kind {device.label!r}: the profile has no times for {alternative}, "
            "and the mesh file gives no rate to estimate them from: measure with hxla profile, or "
            "add [device.rates] float32 to the mesh file"
        )
    bandwidth = device.memory_bytes_per_second or math.inf

    def of(layer: LayerSize) -> LayerTime:
        moved = layer.parameter_bytes + layer.stash_bytes
        forward = max(layer.flops / rate.flops_per_second, moved / bandwidth)
        return LayerTime(
            forward=forward,
            backward=_BACKWARD_FLOPS * forward,
            update=(state_factor + 1) * layer.parameter_bytes / bandwidth,
            measured=False,
        )

    origin = "measured" if rate.measured else "data-sheet"
    how = f"not measured, estimated from FLOPs at the {origin} rate of {rate.dtype}"
    return tuple(of(layer) for layer in sizes), how
