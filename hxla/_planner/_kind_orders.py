"""In which order a pipeline takes kinds of devices: the one whose cut has the least period."""

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from ._chain_tables import Array, Tables

_MOST_MIXES, _MOST_STAGES = 150, 16  # that are worked out: others cost a search more than they gain


def best_order(
    t: Tables, runs: Mapping[int, tuple[int, int]], most: int, check: Callable[[], None]
) -> tuple[int, ...] | None:
    """The kind of each stage, where stages of a kind come in runs that lie in one node.

    Layers are whole, so that an order may suit a chain in which another leaves a slow device too
    much or a fast one too little. A dynamic programme from the last run to the first; its state is
    the runs that were taken, and the first layer. Inside a run a boundary is crossed over the link
    of the node, between two of them over the network.

    Args:
        t: Of the chain, which knows the network.
        runs: Of each kind how many stages it has, and how many of them are a run; what is left of
            them is a shorter one.
        most: Microbatches that a copy runs at most.
        check: Called often; may raise.

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
        """[L+1, L+1] The least period of a run over some layers, with so many stages after it."""
        depths = [min(after + length - i, most) for i in range(length)]
        fits = np.array([t.fits(depth)[kind] for depth in depths])
        key = kind, length, fits.tobytes()
        if key not in known:
            known[key] = _run_periods(t, kind, network, fits)
        return known[key]

    first = np.full(t.num_layers + 1, np.inf)
    first[-1] = 0.0
    rest = {mixes[0]: first}
    taken: dict[tuple[int, ...], tuple[Array, Array]] = {}  # [L+1] the first run, and where it ends
    for mix in mixes[1:]:
        check()
        options, which, ends = [], [], []
        for i, (kind, length, _) in enumerate(lengths):
            if not mix[i]:
                continue
            before = (*mix[:i], mix[i] - 1, *mix[i + 1 :])
            after = sum(n * own for n, (_, own, _) in zip(before, lengths, strict=True))
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
        i, layer = (int(own[layer]) for own in taken[mix])
        groups += [lengths[i][0]] * lengths[i][1]
        mix = (*mix[:i], mix[i] - 1, *mix[i + 1 :])
    return tuple(groups)


def _run_periods(t: Tables, kind: int, network: Array, fits: Array) -> Array:
    """[L+1, L+1] The least period of consecutive stages of a kind, as many as `fits` has."""
    inside, num = t.cross[:, kind, kind], len(fits)
    after = np.triu(np.ones(t.seconds.shape[1:], bool), 1)
    found: Array | None = None
    for i in range(num):
        comes, goes = network if i == 0 else inside, network if i + 1 == num else inside
        own = t.seconds[kind] + comes[:, None] + goes[None, :]
        own = np.where(after & fits[i], own, np.inf)
        if found is None:
            found = own
        else:
            found = np.array([np.maximum(row[:, None], own).min(axis=0) for row in found])
    assert found is not None
    return found
