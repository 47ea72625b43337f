"""From a described cluster and a profiled chain to the search's numbers, and back to devices."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..cluster.cluster import Cluster, Link
from ..core.errors import NothingFitsError, PlanError
from ..core.format import num_bytes
from ..plan.parts import DevicePrediction, Prediction, RunnerUp
from ..plan.plan import name_of_devices
from ..profile.profile import LayerSize, Profile, Setting, are_all_known, measured_sum
from ..schedule.replay import Timeline
from .apportionment import best_counts
from .chain import (
    UNBOUNDED,
    Chain,
    Group,
    ReplicaSort,
    Rings,
    Staging,
    step_seconds,
    tables,
)
from .collective_costs import favoured, volume
from .device_times import Alternative, layer_times
from .placement import (
    Copies,
    DevicePlacement,
    PlacedStaging,
    Ranks,
    busiest_card_seconds,
)
from .search import RankedPlan, SearchResult, search
from .staging_cost import StepCost, staging_cost, state_seconds

_NUM_RUNNERS_UP = 7
_NEAR, _NUM_REPLAYED = 1.02, 8  # replayed: plans within this ratio of the best, at most so many
_BUSY = 0.4  # of a step: busier cards take longer than the formula says


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainWork:
    """The chain of a job, as the search takes it.

    Attributes:
        layers: Names of the chain's layers.
        sizes: (microbatch size, tensor) to one size per layer, on one device of the group.
        sent_bytes: The same keys to the bytes that one device of the group sends in each layer's
            forward and backward; none for a tensor of 1.
        num_collectives: The same keys to the group's collectives in each layer's forward and
            backward, which may be fractions.
        input_bytes: Microbatch size to the bytes of its inputs; a device holds all of them.
        batch_size: Examples of a global batch.
        state_factor: Bytes kept per byte of parameters: parameter, gradient, its sums and the
            optimizer's state.
        reduce_factor: Bytes that a reduction moves per byte of gradient and direction, in units of
            a float32 all-reduce (1.5: exact sums).
        counts_updates: Whether updates take time; False where their owners are chosen later.
    """

    layers: tuple[str, ...]
    sizes: Mapping[tuple[int, int], tuple[LayerSize, ...]]
    sent_bytes: Mapping[tuple[int, int], tuple[float, ...]]
    input_bytes: Mapping[int, int]
    batch_size: int
    state_factor: float
    reduce_factor: float = 1.0
    counts_updates: bool = True
    num_collectives: Mapping[tuple[int, int], tuple[float, ...]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """The result of a search, before a traced graph completes it to a plan.

    Attributes:
        alternative: Microbatch size, tensor parallelism, recomputation.
        replicas: Ranks of each replica's devices, stage by stage.
        starts: Seconds of a step after which each replica begins.
        cuts: First layer of each stage.
        prediction: Times by replay of the schedule.
        reasons: The decisions, and which times are estimates.
    """

    alternative: Alternative
    replicas: tuple[Ranks, ...]
    counts: tuple[int, ...]
    starts: tuple[float, ...]
    cuts: tuple[int, ...]
    prediction: Prediction
    runners_up: tuple[RunnerUp, ...]
    reasons: tuple[str, ...]


def propose(
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    *,
    max_stages: int | None = None,
    recompute: Sequence[bool] = (False, True),
    uncounted: bool = False,
    all_devices: bool = False,
) -> tuple[Proposal, dict[int, Timeline]]:
    """The fastest plan for a cluster, and its runners-up.

    Args:
        work: The model's chain at every microbatch size and tensor parallelism to try.
        profile: Measured times; missing ones are estimated from the mesh file's rates.
        max_stages: Most stages of a plan; None: any number.
        recompute: Whether pipelines run forwards again: what to try.
        uncounted: Whether to try tensor parallelism over a link that is not described, as if its
            transfers took no time.
        all_devices: Whether every device must take part.

    Returns:
        The proposal, and the replayed timeline of the first replica of each sort, by its number.

    Raises:
        PlanError: If a kind of device has neither a profile nor a rate, or nothing fits.
    """
    reasons: list[str] = []
    chains: dict[Alternative, Chain] = {}
    places_of: dict[Alternative, list[list[Ranks]]] = {}
    for size, tensor in sorted(work.sizes):
        kinds = _groups_by_kind(cluster, tensor)
        if not kinds:
            reasons.append(f"tensor {tensor}: no node has so many devices of one kind")
            continue
        if tensor > 1 and not uncounted:
            for label in [k for k, places in kinds.items() if cluster.link(*places[0][:2]) is None]:
                reasons.append(f"{label}: no link described, so tensor parallelism is not tried")
                del kinds[label]
            if not kinds:
                continue
        for again in sorted({False, *recompute}):
            key = Alternative(size, tensor, again)
            chains[key] = _chain(work, key, cluster, kinds, profile, reasons)
            places_of[key] = list(kinds.values())

    def can_run(key: Alternative, num_stages: int) -> bool:
        # A single stage keeps what jax keeps; stages of several devices keep inputs only.
        tried = recompute if num_stages > 1 else (False,)
        fits = key.recompute in tried and (key.recompute or 1 in (key.tensor, num_stages))
        return fits and num_stages <= (max_stages or num_stages)

    measured = measured_sum(profile, (device.label for device in cluster.devices))
    placement = DevicePlacement(
        chains=chains,
        places=places_of,
        cluster=cluster,
        # A measured reduction is not predicted.
        reduce_factor=work.reduce_factor if measured is None else 0.0,
    )

    def searched(most_stages: int | None) -> SearchResult:
        def may_run(key: Alternative, num_stages: int) -> bool:
            return can_run(key, num_stages) and num_stages <= (most_stages or num_stages)

        return search(chains, all_stages=all_devices, can_run=may_run, place=placement.place)

    if are_all_known(cluster) or max_stages == 1:
        result = searched(None)
    else:
        result, reason = _without_stages(searched)
        reasons.append(reason)
    runner_up = functools.partial(_runner_up, chains)
    num = len(cluster.devices)
    ranked = _on_all_devices(result.ranked, chains, num) if all_devices else result.ranked
    if not ranked:
        raise PlanError(
            "no plan in which all devices take part was found; the best is "
            f"{runner_up(result.ranked[0]).description}: write it with hxla plan --write, and "
            "start its devices only, with hxla run --plan"
        )
    if ranked[0].staging.step_seconds > result.ranked[0].staging.step_seconds:
        better = runner_up(result.ranked[0])
        reasons.append(
            f"{better.description} would take {better.step_seconds:.4g} s, but leaves devices out "
            "whose processes have been started: write that plan with hxla plan --profile --write, "
            "and start its devices only, with hxla run --plan"
        )
    chosen, placed, cost = _fastest_by_replay(ranked, placement, chains)
    best = dataclasses.replace(chosen, staging=placed.staging)
    staging, chain = best.staging, chains[best.alternative]
    reasons += _card_reasons(chain, placed)
    replicas, counts, devices = _device_predictions(
        work, best, cost, placed.copies, cluster, profile, reasons
    )
    idle = sorted(set(range(len(cluster.devices))) - {d.rank for d in devices})
    if idle:
        names = name_of_devices(idle, {i: d.kind for i, d in enumerate(cluster.devices)})
        has, it = ("has", "it") if len(idle) == 1 else ("have", "them")
        reasons.append(f"{names} {has} no part: with {it} the step would not be shorter")
    reasons += _reduction_reasons(work, cluster, staging, replicas) if measured is None else ()
    reasons += [f"{which}: {why}" for which, why in result.infeasible.items()]
    firsts = itertools.accumulate((r.count for r in staging.replicas), initial=0)
    others = sorted(
        (runner_up(f) for f in result.ranked if f is not chosen),
        key=lambda other: other.step_seconds,
    )
    return (
        Proposal(
            alternative=best.alternative,
            replicas=replicas,
            counts=counts,
            starts=tuple(itertools.chain(*cost.start_seconds)),
            cuts=staging.cuts,
            prediction=Prediction(
                step_seconds=cost.step_seconds,
                bound_seconds=result.bound_seconds,
                devices=devices,
            ),
            runners_up=tuple(dict.fromkeys(others))[:_NUM_RUNNERS_UP],
            reasons=tuple(dict.fromkeys(reasons)),
        ),
        dict(zip(firsts, cost.timelines, strict=False)),
    )


def _without_stages(searched: Callable[[int | None], SearchResult]) -> tuple[SearchResult, str]:
    """The result of a search without stages, as transfers between them are not known.

    Only if no whole replica fits has it stages.

    Args:
        searched: Searches with at most so many stages (None: any number).
    """
    links = "some links are neither measured, by hxla profile, nor described in the mesh file"
    try:
        return searched(1), f"no pipeline is proposed: {links}"
    except NothingFitsError:
        return searched(None), f"stages, for no device has room for a whole replica: {links}"


def _fastest_by_replay(
    ranked: Sequence[RankedPlan],
    placement: DevicePlacement,
    chains: Mapping[Alternative, Chain],
) -> tuple[RankedPlan, PlacedStaging, StepCost]:
    """The plan of the shortest replay among the best by the search's formula.

    Without the state's moves the formula is above the replay, by more for some plans than for
    others. Where moves make its replay longer, plans that the formula has slower count too.

    Returns:
        The plan as searched, on its devices, and its cost.
    """
    most = _NEAR * ranked[0].staging.step_seconds
    best: tuple[RankedPlan, PlacedStaging, StepCost] | None = None
    for plan in ranked[:_NUM_REPLAYED]:
        key, staging = plan.alternative, plan.staging
        if plan is not ranked[0] and staging.step_seconds > most:
            break
        if (key, staging) not in placement.known:
            staging = placement.place(key, staging, 0.0)
            if best is not None and staging.step_seconds > most:
                continue
        placed = placement.known[key, staging]
        parts = len(staging.cuts)
        cost = staging_cost(chains[key], staging, placed.traffic, state_parts=parts)
        if best is None or cost.step_seconds < best[2].step_seconds * (1 - 1e-3):
            best = plan, placed, cost
        most = max(most, best[2].step_seconds)
    assert best is not None
    return best


def _card_reasons(chain: Chain, placed: PlacedStaging) -> list[str]:
    """What shared network cards cost a plan."""
    alone = step_seconds(chain, placed.staging.cuts, placed.staging.replicas)
    if placed.step_seconds <= alone * (1 + 1e-9):
        return []
    lines = [
        "replicas share their nodes' network cards, on which they reduce at once and send in "
        f"turns: {placed.step_seconds:.4g} s, {alone:.4g} s if each device had its own"
    ]
    busy = busiest_card_seconds(placed.staging, placed.traffic)
    if busy > _BUSY * placed.step_seconds:
        lines.append(
            f"a network card is busy for {busy:.4g} s with what stages send: of transfers over "
            "several boundaries some meet there, for which no time is counted"
        )
    return lines


def _reduction_reasons(
    work: ChainWork, cluster: Cluster, staging: Staging, replicas: Sequence[Ranks]
) -> list[str]:
    """The best algorithm for the largest all-reduce, by the slowest link's figures."""
    ranks = tuple(itertools.chain(*replicas))
    link = slowest_link(cluster, ranks, ranks)
    if len(replicas) == 1 or link is None or not work.reduce_factor:
        return []
    smallest = min(size for size, tensor in work.sizes if tensor == 1)
    whole = [size.parameter_bytes for size in work.sizes[smallest, 1]]
    ends = (*staging.cuts[1:], len(whole))
    largest = max(sum(whole[a:b]) for a, b in zip(staging.cuts, ends, strict=True))
    sent = work.reduce_factor * largest
    best, seconds = favoured(len(replicas), sent, link)
    ring = volume("ring", len(replicas), sent).seconds(link)
    return [
        f"sums of {num_bytes(sent)} over {len(replicas)} replicas: counted as a ring, {ring:.4g} s "
        f"by the slowest link's figures; they favour {best}, {seconds:.4g} s"
    ]


