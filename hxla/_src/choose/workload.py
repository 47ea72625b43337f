"""The input of plans: a job's loss and optimizer, traced for one microbatch size."""

import dataclasses
import math
from collections.abc import Callable

import jax

from ..core.config import Config
from ..graph.graph import Graph
from ..model.functional import Functional
from ..plan.ownership import Ownership, TracedUpdate, ownership
from ..plan.plan import Plan
from ..plan.precision import Precision

#: Operations of a microbatch over those of its forward: the backward has twice as many.
FLOPS_OF_FORWARD = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A job at one microbatch size.

    Attributes:
        input_bytes: The bytes of a microbatch.
        optimizer_bytes: The bytes of the optimizer's state for the whole model.
        trace_update: Traces the optimizer's update of the whole model, which takes time.
    """

    settings: Config
    batch_size: int
    microbatch_size: int
    graph: Graph
    model: Functional
    input_bytes: int
    optimizer_bytes: int
    trace_update: Callable[[], TracedUpdate]

    @property
    def arithmetic(self) -> str:
        """The arithmetic of its products, by the names of devices' rates."""
        precision = self.graph.precision
        return (precision if isinstance(precision, Precision) else Precision()).arithmetic

    @property
    def microbatch_flops(self) -> float:
        """Operations of a microbatch, forward and backward."""
        return FLOPS_OF_FORWARD * self.graph.flops

    def device_optimizer_bytes(self, plan: Plan) -> float:
        """Bytes of an unsharded replica's optimizer state on each of its devices."""
        whole = sum(math.prod(x.shape) for x in jax.tree.leaves(self.model.trained))
        shapes = plan.device_shapes
        on_device = sum(math.prod(shapes[p]) for p in self.model.trained_places)
        return self.optimizer_bytes * on_device / max(whole, 1)

    def ownership(self, granules: tuple[int, ...]) -> Ownership:
        """The owner of each update in a group of replicas with these granules."""
        return ownership(self.trace_update(), granules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workloads:
    """A job at every microbatch size.

    Attributes:
        at: Traces the job for a size, once.
    """

    settings: Config
    batch_size: int
    at: Callable[[int], Workload]
