"""Makes the runner of a replica's microbatches from its plan: a chain or a pipeline."""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from ..graph.graph import Graph, params_of
from ..graph.parts import ChainPart, graph_at, parts_of
from ..model.loss import num_columns
from ..plan.check import schedule_of
from ..plan.layout import check_layers_whole, to_spec
from ..plan.parts import ONE_PROGRAM
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..schedule.segment_sequence import sequence_from_texts
from .chain_runner import ChainRunner
from .chain_spec import ChainSpec, cut_free
from .contribution import Contribution, Tensors, num_terms
from .inputs import Training
from .pipeline import Pipeline
from .pipeline_program import PipelineSpec
from .replica import Replica
from .segment_programs import ChainParts, parts_for
from .slots import Slots, make_slots
from .stage_chain import StageChain

Runner = ChainRunner | Pipeline | StageChain


def chains(plan: Plan, spec: ChainSpec) -> Callable[[Replica], ChainRunner]:
    """A function that makes the chain runner of a replica."""
    texts = ONE_PROGRAM if plan.chain is None or spec.is_whole else plan.chain.sequence
    sequence = sequence_from_texts(len(spec.parts), texts)
    by_part = plan.placement.zero > 1
    parts: dict[str, ChainParts] = {}  # by platform

    def runner(replica: Replica) -> ChainRunner:
        platform = replica.devices[0].platform
        if platform not in parts:
            parts[platform] = parts_for(spec, replica)
        return ChainRunner(spec, parts[platform], sequence, replica, by_part)

    return runner


def slots_of(graph: Graph, parts: Sequence[ChainPart], plan: Plan, trained: Sequence[int]) -> Slots:
    """The slots of the parameters that the stages of a plan read.

    Args:
        graph: In the order in which it is cut.
        trained: Places of the trained parameters.
    """
    num_stages = plan.num_stages
    rows = [graph.values[v].rows for v in graph.param_values]
    return make_slots(
        [layout.shape for layout in plan.parameters],
        [jnp.dtype(layout.dtype) for layout in plan.parameters],
        [
            sorted({p for part in parts[s::num_stages] for p in part.segment.params})
            for s in range(num_stages)
        ],
        [to_spec(layout.spec) for layout in plan.parameters],
        plan.inner_axes,
        trained,
        list(zip(params_of(graph), rows, strict=True)),
    )


def pipeline_spec(
    training: Training,
    graph: Graph,
    plan: Plan,
    tensors: Tensors,
    trained: tuple[int, ...],
    sharded: Sharded | None,
) -> PipelineSpec:
    """The `PipelineSpec` of a plan.

    Args:
        sharded: How the axes inside a stage cut the graph; None: there are none.
    """
    planned = plan.pipeline
    assert planned is not None
    ordered, points = graph_at(graph, planned.cut_by, planned.points)
    if plan.is_cut_free:
        ordered = cut_free(ordered, trained)
    check_layers_whole(ordered, plan.parameters)
    parts = parts_of(ordered, points)
    contribution = Contribution.of(plan.sums, num_terms(ordered, parts, plan.num_microbatches))
    num_stages, num = plan.num_stages, plan.num_microbatches
    slots = slots_of(ordered, parts, plan, trained)
    every = tuple(range(len(slots.slots)))
    table, is_even = planned.schedule, planned.needs_even_counts
    return PipelineSpec(
        graph=ordered,
        tensors=tensors,
        contribution=contribution,
        parts=parts,
        slots=slots,
        groups=tuple(slots.groups()) if plan.placement.zero > 1 else (every,),
        schedule=functools.cache(
            lambda count: schedule_of(table, num_stages, count, planned.num_chunks)
        ),
        most=max(plan.counts) if is_even else num,
        unit=num_stages if table == "interleaved" else max(plan.counts) if is_even else 1,
        num_microbatches=num,
        num_columns=num_columns(graph.metrics),
        seed=training.seed,
        recompute=planned.recompute,
        sharded=None if sharded is None else sharded.over(ordered),
    )


def param_groups(
    runner: Runner, trained: Sequence[int], keeps_roundings: bool
) -> tuple[list[list[int]], list[dict[int, str]]]:
    """Groups of trained parameters that are gathered together.

    A chain has a group for each part, and a last one of unread parameters; a pipeline one for each
    group of slots.

    Args:
        trained: Places of the trained parameters, in the order of their numbers.
        keeps_roundings: Whether compilers keep every cast of the trace; else rounding before the
            gather could differ from it.

    Returns:
        For each group its parameters, and those that may travel in a low dtype, with the dtype.
    """
    number = {p: t for t, p in enumerate(trained)}
    if isinstance(runner, Pipeline):
        read = runner.low_params() if keeps_roundings else {}
        of_slots = [group.trained for group in runner.groups]
        return (
            [[number[p] for p in params] for params in of_slots],
            [{number[p]: read[p] for p in params if p in read} for params in of_slots],
        )
    assert isinstance(runner, ChainRunner), "unlike stages share no state"
    groups, low = [], []
    for i in range(runner.num_parts):
        groups.append(list(dict.fromkeys(number[p] for p in runner.params_of(i) if p in number)))
        dtypes = runner.low_params_of(i) if keeps_roundings else {}
        low.append({number[p]: dtype for p, dtype in dtypes.items() if p in number})
    unread = set(number.values()).difference(*groups)
    return [*groups, sorted(unread)], [*low, {}]