def _on_all_devices(
    ranked: Sequence[RankedPlan], chains: Mapping[Alternative, Chain], num_devices: int
) -> list[RankedPlan]:
    """Plans in which every device takes part, the fastest first.

    A search has one plan for each number of stages. If its replicas leave devices out, those on
    every device are not among its plans.
    """
    plans = list(ranked)
    for key, chain in chains.items():
        staging = None if key.recompute else _replica_on_each(chain)
        if staging is not None:
            plans.append(RankedPlan(alternative=key, staging=staging))
    every = [plan for plan in plans if _num_devices(plan) == num_devices]
    return sorted(every, key=lambda plan: plan.staging.step_seconds)


def _replica_on_each(chain: Chain) -> Staging | None:
    """A replica on every device of the chain, with a microbatch at least; None: none fits."""
    t, num = tables(chain), chain.num_microbatches
    kinds = [k for k, count in enumerate(t.num_devices) for _ in range(count)]
    if len(kinds) > num or not all(t.fits(1)[k, 0, -1] for k in kinds):
        return None
    seconds = [float(t.seconds[k, 0, -1]) for k in kinds]
    fixed = [float(t.update[k, 0, -1]) + s for k, s in zip(kinds, seconds, strict=True)]
    more = best_counts(num - len(kinds), seconds, fixed)
    alike = collections.Counter((k, 1 + count) for k, count in zip(kinds, more, strict=True))
    replicas = tuple(
        ReplicaSort(groups=(k,), count=count, num_microbatches=each)
        for (k, each), count in sorted(alike.items())
    )
    return Staging(cuts=(0,), replicas=replicas, step_seconds=step_seconds(chain, (0,), replicas))


