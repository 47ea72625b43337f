"""All that the texts and figures of one program tell, put together as a `Program`."""

import dataclasses
import math
from collections.abc import Mapping

from .._cluster._cluster import Cluster
from .._jax._buffer_assignment import BufferAssignment
from .._plan._rules import RuleSet
from ._arguments import ArrayLayout, argument_paths, arguments, shardings
from ._call_graph import contexts
from ._collectives import collectives
from ._cost_analysis import work
from ._dataflow import Flow
from ._hlo_text import Module
from ._host_transfers import transfers
from ._origin import Origins
from ._peak_memory import Figures, memory
from ._program import Program
from ._replica_groups import Mesh
from ._warnings import warnings

# The programs of hxla's own step, and whose their arguments are where words do not tell.
_ROLES = {
    "jit_hxla_exchange": "sum of small host arrays over the processes",
    "jit_hxla_micro": "one microbatch",
    "jit_hxla_update": "update of the parameters",
    "jit_hxla_sum": "sum over the replicas",
    "jit_hxla_evaluate": "evaluation of one microbatch",
}
_OWNERS = {
    "jit_hxla_sum": {"values": "gradient", "ints": "gradient", "own": "temporary"},
    "jit_hxla_update": {"totals": "gradient", "ints": "gradient", "aux": "parameter"},
    "jit_hxla_micro": {"sums": "gradient", "aux": "parameter"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hints:
    """What the user says about programs.

    Attributes:
        mesh: Axes and sizes; empty: as the program itself says.
        cluster: For predicted times, its devices in the order of the mesh.
        rules: That parameters should follow.
        owners: Of arguments, by how their path starts.
    """

    mesh: Mesh = ()
    cluster: Cluster | None = None
    rules: RuleSet | None = None
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """What is known of a program beside its optimized text.

    Attributes:
        source: Where it was read from.
        before: The module before optimization.
        mesh: Axes, where the caller knows them.
        known: Whole shape and spec of arguments by number, where the caller knows them.
        donated: Numbers of donated arguments; None: as the text before optimization says.
        assignment: Of memory.
        figures: Of memory.
        memory_missing: Why there is neither.
        memory_source: What they were read from.
        problems: That came up on the way.
    """

    source: str
    before: Module | None = None
    mesh: Mesh = ()
    known: Mapping[int, ArrayLayout] = dataclasses.field(default_factory=dict)
    donated: frozenset[int] | None = None
    assignment: BufferAssignment | None = None
    figures: Figures | None = None
    memory_missing: str = ""
    memory_source: str = ""
    problems: tuple[str, ...] = ()


def analyze(module: Module, compilation: Compilation, hints: Hints) -> Program:
    """Everything about a module.

    Raises:
        InspectError: For an owner that is none.
        AnnotationError: For rules that do not fit the parameters.
    """
    before = compilation.before
    own_mesh, known = shardings(before)
    if "num_partitions=" not in module.header and "replica_count=" not in module.header:
        # Text that jaxlib makes of a protocol buffer does not say how many devices run it.
        module.header += f", num_partitions={math.prod(n for _, n in compilation.mesh or own_mesh)}"
    num_devices = module.num_partitions * module.num_replicas
    mesh = hints.mesh or compilation.mesh or own_mesh
    if mesh and not hints.mesh and math.prod(n for _, n in mesh) != num_devices:
        mesh = ()
    arrays = arguments(
        module,
        compilation.known or known,
        owners={**_OWNERS.get(module.name, {}), **hints.owners},
        donated=sorted(module.aliased),
    )
    ways = contexts(module)
    origins, flow = Origins(module), Flow(module)
    listed = collectives(
        module,
        ways,
        origins,
        mesh=mesh,
        cluster=hints.cluster,
        flow=flow,
        paths=argument_paths(module),
    )
    each, fusions = work(module, ways, origins, listed)
    has_memory = compilation.assignment is not None or compilation.figures is not None
    donated = compilation.donated
    if donated is None:
        donated = before.aliased | before.donors if before else frozenset()
    return Program(
        name=module.name,
        role=_ROLES.get(module.name, ""),
        source=compilation.source,
        num_devices=num_devices,
        mesh=mesh,
        arrays=arrays,
        collectives=listed,
        memory=memory(
            module,
            arrays,
            origins,
            flow,
            assignment=compilation.assignment,
            figures=compilation.figures,
            source=compilation.memory_source,
        )
        if has_memory and module.entry
        else None,
        memory_missing="" if has_memory else compilation.memory_missing,
        work=each,
        fusions=fusions,
        transfers=transfers(module, ways, origins),
        warnings=warnings(
            module,
            ways,
            origins,
            flow,
            arrays=arrays,
            collectives=listed,
            mesh=mesh,
            rules=hints.rules,
            lost=sorted((donated | module.donors) - module.aliased),
        ),
        problems=(*module.problems, *compilation.problems),
    )
