"""Random chains, and planners by exhaustion that share nothing with the real ones."""

import itertools
import math

import numpy as np

from hxla._planner._chain import Chain, Group


def random_chain(rng, *, max_devices, max_layers, max_microbatches, max_kinds=3, tight=None):
    """Whole bytes, so that sums are exact and a limit can be met to the byte."""
    num_kinds = int(rng.integers(1, max_kinds + 1))
    num_layers = int(rng.integers(1, max_layers + 1))
    num_devices = rng.multinomial(
        rng.integers(num_kinds, max(num_kinds, max_devices) + 1) - num_kinds,
        [1 / num_kinds] * num_kinds,
    )
    alike = rng.random() < 0.5
    base = rng.uniform(0.5, 2.0, num_layers)
    if rng.random() < 0.3:
        base = np.round(base)  # ties
    base = np.maximum(base, 0.5)
    parameters = rng.integers(1, 20, num_layers).astype(float)
    stash = rng.integers(0, 8, num_layers).astype(float)
    tight = rng.random() < 0.7 if tight is None else tight
    groups = []
    for k in range(num_kinds):
        speed = rng.uniform(0.3, 3.0)
        noise = 1.0 if alike else rng.uniform(0.5, 1.5, num_layers)
        whole = 4 * parameters.sum() + 3 * stash.sum() + 5
        memory = rng.integers(1, max(2, int(whole))) if tight else 100 * whole
        groups.append(
            Group(
                kind=f"kind{k}",
                num_devices=int(num_devices[k]) + 1,
                memory_bytes=float(memory),
                forward_seconds=tuple(base * noise / speed / 3),
                backward_seconds=tuple(base * noise / speed * 2 / 3),
                update_seconds=tuple(rng.uniform(0, 1, num_layers)),
                parameter_bytes=tuple(parameters),
                stash_bytes=tuple(stash),
            )
        )
    linked = rng.random() < 0.7
    matrix = lambda high: tuple(map(tuple, rng.uniform(0, high, (num_kinds, num_kinds))))  # noqa: E731
    return Chain(
        groups=tuple(groups),
        num_microbatches=int(rng.integers(1, max_microbatches + 1)),
        output_bytes=tuple(rng.integers(0, 10, num_layers).astype(float)),
        workspace_bytes=float(rng.integers(0, 6)),
        send_seconds=matrix(0.05) if linked else (),
        send_latency_seconds=matrix(0.1) if linked else (),
        reduce_seconds=tuple(rng.uniform(0, 0.05, num_kinds)) if linked else (),
    )


def all_cuts(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner)


def round_trip(chain, layer, a, b):
    """Activations of the boundary before `layer` from kind a to b, and their gradients back."""
    seconds = 0.0
    for x, y in ((a, b), (b, a)):
        if chain.send_seconds:
            seconds += chain.send_seconds[x][y] * chain.output_bytes[layer - 1]
        if chain.send_latency_seconds:
            seconds += chain.send_latency_seconds[x][y]
    return seconds


def brute_pipeline(chain):
    """Least fill + (m - 1) * period + update over every cut and placement; None if none fits."""
    num_layers, m = len(chain.output_bytes), chain.num_microbatches
    available = [g.num_devices for g in chain.groups]

    def sums(rows):
        return np.array([[0.0, *itertools.accumulate(r)] for r in rows])

    busy = sums([np.add(g.forward_seconds, g.backward_seconds) for g in chain.groups])
    update = sums([g.update_seconds for g in chain.groups])
    parameters = sums([g.parameter_bytes for g in chain.groups])
    stash = sums([g.stash_bytes for g in chain.groups])
    best = math.inf
    for num in range(1, min(num_layers, sum(available)) + 1):
        cuts = np.array(list(all_cuts(num_layers, num)))
        edges = np.concatenate([cuts, np.full((len(cuts), 1), num_layers)], axis=1)
        for kinds in itertools.product(range(len(available)), repeat=num):
            if any(kinds.count(k) > n for k, n in enumerate(available)):
                continue
            fill, ok = np.zeros(len(cuts)), np.ones(len(cuts), bool)
            period, slowest = np.zeros(len(cuts)), np.zeros(len(cuts))
            trips = [
                np.array([round_trip(chain, c, kinds[i - 1], kinds[i]) for c in cuts[:, i]])
                for i in range(1, num)
            ]
            for i, k in enumerate(kinds):
                a, b = edges[:, i], edges[:, i + 1]
                own = busy[k][b] - busy[k][a]
                before = trips[i - 1] if i else 0.0
                after = trips[i] if i + 1 < num else 0.0
                fill += own + after
                period = np.maximum(period, own + before + after)
                slowest = np.maximum(slowest, update[k][b] - update[k][a])
                need = chain.state_factor * (parameters[k][b] - parameters[k][a])
                need = need + min(num - i, m) * (stash[k][b] - stash[k][a]) + chain.workspace_bytes
                ok &= need <= chain.groups[k].memory_bytes
            if ok.any():
                best = min(best, (fill + (m - 1) * period + slowest)[ok].min())
    return None if best == math.inf else float(best)