def _num_devices(plan: RankedPlan) -> int:
    groups = sum(replica.count * len(replica.groups) for replica in plan.staging.replicas)
    return groups * int(plan.alternative.tensor)


def _device_predictions(
    work: ChainWork,
    best: RankedPlan,
    cost: StepCost,
    copies: Copies,
    cluster: Cluster,
    profile: Profile | None,
    reasons: list[str],
) -> tuple[tuple[Ranks, ...], tuple[int, ...], tuple[DevicePrediction, ...]]:
    """Ranks of each replica, its microbatches, and the prediction of each device."""
    alternative, staging = best.alternative, best.staging
    measured = profile is not None and len(staging.cuts) == 1 and not alternative.recompute
    peaks = profile.peaks if profile is not None and measured else {}
    free = iter(copies)
    replicas, counts, out = [], [], []
    for replica, stages in zip(staging.replicas, cost.stages, strict=True):
        inputs = replica.num_microbatches * work.input_bytes[alternative.microbatch_size]
        for _ in range(replica.count):
            groups = next(free)
            for ranks, spent in zip(groups, stages, strict=True):
                label = cluster.devices[ranks[0]].label
                memory_bytes = spent.memory_bytes
                peak = peaks.get(Setting(label, alternative.microbatch_size, alternative.tensor))
                if peak is not None:
                    reasons.append(f"{label}: memory from the compiled programs")
                    memory_bytes = float(peak)
                known = {"memory_bytes": memory_bytes + inputs}
                out += [spent.model_copy(update={"rank": rank, **known}) for rank in ranks]
            replicas.append(tuple(itertools.chain(*groups)))
            counts.append(replica.num_microbatches)
    return tuple(replicas), tuple(counts), tuple(out)


