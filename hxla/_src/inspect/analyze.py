"""Builds a `Program` from the HLO text, argument layouts and buffers of one program.

Its arguments have shapes, owners and shardings. Transfers between host and device count, and calls
back into Python.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from ..cluster.cluster import Cluster
from ..core.errors import InspectError
from ..core.files import shown
from ..jax.xla_protos import BufferAssignment
from ..plan.rules import RuleSet
from .annotated_module import AnnotatedModule, annotate, op_name
from .collectives import Mesh, collectives, mesh_of
from .cost_analysis import work
from .hlo_text import Computation, Instruction, Module, arrays, first, shape_bytes, tuple_elements
from .peak_memory import memory
from .program import OWNERS, Program, ProgramArray, Transfer
from .warnings import warnings

Spec = tuple[tuple[str, ...], ...]
ArrayLayout = tuple[tuple[int, ...], Spec | None]  # shape of the whole array, and its spec if known

# Words of an argument's path; the first line that has one decides.
_WORDS = {
    "optimizer state": (
        "opt_state opt_common optimizer_state optimizer opt mu nu momentum ema trace adam"
    ),
    "gradient": "grads grad gradient gradients sums totals accumulated ints words",
    "parameter": "params param parameters weights variables kernel bias embedding model",
    "batch": (
        "batch inputs input x y image images token tokens label labels target targets ids mask key "
        "rng seed step where index weight"
    ),
}
_OWNER_OF = {word: owner for owner, words in _WORDS.items() for word in words.split()}
_SHARDING = re.compile(
    r"sharding=\{mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\S*?)?, \[(?P<dims>.*?)\](?:, \w+=|\})"
)
_SDY_MESH = re.compile(r"#sdy\.mesh<\[([^\]]+)\]")
_SDY_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[(?P<dims>.*?)\](?:, \w+=.*?)?>")
_WHOLE = re.compile(r"sharding=\{(?:mesh\[[^\]]*\], )?replicated\}")
_AXIS = re.compile(r"['\"](\w+)['\"]")
_DIM = re.compile(r"\{([^}]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """The shardings and donations of a program's arguments, which its optimized text lacks.

    Attributes:
        layouts: By argument number.
    """

    mesh: Mesh = ()
    layouts: Mapping[int, ArrayLayout] = dataclasses.field(default_factory=dict)
    donated: frozenset[int] = frozenset()


def signature(before: Module) -> Signature:
    """Read the signature from the module before optimization."""
    named = _SDY_MESH.search(before.header.replace("\\", ""))
    mesh = mesh_of(named[1]) if named else ()
    layouts: dict[int, ArrayLayout] = {}
    entry = before.computations.get(before.entry)
    for number, parameter in enumerate(entry.parameters if entry is not None else ()):
        _, shape = first(parameter.shape)
        rest = parameter.rest.replace("\\", "")
        spec = ((),) * len(shape) if _WHOLE.search(rest) else None
        if sharding := _SHARDING.search(rest) or _SDY_SHARDING.search(rest):
            mesh = mesh or mesh_of(sharding.groupdict().get("mesh", ""))
            dims = [tuple(_AXIS.findall(dim)) for dim in _DIM.findall(sharding["dims"])]
            spec = tuple(dims) if len(dims) == len(shape) else None
        layouts[number] = shape, spec
    return Signature(mesh=mesh, layouts=layouts, donated=before.aliased | before.donors)


def arguments(
    module: Module, layouts: Mapping[int, ArrayLayout], owners: Mapping[str, str]
) -> dict[str, ProgramArray]:
    """The program's arguments in order, by the names of their instructions.

    Args:
        layouts: By argument number; none where not known.
        owners: The user's, by prefix of the argument's path.

    Raises:
        InspectError: For an unknown owner.
    """
    odd = sorted(set(owners.values()) - set(OWNERS))
    if odd:
        raise InspectError(f"owners: {odd[0]!r} is no owner, only: {', '.join(OWNERS)}")
    entry = module.computations.get(module.entry)
    if entry is None:
        return {}
    out = {}
    guessed = _guess_owners(entry, module.aliased)
    for number, parameter in enumerate(entry.parameters):
        path = path_of(parameter)
        dtype, local = first(parameter.shape)
        shape, spec = layouts.get(number, (local, None))
        if module.num_partitions == 1 and spec is None:
            spec = ((),) * len(local)
        out[parameter.name] = ProgramArray(
            path=path,
            owner=_owner(path, owners, guessed[_head(path)]),
            dtype=dtype,
            shape=shape,
            local_shape=local,
            spec=spec,
            is_donated=number in module.aliased,
        )
    return out


def path_of(parameter: Instruction) -> str:
    """The path of an argument, `params['Dense_0']['kernel']`, or its number."""
    return op_name(parameter) or f"argument {parameter.number}"


def _head(path: str) -> str:
    """The argument's name: `params` of `params['Dense_0']['kernel']`."""
    return re.split(r"[\[.]", path, maxsplit=1)[0]


def _guess_owners(entry: Computation, donated: Set[int]) -> dict[str, str]:
    """Owners by the arguments' names, for paths whose words do not show them."""
    results = Counter(arrays(entry.root.shape) if entry.root else ())
    groups: dict[str, list[int]] = {}
    for number, parameter in enumerate(entry.parameters):
        groups.setdefault(_head(path_of(parameter)), []).append(number)
    parameters = entry.parameters
    guessed: dict[str, str] = {}
    seen: list[Counter[tuple[str, tuple[int, ...]]]] = []
    for group, members in groups.items():
        shapes = Counter(a for i in members for a in arrays(parameters[i].shape))
        # Arguments whose shapes are also results are state: first parameters, then the optimizer
        # state of the same shapes.
        if shapes and shapes <= results:
            guessed[group] = "optimizer state" if shapes in seen else "parameter"
            seen.append(shapes)
        else:
            is_state = len(members) > 1 or not donated.isdisjoint(members)
            guessed[group] = "parameter" if is_state else "batch"
    return guessed


def _owner(path: str, owners: Mapping[str, str], guess: str) -> str:
    prefixes = [prefix for prefix in owners if path.startswith(prefix)]
    if prefixes:
        return owners[max(prefixes, key=len)]
    head_owner = _OWNER_OF.get(_head(path).lower())
    words = re.findall(r"[A-Za-z_]+", path)
    all_owners = {_OWNER_OF.get(word.lower()) for word in words}
    for owner in ("optimizer state", "gradient"):
        if owner in all_owners and head_owner != "batch":
            return owner
    if head_owner is not None:
        return head_owner
    return "parameter" if "parameter" in all_owners else guess


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
