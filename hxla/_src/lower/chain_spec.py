"""A microbatch as a chain of segments: the inputs of a replica's programs.

A chain of one segment is the microbatch as one program; its graph is the traced one.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..core.types import PyTree
from ..graph.graph import Graph, entries_of, params_of, shapes_of
from ..graph.parts import ChainPart, graph_at, reads_apart, values_by_shape
from ..graph.segments import Segment, segments_at
from ..jax.jaxpr import scan_counts
from ..model.loss import num_columns
from ..plan.layout import check_layers_whole
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..schedule.segment_sequence import sequence_from_texts
from .bitcast_packing import BitcastPacking
from .contribution import (
    Contribution,
    DeviceSums,
    Tensors,
    num_terms,
    pack_shapes,
    pack_specs,
    packs_of,
)
from .inputs import Training
from .uneven import Uneven


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainSpec:
    """The inputs of a chain's programs.

    Attributes:
        graph: Graph of the loss of one microbatch, in the order in which it is cut.
        parts: Parts of the chain; each may read outputs of any earlier one.
        packs: Groups of tensors of one part whose sums are one array.
        trained: Places of the parameters that are trained.
        num_columns: S, sums of a microbatch.
        seed: Root of all random keys.
        specs: PartitionSpec of each float tensor over the axes inside a replica.
        sharded: How these axes cut the graph.
        uneven: How they cut it if shards are of unlike sizes; else None.
        mean: Whether a microbatch's gradient is that of its mean loss, or of its sum.
        clip_norm: Global norm to which each microbatch's gradient is clipped; None: not clipped.
        num_scaled: Losses of a microbatch, if their sum is scaled before it is differentiated; the
            exponent is the last of the other variables. 0: it is not scaled.
        per_call: Most microbatches of a call; several run in a loop.
    """

    graph: Graph
    parts: tuple[ChainPart, ...]
    tensors: Tensors
    packs: Sequence[Sequence[int]]
    trained: tuple[int, ...]
    contribution: Contribution
    num_microbatches: int
    num_columns: int
    seed: int
    specs: tuple[P, ...]
    sharded: Sharded
    uneven: Uneven | None = None
    mean: bool = True
    clip_norm: float | None = None
    num_scaled: int = 0
    per_call: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether a microbatch is one program."""
        return len(self.parts) == 1

    @property
    def trained_entries(self) -> tuple[int, ...]:
        """See `entries_of`, of the trained parameters."""
        return entries_of(self.graph, set(self.trained))

    @property
    def joins_at_end(self) -> bool:
        """Whether gradients of all parts wait for the last backward, to be clipped together."""
        return self.clip_norm is not None and not self.is_whole

    @property
    def shared(self) -> frozenset[int]:
        """Tensors to whose sums a microbatch adds several terms."""
        if self.joins_at_end:
            return frozenset()
        return shared_tensors(self.graph, self.parts, self.trained)

    @property
    def crosses_whole(self) -> bool:
        """Whether values are whole between programs, for their shards are of unlike sizes."""
        return self.uneven is not None and not self.is_whole

    def specs_of(self, values: Sequence[int]) -> list[P]:
        """PartitionSpecs of values of the graph between programs."""
        if self.crosses_whole:
            return [P()] * len(values)
        return list(map(self.sharded.spec_of, values))

    def waiting_specs(self, values: Sequence[int]) -> list[P]:
        """PartitionSpecs of values kept for a later program."""
        if self.crosses_whole:
            return [P()] * len(values)
        return list(map(self.sharded.waiting_spec, values))

    def waiting_bytes(self, values: Sequence[int]) -> int:
        """Bytes of values kept for a later program on one device."""
        if self.crosses_whole:
            return sum(self.graph.values[v].num_bytes for v in values)
        return sum(map(self.sharded.waiting_bytes, values))

    def inner_specs(self, part: ChainPart, shapes: Sequence[Sequence[int]]) -> list[P | None]:
        """PartitionSpecs of inner arrays of a part, None where their shapes do not decide.

        XLA may replicate arrays without a constraint. So an array is sharded as the values of its
        shape are, if these are all sharded in one way.
        """
        values = values_by_shape(self.graph, part)
        known = [set(self.specs_of(values.get(tuple(shape), ()))) for shape in shapes]
        return [next(iter(specs)) if len(specs) == 1 else None for specs in known]

    @functools.cached_property
    def packing(self) -> BitcastPacking | None:
        """How one array has a call's whole batch, as each transfer costs; None: it has several."""
        if self.per_call == 1 or self.sharded.axes or not self.is_whole:
            return None
        return BitcastPacking.like(shapes_of(self.graph, self.graph.batch_values))

    def batch_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of a call's arrays of the batch."""
        if self.packing is not None:
            return [jax.ShapeDtypeStruct((self.per_call, self.packing.size), jnp.uint32)]
        return self.shapes_of_call(shapes_of(self.graph, self.graph.batch_values))

    def batch_specs(self) -> list[P]:
        """PartitionSpecs of a call's arrays of the batch."""
        if self.packing is not None:
            return [P()]
        return self.of_call(self.specs_of(self.graph.batch_values))

    def shapes_of_call(self, each: Sequence[Any]) -> list[Any]:
        """Shapes of a call's arrays, from those of a microbatch; of several they are stacked."""
        if self.per_call == 1:
            return list(each)
        return [jax.ShapeDtypeStruct((self.per_call, *x.shape), x.dtype) for x in each]

    def of_call(self, specs: Sequence[Any]) -> list[Any]:
        """PartitionSpecs of a call's arrays, from those of a microbatch; None where XLA decides."""
        if self.per_call == 1:
            return list(specs)
        return [None if spec is None else P(None, *spec) for spec in specs]

    def batch_of(self, batches: Sequence[PyTree]) -> list[Any]:
        """A call's arrays of the batch in host memory, from those of its microbatches."""
        leaves = [jax.tree.leaves(batch) for batch in batches]
        if self.packing is not None:
            return [self.packing.pack_on_host(leaves, self.per_call)]
        if self.per_call == 1:
            return leaves[0]
        leaves += [leaves[-1]] * (self.per_call - len(leaves))
        return [np.stack([np.asarray(x) for x in arrays]) for arrays in zip(*leaves, strict=True)]

    def sums_specs(self, packs: Sequence[int] | None = None) -> list[tuple[P, ...]]:
        """PartitionSpecs of the limbs of packs; None: of all."""
        each, num = pack_specs(self.specs, self.packs), self.contribution.form.num_parts
        return [(each[k],) * num for k in (range(len(each)) if packs is None else packs)]

    def empty_sums(self) -> DeviceSums:
        """Sums of no microbatch."""
        return DeviceSums(
            jnp.zeros((self.num_microbatches, self.num_columns), jnp.int32),
            jnp.zeros(len(self.tensors.floats), jnp.int32),
            [self.contribution.zeros(shape) for shape in pack_shapes(self.tensors, self.packs)],
            [jnp.zeros(x.shape, x.dtype) for x in self.tensors.words],
        )