def _runner_up(chains: Mapping[Alternative, Chain], plan: RankedPlan) -> RunnerUp:
    t = tables(chains[plan.alternative])
    seconds = plan.staging.step_seconds
    seconds += max(state_seconds(t, plan.staging, len(plan.staging.cuts)))
    stages = len(plan.staging.cuts)
    counts = [f"{r.count} x {r.num_microbatches} microbatches" for r in plan.staging.replicas]
    words = f"{plan.alternative}, {stages} stage{'s' * (stages > 1)}, {', '.join(counts)}"
    return RunnerUp(description=words, step_seconds=seconds)


def _groups_by_kind(cluster: Cluster, tensor: int) -> dict[str, list[Ranks]]:
    """Groups of devices of one node, of one kind and with the same memory."""
    by_kind: dict[tuple[str, int | None], dict[int, list[int]]] = {}
    for rank, device in enumerate(cluster.devices):
        nodes = by_kind.setdefault((device.label, device.memory_bytes), {})
        nodes.setdefault(device.node, []).append(rank)
    out: dict[str, list[Ranks]] = {}
    for (label, memory), nodes in by_kind.items():
        groups = [
            tuple(ranks[i : i + tensor])
            for ranks in nodes.values()
            for i in range(0, len(ranks) - tensor + 1, tensor)
        ]
        twice = sum(other == label for other, _ in by_kind) > 1
        if groups:
            out[f"{label} {memory}" if twice else label] = groups
    return out


