"""The arguments of a program: their shapes, owners and shardings."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Set

from ..core.errors import InspectError
from . import replica_groups as _groups
from .annotated_module import op_name
from .hlo_text import Computation, Instruction, Module, arrays, first
from .program import OWNERS, ProgramArray
from .replica_groups import Mesh

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
    mesh = _groups.mesh_of(named[1]) if named else ()
    layouts: dict[int, ArrayLayout] = {}
    entry = before.computations.get(before.entry)
    for number, parameter in enumerate(entry.parameters if entry is not None else ()):
        _, shape = first(parameter.shape)
        rest = parameter.rest.replace("\\", "")
        spec = ((),) * len(shape) if _WHOLE.search(rest) else None
        if sharding := _SHARDING.search(rest) or _SDY_SHARDING.search(rest):
            mesh = mesh or _groups.mesh_of(sharding.groupdict().get("mesh", ""))
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
