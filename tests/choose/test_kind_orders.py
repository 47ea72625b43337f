"""The order in which a pipeline takes kinds of devices, beside all orders and all cuts."""

import itertools

import numpy as np
import pytest

from support.inside.choose import UNBOUNDED, Chain, Group, Rings, best_order, tables


def random_chain(rng, num_layers, *, memory=UNBOUNDED):
    groups = tuple(
        Group(
            kind=kind,
            num_devices=8,
            memory_bytes=memory,
            forward_seconds=tuple(scale * rng.uniform(0.5, 2.0, num_layers)),
            backward_seconds=(0.0,) * num_layers,
            update_seconds=(0.0,) * num_layers,
            parameter_bytes=(0.0,) * num_layers,
            stash_bytes=(1.0,) * num_layers,
        )
        for kind, scale in (("A", 1.0), ("B", 1.6), ("C", 2.5))
    )
    network = 0.25
    return Chain(
        groups=groups,
        num_microbatches=8,
        output_bytes=tuple(rng.uniform(0.0, 1.0, num_layers)),
        send_seconds=tuple(tuple(0.02 if a == b else network for b in range(3)) for a in range(3)),
        rings=Rings(
            inside_seconds=(0.0,) * 3,
            copies_inside=(2,) * 3,
            num_nodes=(4,) * 3,
            card_seconds=((network,) * 3,) * 3,
        ),
    )


def period(t, cuts, groups, breaks, most):
    """Of a cut whose boundaries at `breaks` lie between two nodes."""
    ends, num = (*cuts[1:], t.num_layers), len(cuts)
    crossed = [0.0]
    for i, (a, b) in enumerate(itertools.pairwise(groups), 1):
        slow = i in breaks
        crossed.append(float(t.shared[cuts[i], a, b] if slow else t.cross[cuts[i], a, b]))
    crossed.append(0.0)
    worst = 0.0
    for i, (k, a, b) in enumerate(zip(groups, cuts, ends, strict=True)):
        if not t.fits(min(num - i, most))[k, a, b]:
            return np.inf
        worst = max(worst, float(t.seconds[k, a, b]) + crossed[i] + crossed[i + 1])
    return worst


def least_period(t, units, most):
    """Of all orders of runs, and all cuts: with the order it is had by."""
    best = np.inf, None
    for order in set(itertools.permutations(units)):
        groups = tuple(k for k, length in order for _ in range(length))
        breaks = set(itertools.accumulate(length for _, length in order))
        for rest in itertools.combinations(range(1, t.num_layers), len(groups) - 1):
            own = period(t, (0, *rest), groups, breaks, most)
            best = min(best, (own, groups), key=lambda x: x[0])
    return best


@pytest.mark.parametrize(
    "runs",
    [{0: (2, 1), 1: (1, 1), 2: (1, 1)}, {0: (4, 2), 1: (1, 2)}, {0: (3, 2), 2: (2, 1)}],
    ids=["single", "two in a node", "one left over"],
)
@pytest.mark.parametrize("memory", [UNBOUNDED, 10.0], ids=["any memory", "little memory"])
def test_no_order_of_runs_has_a_cut_of_less_period(runs, memory):
    """With little memory early stages, which keep most microbatches, hold few layers."""
    units = [
        (k, length)
        for k, (num, each) in runs.items()
        for length in [each] * (num // each) + [num % each] * (num % each > 0)
    ]
    rng, num_found = np.random.default_rng(4), 0
    for _ in range(6):
        t = tables(random_chain(rng, 8, memory=memory))
        least, _ = least_period(t, units, 5)
        order = best_order(t, runs, 5)
        assert (order is None) == (least == np.inf)
        if order is None:
            continue
        # Of its order the best cut, over all ways to see its runs.
        own = min(least_period_of(t, order, way) for way in set(itertools.permutations(units)))
        assert own == pytest.approx(least)
        num_found += 1
    assert num_found > 2


def least_period_of(t, groups, way):
    if tuple(k for k, length in way for _ in range(length)) != groups:
        return np.inf
    breaks = set(itertools.accumulate(length for _, length in way))
    rests = itertools.combinations(range(1, t.num_layers), len(groups) - 1)
    return min(period(t, (0, *rest), groups, breaks, 5) for rest in rests)


def test_too_many_orders_are_left_alone():
    t = tables(random_chain(np.random.default_rng(0), 8))
    assert best_order(t, {k: (40, 1) for k in range(3)}, 5) is None
