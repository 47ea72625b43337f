"""Whale's own load balance, as published: the reference that the exact planners are held to."""

import math
from collections.abc import Sequence

import numpy as np

from hxla import PlanError
from support.inside.choose import Chain, ReplicaSort, SplitDevice, Staging, step_seconds, tables


def whale_counts(
    num_microbatches: int,
    seconds: Sequence[float],
    microbatch_bytes: Sequence[float],
    fixed_bytes: Sequence[float],
    limit_bytes: Sequence[float],
) -> tuple[int, ...]:
    """Whale's Algorithm 1, memory-constraint load balancing, in units of a microbatch.

    From the paper: load ratios proportional to speed; devices whose memory utilisation exceeds 1
    are out of memory, the others free; while there are both, load is shifted from the *peak* (the
    device out of memory with the highest memory utilisation) to the *valley* (the free device with
    the lowest computing utilisation, then the lowest memory utilisation); a peak that fits leaves
    the first list, a valley that can take no more leaves the second.

    Where the paper is silent: a shift moves one microbatch and fails if the valley would no longer
    fit; ratios are rounded to whole microbatches by largest remainder; ties go to the device that
    comes first; speed is one over the measured seconds of a microbatch, not peak FLOPS; memory has
    a part that does not depend on the load. It looks at time only where memory forces a shift, so
    the counts are not the fastest that fit: `balanced_counts` gives those.

    Args:
        num_microbatches: Microbatches to hand out.
        seconds: Of one microbatch on each device.
        microbatch_bytes: Memory of one microbatch on each device.
        fixed_bytes: Memory that does not depend on the count.
        limit_bytes: Memory of each device.

    Returns:
        One count per device, summing to `num_microbatches`.

    Raises:
        PlanError: If devices are left out of memory: which, and the bytes they lack.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.3.1 and Algorithm 1.
    """
    _check(
        num_microbatches,
        seconds=seconds,
        microbatch_bytes=microbatch_bytes,
        fixed_bytes=fixed_bytes,
        limit_bytes=limit_bytes,
    )
    speed = 1 / np.array(seconds)
    share = num_microbatches * speed / speed.sum()
    counts = np.floor(share).astype(int)
    for d in np.argsort(counts - share, kind="stable")[: num_microbatches - counts.sum()]:
        counts[d] += 1

    def memory_utilisation(d: int, count: int) -> float:
        return (fixed_bytes[d] + count * microbatch_bytes[d]) / limit_bytes[d]

    devices = range(len(seconds))
    full = [d for d in devices if memory_utilisation(d, counts[d]) > 1]
    free = [d for d in devices if d not in full]
    while full and free:
        peak = max(full, key=lambda d: memory_utilisation(d, counts[d]))
        valley = min(free, key=lambda d: (counts[d] * seconds[d], memory_utilisation(d, counts[d])))
        if counts[peak] == 0:
            break
        if memory_utilisation(valley, counts[valley] + 1) > 1:
            free.remove(valley)
            continue
        counts[peak] -= 1
        counts[valley] += 1
        if memory_utilisation(peak, counts[peak]) <= 1:
            full.remove(peak)
    if full:
        lacking = "; ".join(
            f"device {d} lacks "
            f"{fixed_bytes[d] + counts[d] * microbatch_bytes[d] - limit_bytes[d]:,.0f} bytes"
            for d in full
        )
        raise PlanError(
            f"{num_microbatches} microbatches do not fit: {lacking}, and no other device can take "
            "more. Use a smaller microbatch_size or batch_size"
        )
    return tuple(int(c) for c in counts)


def whale_sizes(
    num_units: int,
    devices: Sequence[SplitDevice],
    *,
    padded_bytes: float = 0.0,
    own_bytes: float = 0.0,
) -> tuple[int, ...]:
    """Whale's Algorithm 1 for a `split` TaskGraph, in units of the split.

    From the paper: a `split` is balanced by uneven sharding, its load ratios those of Algorithm 1.
    Its memory is a TaskGraph's bytes times the load ratio, so padding, which the paper does not
    speak of, is counted as if each device had only its own part; what then does not fit with the
    padding is out of memory.

    Args:
        num_units: Units to hand out.
        devices: That share them.
        padded_bytes: See `best_sizes`.
        own_bytes: Likewise.

    Raises:
        PlanError: If devices are left out of memory.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.3.1 and Algorithm 1.
    """
    limits = [1e30 if d.memory_bytes is None else d.memory_bytes for d in devices]
    sizes = whale_counts(
        num_units,
        [d.unit_seconds for d in devices],
        [padded_bytes + own_bytes] * len(devices),
        [d.fixed_bytes for d in devices],
        limits,
    )
    for device, size, limit in zip(devices, sizes, limits, strict=True):
        needed = device.fixed_bytes + padded_bytes * max(sizes) + own_bytes * size
        if needed > limit:
            raise PlanError(f"{device.name} lacks {needed - limit:,.0f} bytes for its padding")
    return sizes


