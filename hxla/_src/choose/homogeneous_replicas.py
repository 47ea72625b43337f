"""Plans of equal replicas whose stages are of one kind each, and the order of kinds.

The places of such replicas in nodes are known, and with them the shared network cards. A node may
hold one stage of a block of replicas: their all-reduce leaves the node once, but they send over its
card in turns. Or it holds consecutive stages of fewer replicas: these send inside the node, but the
ring of each stage leaves it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from .chain import (
    Array,
    ReplicaSort,
    Staging,
    Tables,
    fill_and_period,
    tail_seconds,
    times_with_edges,
)
from .cuts import best_cut

_MOST_MIXES, _MOST_STAGES = 150, 16  # larger problems cost a search more than they gain


def best_order(t: Tables, runs: Mapping[int, tuple[int, int]], most: int) -> tuple[int, ...] | None:
    """The kind of each stage, where stages of a kind come in runs inside one node.

    Layers are whole, so another order may give a slow device too much or a fast one too little. A
    dynamic programme from the last run to the first; its state is the runs taken and the first
    layer. A boundary inside a run is crossed over the node's link, one between runs over the
    network.

    Args:
        t: Tables with the times of the network.
        runs: Per kind, the number of its stages, and of the stages in a run; the rest are a shorter
            run.
        most: The most microbatches of a replica.

    Returns:
        None if no cut fits, or the orders are too many.
    """
    assert t.shared is not None
    lengths = [
        (k, length, num)
        for k, (stages, each) in runs.items()
        for length, num in ((each, stages // each), (stages % each, 1))
        if length and num
    ]
    num_stages = sum(stages for stages, _ in runs.values())
    if num_stages > _MOST_STAGES or math.prod(num + 1 for *_, num in lengths) > _MOST_MIXES:
        return None
    mixes = sorted(itertools.product(*(range(num + 1) for *_, num in lengths)), key=sum)
    kinds = list(runs)
    network = np.maximum(t.cross[:, :-1, :-1], t.shared)[:, kinds][:, :, kinds].min(axis=(1, 2))
    known: dict[tuple[int, int, bytes], Array] = {}

    def periods(kind: int, length: int, after: int) -> Array:
        """[L+1, L+1] The least period of a run by its layers, with so many stages after it."""
        depths = [min(after + length - i, most) for i in range(length)]
        fits = np.array([t.fits(depth)[kind] for depth in depths])
        key = kind, length, fits.tobytes()
        if key not in known:
            known[key] = _run_periods(t, kind, network, fits)
        return known[key]

    first = np.full(t.num_layers + 1, np.inf)
    first[-1] = 0.0
    rest = {mixes[0]: first}
    taken: dict[tuple[int, ...], tuple[Array, Array]] = {}  # [L+1] the first run, and its end
    for mix in mixes[1:]:
        options, which, ends = [], [], []
        for i, (kind, length, _) in enumerate(lengths):
            if not mix[i]:
                continue
            before = (*mix[:i], mix[i] - 1, *mix[i + 1 :])
            after = sum(n * each for n, (_, each, _) in zip(before, lengths, strict=True))
            total = np.maximum(periods(kind, length, after), rest[before][None, :])
            ends.append(total.argmin(axis=1))
            options.append(total.min(axis=1))
            which.append(i)
        at = np.argmin(options, axis=0)
        rest[mix] = np.min(options, axis=0)
        taken[mix] = np.array(which)[at], np.choose(at, ends)
    mix, layer = mixes[-1], 0
    if not np.isfinite(rest[mix][0]):
        return None
    groups: list[int] = []
    while any(mix):
        i, layer = (int(by_layer[layer]) for by_layer in taken[mix])
        groups += [lengths[i][0]] * lengths[i][1]
        mix = (*mix[:i], mix[i] - 1, *mix[i + 1 :])
    return tuple(groups)


def _run_periods(t: Tables, kind: int, network: Array, fits: Array) -> Array:
    """[L+1, L+1] The least period of consecutive stages of a kind, as many as `fits` has."""
    inside, num = t.cross[:, kind, kind], len(fits)
    after = np.triu(np.ones(t.seconds.shape[1:], bool), 1)
    least: Array | None = None
    for i in range(num):
        comes, goes = network if i == 0 else inside, network if i + 1 == num else inside
        stage_periods = t.seconds[kind] + comes[:, None] + goes[None, :]
        stage_periods = np.where(after & fits[i], stage_periods, np.inf)
        if least is None:
            least = stage_periods
        else:
            least = np.array([np.maximum(row[:, None], stage_periods).min(axis=0) for row in least])
    assert least is not None
    return least


_MOST = 400  # arrangements of a chain, about
_MOST_ORDERED = 4  # kinds, in all orders
_NEAR = 1.02  # times the best one: slower estimates are skipped


@dataclasses.dataclass(frozen=True)
class _Arrangement:
    """A placement of equal replicas.

    Attributes:
        groups: The kind of each stage.
        block: The replicas of a stage in one node, where it has so many devices.
    """

    copies: int
    groups: tuple[int, ...]
    block: int


def homogeneous_plans(t: Tables, num_microbatches: int, most_stages: int) -> list[Staging]:
    """The best plans by number of replicas, order of kinds and block in nodes, likely best first.

    Each has the cut of least period for its stages, by a dynamic programme.
    """
    choices = sorted(
        (_optimistic(t, copies, kinds, num_microbatches), i, copies, kinds)
        for i, (copies, kinds) in enumerate(_choices(t, num_microbatches, most_stages))
    )
    best, num_tried, stagings = math.inf, 0, {}
    for least, _, copies, kinds in choices:
        if least > best * _NEAR or num_tried >= _MOST:
            break
        for arrangement in _arrangements(t, copies, kinds, -(-num_microbatches // copies)):
            num_tried += 1
            numbers = _sharing(t, arrangement)
            key = (
                arrangement.copies,
                arrangement.groups,
                tuple(map(bool, numbers)),
                max(numbers, default=0),
            )
            if key not in stagings and (
                cuts := _even_periods(t, arrangement, numbers, num_microbatches)
            ):
                seconds = _seconds(t, arrangement, numbers, cuts, num_microbatches)
                stagings[key] = seconds, num_tried, _staging(t, cuts, arrangement, num_microbatches)
                best = min(best, seconds)
    return [staging for _, _, staging in sorted(stagings.values(), key=lambda x: x[:2])]


def _choices(
    t: Tables, num_microbatches: int, most_stages: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers of replicas that differ in their stages, and kinds: all or all but one."""
    every = range(t.num_kinds)
    left_out = [(), *([(k,) for k in every] if t.num_kinds > 1 else [])]
    most = min(num_microbatches, sum(t.num_devices))
    nodes = {min(inside, most) for inside in t.copies_inside}
    before: list[int] = []
    for copies in range(most, 1, -1):
        blocks = [num // copies for num in t.num_devices]
        if blocks == before and copies not in nodes and copies & (copies - 1):
            continue  # more replicas of as many stages are better
        before = blocks
        for without in left_out:
            kinds = tuple(k for k in every if blocks[k] and k not in without)
            if 1 <= sum(blocks[k] for k in kinds) <= most_stages:
                yield copies, kinds


def _arrangements(
    t: Tables, copies: int, kinds: Sequence[int], most: int
) -> Iterator[_Arrangement]:
    """Orders of the kinds, and blocks; of many kinds only the cyclic orders."""
    orders: Iterable[tuple[int, ...]] = itertools.permutations(kinds)
    if len(kinds) > _MOST_ORDERED:
        around = [(*kinds[i:], *kinds[:i]) for i in range(len(kinds))]
        orders = [*around, *(reverse[::-1] for reverse in around)]
    stage_kinds = [
        tuple(k for k in order for _ in range(t.num_devices[k] // copies)) for order in orders
    ]
    blocks = _blocks(t, copies)
    yield from (_Arrangement(copies, *choice) for choice in itertools.product(stage_kinds, blocks))
    if t.shared is None:
        return
    for block in blocks:
        some = _Arrangement(copies, stage_kinds[0], block)
        runs = {k: (stage_kinds[0].count(k), _in_node(t, some, k)[0]) for k in kinds}
        best = best_order(t, runs, most)
        if best is not None and best not in stage_kinds:
            yield _Arrangement(copies, best, block)


def _blocks(t: Tables, copies: int) -> list[int]:
    """Candidate numbers of replicas in one node."""
    if t.shared is None:
        return [copies]
    most = min(copies, max(t.copies_inside))
    return sorted({most, *(2**i for i in range(most.bit_length()))})


def _sharing(t: Tables, arrangement: _Arrangement) -> list[int]:
    """Replicas that share a card at each boundary between stages; 0: they pass no card."""
    if t.shared is None:
        return [0] * (len(arrangement.groups) - 1)
    in_node = {k: _in_node(t, arrangement, k) for k in dict.fromkeys(arrangement.groups)}
    num_sharing, run = [], 0
    for before, after in itertools.pairwise(arrangement.groups):
        run = run + 1 if before == after else 0
        is_inside = before == after and (t.num_nodes[after] == 1 or run % in_node[after][0])
        num_sharing.append(0 if is_inside else max(in_node[before][1], in_node[after][1]))
    return num_sharing


def _in_node(t: Tables, arrangement: _Arrangement, kind: int) -> tuple[int, int]:
    """The stages in a full node of a kind, and the replicas of each."""
    inside, num = t.copies_inside[kind], arrangement.groups.count(kind)
    stages = max(1, inside // arrangement.block)
    if stages > num:
        stages = num
        return stages, min(arrangement.copies, inside // stages)
    return stages, min(arrangement.block, inside)


def _optimistic(t: Tables, copies: int, kinds: Sequence[int], num_microbatches: int) -> float:
    """About the least that stages of equal periods without transfers would take."""
    stages = {k: t.num_devices[k] // copies for k in kinds}
    rate = sum(num / float(t.seconds[k, 0, -1]) for k, num in stages.items())
    num_stages = sum(stages.values())
    total = (-(-num_microbatches // copies) - 1 + num_stages) / rate
    if t.copies_inside and copies > max(t.copies_inside):
        total += float(t.least_reduce(copies)[:, 0, -1].min()) / num_stages
    return total


def _even_periods(
    t: Tables, arrangement: _Arrangement, sharing: Sequence[int], num_microbatches: int
) -> tuple[int, ...] | None:
    """The cut of least period for the kinds of the stages; None: none fits."""
    num, most = len(arrangement.groups), -(-num_microbatches // arrangement.copies)
    kinds = (t.num_kinds, *arrangement.groups, t.num_kinds)
    leave = (False, *map(bool, sharing), False)
    after = np.triu(np.ones((t.num_layers + 1,) * 2, bool), 1)

    @functools.cache
    def periods(before: int, k: int, behind: int, comes: bool, goes: bool, depth: int) -> Array:
        first = _crossing(t, before, k, comes)[:, None]
        last = _crossing(t, k, behind, goes)[None, :]
        return np.where(after & t.fits(depth)[k], t.seconds[k] + first + last, np.inf)

    def score(position: int) -> Array:
        i = num - position
        return periods(*kinds[i : i + 3], *leave[i : i + 2], min(position, most))

    return best_cut(num, score, np.maximum)


def _crossing(t: Tables, before: int, after: int, leaves: bool) -> Array:
    """[L+1] Seconds of a replica over a boundary."""
    alone = t.cross[:, before, after]
    if not leaves:
        return alone
    assert t.shared is not None
    return np.maximum(alone, t.shared[:, before, after])


def _seconds(
    t: Tables,
    arrangement: _Arrangement,
    sharing: Sequence[int],
    cuts: Sequence[int],
    num_microbatches: int,
) -> float:
    """About the seconds of a step, shared network cards counted."""
    pairs = list(zip(cuts[1:], itertools.pairwise(arrangement.groups), sharing, strict=True))
    edges = [float(_crossing(t, *pair, num > 0)[cut]) for cut, pair, num in pairs]
    fill, period = times_with_edges(t, cuts, arrangement.groups, edges)
    stages = list(zip(arrangement.groups, cuts, (*cuts[1:], t.num_layers), strict=True))
    update = max(float(t.update[stage]) for stage in stages)
    seconds = fill + (-(-num_microbatches // arrangement.copies) - 1) * period + update
    # Replicas that share a card begin one transfer after another.
    shared = (edge for edge, num in zip(edges, sharing, strict=True) if num > 1)
    seconds += (max(sharing, default=1) - 1) * max(shared, default=0.0) / 2
    if not t.copies_inside:
        return seconds + max(float(t.reduce[stage]) for stage in stages)
    reduction = 0.0
    for kind, same in itertools.groupby(stages, key=lambda stage: stage[0]):
        stages_of_kind = list(same)
        num, copies = _in_node(t, arrangement, kind)
        if arrangement.copies <= copies:
            reduction = max(reduction, *(float(t.reduce_inside[stage]) for stage in stages_of_kind))
            continue
        # The rings of all stages in a node pass its card.
        num = num if t.shared is not None else 1
        for first in range(0, len(stages_of_kind), num):
            last = stages_of_kind[min(first + num, len(stages_of_kind)) - 1]
            reduction = max(reduction, float(t.reduce[kind, stages_of_kind[first][1], last[2]]))
    return seconds + reduction * (1 - 1 / arrangement.copies)


def _staging(t: Tables, cuts: tuple[int, ...], arrangement: _Arrangement, num: int) -> Staging:
    """The plan, as if transfers shared no card."""
    few, more = divmod(num, arrangement.copies)
    sorts = [
        ReplicaSort(groups=arrangement.groups, count=count, num_microbatches=each)
        for count, each in ((arrangement.copies - more, few), (more, few + 1))
        if count
    ]
    fill, period = fill_and_period(t, cuts, arrangement.groups)
    seconds = fill + (sorts[-1].num_microbatches - 1) * period + tail_seconds(t, cuts, sorts)
    return Staging(cuts=cuts, replicas=tuple(sorts), step_seconds=seconds)
