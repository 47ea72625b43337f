"""A staging seen by the replay: where each device's time goes, and what it holds.

A search over stagings needs closed formulas; this is the slower and truer figure for the one that
it hands over.
"""

import dataclasses
import itertools

from .._plan._plan_parts import DevicePrediction
from .._schedule._blocking_replay import blocking_replay
from .._schedule._replay import Timeline
from .._schedule._schedules import one_f_one_b
from ._chain import UNBOUNDED, Chain, Staging
from ._chain_tables import reductions, tables
from ._shared_links import Traffic, busiest_card_seconds, copy_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Predicted time of a step.

    Attributes:
        step_seconds: From one step's reduction to the next one's, where steps follow one another.
        stages: Per sort of replicas and stage, what one device of it spends and holds, as if its
            rank were 0: state, workspace and the stash of the microbatches in flight.
        timelines: One per sort of replicas, of the one that begins last.
        start_seconds: Per sort, when each of its replicas begins.
    """

    step_seconds: float
    stages: tuple[tuple[DevicePrediction, ...], ...]
    timelines: tuple[Timeline, ...]
    start_seconds: tuple[tuple[float, ...], ...]


def staging_cost(chain: Chain, staging: Staging, traffic: Traffic | None = None) -> StepCost:
    """A step of pipelines that train one model together, under 1F1B, by replay.

    Transfers hold up both stages, as the search's formula has it (`fill_and_period`).

    Args:
        chain: That is cut.
        staging: Its cut.
        traffic: The least that its transfers take where they share network cards; None: they
            share none.

    A stage's reduction starts when the stage is done in every replica, its update when the
    reduction is done, and the next step of each replica with its own update.

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
            [sum(chain.groups[k].forward_seconds[a:b]) for k, a, b in own],
            [sum(chain.groups[k].backward_seconds[a:b]) for k, a, b in own],
            [  # one way
                max(float(t.cross[cut, k, after]) / 2, least)
                for cut, (k, after), least in zip(
                    ends, itertools.pairwise(replica.groups), sent, strict=False
                )
            ],
            start_seconds=max(last, default=0.0),
        )
        for replica, own, sent, last in zip(
            staging.replicas, stages, least_sent, begun, strict=True
        )
    )
    summed = [
        max(least, own)
        for least, own in zip(
            least_reduced, reductions(t, staging.cuts, staging.replicas), strict=True
        )
    ]
    # Nobody waits for another's update, so each replica's lies on its own path to the next sum.
    step = max(
        max(done, busiest) + reduction + float(t.update[s])
        for timeline, own in zip(timelines, stages, strict=True)
        for done, reduction, s in zip(timeline.finish_seconds, summed, own, strict=True)
    )
    costs = []
    for replica, timeline, own in zip(staging.replicas, timelines, stages, strict=True):
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
                    zip(timeline.busy_seconds, summed, own, strict=True)
                )
            )
        )
    return StepCost(
        step_seconds=step,
        stages=tuple(costs),
        timelines=timelines,
        start_seconds=tuple(map(tuple, begun)),
    )
