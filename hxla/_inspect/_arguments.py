"""The arguments of a program: what they are, whose they are, how they lie on the mesh."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from .._core._errors import InspectError
from . import _replica_groups as _groups
from . import _shapes
from ._hlo_text import Module
from ._origin import op_name
from ._program import OWNERS, Array
from ._replica_groups import Mesh

Spec = tuple[tuple[str, ...], ...]
ArrayLayout = tuple[tuple[int, ...], Spec | None]  # shape of the whole array, and its spec if known

# Words of an argument's path; the first line that has one decides.
_WORDS = {
    "optimizer state": "opt_state optimizer_state optimizer opt mu nu momentum ema trace adam",
    "gradient": "grads grad gradient gradients sums totals accumulated ints",
    "parameter": "params param parameters weights variables kernel bias embedding model",
    "batch": (
        "batch inputs input x y image images token tokens label labels target targets ids mask key "
        "rng seed step where index weight"
    ),
}
_OWNER_OF = {word: owner for owner, words in _WORDS.items() for word in words.split()}
_MESH = re.compile(r"sharding=\{mesh\[([^\]]*)\](?:, device_ids=\S*?)?, \[(.*?)\](?:, \w+=|\})")
_SDY = re.compile(r"#sdy\.mesh<\[([^\]]+)\]")
_SDY_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[(.*?)\](?:, \w+=.*?)?>")
_WHOLE = re.compile(r"sharding=\{(?:mesh\[[^\]]*\], )?replicated\}")
_DIM = re.compile(r"\{([^}]*)\}")


def argument_paths(module: Module) -> dict[str, str]:
    """Of the entry's parameters, by their names in the HLO."""
    entry = module.computations.get(module.entry)
    if entry is None:
        return {}
    return {p.name: op_name(p) or f"argument {p.arguments}" for p in entry.parameters}


def shardings(before: Module | None) -> tuple[Mesh, dict[int, ArrayLayout]]:
    """The mesh, and how each argument lies on it, as the text before optimization has them.

    Args:
        before: The module before optimization; None if there is none.
    """
    if before is None or before.entry not in before.computations:
        return (), {}
    mesh: Mesh = ()
    if named := _SDY.search(before.header.replace("\\", "")):
        mesh = _groups.mesh_of(named[1])
    out: dict[int, ArrayLayout] = {}
    for parameter in before.computations[before.entry].parameters:
        arrays = _shapes.arrays(parameter.shape)
        rest = parameter.rest.replace("\\", "")
        found, shardy = _MESH.search(rest), _SDY_SHARDING.search(rest)
        spec = None
        if found or shardy:
            if found:
                mesh = mesh or _groups.mesh_of(found[1])
            written = found[2] if found else shardy[1] if shardy else ""
            dims = [tuple(re.findall(r"['\"](\w+)['\"]", d)) for d in _DIM.findall(written)]
            rank = len(arrays[0][1]) if arrays else 0
            spec = tuple(dims) if len(dims) == rank else None
        elif _WHOLE.search(rest) and arrays:
            spec = ((),) * len(arrays[0][1])
        out[int(parameter.arguments)] = (arrays[0][1] if arrays else (), spec)
    return mesh, out


def arguments(
    module: Module,
    known: Mapping[int, ArrayLayout],
    *,
    owners: Mapping[str, str],
    donated: Sequence[int],
) -> tuple[Array, ...]:
    """The program's arguments in order.

    Args:
        module: Optimized.
        known: Whole shape and spec by number, where known.
        owners: Of arguments whose path starts with the key, as the user says.
        donated: Numbers of those whose memory results take over.

    Raises:
        InspectError: For an owner that is none.
    """
    odd = sorted(set(owners.values()) - set(OWNERS))
    if odd:
        raise InspectError(f"owners: {odd[0]!r} is no owner, only: {', '.join(OWNERS)}")
    entry = module.computations.get(module.entry)
    if entry is None:
        return ()
    parameters = entry.parameters
    names = [op_name(p) or f"argument {p.arguments}" for p in parameters]
    whose = _owners(names, [p.shape for p in parameters], module, owners, set(donated))
    out = []
    for parameter, path, owner in zip(parameters, names, whose, strict=True):
        number = int(parameter.arguments)
        arrays = _shapes.arrays(parameter.shape)
        dtype, local = arrays[0] if arrays else ("token", ())
        shape, spec = known.get(number, (local, None))
        if module.num_partitions == 1 and spec is None:
            spec = ((),) * len(local)
        out.append(
            Array(
                path=path,
                owner=owner,
                dtype=dtype,
                shape=shape,
                local_shape=local,
                spec=spec,
                is_donated=number in donated,
            )
        )
    return tuple(out)


def array_bytes(array: Array) -> int:
    """Bytes of one device's part."""
    return _shapes.shape_bytes(_shapes.array_text(array.dtype, array.local_shape))


def head(path: str) -> str:
    """The argument's own name: `params` of `params['Dense_0']['kernel']`."""
    return re.split(r"[\[.]", path, maxsplit=1)[0]


def _owners(
    names: Sequence[str],
    shapes: Sequence[str],
    module: Module,
    owners: Mapping[str, str],
    donated: set[int],
) -> list[str]:
    entry = module.computations[module.entry]
    results = Counter(_shapes.arrays(entry.root.shape) if entry.root else ())
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(head(name), []).append(i)
    guessed: dict[str, str] = {}
    seen: list[Counter[object]] = []
    for group, members in groups.items():
        own: Counter[object] = Counter(a for i in members for a in _shapes.arrays(shapes[i]))
        # What comes back changed, or whose gradient does, is state: parameters first, then what
        # the optimizer keeps in the same shapes.
        if own and own <= Counter[object](results):
            guessed[group] = "optimizer state" if own in seen else "parameter"
            seen.append(own)
        elif donated & set(members):
            guessed[group] = "parameter"
        else:
            guessed[group] = "parameter" if len(members) > 1 else "batch"
    return [_owner(name, owners, guessed[head(name)]) for name in names]


def _owner(path: str, owners: Mapping[str, str], guess: str) -> str:
    said = [prefix for prefix in owners if path.startswith(prefix)]
    if said:
        return owners[max(said, key=len)]
    own = _OWNER_OF.get(head(path).lower())
    words = re.findall(r"[A-Za-z_]+", path)
    all_owners = {_OWNER_OF.get(word.lower()) for word in words}
    for owner in ("optimizer state", "gradient"):
        if owner in all_owners and own != "batch":
            return owner
    if own is not None:
        return own
    return "parameter" if "parameter" in all_owners else guess
