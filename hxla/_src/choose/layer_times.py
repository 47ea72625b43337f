"""Times of a chain's layers on a device: measured where a profile has them, else estimated."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..cluster.cluster import Device, Link, Rate
from ..core.errors import PlanError
from ..profile.products import MatrixProduct
from ..profile.profile import LayerSize, Profile, Setting

_BACKWARD = 2.0  # a layer's backward is two products for each of its forward's
# Of the data sheet's rate, what large products reach: seen on one V100 in the profiles of Sailor
# (SOSP 2025), GPT-Neo-2.7, whose matrices fill all waves. docs/prediction.md says what was chosen
# with which figures in view.
_SHARE_OF_DATA_SHEET = 0.9
# A chain of short kernels goes at so many seconds each on a V100: NVIDIA, "Getting Started with
# CUDA Graphs", 2019.
_LAUNCH_SECONDS = 3.8e-6
# Kernels beside those of products, for each of these: the GPTs of benchmarks/gpu_parts, compiled
# for an H100, have 492 beside 219 (124 million parameters) and 174 beside 75.
_FUSED_PER_PRODUCT = 2.25
# Sides of the tiles of products. Operations per number that is loaded go with the side; the speed
# is taken half way (geometrically) between that and none of it.
_TILES = (128, 64, 32)


@dataclasses.dataclass(frozen=True, order=True)
class Alternative:
    """What changes the chain itself.

    Attributes:
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
    whole: Sequence[LayerSize] = (),
    sent_bytes: Sequence[float] = (),
    link: Link | None = None,
) -> tuple[np.ndarray, str]:
    """[3, L] Seconds of every layer's forward, backward and update; how they are known, in words.

    A tensor-parallel group that was not measured takes of what one device was measured to take the
    share that it does by estimate, for smaller products are slower, and what is not cut each device
    repeats; and what its collectives take on the node's link, half of it in the forward. Without a
    rate to estimate by, it shares all work evenly.

    Args:
        alternative: Microbatch size, tensor parallelism, recomputation.
        sizes: Of the layers on one device of the group.
        profile: Measured times, if there are any.
        state_factor: Bytes kept per byte of parameters.
        whole: Sizes of the same layers on a device alone.
        sent_bytes: Per layer, what one device of the group sends in a forward and backward; empty:
            nothing.
        link: Between the devices of the group.

    Raises:
        PlanError: If there are neither times nor a rate.
    """
    size, tensor = alternative.microbatch_size, alternative.tensor
    own, alone = Setting(device.label, size, tensor), Setting(device.label, size)
    known = profile.times if profile is not None else {}
    found, how = known.get(own), "measured"
    if found is None and alone in known:
        found, how = known[alone], f"measured alone, shared by {tensor}"
    if found is None:
        seconds, how = _estimated(device, alternative, sizes, state_factor)
    else:
        seconds = np.array([(t.forward, t.backward, t.update) for t in found]).T
    if own not in known:
        if found is not None:
            seconds *= _share(device, alternative, sizes, whole, state_factor)
        if link is not None and len(sent_bytes):
            seconds[:2] += np.array(sent_bytes) / 2 / link.bytes_per_second
    if alternative.recompute:
        seconds[1] += seconds[0]
    return seconds, f"{device.label}: {how}"


def _share(
    device: Device,
    alternative: Alternative,
    sizes: Sequence[LayerSize],
    whole: Sequence[LayerSize],
    state_factor: float,
) -> np.ndarray:
    """[3, L] What one device of a group takes of the time of a device alone, by estimate."""
    even = np.full((3, len(sizes)), 1.0 / alternative.tensor)
    arithmetic = sizes[0].arithmetic if sizes else "model"
    if device.product_rate(arithmetic) is None or len(whole) != len(sizes):
        return even
    own, alone = (_estimated(device, alternative, s, state_factor)[0] for s in (sizes, whole))
    return np.divide(own, alone, out=even, where=alone > 0)


