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
from ._chain_tables import tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Predicted time of a step.

    Attributes:
        step_seconds: From one step's reduction to the next one's, where steps follow one another.
        stages: Per sort of replicas and stage, what one device of it spends and holds, as if its
            rank were 0: state, workspace and the stash of the microbatches in flight.
        timelines: One per sort of replicas.
    """

    step_seconds: float
    stages: tuple[tuple[DevicePrediction, ...], ...]
    timelines: tuple[Timeline, ...]


def staging_cost(chain: Chain, staging: Staging) -> StepCost:
    """A step of pipelines that train one model together, under 1F1B, by replay.

    Transfers hold up both stages, as the search's formula has it (`fill_and_period`).

    A stage's reduction starts when the stage is done in every replica, its update when the
    reduction is done, and the next step of each replica with its own update.

    References:
        Under 1F1B stage s of S keeps min(M, S - s) microbatches: Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, 2.2.1.
    """
    t = tables(chain)
    num_stages, ends = len(staging.cuts), (*staging.cuts[1:], t.num_layers)
    stages = [list(zip(r.groups, staging.cuts, ends, strict=True)) for r in staging.replicas]
    timelines = tuple(
        blocking_replay(
            one_f_one_b(num_stages, replica.num_microbatches),
            [sum(chain.groups[k].forward_seconds[a:b]) for k, a, b in own],
            [sum(chain.groups[k].backward_seconds[a:b]) for k, a, b in own],
            [  # one way
                float(t.cross[cut, k, after]) / 2
                for cut, (k, after) in zip(ends, itertools.pairwise(replica.groups), strict=False)
            ],
        )
        for replica, own in zip(staging.replicas, stages, strict=True)
    )
    several = sum(replica.count for replica in staging.replicas) > 1
    reductions = [
        float(max(t.reduce[s] for s in like)) if several else 0.0
        for like in zip(*stages, strict=True)
    ]
    # Nobody waits for another's update, so each replica's lies on its own path to the next sum.
    step = max(
        done + reduction + float(t.update[s])
        for timeline, own in zip(timelines, stages, strict=True)
        for done, reduction, s in zip(timeline.finish_seconds, reductions, own, strict=True)
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
                    zip(timeline.busy_seconds, reductions, own, strict=True)
                )
            )
        )
    return StepCost(step_seconds=step, stages=tuple(costs), timelines=timelines)
