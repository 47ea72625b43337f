"""Builds a `Program` from the HLO text, argument layouts and buffers of one program.

Transfers between host and device count, and calls back into Python.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from ..cluster.cluster import Cluster
from ..core.errors import InspectError
from ..core.files import shown
from ..jax.xla_protos import BufferAssignment
from ..plan.rules import RuleSet
from .annotated_module import AnnotatedModule, annotate
from .arguments import Signature, arguments
from .collectives import collectives
from .cost_analysis import work
from .hlo_text import Computation, Instruction, Module, shape_bytes, tuple_elements
from .peak_memory import memory
from .program import Program, Transfer
from .replica_groups import Mesh
from .warnings import warnings

_TRANSFERS = frozenset({"infeed", "outfeed", "send", "recv", "custom-call", "copy", "copy-start"})
_CALLBACK = re.compile(r'custom_call_target="([^"]*(?:python|callback)[^"]*)"')
_HOST_SPACE = "S(5)"  # memory space 5 of a layout is the host's, on GPU and TPU alike


def transfers(read: AnnotatedModule) -> tuple[Transfer, ...]:
    """List a module's transfers between host and device, and its callbacks into Python."""
    out = []
    for i, computation in read.module.find(_TRANSFERS):
        kind = _kind(i, computation)
        if kind and computation.name in read.contexts:
            shape = i.arguments if kind == "outfeed" else i.shape
            moved = tuple_elements(shape)[0] if shape else ""
            out.append(
                Transfer(
                    kind=kind,
                    name=i.name,
                    num_bytes=shape_bytes(moved),
                    runs=read.runs(computation),
                    origin=read.origins.of(i, computation),
                )
            )
    return tuple(out)


def _kind(instruction: Instruction, computation: Computation) -> str:
    opcode = instruction.opcode
    if opcode in ("infeed", "outfeed"):
        return opcode
    if opcode in ("send", "recv") and "is_host_transfer=true" in instruction.rest:
        return "to host" if opcode == "send" else "to device"
    if opcode == "custom-call":
        if "MoveToHost" in instruction.rest:
            return "to host"
        if "MoveToDevice" in instruction.rest:
            return "to device"
        return "callback" if _CALLBACK.search(instruction.rest) else ""
    if opcode in ("copy", "copy-start") and instruction.operands:
        source = computation.shape_of(*instruction.operands[0])
        here = tuple_elements(instruction.shape)[0]
        if source and (_HOST_SPACE in source) != (_HOST_SPACE in here):
            return "to host" if _HOST_SPACE in here else "to device"
    return ""


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