def chain_spec(
    training: Training,
    graph: Graph,
    plan: Plan,
    tensors: Tensors,
    trained: tuple[int, ...],
    alone: Collection[int],
    specs: Sequence[P],
    inner: Uneven | Sharded | None,
) -> ChainSpec:
    """The `ChainSpec` of a plan.

    Args:
        alone: Tensors that are packed with no other.
        specs: PartitionSpec of each float tensor over the axes inside a replica.
        inner: How these axes cut the graph; None: there are none.

    Raises:
        PlanError: If each microbatch's gradient is to be clipped, but is never whole.
    """
    points = () if plan.chain is None else plan.chain.points
    if points and training.microbatch_clip_norm is not None and plan.placement.zero > 1:
        raise PlanError(
            f"placement.zero: in stage {plan.placement.zero} the gradients of a segment are summed "
            "before those of the next exist, so no microbatch's own gradient can be clipped: use "
            "stage 0 or 1, or set communication.clip to 'after'"
        )
    if plan.is_cut_free:
        check_settings_in_granules(training)
    if isinstance(inner, Uneven) and points:
        inner, points = inner.in_segments(_segments_again(graph, plan)), ()
    ordered, points = graph_at(graph, "work", points)
    if plan.is_cut_free:
        ordered = cut_free(ordered, trained)
    check_layers_whole(ordered, plan.parameters)
    parts = direct_parts(ordered, points)
    owners = parts_of_tensors(ordered, parts, tensors, trained)
    num = plan.num_microbatches
    sharded = inner.sharded if isinstance(inner, Uneven) else inner
    return ChainSpec(
        graph=ordered,
        parts=parts,
        tensors=tensors,
        packs=chain_packs(tensors, owners, {*alone, *shared_tensors(ordered, parts, trained)}),
        trained=trained,
        contribution=Contribution.of(plan.sums, num_terms(ordered, parts, num)),
        num_microbatches=num,
        num_columns=num_columns(ordered.metrics),
        seed=training.seed,
        specs=tuple(specs),
        sharded=(sharded or Sharded(graph, {})).over(ordered),
        uneven=inner if isinstance(inner, Uneven) else None,
        mean=training.mean,
        clip_norm=training.microbatch_clip_norm,
        num_scaled=graph.num_losses if plan.precision.loss_scale is not None else 0,
        per_call=plan.microbatches_per_call,
    )


def check_settings_in_granules(training: Training) -> None:
    """Refuse settings whose programs depend on how a replica is cut."""
    refused = []
    if training.microbatch_clip_norm is not None:
        refused.append("communication.clip of 'before' adds squares of a microbatch's gradients")
    if training.over_batch is not None:
        refused.append("hxla.over_batch has a program for the whole batch")
    if refused:
        raise PlanError(
            f"numerics.cut: {' and '.join(refused)}, in an order that depends on how a replica is "
            "cut: leave that out, or set numerics.cut to 'planned'"
        )


