"""A staging seen by the cost and the memory model: what a search found, checked by replay.

A search over stagings needs closed formulas; this is the slower and truer figure for the few that
it hands over, and where each device's time and memory go.
"""

import itertools

from .._profile._profile import LayerSize
from .._schedule._schedules import one_f_one_b
from ._chain import Chain, ReplicaSort, Staging
from ._cost import LinkSeconds, StageLoad, StepCost, step_cost
from ._stage_memory import DeviceMemory, MemoryRule, pipeline_memory


def staging_cost(chain: Chain, staging: Staging) -> StepCost:
    """Time of a step of a staging under 1F1B, by replay.

    Returns:
        The step, with one entry per sort of replicas.
    """
    layers = _layers(chain, staging)
    replicas = staging.replicas
    reduced = sum(replica.count for replica in replicas) > 1
    return step_cost(
        [
            [_load(chain, group, part) for group, part in zip(replica.groups, layers, strict=True)]
            for replica in replicas
        ],
        [replica.num_microbatches for replica in replicas],
        [[_link(chain, a, b) for a, b in itertools.pairwise(r.groups)] for r in replicas],
        [
            max(_reduction_seconds(chain, replica.groups[s], part) for replica in replicas)
            if reduced
            else 0.0
            for s, part in enumerate(layers)
        ],
    )


def staging_memory(chain: Chain, staging: Staging) -> tuple[tuple[DeviceMemory, ...], ...]:
    """Memory of each sort of replicas' stages, and in each of one device."""
    # The chain has one factor for all of parameters, gradients and optimizer state.
    rule = MemoryRule(
        gradient_factor=min(1.0, max(0.0, chain.state_factor - 1)),
        optimizer_factor=max(0.0, chain.state_factor - 2),
        workspace_layers=0.0,
        context_bytes=chain.workspace_bytes,
    )
    layers = _layers(chain, staging)

    def of(replica: ReplicaSort) -> tuple[DeviceMemory, ...]:
        parts = [
            [
                LayerSize(
                    parameter_bytes=chain.groups[group].parameter_bytes[i],
                    output_bytes=chain.output_bytes[i],
                    stash_bytes=chain.groups[group].stash_bytes[i],
                )
                for i in part
            ]
            for group, part in zip(replica.groups, layers, strict=True)
        ]
        return pipeline_memory(parts, one_f_one_b(len(parts), replica.num_microbatches), rule)

    return tuple(of(replica) for replica in staging.replicas)


def _layers(chain: Chain, staging: Staging) -> list[range]:
    ends = (*staging.cuts[1:], len(chain.output_bytes))
    return [range(first, end) for first, end in zip(staging.cuts, ends, strict=True)]


def _load(chain: Chain, group: int, layers: range) -> StageLoad:
    own = chain.groups[group]
    return StageLoad(
        forward_seconds=sum(own.forward_seconds[i] for i in layers),
        backward_seconds=sum(own.backward_seconds[i] for i in layers),
        update_seconds=sum(own.update_seconds[i] for i in layers),
        gradient_bytes=sum(own.parameter_bytes[i] for i in layers),
        send_bytes=chain.output_bytes[layers[-1]],
    )


def _link(chain: Chain, sender: int, receiver: int) -> LinkSeconds:
    def cell(table: tuple[tuple[float, ...], ...]) -> float:
        return table[sender][receiver] if table else 0.0

    per_byte, latency = cell(chain.send_seconds), cell(chain.send_latency_seconds)
    return lambda num_bytes: latency + num_bytes * per_byte


def _reduction_seconds(chain: Chain, group: int, layers: range) -> float:
    if not chain.reduce_seconds:
        return 0.0
    own = chain.groups[group].parameter_bytes
    return chain.reduce_seconds[group] * sum(own[i] for i in layers)
