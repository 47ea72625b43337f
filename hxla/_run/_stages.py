"""Stages of a pipeline: how many, cut where, on which devices."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax

from .._core._config import Pipeline
from .._core._errors import ConfigError, PlanError
from .._core._types import PyTree
from .._graph._graph import Graph
from .._graph._parts import parts_of
from .._graph._segments import cut_points, in_task_order, segments_at, task_points
from .._graph._trace import trace_sums
from .._lower._pipeline import PipelineSpec
from .._lower._replicate import Reduction
from .._lower._slots import make_slots
from .._model._functional import Functional
from .._plan._sharding import Sharded
from .._schedule._schedules import Schedule, make_schedule, schedule_from_table

_FINE = 4  # segments that each part is chosen from
_MOST_SEGMENTS = 32
_MICROBATCHES_PER_STAGE = 4  # a bubble of at most a fifth

Table = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """A pipeline as the user asked for it.

    Attributes:
        num: Stages.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, or a table of the user's own.
        num_chunks: Parts of the model on each stage, for `interleaved`.
        recompute: Whether backwards run their forwards again.
        shares: Work of each part in proportion; None: even.
        by_tasks: Whether the cuts are those of the annotations.
        layers: Segments of each part, once they are measured; None: by `shares`.
        fractions: Of the work on each stage by its own device's times; none if not measured.
    """

    num: int
    schedule: str | Table = "1f1b"
    num_chunks: int = 1
    recompute: bool = False
    shares: tuple[float, ...] | None = None
    by_tasks: bool = False
    layers: tuple[int, ...] | None = None
    fractions: tuple[float, ...] = ()

    @property
    def num_parts(self) -> int:
        """Parts of the chain."""
        return self.num * self.num_chunks

    @property
    def num_segments(self) -> int:
        """Segments that a chain is cut into before they are put together to parts."""
        return max(self.num_parts, min(_FINE * self.num_parts, _MOST_SEGMENTS))

    @property
    def needs_even_counts(self) -> bool:
        """Whether the schedule is made for some numbers of microbatches only."""
        return self.schedule == "interleaved" or not isinstance(self.schedule, str)

    def unit(self, num_microbatches: int) -> int:
        """The number of which a pipeline's microbatches are a multiple.

        Args:
            num_microbatches: Of each pipeline, if counts are even.
        """
        if not isinstance(self.schedule, str):
            return num_microbatches
        return self.num if self.schedule == "interleaved" else 1

    def make_schedule(self, num_microbatches: int) -> Schedule:
        """For one pipeline.

        Raises:
            PlanError: If the schedule is not for so many stages or microbatches.
        """
        if isinstance(self.schedule, str):
            return make_schedule(self.schedule, self.num, num_microbatches, self.num_chunks)
        schedule = schedule_from_table(self.schedule)
        own = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
        if own != (self.num, num_microbatches, self.num_chunks):
            raise PlanError(
                f"the table of pipeline.schedule is for {own[0]} stages, {own[1]} microbatches and "
                f"{own[2]} chunks; this pipeline has {self.num} stages, {num_microbatches} "
                f"microbatches and {self.num_chunks} chunks"
            )
        return schedule

    def points(self, graph: Graph) -> tuple[int, ...]:
        """Where a graph is cut into parts.

        Raises:
            PlanError: If there are fewer places to cut than it takes.
        """
        if self.by_tasks:
            points = task_points(graph)
            if len(points) + 1 != self.num_parts:
                raise PlanError(
                    f"the annotations make {len(points) + 1} parts for {self.num_parts} stages: "
                    "each takes a TaskGraph with equations of its own, and one chunk"
                )
            return points
        fine = cut_points(graph, self.num_segments)
        chain = segments_at(graph, fine)
        if len(chain) < self.num_parts:
            raise PlanError(
                f"the loss has {len(chain)} parts that can be told apart (a scan over layers is "
                f"one), too few for {self.num_parts} stages: use fewer, or a loop over layers"
            )
        if self.layers is not None:
            assert sum(self.layers) == len(chain), (self.layers, len(chain))
            ends = list(itertools.accumulate(self.layers))
        else:
            ends = _even([s.flops for s in chain], self.shares or (1.0,) * self.num_parts)
        return tuple(fine[e - 1] for e in ends[:-1])

    def spec(
        self,
        run: Any,
        model: Functional,
        batch: PyTree,
        *,
        num_microbatches: int,
        num_sums: int,
        seed: int,
        reduction: Reduction,
        num_pipelines: int,
        axes: Sequence[tuple[str, int]] = (),
        shard: Callable[..., Sharded] | None = None,
    ) -> PipelineSpec:
        """What the programs are made from, for a microbatch like `batch`.

        Args:
            run: Of the loss, see `trace_sums`.
            model: As pure functions.
            batch: One microbatch.
            num_microbatches: Of a global batch.
            num_sums: Columns of a microbatch's sums.
            seed: Root of all random keys.
            reduction: `exact` or `float`.
            num_pipelines: That share the microbatches.
            axes: Mesh axes inside a stage, with their sizes.
            shard: Plans what they cut, see `Strategy.shard`.
        """
        sharded = shard(run, model.params, model.aux, batch, model.logical) if shard else None
        graph = (
            sharded.graph
            if sharded is not None
            else trace_sums(run, model.params, model.aux, batch, logical=model.logical)
        )
        if self.by_tasks:
            graph = in_task_order(graph)
        parts = parts_of(graph, self.points(graph))
        leaves = jax.tree.leaves(model.params)
        slots = make_slots(
            [tuple(x.shape) for x in leaves],
            [x.dtype for x in leaves],
            [
                sorted({p for part in parts[s :: self.num] for p in part.segment.params})
                for s in range(self.num)
            ],
            sharded.param_specs() if sharded is not None else None,
            axes,
        )
        even = self.needs_even_counts
        return PipelineSpec(
            graph=graph,
            parts=parts,
            slots=slots,
            schedule=functools.cache(self.make_schedule),
            most=num_microbatches // num_pipelines if even else num_microbatches,
            unit=self.unit(num_microbatches // num_pipelines),
            num_microbatches=num_microbatches,
            num_sums=num_sums,
            seed=seed,
            reduction=reduction,
            recompute=self.recompute,
            sharded=sharded,
        )

    def split_inside(self, size: int) -> "Stages":
        """As it runs on stages of several devices, which keep the inputs of microbatches only.

        Raises:
            ConfigError: If the schedule needs residuals.
        """
        table = self.schedule if not isinstance(self.schedule, str) else ()
        if self.schedule == "zb-h1" or any("W" in text for tick in table for text in tick):
            raise ConfigError(
                "weight gradients of their own (pipeline.schedule='zb-h1') need residuals, which "
                f"stages of {size} devices each do not keep: use schedule='1f1b', or stages of one "
                "device"
            )
        return dataclasses.replace(self, recompute=True)


def asked(stages: int | Sequence[float] | None, config: Pipeline) -> Stages:
    """What arguments and configuration say of a pipeline; of the number of stages, if they do.

    Raises:
        ConfigError: If it is no number, or the shares are not positive numbers, one per part.
    """
    num, shares = 0, None
    if isinstance(stages, SupportsIndex):
        num = operator.index(stages)
    elif stages is not None:
        try:
            shares = tuple(map(float, stages))
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
    table = config.schedule if not isinstance(config.schedule, str) else ()
    splits = config.schedule == "zb-h1" or any("W" in text for tick in table for text in tick)
    if config.recompute and splits:
        raise ConfigError(
            "pipeline.recompute=True with weight gradients of their own would run each forward "
            "three times: use schedule='1f1b', or keep residuals"
        )
    return Stages(
        num=num,
        schedule=config.schedule,
        num_chunks=config.num_chunks,
        recompute=config.recompute,
        shares=shares,
    )


def microbatch_size(stages: Stages, batch_size: int, num_pipelines: int) -> tuple[int, str]:
    """The largest that leaves every stage enough microbatches, and why."""
    num = num_pipelines * stages.num * _MICROBATCHES_PER_STAGE
    divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    size = max((b for b in divisors if b * num <= batch_size), default=1)
    return size, f"microbatch_size={size}: at least {_MICROBATCHES_PER_STAGE} per stage"


def check_even(stages: Stages, num_microbatches: int, num_pipelines: int, split: Any) -> None:
    """A schedule for some numbers of microbatches only gets one of them on every pipeline.

    Raises:
        PlanError: If the microbatches do not suit the pipelines.
        ConfigError: If the split is uneven.
    """
    if num_microbatches % (num_pipelines * stages.unit(num_microbatches // num_pipelines)):
        raise PlanError(
            f"{num_microbatches} microbatches do not suit {num_pipelines} pipelines of schedule "
            f"{stages.make_schedule(stages.num).name}: use a multiple of "
            f"{num_pipelines * stages.num}"
        )
    if not isinstance(split, str) and len(set(split)) > 1:
        raise ConfigError(
            f"split={tuple(split)}: this schedule gives every pipeline as many microbatches; use "
            "split='even', or pipeline.schedule='1f1b'"
        )


def check_unannotated(graph: Graph, num: int) -> None:
    """Stages are asked for in one way only.

    Raises:
        ConfigError: If the model is annotated.
    """
    annotated = [t.label for t in graph.task_graphs if t.strategy == "split" or t.device_count]
    if annotated:
        raise ConfigError(
            f"stages={num} cuts a model that annotations cut already ({', '.join(annotated)}): "
            "remove the annotations or the stages"
        )


def _even(work: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Ends of consecutive groups whose work over its share is at most as large as it must be."""
    total = list(itertools.accumulate(work, initial=0.0))
    size = len(work)
    infinite = float("inf")
    best: list[tuple[float, list[int]]] = [
        (0.0, []) if e == 0 else (infinite, []) for e in range(size + 1)
    ]
    for share in shares:
        best = [
            min(
                (
                    (max(best[s][0], (total[e] - total[s]) / share), [*best[s][1], e])
                    for s in range(e)
                    if best[s][0] < infinite
                ),
                default=(infinite, []),
            )
            for e in range(size + 1)
        ]
    return best[size][1]
