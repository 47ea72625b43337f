"""A pipeline as the user asks for it, and where it cuts a graph.

Cuts between stages follow times that are measured on their devices.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, SupportsIndex

import numpy as np

from ..core.config import Config
from ..core.errors import ConfigError, PlanError
from ..core.files import listed
from ..graph.graph import Graph
from ..graph.parts import graph_of, uncut_scans
from ..graph.segments import cut_points, segments, segments_at, task_points
from ..jax.jaxpr import scan_counts, source_of
from ..plan.axis_assignment import shard_graph
from ..plan.parts import PlannedPipeline, PlannedSegment
from ..profile.segment_times import layer_sizes
from ..schedule.schedules import needs_even_counts
from .microbatch_counts import Counts
from .stage_forms import StageForm, forms_asked, replica_forms_asked, stages_in_granules

_FINE = 4  # segments that each part is chosen from
_MOST_SEGMENTS = 32
_MICROBATCHES_PER_STAGE = 4  # a bubble of at most a fifth

Table = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class UnlikeReplica:
    """A replica beside replicas of another form.

    Attributes:
        forms: The devices of each of its stages.
        cut: The parts of the chain that each stage runs; empty: not chosen yet.
        num_microbatches: Of a step; 0 before it is chosen.
    """

    forms: tuple[StageForm, ...]
    cut: tuple[int, ...] = ()
    num_microbatches: int = 0

    @property
    def num_devices(self) -> int:
        """The number of devices of the replica."""
        return sum(form.num_devices for form in self.forms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """A pipeline as the user asks for it.

    Attributes:
        is_asked: Whether a number of stages, valid or not, was asked for.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, or a user's table.
        num_chunks: Parts of the model on each stage, for `interleaved`.
        recompute: Whether backwards run their forwards again; None: as the stages need it.
        shares: Work of each part in proportion; None: even.
        by_annotations: Whether the cuts are those of the annotations.
        num_segments: Segments of the chain; 0: chosen by the number of parts.
        cut: Segments of each part; None: by `shares`.
        forms: The devices of each stage, where they are unlike; empty: all are alike.
        replicas: The stages of each replica, where replicas are unlike; empty: all are alike.
    """

    num: int
    is_asked: bool = True
    schedule: str | Table = "1f1b"
    num_chunks: int = 1
    recompute: bool | None = None
    shares: tuple[float, ...] | None = None
    by_annotations: bool = False
    num_segments: int = 0
    cut: tuple[int, ...] | None = None
    forms: tuple[StageForm, ...] = ()
    replicas: tuple[UnlikeReplica, ...] = ()

    @property
    def has_forms(self) -> bool:
        """Whether stages or replicas are unlike."""
        return bool(self.forms or self.replicas)

    @property
    def num_parts(self) -> int:
        """Parts of the chain."""
        return self.num * self.num_chunks

    @property
    def most_segments(self) -> int:
        """Segments of the chain, before they are joined to parts."""
        num = sum(len(replica.forms) for replica in self.replicas) or self.num_parts
        some = max(self.num_parts, min(_FINE * num, _MOST_SEGMENTS))
        if self.shares is not None:  # nothing is measured, so a fine chain costs nothing
            some = max(some, _MOST_SEGMENTS)
        return self.num_segments or some

    @property
    def needs_even_counts(self) -> bool:
        """Whether the schedule needs the same number of microbatches on every pipeline."""
        return needs_even_counts(self.schedule)

    def unit(self, num_microbatches: int) -> int:
        """The divisor of a pipeline's microbatches.

        Args:
            num_microbatches: Of each pipeline, if counts are even.
        """
        if not isinstance(self.schedule, str):
            return num_microbatches
        return self.num if self.schedule == "interleaved" else 1

    @property
    def has_weight(self) -> bool:
        """Whether weight gradients are separate actions."""
        table = self.schedule if not isinstance(self.schedule, str) else ()
        return self.schedule == "zb-h1" or any("W" in text for tick in table for text in tick)

    def in_granules(self, granules: int) -> "PipelineRequest":
        """The request with the axis `tensor` in each unlike stage, also of one device.

        Raises:
            ConfigError: With every stage that has no whole granules.
        """
        forms, faults = stages_in_granules(self.forms, granules, "stages")
        replicas = []
        for r, replica in enumerate(self.replicas):
            own, wrong = stages_in_granules(replica.forms, granules, f"stages[{r}]")
            replicas.append(dataclasses.replace(replica, forms=own))
            faults += wrong
        if faults:
            raise ConfigError(f"numerics.cut of 'any' does not run these stages:{listed(faults)}")
        return dataclasses.replace(self, forms=forms, replicas=tuple(replicas))

    def check_inside(self, size: int) -> None:
        """Refuse residuals in stages of several devices, which keep inputs only.

        Raises:
            ConfigError: If the schedule needs residuals, or they are asked for.
        """
        if size > 1 and self.recompute is False:
            raise ConfigError(
                f"memory.recompute='none': stages of {size} devices each keep no residuals: leave "
                "it out, set 'boundaries', or use stages of one device"
            )
        if size > 1 and self.has_weight:
            raise ConfigError(
                "weight gradients of their own (pipeline.schedule='zb-h1') need residuals, which "
                f"stages of {size} devices each do not keep: use schedule='1f1b', or stages of one "
                "device"
            )

    def planned(self, graph: Graph) -> PlannedPipeline:
        """The pipeline of a graph.

        Raises:
            PlanError: If the graph has too few places to cut.
        """
        cut_by: Literal["work", "annotations"] = "annotations" if self.by_annotations else "work"
        graph = graph_of(graph, cut_by)
        if self.by_annotations:
            points = task_points(graph)
            if len(points) + 1 != self.num_parts:
                raise PlanError(
                    f"the annotations make {len(points) + 1} parts for {self.num_parts} stages: "
                    "each takes a TaskGraph with equations of its own, and one chunk"
                )
            cut = (1,) * self.num_parts
        else:
            points = cut_points(graph, self.most_segments)
        chain = segments_at(graph, points)
        if len(chain) < self.num_parts:
            raise _too_few(graph, [segment.name for segment in chain], self)
        if self.cut is not None:
            assert sum(self.cut) == len(chain), (self.cut, len(chain))
            cut = self.cut
        elif not self.by_annotations:
            cut = _even([s.flops for s in chain], self.shares or (1.0,) * self.num_parts)
        parts = [part for part, num in enumerate(cut) for _ in range(num)]
        table = self.schedule
        return PlannedPipeline(
            cut_by=cut_by,
            segments=tuple(
                PlannedSegment(
                    name=segment.name,
                    first=first,
                    part=part,
                    keep="inputs" if self.recompute else "residuals",
                )
                for segment, first, part in zip(chain, (0, *points), parts, strict=True)
            ),
            schedule=table if isinstance(table, str) else tuple(tuple(tick) for tick in table),
            num_chunks=self.num_chunks,
        )


def _too_few(graph: Graph, names: Sequence[str], request: PipelineRequest) -> PlanError:
    scans = [op for op in graph.ops if op.kind == "scan" and op.iterations is None]
    uncut = uncut_scans(graph)
    why = "".join(f" ({line})" for line in uncut)
    if scans and not uncut:
        lacks = "takes no slices of parameters"
        if scan_counts(scans[0].eqn)[1] == 0:
            lacks = "hands nothing from one iteration to the next"
        why = (
            f" (a scan, {source_of(scans[0].eqn)}, is one: it {lacks}, as a scan over layers does)"
        )
    remedy = f"use at most {len(names) // request.num_chunks}"
    if len(names) == 1 and scans:
        remedy = "stack its layers' parameters for the scan, or write its layers as a Python loop"
    elif len(names) < 2 * request.num_chunks:
        remedy = "train replicas without stages"
    return PlanError(
        f"the loss has {len(names)} parts that can be told apart{why}, {', '.join(names)}: too few "
        f"for {request.num_parts} stages; {remedy}"
    )


#: What a user may ask of stages: their number, their shares of the work, a table for each, or a
#: list of tables for each replica.
Stages = (
    int | Sequence[float] | Sequence[Mapping[str, float]] | Sequence[Sequence[Mapping[str, float]]]
)


def asked(stages: Stages | None, settings: Config) -> PipelineRequest:
    """The pipeline by arguments and configuration; `auto` recomputation waits for the memory.

    Raises:
        ConfigError: If stages are no number, or shares are not positive numbers, one per part.
    """
    config, recompute = settings.pipeline, settings.memory.recompute
    num, shares = 0, None
    forms: tuple[StageForm, ...] = ()
    replicas: tuple[UnlikeReplica, ...] = ()
    if isinstance(stages, SupportsIndex):
        num = operator.index(stages)
    elif isinstance(stages, list | tuple) and any(isinstance(x, Mapping) for x in stages):
        forms = forms_asked(stages)
        num, shares = len(forms), tuple(form.work for form in forms)
    elif isinstance(stages, list | tuple) and any(isinstance(x, list | tuple) for x in stages):
        replicas = tuple(map(UnlikeReplica, replica_forms_asked(stages)))
        num = max(len(replica.forms) for replica in replicas)
    elif stages is not None:
        try:
            shares = tuple(map(float, stages))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(
                f"stages={stages!r} is neither a number of stages nor one share of the work for "
                "each"
            ) from None
        num, rest = divmod(len(shares), config.num_chunks)
        if rest or not all(0 < x < float("inf") for x in shares):
            raise ConfigError(
                f"stages={list(stages)} must be positive shares of the work, one for each of the "
                f"{config.num_chunks} chunks of each stage"
            )
    if config.num_chunks > 1 and config.schedule in ("gpipe", "1f1b", "zb-h1"):
        raise ConfigError(
            f"pipeline.num_chunks={config.num_chunks} needs pipeline.schedule='interleaved', not "
            f"{config.schedule!r}"
        )
    request = PipelineRequest(
        num=num,
        is_asked=stages is not None,
        schedule=config.schedule,
        num_chunks=config.num_chunks,
        recompute=None if recompute in (None, "auto") else recompute == "boundaries",
        shares=shares,
        forms=forms,
        replicas=replicas,
    )
    if request.recompute and request.has_weight:
        raise ConfigError(
            "memory.recompute='boundaries' with weight gradients of their own would run each "
            "forward three times: use schedule='1f1b', or keep residuals"
        )
    return request


def microbatch_size(
    request: PipelineRequest, batch_size: int, num_pipelines: int
) -> tuple[int, str]:
    """The largest size that leaves every stage enough microbatches, and why."""
    num = num_pipelines * request.num * _MICROBATCHES_PER_STAGE
    divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    size = max((b for b in divisors if b * num <= batch_size), default=1)
    return size, f"microbatch_size={size}: at least {_MICROBATCHES_PER_STAGE} per stage"


def check_even(
    request: PipelineRequest, num_microbatches: int, num_pipelines: int, counts: Counts
) -> None:
    """Check that the microbatches suit the schedule on every pipeline.

    Raises:
        PlanError: If the microbatches do not suit the pipelines.
        ConfigError: If the counts are uneven.
    """
    if num_microbatches % (num_pipelines * request.unit(num_microbatches // num_pipelines)):
        name = request.schedule if isinstance(request.schedule, str) else "of your own"
        raise PlanError(
            f"{num_microbatches} microbatches do not suit {num_pipelines} pipelines of schedule "
            f"{name}: use a multiple of {num_pipelines * request.num}"
        )
    if request.needs_even_counts and not isinstance(counts, str) and len(set(counts)) > 1:
        raise ConfigError(
            f"counts={tuple(counts)}: this schedule gives every pipeline as many microbatches; use "
            "counts='even', or pipeline.schedule='1f1b'"
        )


def _even(work: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """Sizes of consecutive groups with the least maximum of work over share."""
    total = list(itertools.accumulate(work, initial=0.0))
    ends = least_maximum(
        len(shares), len(work), lambda group, a, b: (total[b] - total[a]) / shares[group]
    )
    return tuple(b - a for a, b in itertools.pairwise((0, *ends)))


def least_maximum(num: int, size: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Ends of so many consecutive groups with the least maximum of their costs.

    Args:
        size: The number of members.
        cost: From the number of a group, its first member, and that behind its last.
    """
    infinite = float("inf")
    best: list[tuple[float, tuple[int, ...]]] = [
        (0.0, ()) if end == 0 else (infinite, ()) for end in range(size + 1)
    ]
    for group in range(num):
        best = [
            min(
                (
                    (max(best[first][0], cost(group, first, end)), (*best[first][1], end))
                    for first in range(end)
                    if best[first][0] < infinite
                ),
                default=(infinite, ()),
            )
            for end in range(size + 1)
        ]
    return best[size][1]


