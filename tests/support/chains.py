"""Random chains, and planners by exhaustion that share nothing with the real ones."""

import itertools
import math

import numpy as np

from support.inside.choose import Chain, Group, Rings


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
    rates = rng.uniform(0, 0.05, num_kinds)
    rings = Rings(
        inside_seconds=tuple(rates * rng.uniform(0, 1, num_kinds)),
        copies_inside=tuple(map(int, rng.integers(1, 4, num_kinds))),
    )
    matrix = lambda high: tuple(map(tuple, rng.uniform(0, high, (num_kinds, num_kinds))))  # noqa: E731
    return Chain(
        groups=tuple(groups),
        num_microbatches=int(rng.integers(1, max_microbatches + 1)),
        output_bytes=tuple(rng.integers(0, 10, num_layers).astype(float)),
        workspace_bytes=float(rng.integers(0, 6)),
        send_seconds=matrix(0.05) if linked else (),
        send_latency_seconds=matrix(0.1) if linked else (),
        reduce_seconds=tuple(rates) if linked else (),
        rings=rings if linked and rng.random() < 0.7 else None,
        keeps_inputs=bool(rng.random() < 0.3),
    )


def stage_bytes(chain, k, a, b, in_flight):
    """What the stage of layers a to b - 1 holds on a device of kind k."""
    group = chain.groups[k]
    held = chain.state_factor * sum(group.parameter_bytes[a:b]) + chain.workspace_bytes
    kept = sum(group.stash_bytes[a:b])
    if not chain.keeps_inputs:
        return held + in_flight * kept
    return held + kept + in_flight * (chain.output_bytes[a - 1] if a else 0.0)


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
    pairs = itertools.product(range(len(available)), repeat=2)
    trip = {
        (a, b): np.array([round_trip(chain, layer, a, b) for layer in range(num_layers)])
        for a, b in pairs
    }
    best = math.inf
    for num in range(1, min(num_layers, sum(available)) + 1):
        cuts = np.array(list(all_cuts(num_layers, num)))
        edges = np.concatenate([cuts, np.full((len(cuts), 1), num_layers)], axis=1)
        for kinds in itertools.product(range(len(available)), repeat=num):
            if any(kinds.count(k) > n for k, n in enumerate(available)):
                continue
            fill, ok = np.zeros(len(cuts)), np.ones(len(cuts), bool)
            period, slowest = np.zeros(len(cuts)), np.zeros(len(cuts))
            trips = [trip[kinds[i - 1], kinds[i]][cuts[:, i]] for i in range(1, num)]
            for i, k in enumerate(kinds):
                a, b = edges[:, i], edges[:, i + 1]
                own = busy[k][b] - busy[k][a]
                before = trips[i - 1] if i else 0.0
                after = trips[i] if i + 1 < num else 0.0
                fill += own + after
                period = np.maximum(period, own + before + after)
                slowest = np.maximum(slowest, update[k][b] - update[k][a])
                need = chain.state_factor * (parameters[k][b] - parameters[k][a])
                need = need + chain.workspace_bytes
                kept = stash[k][b] - stash[k][a]
                if chain.keeps_inputs:
                    need, kept = need + kept, np.array([0.0, *chain.output_bytes])[a]
                need = need + min(num - i, m) * kept
                ok &= need <= chain.groups[k].memory_bytes
            if ok.any():
                best = min(best, (fill + (m - 1) * period + slowest)[ok].min())
    return None if best == math.inf else float(best)


