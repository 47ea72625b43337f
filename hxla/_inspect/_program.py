"""One program: all that its texts and figures tell, put together."""

import dataclasses
import math
from collections.abc import Mapping

from .._cluster._cluster import Cluster
from .._jax._buffer_assignment import Assignment
from .._plan._rules import RuleSet
from ._arguments import Layout, arguments, paths, shardings
from ._calls import contexts
from ._collectives import collectives
from ._flow import Flow
from ._origin import Origins
from ._peak_memory import Figures, memory
from ._programs import Program
from ._replica_groups import Mesh
from ._text import Module
from ._warnings import warnings
from ._work import transfers, work

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
class Wish:
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
class Found:
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
    known: Mapping[int, Layout] = dataclasses.field(default_factory=dict)
    donated: frozenset[int] | None = None
    assignment: Assignment | None = None
    figures: Figures | None = None
    memory_missing: str = ""
    memory_source: str = ""
    problems: tuple[str, ...] = ()


def program(module: Module, found: Found, wish: Wish) -> Program:
    """Everything about a module.

    Raises:
        InspectError: For an owner that is none.
        AnnotationError: For rules that do not fit the parameters.
    """
    own_mesh, known = shardings(found.before)
    if "num_partitions=" not in module.header and "replica_count=" not in module.header:
        # Text that jaxlib makes of a protocol buffer does not say how many devices run it.
        module.header += f", num_partitions={math.prod(n for _, n in found.mesh or own_mesh)}"
    num_devices = module.num_partitions * module.num_replicas
    mesh = wish.mesh or found.mesh or own_mesh
    if mesh and not wish.mesh and math.prod(n for _, n in mesh) != num_devices:
        mesh = ()
    arrays = arguments(
        module,
        found.known or known,
        owners={**_OWNERS.get(module.name, {}), **wish.owners},
        donated=sorted(module.aliased),
    )
    ways = contexts(module)
    origins, flow = Origins(module), Flow(module)
    listed = collectives(
        module,
        ways,
        origins,
        mesh=mesh,
        cluster=wish.cluster,
        flow=flow,
        paths=paths(module),
    )
    each, fusions = work(module, ways, origins, listed)
    has_memory = found.assignment is not None or found.figures is not None
    donated = found.donated
    if donated is None:
        donated = found.before.aliased | found.before.donors if found.before else frozenset()
    return Program(
        name=module.name,
        role=_ROLES.get(module.name, ""),
        source=found.source,
        num_devices=num_devices,
        mesh=mesh,
        arrays=arrays,
        collectives=listed,
        memory=memory(
            module,
            arrays,
            origins,
            flow,
            assignment=found.assignment,
            figures=found.figures,
            source=found.memory_source,
        )
        if has_memory and module.entry
        else None,
        memory_missing="" if has_memory else found.memory_missing,
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
            rules=wish.rules,
            lost=sorted((donated | module.donors) - module.aliased),
        ),
        problems=(*module.problems, *found.problems),
    )