_MOST_WORK = 3e7  # of a dynamic programme over groups of devices, of which a cut solves some


def _alike(seconds: Sequence[float], room: Sequence[float], num_layers: int) -> list[list[int]]:
    """Groups of devices that a cut may take for equal: as few as its search needs.

    Its search grows exponentially with the groups. Equal devices are one group. While there are too
    many groups, the two that are most alike in seconds and memory become one.

    Args:
        seconds: Of the whole model on each device.
        room: The memory of each device, in bytes.

    Returns:
        For each group the places of its devices.
    """

    def distance(a: list[int], b: list[int]) -> float:
        each = [[[x[i] for i in group] for group in (a, b)] for x in (seconds, room)]
        return sum(abs(math.log(np.mean(one) / np.mean(other))) for one, other in each)

    def work(groups: list[list[int]]) -> float:
        num = len(groups)
        states = math.prod(len(group) + 1 for group in groups)
        return float(states * num * ((num_layers + 1) * (num + 1)) ** 2)

    same: dict[tuple[float, float], list[int]] = {}
    for i, key in enumerate(zip(seconds, room, strict=True)):
        same.setdefault(key, []).append(i)
    groups = list(same.values())
    while len(groups) > 1 and work(groups) > _MOST_WORK:
        a, b = min(itertools.combinations(groups, 2), key=lambda pair: distance(*pair))
        groups.remove(a)
        groups.remove(b)
        groups.append(sorted(a + b))
    return sorted(groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCut:
    """Stages on devices.

    Attributes:
        order: The devices of the pipelines, in the order of their stages.
        fractions: Each stage's part of a microbatch's time on its device.
        stage_seconds: Of a microbatch on each stage.
    """

    order: tuple[int, ...]
    layers: tuple[int, ...]
    fractions: tuple[float, ...]
    stage_seconds: tuple[float, ...]


def best_cut(
    graph: Graph,
    request: PipelineRequest,
    times: Mapping[int, np.ndarray],
    *,
    memory_bytes: Mapping[int, int | None],
    num_microbatches: int,
    optimizer_bytes: int,
    num_parts: int,
    trained: Collection[int] | None = None,
) -> StageCut:
    """The fastest stages for one pipeline over unlike devices, or for several equal pipelines.

    Args:
        times: [2, L] Seconds of the segments' forward and backward on each device.
        memory_bytes: Of each device; None: taken to be enough.
        optimizer_bytes: Of the optimizer's state for the whole model.
        num_parts: Arrays in which a gradient is summed.
        trained: Places of the parameters that have a gradient; None: all.

    Raises:
        PlanError: If no cut fits the devices' memory.
    """
    from .chain import UNBOUNDED, Chain, Group, best_pipeline

    opened = graph_of(graph)
    chain = segments(opened, request.most_segments)
    sizes = layer_sizes(opened, chain, shard_graph(opened, (), {}), trained=trained)
    num = request.num
    seconds = {d: rows[:2].T for d, rows in times.items()}
    pipelines = [list(range(i, i + num)) for i in range(0, len(times), num)]
    # Several pipelines share the cut of their mean pipeline. Each has its larger memories first,
    # because earlier stages keep more.
    if len(pipelines) > 1:
        for ranks in pipelines:
            ranks.sort(key=lambda d: (-(memory_bytes[d] or 0), float(seconds[d].sum())))
    means = [np.mean([seconds[ranks[i]] for ranks in pipelines], axis=0) for i in range(num)]
    known = [[m for ranks in pipelines if (m := memory_bytes[ranks[i]])] for i in range(num)]
    room = [min(each, default=UNBOUNDED) for each in known]
    alike = _alike([float(x.sum()) for x in means], room, len(sizes))
    groups = tuple(
        Group(
            kind=f"devices {members}",
            num_devices=len(members),
            memory_bytes=min(room[i] for i in members),
            forward_seconds=tuple(np.mean([means[i][:, 0] for i in members], axis=0).tolist()),
            backward_seconds=tuple(np.mean([means[i][:, 1] for i in members], axis=0).tolist()),
            update_seconds=(0.0,) * len(sizes),
            parameter_bytes=tuple(s.parameter_bytes for s in sizes),
            stash_bytes=tuple(s.stash_bytes for s in sizes),
        )
        for members in alike
    )
    param_bytes = sum(s.parameter_bytes for s in sizes)
    problem = Chain(
        groups=groups,
        num_microbatches=max(1, num_microbatches // len(pipelines)),
        output_bytes=tuple(s.output_bytes for s in sizes),
        # A stage's parameters and their sums; stored state is even over all stages.
        state_factor=1.0 + num_parts,
        workspace_bytes=(param_bytes * (1 + num_parts) + optimizer_bytes) / num,
    )
    staging = best_pipeline(problem, num_stages=num)
    (replica,) = staging.replicas
    ends = (*staging.cuts[1:], len(sizes))
    layers = tuple(b - a for a, b in zip(staging.cuts, ends, strict=True))
    left = list(map(iter, alike))
    chosen = [next(left[g]) for g in replica.groups]
    pipelines = [[ranks[i] for i in chosen] for ranks in pipelines]
    spans = zip(chosen, staging.cuts, ends, strict=True)
    busy = [float(means[i][a:b].sum()) for i, a, b in spans]
    whole = [float(means[i].sum()) for i in chosen]
    return StageCut(
        order=tuple(itertools.chain(*pipelines)),
        layers=layers,
        fractions=tuple(b / w if w else 0.0 for b, w in zip(busy, whole, strict=True)),
        stage_seconds=tuple(busy),
    )
