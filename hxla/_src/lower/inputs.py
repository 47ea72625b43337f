"""Inputs of lowering besides the graph: the user's settings, and a plan's sharding."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..graph.graph import Graph
from ..jax.jaxpr import ClosedJaxpr
from ..model.functional import Functional, leaf_names
from ..model.optimizer import Optimizer
from ..model.over_batch import OverBatch, TracedOverBatch
from ..plan.axis_assignment import shard_graph
from ..plan.layout import to_spec
from ..plan.linked_dims import LinkedDims, planned_parts
from ..plan.ownership import SUMMED_STATE, Ownership, TracedUpdate, traced_update
from ..plan.ownership import ownership as make_ownership
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from .padding import Padding
from .uneven import Uneven


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and the meaning of a step: the user's settings, which no plan changes.

    Attributes:
        seed: Root of all random keys.
        mean: Whether the update reads the gradient of the batch's mean loss; else of its sum.
        microbatch_clip_norm: Global norm to which microbatch gradients are clipped; None: no clip.
        update_clip_norm: Global norm to which the gradient of a step is clipped; None: no clip.
        num_groups: Groups of parameters, updated one after another.
        offload_directory: Folder for state offloaded to a disk; None: the system's.
        over_batch: The loss, if it is one over the whole batch; else None.
        eval_over_batch: The loss for evaluation, if it is one over the whole batch; else None.
    """

    model: Functional
    optimizer: Optimizer
    seed: int
    mean: bool = True
    microbatch_clip_norm: float | None = None
    update_clip_norm: float | None = None
    num_groups: int = 1
    offload_directory: str | None = None
    over_batch: TracedOverBatch | None = None
    eval_over_batch: OverBatch | None = None

    @functools.cached_property
    def traced_update(self) -> TracedUpdate:
        """The optimizer's update, after the clip of a step's gradient."""
        return self._trace_update(self.update_clip_norm)

    @property
    def written_update(self) -> ClosedJaxpr:
        """The optimizer's update without the clip."""
        is_same = self.update_clip_norm is None
        return (self.traced_update if is_same else self._trace_update(None)).update.closed

    def _trace_update(self, clip_norm: float | None) -> TracedUpdate:
        params = jax.eval_shape(lambda tree: tree, self.model.trained)
        return traced_update(self.optimizer, params, clip_norm)


def ownership_of(training: Training, plan: Plan) -> Ownership | None:
    """The units that each replica updates; None: each updates everything."""
    if not plan.placement.zero:
        return None
    ownership = make_ownership(training.traced_update, plan.granules)
    ownership = dataclasses.replace(ownership, cuts_params=plan.placement.zero > 2)
    if plan.axes:
        ownership = _with_axes(ownership, training, plan)
    if plan.placement.optimizer != "device" and ownership.summed_state:
        raise PlanError(f"placement.optimizer: {SUMMED_STATE}: use 'device'")
    names = leaf_names(training.model.trained)
    whole = tuple(n for n, o in zip(names, ownership.shares.owners, strict=True) if o is not None)
    if whole != plan.placement.whole:
        raise PlanError(
            f"placement.whole: the optimizer treats {', '.join(whole) or 'no parameter'} as a "
            f"whole, the plan says {', '.join(plan.placement.whole) or 'none'}"
        )
    return ownership


def _with_axes(ownership: Ownership, training: Training, plan: Plan) -> Ownership:
    """The ownership with the axes and PartitionSpecs inside replicas."""
    trained = itertools.compress(plan.parameters, training.model.is_trained)
    specs = [P()] * len(ownership.owners)
    parts: list[Any] = [()] * len(ownership.owners)
    for layout, domain in zip(trained, ownership.update.domain_of, strict=False):
        if domain is not None:
            specs[domain], parts[domain] = to_spec(layout.spec), layout.sizes
    axes = tuple((axis.name, axis.size) for axis in plan.axes)
    is_uneven = any(map(any, parts))
    return dataclasses.replace(
        ownership, axes=axes, specs=tuple(specs), parts=tuple(parts) if is_uneven else ()
    )


def whole_ownership_of(
    training: Training, plan: Plan, leaves: Sequence[tuple[P, Padding]]
) -> Ownership | None:
    """The ownership where each replica updates everything, with the arithmetic of ZeRO.

    None for float sums, and for optimizers that treat parameters as a whole or whose state is
    sharded unlike its parameter: there one program decides the bits.

    Args:
        leaves: PartitionSpec and padding of each leaf of the optimizer's state.
    """
    if plan.placement.zero or (plan.sums.kind != "exact" and not plan.is_uneven):
        return None
    traced = training.traced_update
    ownership = dataclasses.replace(make_ownership(traced, (1,)), is_whole=True)
    domains = ownership.update.domain_of
    param_domains = domains[: ownership.num_params]
    if any(d is not None and not ownership.update.slices[d] for d in param_domains):
        return None
    if not plan.axes:
        return ownership
    ownership = _with_axes(ownership, training, plan)
    state = zip(domains[ownership.num_params :], leaves, strict=False)
    alike = [
        (spec, padding) == (ownership.spec(d), Padding(ownership.parts_of(d)))
        for d, (spec, padding) in state
        if d is not None
    ]
    return ownership if all(alike) else None


def check_in_granules(plan: Plan, ownership: Ownership | None) -> None:
    """Refuse an update whose bits depend on how a replica is cut, if those of its plan may not.

    Args:
        ownership: None: the update is one program.
    """
    in_granules = plan.is_cut_free
    if in_granules and (ownership is None or plan.placement.whole):
        raise PlanError(
            "numerics.cut: the optimizer reads parameters as a whole, and the bits of that depend "
            "on how a replica is cut: use one that works on each element, such as optax.adamw, or "
            "set numerics.cut to 'planned'"
        )


def sharded_of(graph: Graph, plan: Plan) -> Sharded | None:
    """The graph sharded over the axes inside a replica or its stages; None: no such axes."""
    axes = plan.inner_axes
    if not axes:
        return None
    dims = [
        {name: dim for name, _ in axes if (dim := layout.dim_of(name)) is not None}
        for layout in plan.parameters
    ]
    roles = {axis.name: axis.roles for axis in plan.axes}
    granules = next((axis.granules for axis in plan.axes if axis.granules is not None), None)
    return shard_graph(graph, axes, roles, dims, unlike=plan.is_uneven, granules=granules)


def uneven_of(sharded: Sharded | None, plan: Plan) -> Uneven | None:
    """The sharded graph with unlike shards; None: shards are alike."""
    if sharded is None or not plan.is_uneven:
        return None
    [axis] = plan.axes
    linked = LinkedDims(sharded.graph, sharded.axes[axis.name])
    return Uneven(sharded, planned_parts(linked, plan.parameters, axis.shares))
