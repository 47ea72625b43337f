"""Replicas of unlike depth: where each is cut into stages, and how many microbatches it gets.

The chain of the model's segments is cut wherever any replica begins a stage. What lies between two
cuts is a part, a program of its own on every replica. So a replica of one device and one of two
stages run the same programs.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..graph.graph import Graph
from ..graph.parts import graph_of
from ..graph.segments import segments
from .apportionment import best_counts, even_counts
from .microbatch_counts import Counts, asked_counts
from .pipeline_request import PipelineRequest, UnlikeReplica, least_maximum
from .stage_forms import StageForm


def with_cuts_and_counts(
    graph: Graph,
    request: PipelineRequest,
    num_microbatches: int,
    counts: Counts,
    seconds: Mapping[int, np.ndarray],
    kept: Sequence[int],
) -> tuple[PipelineRequest, tuple[float, ...], tuple[float, ...]]:
    """The request with the stages and microbatches of each replica.

    Args:
        num_microbatches: Of a step.
        seconds: [3, L] Seconds of the segments on each device, by its place; empty: not known, and
            devices are taken to be alike.
        kept: The segments of each part of an earlier plan, where a run goes on; empty: none.

    Returns:
        The request; for each replica what its slowest stage takes of a microbatch, and what its
        other stages take of one: seconds, where these are known.

    Raises:
        PlanError: If the model has too few segments.
        ConfigError: If the counts are no counts.
    """
    request = dataclasses.replace(request, num_segments=request.most_segments)
    chain = segments(graph_of(graph), request.num_segments)
    if len(chain) < request.num:
        request.planned(graph)  # says why
    flops = np.array([max(segment.flops, 1.0) for segment in chain])
    is_kept = sum(kept) == len(chain) and len(kept) >= request.num
    units = list(kept) if is_kept else [1] * len(chain)
    firsts = np.cumsum([0, *units[:-1]])
    rest = iter(range(sum(replica.num_devices for replica in request.replicas)))
    ends, times = [], []
    for replica in request.replicas:
        costs = _costs(replica.forms, rest, flops, seconds)
        totals = [[0.0, *np.cumsum(np.add.reduceat(row, firsts)).tolist()] for row in costs]

        def cost(s: int, a: int, b: int, totals: list[list[float]] = totals) -> float:
            return totals[s][b] - totals[s][a]

        ends.append(least_maximum(len(totals), len(units), cost))
        bounds = itertools.pairwise((0, *ends[-1]))
        times.append([row[b] - row[a] for row, (a, b) in zip(totals, bounds, strict=True)])
    points = sorted(set().union(*ends))
    parts = tuple(sum(units[a:b]) for a, b in itertools.pairwise((0, *points)))
    slowest = [max(each) for each in times]
    fixed = [sum(each) - most for each, most in zip(times, slowest, strict=True)]
    if counts == "measured":
        numbers = best_counts(num_microbatches, slowest, fixed)
    elif counts == "even":
        numbers = even_counts(num_microbatches, len(times))
    else:
        numbers = asked_counts(counts, num_microbatches, len(times))
    replicas = tuple(
        UnlikeReplica(
            replica.forms,
            tuple(
                sum(a < point <= b for point in points) for a, b in itertools.pairwise((0, *each))
            ),
            number,
        )
        for replica, each, number in zip(request.replicas, ends, numbers, strict=True)
    )
    request = dataclasses.replace(request, num=len(parts), cut=parts, replicas=replicas)
    return request, tuple(slowest), tuple(fixed)


def counts_are_free(request: PipelineRequest, granules: int | None) -> bool:
    """Whether bits depend on no count: every stage is one device, or computes in granules."""
    forms = [form for replica in request.replicas for form in replica.forms]
    return granules is not None or not any(form.axes for form in forms)


def _costs(
    forms: Sequence[StageForm],
    places: Iterator[int],
    flops: np.ndarray,
    seconds: Mapping[int, np.ndarray],
) -> list[np.ndarray]:
    """For each stage what it takes of each segment: seconds, or work in proportion."""
    out, is_stated = [], any(form.is_stated for form in forms)
    for form in forms:
        own = list(itertools.islice(places, form.num_devices))
        if is_stated:
            out.append(flops / form.work)
        elif seconds:
            slowest = np.max([seconds[place][:2].sum(0) for place in own], axis=0)
            out.append(slowest / form.num_devices)
        else:
            out.append(flops / form.num_devices)
    return out
