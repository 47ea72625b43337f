"""What lowering reads besides the graph: the user's words, and what a plan says of copies."""

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
from ..plan.ownership import SUMMED_STATE, Ownership, TracedUpdate, ownership, traced_update
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from .padding import Padding
from .uneven import Uneven


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and what a step means: the user's words, which no plan changes.

    Attributes:
        seed: Root of all random keys.
        mean: Whether the update sees the gradient of the batch's mean loss, or of its sum.
        microbatch_clip_norm: Global norm to which each microbatch's own gradient is clipped; None:
            not at all.
        update_clip_norm: That to which the gradient of a step is; None: likewise.
        num_groups: Parts in which parameters are updated one after another.
        offload_directory: Folder for state that waits on a disk; None: the system's own.
        over_batch: The loss, where it is one over the whole batch; None: it is not.
        eval_over_batch: The same of the loss for evaluation.
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
        """The optimizer's, of what it trains, with the clip of a step's gradient before it."""
        return self._traced(self.update_clip_norm)

    @property
    def written_update(self) -> ClosedJaxpr:
        """The same without the clip."""
        is_same = self.update_clip_norm is None
        return (self.traced_update if is_same else self._traced(None)).update.closed

    def _traced(self, clip_norm: float | None) -> TracedUpdate:
        params = jax.eval_shape(lambda tree: tree, self.model.trained)
        return traced_update(self.optimizer, params, clip_norm)


def ownership_of(training: Training, plan: Plan) -> Ownership | None:
    """Which copy updates what, if not each everything."""
    if not plan.placement.zero:
        return None
    own = ownership(training.traced_update, plan.granules)
    own = dataclasses.replace(own, cuts_params=plan.placement.zero > 2)
    if plan.axes:
        own = _on_axes(own, training, plan)
    if plan.placement.optimizer != "device" and own.summed_state:
        raise PlanError(f"placement.optimizer: {SUMMED_STATE}: use 'device'")
    names = leaf_names(training.model.trained)
    whole = tuple(n for n, o in zip(names, own.shares.owners, strict=True) if o is not None)
    if whole != plan.placement.whole:
        raise PlanError(
            f"placement.whole: the optimizer treats {', '.join(whole) or 'no parameter'} as a "
            f"whole, the plan says {', '.join(plan.placement.whole) or 'none'}"
        )
    return own


def _on_axes(own: Ownership, training: Training, plan: Plan) -> Ownership:
    """Who updates what, where several devices hold each copy."""
    trained = itertools.compress(plan.parameters, training.model.is_trained)
    specs = [P()] * len(own.owners)
    parts: list[Any] = [()] * len(own.owners)
    for layout, domain in zip(trained, own.update.domain_of, strict=False):
        if domain is not None:
            specs[domain], parts[domain] = to_spec(layout.spec), layout.sizes
    axes = tuple((axis.name, axis.size) for axis in plan.axes)
    is_uneven = any(map(any, parts))
    return dataclasses.replace(
        own, axes=axes, specs=tuple(specs), parts=tuple(parts) if is_uneven else ()
    )


def whole_ownership_of(
    training: Training, plan: Plan, leaves: Sequence[tuple[P, Padding]]
) -> Ownership | None:
    """What each replica updates where each updates everything, by the arithmetic of shared state.

    None where sums are of floats, and where the optimizer treats parameters as a whole or keeps
    state in another shape than the sharded parameter of it: there one program decides the bits.

    Args:
        leaves: How each leaf of the optimizer's state is sharded and padded.
    """
    if plan.placement.zero or (plan.sums.kind != "exact" and not plan.is_uneven):
        return None
    traced = training.traced_update
    own = dataclasses.replace(ownership(traced, (1,)), is_whole=True)
    domains = own.update.domain_of
    if any(d is not None and not own.update.slices[d] for d in domains[: own.num_params]):
        return None
    if not plan.axes:
        return own
    own = _on_axes(own, training, plan)
    state = zip(domains[own.num_params :], leaves, strict=False)
    alike = [
        (spec, padding) == (own.spec(d), Padding(own.parts_of(d)))
        for d, (spec, padding) in state
        if d is not None
    ]
    return own if all(alike) else None


def sharded_of(graph: Graph, plan: Plan) -> Sharded | None:
    """What the axes inside a replica, or inside its stages, cut."""
    axes = plan.inner_axes
    if not axes:
        return None
    dims = [
        {name: dim for name, _ in axes if (dim := layout.dim_of(name)) is not None}
        for layout in plan.parameters
    ]
    roles = {axis.name: axis.roles for axis in plan.axes}
    return shard_graph(graph, axes, roles, dims, unlike=plan.is_uneven)


def uneven_of(sharded: Sharded | None, plan: Plan) -> Uneven | None:
    """The same, where the parts of devices may be unlike."""
    if sharded is None or not plan.is_uneven:
        return None
    [axis] = plan.axes
    linked = LinkedDims(sharded.graph, sharded.axes[axis.name])
    return Uneven(sharded, planned_parts(linked, plan.parameters, axis.shares))
