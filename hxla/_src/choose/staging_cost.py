"""A step of pipelines by replay: slower and truer than the closed formulas of a search."""

import dataclasses
import itertools

from ..plan.parts import DevicePrediction
from ..schedule.replay import Timeline, blocking_replay
from ..schedule.schedules import one_f_one_b
from .chain import UNBOUNDED, Chain, Staging, Tables, reductions, tables
from .placement import Traffic, busiest_card_seconds, copy_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Predicted time of a step.

    Attributes:
        step_seconds: From one step's reduction to the next one's, where steps follow one another.
        stages: Per sort of replicas and stage, the seconds and bytes of one device, as if its rank
            were 0: state, workspace and the stash of the microbatches in flight.
        timelines: One per sort of replicas: the replay of the replica that begins last.
        start_seconds: Per sort, when each of its replicas begins.
    """

    step_seconds: float
    stages: tuple[tuple[DevicePrediction, ...], ...]
    timelines: tuple[Timeline, ...]
    start_seconds: tuple[tuple[float, ...], ...]


def staging_cost(
    chain: Chain, staging: Staging, traffic: Traffic | None = None, *, state_parts: int = 1
) -> StepCost:
    """A step of pipelines that train one model together, under 1F1B, by replay.

    Transfers hold up both stages, as the search's formula has it (`fill_and_period`).

    A stage's reduction starts when the stage is done in every replica, its update when the
    reduction is done, and the next step of each replica after its update.

    Args:
        traffic: The least seconds of transfers that share network cards; None: they share none.
        state_parts: Devices that share the state of a stage between steps: its sums go there and
            its parameters come back. 1: the stage keeps it.

    References:
        Under 1F1B stage s of S keeps min(M, S - s) microbatches: Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, 2.2.1.
    """
    t = tables(chain)
    num_stages, ends = len(staging.cuts), (*staging.cuts[1:], t.num_layers)
    stages = [list(zip(r.groups, staging.cuts, ends, strict=True)) for r in staging.replicas]
    least_sent = traffic.send_seconds if traffic else [[0.0] * num_stages for _ in stages]
    least_reduced = traffic.reduction_seconds if traffic else [0.0] * num_stages
    begun = [[0.0] * r.count for r in staging.replicas]
    busiest = 0.0
    if traffic is not None:
        _, begun = copy_seconds(t, staging, traffic)
        busiest = busiest_card_seconds(staging, traffic)
    timelines = tuple(
        blocking_replay(
            one_f_one_b(num_stages, replica.num_microbatches),
            [sum(chain.groups[k].forward_seconds[a:b]) for k, a, b in spans],
            [sum(chain.groups[k].backward_seconds[a:b]) for k, a, b in spans],
            [  # one way
                max(float(t.cross[cut, k, after]) / 2, least)
                for cut, (k, after), least in zip(
                    ends, itertools.pairwise(replica.groups), sent, strict=False
                )
            ],
            start_seconds=max(last, default=0.0),
        )
        for replica, spans, sent, last in zip(
            staging.replicas, stages, least_sent, begun, strict=True
        )
    )
    summed = [
        max(least, alone)
        for least, alone in zip(
            least_reduced, reductions(t, staging.cuts, staging.replicas), strict=True
        )
    ]
    moved = state_seconds(t, staging, state_parts)
    summed = [one + more for one, more in zip(summed, moved, strict=True)]
    # No replica waits for the update of another, so each counts its update only.
    step = max(
        max(done, busiest) + reduction + float(t.update[s])
        for timeline, spans in zip(timelines, stages, strict=True)
        for done, reduction, s in zip(timeline.finish_seconds, summed, spans, strict=True)
    )
    costs = []
    for replica, timeline, spans in zip(staging.replicas, timelines, stages, strict=True):
        costs.append(
            tuple(
                DevicePrediction(
                    rank=0,
                    compute_seconds=busy,
                    wait_seconds=max(0.0, step - busy - reduction - float(t.update[s])),
                    reduction_seconds=reduction,
                    update_seconds=float(t.update[s]),
                    memory_bytes=float(
                        t.state_bytes[s]
                        + min(num_stages - i, replica.num_microbatches) * t.stash_bytes[s]
                    ),
                    capacity_bytes=t.memory[s[0]] if t.memory[s[0]] < UNBOUNDED else 0.0,
                )
                for i, (busy, reduction, s) in enumerate(
                    zip(timeline.busy_seconds, summed, spans, strict=True)
                )
            )
        )
    return StepCost(
        step_seconds=step,
        stages=tuple(costs),
        timelines=timelines,
        start_seconds=tuple(map(tuple, begun)),
    )


def state_seconds(t: Tables, staging: Staging, num_parts: int) -> list[float]:
    """Per stage, the seconds in which its state moves: its sums and parameters, as in a ring."""
    ends = (*staging.cuts[1:], t.num_layers)
    if num_parts < 2 or t.meeting:  # a measured sum has them
        return [0.0] * len(ends)
    kinds = {kind for replica in staging.replicas for kind in replica.groups}
    inside = t.copies_inside[min(kinds)] if t.copies_inside and len(kinds) == 1 else 0
    rates = t.reduce_inside if num_parts <= inside else t.reduce
    return [
        max(float(rates[r.groups[i], a, b]) for r in staging.replicas) * (1 - 1 / num_parts)
        for i, (a, b) in enumerate(zip(staging.cuts, ends, strict=True))
    ]