def _estimated(
    device: Device, alternative: Alternative, sizes: Sequence[LayerSize], state_factor: float
) -> tuple[np.ndarray, str]:
    """[3, L] Seconds of products, of what stands between them, and of launching both."""
    rate = device.product_rate(sizes[0].arithmetic if sizes else "model")
    if rate is None:
        raise PlanError(
            f"device kind {device.label!r}: the profile has no times for {alternative}, "
            "and the mesh file gives no rate to estimate them from: measure with hxla profile, or "
            "add [device.rates] float32 to the mesh file"
        )
    bandwidth = device.memory_bytes_per_second or math.inf
    said = dict.fromkeys(p.arithmetic for s in sizes for p in s.products)
    rates = {arithmetic: device.product_rate(arithmetic) or rate for arithmetic in said}
    launch = device.launch_seconds or (_LAUNCH_SECONDS if device.multiprocessors else 0.0)

    def speed(own: Rate) -> float:
        return own.flops_per_second * (1.0 if own.measured else _SHARE_OF_DATA_SHEET)

    def own(products: Sequence[MatrixProduct], flops: float, num_bytes: float) -> float:
        # No kernel takes less than it takes to launch the next.
        work = sum(
            max(
                product_flops(p, device.multiprocessors) / speed(rates[p.arithmetic]),
                launch * p.count,
            )
            for p in products
        )
        rest = max(0.0, flops - sum(p.flops for p in products)) / speed(rate)
        fused = launch * _FUSED_PER_PRODUCT * sum(p.count for p in products)
        # What only moves bytes does not run beside products: one operation follows another.
        return work + rest + max(num_bytes / bandwidth, fused)

    rows = []
    for s in sizes:
        backward = tuple(itertools.chain(*(product.backward for product in s.products)))
        moved = s.parameter_bytes + (s.moved_bytes or s.stash_bytes)
        update = (state_factor + 1) * s.parameter_bytes / bandwidth
        rows.append(
            (
                own(s.products, s.flops, moved),
                own(backward, _BACKWARD * s.flops, _BACKWARD * moved),
                update,
            )
        )
    used = list(dict.fromkeys(rates.values())) or [rate]
    origin = "measured" if all(own.measured for own in used) else "data-sheet"
    names = " and ".join(own.dtype for own in used)
    how = f"not measured, estimated from FLOPs at the {origin} rate of {names}"
    if device.multiprocessors is None and not rate.measured:
        how += (
            "; small products are taken to be as fast as large ones, for the mesh file does not "
            "give its multiprocessors"
        )
    return np.array(rows, float).reshape(-1, 3).T, how


def product_flops(product: MatrixProduct, multiprocessors: int | None) -> float:
    """What a GPU could compute in the time of a product, if all of it were always at work.

    A product is cut into tiles, each of which one multiprocessor computes; as many as there are run
    at once, and the last of these waves takes as long as a full one. A smaller tile leaves fewer
    multiprocessors idle, and loads more numbers for each operation: of the tiles the fastest is
    taken.

    Args:
        multiprocessors: Of the GPU; None: not known, it is always at work.

    References:
        NVIDIA, "Matrix Multiplication Background User's Guide", 2023, sections 3.1 and 3.2 (tile
        and wave quantization).
    """
    if multiprocessors is None:
        return product.flops

    def of(side: int) -> float:
        # The edge of a narrow matrix is cut off in steps of the least tile.
        rows, columns = (min(side, _up(n, _TILES[-1])) for n in (product.rows, product.columns))
        tiles = math.ceil(product.rows / rows) * math.ceil(product.columns / columns)
        waves = math.ceil(product.copies * tiles / multiprocessors)
        work = 2.0 * rows * columns * product.depth * multiprocessors * waves
        return work / math.sqrt(side / _TILES[0])

    return product.count * min(map(of, _TILES))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