def _chain(
    work: ChainWork,
    key: Alternative,
    cluster: Cluster,
    kinds: Mapping[str, Sequence[Ranks]],
    profile: Profile | None,
    reasons: list[str],
) -> Chain:
    sizes = work.sizes[key.microbatch_size, key.tensor]
    groups, gathers = [], []
    for label, places in kinds.items():
        device = cluster.devices[places[0][0]]
        inside = cluster.link(places[0][0], places[0][1]) if key.tensor > 1 else None
        if key.tensor > 1 and inside is None:
            reasons.append(
                f"{label}: no link described, tensor parallelism's transfers not counted"
            )
        gathers.append((key.tensor - 1) / inside.bytes_per_second if inside is not None else 0.0)
        seconds, how = layer_times(
            device,
            key,
            sizes,
            profile,
            state_factor=work.state_factor,
            whole=work.sizes.get((key.microbatch_size, 1), ()),
            sent_bytes=work.sent_bytes.get((key.microbatch_size, key.tensor), ()),
            num_collectives=work.num_collectives.get((key.microbatch_size, key.tensor), ()),
            link=inside,
        )
        reasons.append(how)
        if device.memory_bytes is None:
            reasons.append(f"{label}: memory not described, taken to be enough")
        groups.append(
            Group(
                kind=label,
                num_devices=len(places),
                memory_bytes=UNBOUNDED if device.memory_bytes is None else device.memory_bytes,
                forward_seconds=tuple(seconds[0].tolist()),
                backward_seconds=tuple(seconds[1].tolist()),
                update_seconds=tuple((seconds[2] * work.counts_updates).tolist()),
                parameter_bytes=tuple(s.parameter_bytes for s in sizes),
                stash_bytes=tuple(s.stash_bytes for s in sizes),
            )
        )
    leaders = [[group[0] for group in places] for places in kinds.values()]
    links = [[_links(cluster, a, b, reasons, key.tensor) for b in leaders] for a in leaders]
    # The places of a plan are not known yet: no transfer is faster than over the best link.
    fastest = [
        [max((x for x, _ in row), key=_rate, default=None) for row in rows] for rows in links
    ]
    measured = measured_sum(profile, (device.label for device in cluster.devices))
    if measured is not None and len(cluster.devices) > 1:
        reasons.append(f"the sum over all devices, and the loop: measured, {measured:.4g} s")
    per_byte = [[1 / x.bytes_per_second if x is not None else 0.0 for x in row] for row in fastest]

    def sum_seconds(links: Iterable[Link]) -> float:
        """Per byte: a ring's reduce-scatter and all-gather of many devices, over the best link."""
        return 2 * work.reduce_factor / max(map(_rate, links), default=math.inf)

    in_node = [sum_seconds(x for x, within in rows[a] if within) for a, rows in enumerate(links)]
    beyond = [  # to another node or kind
        sum_seconds(x for b, row in enumerate(rows) for x, within in row if b != a or not within)
        for a, rows in enumerate(links)
    ]
    beyond = [outside or within for outside, within in zip(beyond, in_node, strict=True)]
    # Each device of a group sends its shard of a boundary, and gathers the others'.
    send_seconds = tuple(
        tuple(send + gather for send, gather in zip(row, gathers, strict=True)) for row in per_byte
    )
    whole_bytes = sum(s.parameter_bytes for s in work.sizes[key.microbatch_size, 1])
    return Chain(
        groups=tuple(groups),
        num_microbatches=work.batch_size // key.microbatch_size,
        output_bytes=tuple(s.output_bytes / key.tensor for s in sizes),
        state_factor=work.state_factor,
        keeps_inputs=key.recompute,
        send_seconds=send_seconds,
        send_latency_seconds=tuple(
            tuple(x.latency_seconds if x is not None else 0.0 for x in row) for row in fastest
        ),
        reduce_seconds=tuple(beyond)
        if measured is None
        else (measured / whole_bytes,) * len(groups),
        meeting_seconds=measured or 0.0,
        rings=Rings(
            inside_seconds=tuple(in_node),
            num_nodes=tuple(len({cluster.devices[r].node for r in ranks}) for ranks in leaders),
            card_seconds=_card_seconds(cluster, leaders, key.tensor),
            copies_inside=tuple(
                max(collections.Counter(cluster.devices[r].node for r in ranks).values())
                for ranks in leaders
            ),
        )
        if measured is None
        else None,
    )


