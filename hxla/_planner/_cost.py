"""What a step takes: compute, communication, bubbles, gradient reduction and update.

A link is a function from bytes to seconds, so a line (`latency + bytes / bandwidth`) and a measured
curve are the same thing here. Times of stages come from a profile; the schedule is replayed with
them, so bubbles are counted and not estimated.
"""

import dataclasses
from collections.abc import Callable, Sequence

from .._schedule._replay import Timeline, replay
from .._schedule._schedules import Schedule, one_f_one_b

LinkSeconds = Callable[[float], float]  # of a message of so many bytes


def ring_all_reduce_seconds(
    num_bytes: float, num_devices: int, link: LinkSeconds, *, duplex: bool = True
) -> float:
    """All-reduce over a ring: `2 (n - 1)` steps of one n-th of the bytes.

    Args:
        num_bytes: Of the array that every device holds.
        num_devices: On the ring.
        link: Of the ring's slowest pair.
        duplex: False if a device's sends and receives share its link's bandwidth, which doubles
            every step.

    References:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009, section 3;
        NCCL computes its bus bandwidth with the same factor 2 (n - 1) / n.
    """
    return 2 * _ring_seconds(num_bytes, num_devices, link) * (1 if duplex else 2)


def all_gather_seconds(num_bytes: float, num_devices: int, link: LinkSeconds) -> float:
    """All-gather over a ring, or a reduce-scatter: `n - 1` steps of one n-th of the bytes.

    Args:
        num_bytes: Of the whole array.
        num_devices: On the ring.
        link: Of the ring's slowest pair.
    """
    return _ring_seconds(num_bytes, num_devices, link)


def _ring_seconds(num_bytes: float, num_devices: int, link: LinkSeconds) -> float:
    if num_devices <= 1 or num_bytes == 0:
        return 0.0
    return (num_devices - 1) * link(num_bytes / num_devices)


def exposed_reduction_seconds(
    reduction_seconds: float, last_backward_seconds: float, num_buckets: int
) -> float:
    """Part of a gradient reduction that the last backward does not hide.

    The gradients leave in buckets as the backward of the last microbatch finishes them. All but the
    last bucket may be reduced under the rest of it; the last bucket never is. One bucket hides
    nothing.

    References:
        Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3.
    """
    hidden = last_backward_seconds * (num_buckets - 1) / num_buckets
    return max(reduction_seconds / num_buckets, reduction_seconds - hidden)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What one stage of one replica has to do.

    Attributes:
        forward_seconds: Of one microbatch.
        backward_seconds: Of one microbatch.
        update_seconds: Optimizer update, once a step.
        gradient_bytes: Of one device, reduced over the replicas once a step.
        send_bytes: Of one microbatch's output.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    gradient_bytes: float
    send_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCost:
    """Where the step's time of one stage goes; the fields add up to the step.

    Attributes:
        compute_seconds: Forwards and backwards.
        wait_seconds: Bubbles, transfers, and other replicas and stages.
        reduction_seconds: Of its gradients over the replicas, as far as exposed.
        update_seconds: Optimizer update.
    """

    compute_seconds: float
    wait_seconds: float
    reduction_seconds: float
    update_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Predicted time of a step.

    Attributes:
        step_seconds: From one step's reduction to the next one's, where steps follow one another.
        stages: Per replica and stage.
        timelines: One per replica.
    """

    step_seconds: float
    stages: tuple[tuple[StageCost, ...], ...]
    timelines: tuple[Timeline, ...]


def step_cost(
    replicas: Sequence[Sequence[StageLoad]],
    num_microbatches: Sequence[int],
    links: Sequence[Sequence[LinkSeconds]],
    reduction_seconds: Sequence[float],
    *,
    make_schedule: Callable[[int, int], Schedule] = one_f_one_b,
    blocking: bool = False,
    num_buckets: int = 1,
    barrier: bool = False,
) -> StepCost:
    """Time of a step of pipelines that train one model together.

    A stage's reduction starts when the stage is done in every replica, its update when the
    reduction is done, and the next step of each replica with its own update.

    Args:
        replicas: Loads of each replica's stages; like replicas may be given once.
        num_microbatches: Of each replica.
        links: Per replica, the link from each stage to the next.
        reduction_seconds: Of each stage's gradients over the replicas.
        make_schedule: From stages and microbatches to a schedule of one chunk per stage.
        blocking: Whether a transfer holds up both of its stages, see `replay`.
        num_buckets: Of the gradient reduction, see `exposed_reduction_seconds`.
        barrier: Whether all stages wait for one another before the reduction.

    Returns:
        The time of the step and where each stage's time goes.
    """
    timelines = tuple(
        replay(
            make_schedule(len(stages), count),
            [stage.forward_seconds for stage in stages],
            [stage.backward_seconds for stage in stages],
            send_seconds_P=[
                link(stage.send_bytes) for link, stage in zip(between, stages[:-1], strict=True)
            ],
            blocking=blocking,
        )
        for stages, count, between in zip(replicas, num_microbatches, links, strict=True)
    )
    num_stages = len(reduction_seconds)
    done = [t.finish_seconds for t in timelines]
    if barrier:
        done = [(max(map(max, done)),) * num_stages] * len(done)
    exposed = [
        exposed_reduction_seconds(
            seconds, min(stages[s].backward_seconds for stages in replicas), num_buckets
        )
        for s, seconds in enumerate(reduction_seconds)
    ]
    # Nobody waits for another's update, so each replica's lies on its own path to the next sum.
    step = max(
        own[s] + exposed[s] + stages[s].update_seconds
        for stages, own in zip(replicas, done, strict=True)
        for s in range(num_stages)
    )
    costs = tuple(
        tuple(
            StageCost(
                compute_seconds=timeline.busy_seconds[s],
                wait_seconds=step
                - timeline.busy_seconds[s]
                - exposed[s]
                - stages[s].update_seconds,
                reduction_seconds=exposed[s],
                update_seconds=stages[s].update_seconds,
            )
            for s in range(num_stages)
        )
        for stages, timeline in zip(replicas, timelines, strict=True)
    )
    return StepCost(step_seconds=step, stages=costs, timelines=timelines)