def _segments_again(graph: Graph, plan: Plan) -> list[tuple[Segment, bool]]:
    """The segments of a chain that is one program, and which of them its backward runs again.

    Raises:
        PlanError: If a segment ends inside a scan.
    """
    assert plan.chain is not None
    ordered, points = graph_at(graph, "work", plan.chain.points)
    if len(ordered.values) != len(graph.values):
        raise PlanError(
            "chain: a segment ends inside a scan over layers, which shards of unlike sizes run "
            "whole: leave memory.recompute out"
        )
    chain = segments_at(ordered, points)
    sequence = sequence_from_texts(len(chain), plan.chain.sequence)
    return [(x, num > 1) for x, num in zip(chain, sequence.num_forwards, strict=True)]


def direct_parts(graph: Graph, points: Sequence[int]) -> tuple[ChainPart, ...]:
    """The parts of a chain on one replica: each may read outputs of any earlier one.

    Args:
        points: Cuts, see `segments.cut_points`.
    """
    chain = segments_at(graph, points)
    return tuple(
        ChainPart(
            segment=segment,
            inputs=segment.inputs,
            outputs=() if i == len(chain) - 1 else segment.outputs,
            is_last=i == len(chain) - 1,
        )
        for i, segment in enumerate(chain)
    )


def parts_of_tensors(
    graph: Graph, parts: Sequence[ChainPart], tensors: Tensors, trained: Sequence[int]
) -> list[tuple[int, ...]]:
    """For each float tensor the parts that add to its sums; for other variables the last part."""
    param_of, last = params_of(graph), len(parts) - 1
    readers: dict[int, dict[int, None]] = collections.defaultdict(dict)
    for i, part in enumerate(parts):
        for entry in part.segment.params:
            readers[param_of[entry]][i] = None
    return [*(tuple(readers[p]) or (last,) for p in trained), *[(last,)] * sum(tensors.is_summed)]


def chain_packs(
    tensors: Tensors, parts_of: Sequence[tuple[int, ...]], alone: Collection[int]
) -> list[list[int]]:
    """`packs_of`, with tensors of one part only in each pack.

    Args:
        parts_of: For each tensor the parts that add to its sums.
        alone: Tensors that are packed with no other, such as `shared_tensors`.
    """
    out = []
    for part in sorted(set(parts_of)):
        others = {t for t, adding in enumerate(parts_of) if adding != part}
        packs = packs_of(tensors, {*alone, *others})
        out += [pack for pack in packs if parts_of[pack[0]] == part]
    return out


def first_packs(spec: ChainSpec) -> list[tuple[int, ...]]:
    """For each part the packs whose sums begin with its backward, the first that adds to them."""
    return _packs_at(spec, max)


def last_packs(spec: ChainSpec) -> list[tuple[int, ...]]:
    """For each part the packs whose sums are whole after its backward."""
    return _packs_at(spec, min)


def _packs_at(spec: ChainSpec, which: Callable[[tuple[int, ...]], int]) -> list[tuple[int, ...]]:
    owners = parts_of_tensors(spec.graph, spec.parts, spec.tensors, spec.trained)
    at = [which(owners[pack[0]]) for pack in spec.packs]
    return [tuple(k for k, part in enumerate(at) if part == i) for i in range(len(spec.parts))]


def shared_tensors(
    graph: Graph, parts: Sequence[ChainPart], trained: Sequence[int]
) -> frozenset[int]:
    """Tensors to whose sums several entries, or entries of some rows, add."""
    param_of = params_of(graph)
    num: collections.Counter[int] = collections.Counter()
    for entry in (entry for part in parts for entry in part.segment.params):
        has_rows = graph.values[graph.param_values[entry]].rows is not None
        num[param_of[entry]] += 1 + has_rows
    return frozenset(t for t, p in enumerate(trained) if num[p] > 1)


def cut_free(graph: Graph, trained: Collection[int]) -> Graph:
    """A cut graph whose gradients depend on no cut, if its programs do not.

    Raises:
        PlanError: For a scan over layers that is cut inside, if all its layers read a value that
            has a gradient: a scan adds up the terms of its own layers first.
    """
    wanted = wanted_values(graph, trained)
    for op in (op for op in graph.ops if op.iterations is not None):
        num_consts, _ = scan_counts(op.eqn)
        if not wanted.isdisjoint(v for v in op.inputs[:num_consts] if isinstance(v, int)):
            raise PlanError(
                f"numerics.cut: the layers of the scan at {op.source} all read one value, whose "
                "gradient depends on where the scan is cut: use fewer stages or leave "
                "recomputation out, so that it stays whole, or set numerics.cut to 'planned'"
            )
    return reads_apart(graph)


def wanted_values(graph: Graph, trained: Collection[int]) -> set[int]:
    """Values that depend on trained parameters, and on which the loss depends."""
    param_of = params_of(graph)
    varies = {v for v, p in zip(graph.param_values, param_of, strict=True) if p in trained}
    for op in graph.ops:
        if not varies.isdisjoint(v for v in op.inputs if isinstance(v, int)):
            varies.update(op.outputs)
    needed = {v for v in graph.result_values[:1] if isinstance(v, int)}
    for op in reversed(graph.ops):
        # Nothing goes back through `stop_gradient` and its like.
        if any(v in needed and graph.values[v].differentiable for v in op.outputs):
            needed.update(v for v in op.inputs if isinstance(v, int))
    return needed & varies
