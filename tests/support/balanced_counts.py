"""How many microbatches each device runs where time is a measured table: the exact optimum."""

import math
from collections.abc import Sequence

from hxla import PlanError


def balanced_counts(
    num_microbatches: int,
    seconds: Sequence[Sequence[float]],
    memory_bytes: Sequence[Sequence[float]] | None = None,
    limit_bytes: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Counts that minimise the time of the slowest device, for any times whatever.

    A device may need less time for eight microbatches than for seven, and may hold six but not
    five (kernels and allocators have such steps), so neither greedy nor proportional shares are
    optimal. The optimum is one of the times in the tables. For a limit on time each device is left
    with a set of counts; which totals the devices can reach together is a set of integers, kept as
    the bits of one number and built by shifts, device by device. Reachable totals only grow with
    the limit, so a binary search over the sorted times finds the least one that reaches
    `num_microbatches`, and no smaller time does. Where time is linear, `best_counts` is faster.

    Args:
        num_microbatches: Microbatches to hand out.
        seconds: `seconds[d][c]`: time of device `d` with `c` microbatches, from `c = 0`. A device
            takes no more than its table is long.
        memory_bytes: `memory_bytes[d][c]`: what device `d` then needs (default: nothing).
        limit_bytes: What each device has.

    Returns:
        One count per device, summing to `num_microbatches`.

    Raises:
        PlanError: If the input is no such table (all faults are listed), or nothing fits: which
            device lacks how many bytes.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.3.1 (the problem); Kellerer, Pferschy and
        Pisinger, "Knapsack Problems", 2004, section 4.1 (sums of subsets as bits of a word).
    """
    if memory_bytes is None or limit_bytes is None:
        memory_bytes = [[0.0] * len(row) for row in seconds]
        limit_bytes = [1.0] * len(seconds)
    _check(num_microbatches, seconds, memory_bytes, limit_bytes)
    fitting = [
        [c for c in range(min(len(row), num_microbatches + 1)) if need[c] <= limit]
        for row, need, limit in zip(seconds, memory_bytes, limit_bytes, strict=True)
    ]
    times = sorted({seconds[d][c] for d, counts in enumerate(fitting) for c in counts})
    if not times or not _reach(fitting, num_microbatches)[-1] >> num_microbatches & 1:
        raise PlanError(_infeasible(num_microbatches, fitting, memory_bytes, limit_bytes))

    def allowed(limit: float) -> list[list[int]]:
        return [[c for c in cs if seconds[d][c] <= limit] for d, cs in enumerate(fitting)]

    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _reach(allowed(times[middle]), num_microbatches)[-1] >> num_microbatches & 1:
            high = middle
        else:
            low = middle + 1
    choices = allowed(times[low])
    reach = _reach(choices, num_microbatches)
    left = num_microbatches
    counts: list[int] = []
    for d in reversed(range(len(seconds))):
        counts.append(next(c for c in choices[d] if c <= left and reach[d] >> (left - c) & 1))
        left -= counts[-1]
    return tuple(reversed(counts))


def _reach(choices: Sequence[Sequence[int]], total: int) -> list[int]:
    """For each number of devices the totals up to `total` that they can reach, as bits."""
    mask = (1 << total + 1) - 1
    reach = [1]
    for counts in choices:
        sums = 0
        for start, length in _runs(counts):
            block, done = reach[-1], 1
            while done < length:
                step = min(done, length - done)
                block |= block << step
                done += step
            sums |= block << start
        reach.append(sums & mask)
    return reach


def _runs(counts: Sequence[int]) -> list[tuple[int, int]]:
    """First member and length of each run of consecutive integers."""
    runs: list[tuple[int, int]] = []
    for c in counts:
        if runs and sum(runs[-1]) == c:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((c, 1))
    return runs


def _infeasible(
    num_microbatches: int,
    fitting: Sequence[Sequence[int]],
    memory_bytes: Sequence[Sequence[float]],
    limit_bytes: Sequence[float],
) -> str:
    lines = []
    for d, (counts, need, limit) in enumerate(zip(fitting, memory_bytes, limit_bytes, strict=True)):
        if not counts:
            missing = min(need[: num_microbatches + 1]) - limit
            lines.append(
                f"device {d} has {limit:,.0f} bytes and lacks {missing:,.0f} for any count"
            )
    most = sum(max(counts, default=0) for counts in fitting)
    if not lines and most < num_microbatches:
        for d, counts in enumerate(fitting):
            more = [c for c in range(len(memory_bytes[d])) if c > counts[-1]]
            line = f"device {d} takes {counts[-1]} at most"
            if more:
                least, c = min((memory_bytes[d][c], c) for c in more)
                missing = least - limit_bytes[d]
                line += f" and lacks {missing:,.0f} bytes for {c}"
            lines.append(line)
        lines.append(f"that is {most} in all")
    if not lines:
        sets = "; ".join(f"device {d} takes {list(c)}" for d, c in enumerate(fitting))
        lines.append(f"the counts that fit add up to no such total ({sets})")
    return (
        f"{num_microbatches} microbatches do not fit: {'; '.join(lines)}. "
        "Use a smaller microbatch_size or batch_size, or devices with more memory"
    )


def _check(
    num_microbatches: int,
    seconds: Sequence[Sequence[float]],
    memory_bytes: Sequence[Sequence[float]],
    limit_bytes: Sequence[float],
) -> None:
    faults = []
    if num_microbatches < 1:
        faults.append(f"num_microbatches is {num_microbatches}: give at least one")
    if not seconds:
        faults.append("there are no devices: give one row of seconds for each")
    if not len(seconds) == len(memory_bytes) == len(limit_bytes):
        faults.append(
            f"{len(seconds)} devices have seconds, {len(memory_bytes)} memory_bytes and "
            f"{len(limit_bytes)} limit_bytes: give one of each per device"
        )
    for name, table in (("seconds", seconds), ("memory_bytes", memory_bytes)):
        for d, row in enumerate(table):
            if not row:
                faults.append(f"{name}[{d}] is empty: begin with count 0")
            for c, x in enumerate(row):
                if not (math.isfinite(x) and x >= 0):
                    faults.append(f"{name}[{d}][{c}] is {x}: measure it again")
    for d, (row, need) in enumerate(zip(seconds, memory_bytes, strict=False)):
        if len(row) != len(need):
            faults.append(
                f"device {d} has seconds for {len(row)} counts and memory_bytes for {len(need)}: "
                "give both for the same counts"
            )
    for d, limit in enumerate(limit_bytes):
        if not (math.isfinite(limit) and limit > 0):
            faults.append(f"limit_bytes[{d}] is {limit}: give the bytes that device {d} may use")
    if faults:
        raise PlanError("the counts cannot be balanced:\n" + "\n".join(f"  {f}" for f in faults))
