"""Times of a chain's layers on a device: from a profile, else estimated."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..cluster.cluster import Device, Link, Rate
from ..core.errors import PlanError
from ..profile.products import MatrixProduct
from ..profile.profile import LayerSize, Profile, Setting

BACKWARD_FLOPS = 2.0  # a layer's backward is two products for each of its forward's
# The part of the data sheet's rate that large products reach: on one V100 in the profiles of Sailor
# (SOSP 2025), GPT-Neo-2.7, whose matrices fill all waves. docs/concepts/prediction.md says why
# such figures were chosen.
_SHARE_OF_DATA_SHEET = 0.9
# Seconds of each kernel in a chain of short ones on a V100: NVIDIA, "Getting Started with
# CUDA Graphs", 2019.
_LAUNCH_SECONDS = 3.8e-6
# Other kernels per kernel of a product: the GPTs of benchmarks/gpu_parts, compiled for an H100,
# have 492 beside 219 (124 million parameters) and 174 beside 75.
_FUSED_PER_PRODUCT = 2.25
# Sides of the tiles of products. Operations per loaded number grow with the side; the speed is
# assumed to grow with its square root.
_TILES = (128, 64, 32)


@dataclasses.dataclass(frozen=True, order=True)
class Alternative:
    """A choice that changes the chain itself.

    Attributes:
        tensor: Devices of a tensor-parallel group, all of one kind and in one node.
        recompute: Whether a segment keeps its inputs only and its backward runs the forward again.
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
    """[3, L] Seconds of every layer's forward, backward and update; their origin in words.

    A tensor-parallel group that was not measured takes a share of the time measured on one device.
    The share is an estimate, because smaller products are slower and unsharded work is repeated.
    Its collectives on the node's link are added, half in the forward. Without a rate the group
    shares all work evenly.

    Args:
        alternative: Microbatch size, tensor parallelism, recomputation.
        sizes: Of the layers on one device of the group.
        profile: None: no measured times.
        state_factor: Bytes kept per byte of parameters.
        whole: Sizes of the same layers on a device alone.
        sent_bytes: Per layer, of one device of the group in a forward and backward; empty: none.
        link: Between the devices of the group.

    Raises:
        PlanError: If there are neither times nor a rate.
    """
    size, tensor = alternative.microbatch_size, alternative.tensor
    setting, alone = Setting(device.label, size, tensor), Setting(device.label, size)
    known = profile.times if profile is not None else {}
    times, how = known.get(setting), "measured"
    if times is None and alone in known:
        times, how = known[alone], f"measured alone, shared by {tensor}"
    if times is None:
        seconds, how = _estimated(device, alternative, sizes, state_factor)
    else:
        seconds = np.array([(t.forward, t.backward, t.update) for t in times]).T
    if setting not in known:
        if times is not None:
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
    """[3, L] The time of one device of a group over that of a device alone, by estimate."""
    even = np.full((3, len(sizes)), 1.0 / alternative.tensor)
    arithmetic = sizes[0].arithmetic if sizes else "model"
    if device.product_rate(arithmetic) is None or len(whole) != len(sizes):
        return even
    grouped, alone = (_estimated(device, alternative, s, state_factor)[0] for s in (sizes, whole))
    return np.divide(grouped, alone, out=even, where=alone > 0)


def _estimated(
    device: Device, alternative: Alternative, sizes: Sequence[LayerSize], state_factor: float
) -> tuple[np.ndarray, str]:
    """[3, L] Seconds of products, of other kernels, and of launches."""
    rate = device.product_rate(sizes[0].arithmetic if sizes else "model")
    if rate is None:
        raise PlanError(
            f"device kind {device.label!r}: the profile has no times for {alternative}, "
            "and the mesh file gives no rate to estimate them from: measure with hxla profile, or "
            "add [device.rates] float32 to the mesh file"
        )
    bandwidth = device.memory_bytes_per_second or math.inf
    arithmetics = dict.fromkeys(p.arithmetic for s in sizes for p in s.products)
    rates = {arithmetic: device.product_rate(arithmetic) or rate for arithmetic in arithmetics}
    launch = device.launch_seconds or (_LAUNCH_SECONDS if device.multiprocessors else 0.0)

    def speed(rate: Rate) -> float:
        return rate.flops_per_second * (1.0 if rate.measured else _SHARE_OF_DATA_SHEET)

    def kernel_seconds(products: Sequence[MatrixProduct], flops: float, num_bytes: float) -> float:
        # No kernel takes less time than the launch of the next.
        work = sum(
            max(
                product_flops(p, device.multiprocessors) / speed(rates[p.arithmetic]),
                launch * p.count,
            )
            for p in products
        )
        rest = max(0.0, flops - sum(p.flops for p in products)) / speed(rate)
        fused = launch * _FUSED_PER_PRODUCT * sum(p.count for p in products)
        # Kernels that only move bytes do not overlap with products.
        return work + rest + max(num_bytes / bandwidth, fused)

    rows = []
    for s in sizes:
        backward = tuple(itertools.chain(*(product.backward for product in s.products)))
        moved = s.parameter_bytes + (s.moved_bytes or s.stash_bytes)
        update = (state_factor + 1) * s.parameter_bytes / bandwidth
        rows.append(
            (
                kernel_seconds(s.products, s.flops, moved),
                kernel_seconds(backward, BACKWARD_FLOPS * s.flops, BACKWARD_FLOPS * moved),
                update,
            )
        )
    used = list(dict.fromkeys(rates.values())) or [rate]
    origin = "measured" if all(x.measured for x in used) else "data-sheet"
    names = " and ".join(x.dtype for x in used)
    how = f"not measured, estimated from FLOPs at the {origin} rate of {names}"
    if device.multiprocessors is None and not rate.measured:
        how += (
            "; small products are taken to be as fast as large ones, for the mesh file does not "
            "give its multiprocessors"
        )
    return np.array(rows, float).reshape(-1, 3).T, how


def product_flops(product: MatrixProduct, multiprocessors: int | None) -> float:
    """Operations that a fully busy GPU would compute in the time of a product.

    A product is cut into tiles, each of which one multiprocessor computes; as many as there are run
    at once, and the last of these waves takes as long as a full one. A smaller tile leaves fewer
    multiprocessors idle, and loads more numbers for each operation: of the tiles the fastest is
    taken.

    Args:
        multiprocessors: Of the GPU; None: not known, taken as fully busy.

    References:
        NVIDIA, "Matrix Multiplication Background User's Guide", 2023, sections 3.1 and 3.2 (tile
        and wave quantization).
    """
    if multiprocessors is None:
        return product.flops

    def by_tile(side: int) -> float:
        # The tile of a narrow matrix is cut in steps of the least tile.
        rows, columns = (min(side, _up(n, _TILES[-1])) for n in (product.rows, product.columns))
        tiles = math.ceil(product.rows / rows) * math.ceil(product.columns / columns)
        waves = math.ceil(product.copies * tiles / multiprocessors)
        work = 2.0 * rows * columns * product.depth * multiprocessors * waves
        return work / math.sqrt(side / _TILES[0])

    return product.count * min(map(by_tile, _TILES))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