def _card_seconds(
    cluster: Cluster, leaders: Sequence[Sequence[int]], tensor: int
) -> tuple[tuple[float, ...], ...]:
    """Seconds of a replica's byte from node to node; empty if a node has two kinds."""
    nodes = [{cluster.devices[rank].node for rank in ranks} for ranks in leaders]
    num = sum(map(len, nodes))
    if num < 2 or len(set().union(*nodes)) < num:
        return ()
    cards = [[cluster.network_card(node) for node in group] for group in nodes]
    seconds = [
        min(tensor / card.bytes_per_second if card else 0.0 for card in group) for group in cards
    ]
    return tuple(
        tuple(max(seconds[i], seconds[j]) for j in range(len(seconds))) for i in range(len(seconds))
    )


def slowest_link(cluster: Cluster, a: Sequence[int], b: Sequence[int]) -> Link | None:
    """The slowest link between the devices of two groups."""
    links = _links(cluster, a, b, [])
    return min((link for link, _ in links), key=_rate, default=None)


def _rate(link: Link) -> float:
    return link.bytes_per_second


def _links(
    cluster: Cluster, a: Sequence[int], b: Sequence[int], reasons: list[str], num_at_once: int = 1
) -> list[tuple[Link, bool]]:
    """Links between the devices of two groups, for so many transfers at once.

    Returns:
        Each link, and whether it is inside a node.
    """
    by_node: dict[int, list[int]] = {}
    for rank in dict.fromkeys((*a, *b)):
        by_node.setdefault(cluster.devices[rank].node, []).append(rank)
    cards_of = {node: cluster.network_card(node) for node in by_node}
    kinds_of_link: dict[tuple[int, float, bool], Link] = {}  # a large cluster has many equal links
    for i, j in itertools.product(
        dict.fromkeys(cluster.devices[r].node for r in a),
        dict.fromkeys(cluster.devices[r].node for r in b),
    ):
        first = by_node[i][0]
        second = next((r for r in by_node[j] if r != first), None)
        if second is None:
            continue  # a single device sends nothing
        link = cluster.link(first, second)
        if link is None:
            reasons.append(
                "some links are neither described nor measured: their communication is not counted"
            )
        else:
            cards = [cards_of[node] for node in (i, j) if i != j]
            shares = [card.bytes_per_second / num_at_once for card in cards if card is not None]
            least = min((link.bytes_per_second, *shares))
            kinds_of_link.setdefault((id(link), least, i == j), link)
    return [
        (link.model_copy(update={"bytes_per_second": least}), within)
        for (_, least, within), link in kinds_of_link.items()
    ]
