"""Builds a `Program` from the HLO text, argument layouts and buffers of one program."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..cluster.cluster import Cluster
from ..core.errors import InspectError
from ..core.files import shown
from ..jax.xla_protos import BufferAssignment
from ..plan.rules import RuleSet
from .annotated_module import annotate
from .arguments import Signature, arguments
from .collectives import collectives
from .cost_analysis import work
from .hlo_text import Module
from .host_transfers import transfers
from .peak_memory import memory
from .program import Program
from .replica_groups import Mesh
from .warnings import warnings

#: Errors that a damaged text, or one of an unknown format, may raise anywhere.
UNREADABLE = (
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    TypeError,
    RecursionError,
    AssertionError,
)

# Roles of the programs of hxla's step, and owners of arguments whose names do not show them.
_ROLES = {
    "jit_hxla_exchange": "sum of small host arrays over the processes",
    "jit_hxla_micro": "one microbatch",
    "jit_hxla_step": "a whole step",
    "jit_hxla_update": "update of the parameters",
    "jit_hxla_sum": "sum over the replicas",
    "jit_hxla_evaluate": "evaluation of one microbatch",
    "jit_hxla_embed": "embeddings of one microbatch",
    "jit_hxla_over_batch": "losses over the whole batch",
}
_UPDATE_OWNERS = {
    "given": "batch",
    "given.totals": "gradient",
    "given.words": "gradient",
    "given.sums": "gradient",
    "aux": "parameter",
}
_OWNERS = {
    "jit_hxla_sum": {"values": "gradient", "ints": "gradient", "own": "temporary"},
    "jit_hxla_update": _UPDATE_OWNERS,
    "jit_hxla_update_group": _UPDATE_OWNERS,
    "jit_hxla_largest": _UPDATE_OWNERS,
    "jit_hxla_digits": _UPDATE_OWNERS,
    "jit_hxla_micro": {"sums": "gradient", "aux": "parameter"},
    "jit_hxla_step": {"sums": "gradient", "aux": "parameter", "frozen_params": "parameter"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hints:
    """The user's hints about programs.

    Attributes:
        mesh: Axes and sizes; empty: those of the program.
        cluster: Devices in the order of the mesh; None: no predicted times.
        owners: Owners of arguments, by prefix of their path.
    """

    mesh: Mesh = ()
    cluster: Cluster | None = None
    rules: RuleSet | None = None
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)


def analyze(
    module: Module,
    hints: Hints,
    *,
    source: str,
    signature: Signature | None = None,
    assignment: BufferAssignment | None = None,
    memory_missing: str = "",
    problems: Sequence[str] = (),
) -> Program:
    """Analyze a module.

    Args:
        signature: None: the text alone describes the arguments.
        assignment: None if not known; `memory_missing` then says why.

    Raises:
        InspectError: For an unknown owner, or a text that contradicts itself.
        AnnotationError: For rules that do not fit the parameters.
    """
    try:
        return _analyzed(
            module,
            hints,
            source=source,
            signature=signature or Signature(),
            assignment=assignment,
            memory_missing=memory_missing,
            problems=problems,
        )
    except UNREADABLE as error:
        words = f"{type(error).__name__}: {shown(error)}"
        raise InspectError(f"{source}: the program is not as XLA writes them: {words}") from error


def _analyzed(
    module: Module,
    hints: Hints,
    *,
    source: str,
    signature: Signature,
    assignment: BufferAssignment | None,
    memory_missing: str,
    problems: Sequence[str],
) -> Program:
    if "num_partitions=" not in module.header and "replica_count=" not in module.header:
        # Text that jaxlib makes from a protocol buffer lacks the number of devices.
        module.num_partitions = math.prod(n for _, n in signature.mesh)
    mesh = hints.mesh or signature.mesh
    if mesh and not hints.mesh and math.prod(n for _, n in mesh) != module.num_devices:
        mesh = ()
    owners = {**_OWNERS.get(module.name, {}), **hints.owners}
    read = annotate(module, arguments(module, signature.layouts, owners))
    listed = collectives(read, mesh, hints.cluster)
    each, fusions = work(read, listed)
    lost = (signature.donated | module.donors) - module.aliased
    return Program(
        name=module.name,
        role=_ROLES.get(module.name, ""),
        source=source,
        num_devices=module.num_devices,
        mesh=mesh,
        arrays=read.arrays,
        collectives=listed,
        memory=memory(read, assignment) if assignment is not None and module.entry else None,
        memory_missing=memory_missing if assignment is None else "",
        work=each,
        fusions=fusions,
        transfers=transfers(read),
        warnings=warnings(read, listed, mesh=mesh, rules=hints.rules, lost=lost),
        problems=(*module.problems, *problems),
    )