def whale_staging(chain: Chain) -> Staging:
    """Whale's placement of one pipeline: larger memory first, work proportional to speed.

    From the paper: earlier stages hold more microbatches in flight, so devices are put in order of
    memory, largest first, and stages are cut so that work is proportional to the devices' speed.

    Where the paper is silent: the work of a layer is its time on the kind that runs the whole chain
    fastest; a cut goes to the boundary nearest to the proportional share, and every stage has a
    layer; a kind's speed is one over its time of the whole chain; where devices outnumber layers,
    those of least memory stay idle.

    Raises:
        PlanError: If a stage does not fit: which one, its device, and the bytes it lacks.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.3.2.
    """
    t = tables(chain)
    totals = t.seconds[:, 0, -1]
    order = sorted(range(t.num_kinds), key=lambda k: (-t.memory[k], totals[k], k))
    groups = [k for k in order for _ in range(t.num_devices[k])][: t.num_layers]
    speed = np.cumsum([1 / totals[k] for k in groups])
    work = t.seconds[int(totals.argmin()), 0]
    cuts = [0]
    for i in range(1, len(groups)):
        wanted = work[-1] * speed[i - 1] / speed[-1]
        low, high = cuts[-1] + 1, t.num_layers - (len(groups) - i)
        nearest = low + int(np.abs(work[low : high + 1] - wanted).argmin())
        cuts.append(nearest)
    need = stage_bytes(chain, cuts, groups, chain.num_microbatches)
    lacking = [
        f"stage {i} of {len(groups)} (layers {cuts[i]} and on, on {chain.groups[k].kind}) lacks "
        f"{need[i] - t.memory[k]:,.0f} bytes"
        for i, k in enumerate(groups)
        if need[i] > t.memory[k]
    ]
    if lacking:
        raise PlanError(f"Whale's placement does not fit: {'; '.join(lacking)}")
    replica = ReplicaSort(groups=tuple(groups), count=1, num_microbatches=chain.num_microbatches)
    return Staging(
        cuts=tuple(cuts),
        replicas=(replica,),
        step_seconds=step_seconds(chain, cuts, [replica]),
    )


def stage_bytes(
    chain: Chain, cuts: Sequence[int], groups: Sequence[int], num_microbatches: int
) -> tuple[float, ...]:
    """Bytes that each stage needs on its device.

    Under 1F1B stage i of S holds `min(S - i, m)` of its m microbatches in flight. State, gradients
    and optimizer are counted by the chain's `state_factor`.

    References:
        Narayanan et al., "PipeDream", SOSP 2019, section 3.3 (microbatches in flight).
    """
    t = tables(chain)
    num, ends = len(cuts), (*cuts[1:], t.num_layers)
    return tuple(
        float(t.state_bytes[k, a, b] + min(num - i, num_microbatches) * t.stash_bytes[k, a, b])
        for i, (k, a, b) in enumerate(zip(groups, cuts, ends, strict=True))
    )


def _check(num_microbatches: int, **rows: Sequence[float]) -> None:
    faults = []
    if num_microbatches < 1:
        faults.append(f"num_microbatches is {num_microbatches}: give at least one")
    if not rows["seconds"]:
        faults.append("there are no devices: give seconds for at least one")
    for name, row in rows.items():
        if len(row) != len(rows["seconds"]):
            faults.append(f"{name} has {len(row)} values for {len(rows['seconds'])} devices")
        least = "positive" if name in ("seconds", "limit_bytes") else "no less than 0"
        for d, x in enumerate(row):
            if not math.isfinite(x) or x < 0 or (x == 0 and least == "positive"):
                faults.append(f"{name}[{d}] is {x}: give a number that is {least}")
    if faults:
        raise PlanError("the load cannot be balanced:\n" + "\n".join(f"  {f}" for f in faults))