def brute_search(chain):
    """Least step over the whole plan space; None if nothing fits."""
    num_layers, m = len(chain.output_bytes), chain.num_microbatches
    available = [g.num_devices for g in chain.groups]
    best = math.inf
    for num in range(1, min(num_layers, sum(available)) + 1):
        orders = list(itertools.product(range(len(available)), repeat=num))
        for cuts in all_cuts(num_layers, num):
            spans = list(zip(cuts, (*cuts[1:], num_layers), strict=True))
            costs = {kinds: pipeline_costs(chain, spans, kinds) for kinds in orders}
            for count in range(1, min(sum(available) // num, m) + 1):
                for replicas in itertools.combinations_with_replacement(orders, count):
                    used = [k for kinds in replicas for k in kinds]
                    if any(used.count(k) > n for k, n in enumerate(available)):
                        continue
                    best = min(best, best_deal(chain, spans, replicas, costs, m))
    return None if best == math.inf else best


def pipeline_costs(chain, spans, kinds):
    """Fill, period and the most microbatches that fit (a longer pipeline holds more at once)."""
    busy = [
        sum(chain.groups[k].forward_seconds[a:b]) + sum(chain.groups[k].backward_seconds[a:b])
        for k, (a, b) in zip(kinds, spans, strict=True)
    ]
    trips = [0.0]
    trips += [round_trip(chain, spans[i][0], kinds[i - 1], kinds[i]) for i in range(1, len(kinds))]
    trips += [0.0]
    fitting = []
    for m in range(1, chain.num_microbatches + 1):
        need = [
            stage_bytes(chain, k, a, b, min(len(kinds) - i, m))
            for i, (k, (a, b)) in enumerate(zip(kinds, spans, strict=True))
        ]
        if all(x <= chain.groups[k].memory_bytes for x, k in zip(need, kinds, strict=True)):
            fitting.append(m)
    period = max(x + trips[i] + trips[i + 1] for i, x in enumerate(busy))
    return sum(busy) + sum(trips), period, max(fitting, default=0)


def best_deal(chain, spans, replicas, costs, m):
    """Least step over every way to deal microbatches to these replicas, at least one to each."""
    stages = [(k, span) for kinds in replicas for k, span in zip(kinds, spans, strict=True)]
    groups = chain.groups
    tail = max(sum(groups[k].update_seconds[a:b]) for k, (a, b) in stages)
    sums = [chain.meeting_seconds if len(stages) > 1 else 0.0]
    if len(replicas) > 1 and chain.reduce_seconds:
        sums += (
            sum_seconds(chain, own, span, len(replicas))
            for own, span in zip(zip(*replicas, strict=True), spans, strict=True)
        )
    tail += max(sums)
    best = math.inf
    for inner in itertools.combinations(range(1, m), len(replicas) - 1):
        counts = [b - a for a, b in itertools.pairwise((0, *inner, m))]
        if all(c <= costs[kinds][2] for c, kinds in zip(counts, replicas, strict=True)):
            times = [
                costs[kinds][0] + (c - 1) * costs[kinds][1]
                for c, kinds in zip(counts, replicas, strict=True)
            ]
            best = min(best, max(times) + tail)
    return best


def sum_seconds(chain, kinds, span, num_copies):
    """The sum over copies of a stage, by the kind of each; inside a node if there may be one."""
    rates, part = chain.reduce_seconds, 1.0
    if chain.rings:
        part = (num_copies - 1) / num_copies
        if len(set(kinds)) == 1 and num_copies <= chain.rings.copies_inside[kinds[0]]:
            rates = np.minimum(rates, chain.rings.inside_seconds)
    held = [sum(chain.groups[k].parameter_bytes[slice(*span)]) for k in kinds]
    return part * max(rates[k] * num_bytes for k, num_bytes in zip(kinds, held, strict=True))


def faults(chain, staging):
    """What is wrong with a plan, by its own arithmetic."""
    num_layers, found = len(chain.output_bytes), []
    spans = list(zip(staging.cuts, (*staging.cuts[1:], num_layers), strict=True))
    if staging.cuts[0] != 0 or any(a >= b for a, b in spans):
        found.append(f"cuts {staging.cuts}")
    if sum(r.count * r.num_microbatches for r in staging.replicas) != chain.num_microbatches:
        found.append("microbatches")
    for k, g in enumerate(chain.groups):
        if sum(r.count * r.groups.count(k) for r in staging.replicas) > g.num_devices:
            found.append(f"too many of {g.kind}")
    slowest = 0.0
    for r in staging.replicas:
        for i, (k, (a, b)) in enumerate(zip(r.groups, spans, strict=True)):
            g = chain.groups[k]
            in_flight = min(len(spans) - i, r.num_microbatches)
            if stage_bytes(chain, k, a, b, in_flight) > g.memory_bytes * (1 + 1e-12):
                found.append(f"stage {i} on {g.kind} does not fit")
        busy = [
            sum(chain.groups[k].forward_seconds[a:b]) + sum(chain.groups[k].backward_seconds[a:b])
            for k, (a, b) in zip(r.groups, spans, strict=True)
        ]
        trips = [
            round_trip(chain, spans[i][0], r.groups[i - 1], r.groups[i])
            for i in range(1, len(spans))
        ]
        ends = [0.0, *trips, 0.0]
        period = max(x + ends[i] + ends[i + 1] for i, x in enumerate(busy))
        slowest = max(slowest, sum(busy) + sum(trips) + (r.num_microbatches - 1) * period)
    if slowest > staging.step_seconds * (1 + 1e-9):
        found.append(f"{slowest} s of pipelines in a step of {staging.step_seconds} s")
    return found
