"""The groups of devices that run a collective together, and their mesh axes."""

import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

MOST_DEVICES = 1 << 16  # of a program

Mesh = tuple[tuple[str, int], ...]
Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"mesh\[([^\]]*)\](?:\s*,\s*device_ids=[^{]*)?\s*\{([^}]*)\}")


@functools.lru_cache(maxsize=1024)
def parse(text: str | None, num_devices: int) -> Groups:
    """Read groups in any of XLA's three forms; `{}` and None are all devices together.

    Args:
        text: `{{0,1},{2,3}}`, `[2,2]<=[4]T(1,0)` or `mesh['d'=4] {'d'}`.

    Raises:
        ValueError: For a form that is not known.
    """
    if text is None or text.replace(" ", "") in ("{}", "{{}}"):
        return (tuple(range(num_devices)),)
    if iota := _IOTA.match(text):
        shape, dims = _ints(iota[1]), _ints(iota[2])
        ids = np.arange(_num_devices(dims)).reshape(dims)
        if iota[3]:
            ids = ids.transpose(_ints(iota[3]))
        return tuple(map(tuple, ids.reshape(shape[0], -1).tolist()))
    if named := _NAMED.match(text):
        mesh = mesh_of(named[1])
        return groups_of(mesh, [a for a in re.findall(r"'([^']+)'", named[2])])
    groups = re.findall(r"\{([\d,\s]+)\}", text)
    if not groups:
        raise ValueError(f"replica groups of a form not known: {text[:60]}")
    return tuple(tuple(_ints(group)) for group in groups)


@functools.lru_cache(maxsize=1024)
def pairs(text: str | None) -> Groups:
    """Sources and targets of a collective-permute."""
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text or ""))


def mesh_of(text: str) -> Mesh:
    """`'d'=2,'t'=4` or `"d"=2, "t"=4` as axes."""
    return tuple((name, int(n)) for name, n in re.findall(r"['\"]?(\w+)['\"]?=(\d+)", text))


def groups_of(mesh: Mesh, axes: Sequence[str]) -> Groups:
    """Groups of devices that differ along these axes only."""
    names = [name for name, _ in mesh]
    ids = np.arange(_num_devices([n for _, n in mesh])).reshape([n for _, n in mesh])
    rest = [i for i, name in enumerate(names) if name not in axes]
    along = [names.index(a) for a in axes]
    size = int(np.prod([mesh[i][1] for i in along], dtype=int))
    return tuple(map(tuple, ids.transpose([*rest, *along]).reshape(-1, size).tolist()))


def axes_of(groups: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes that groups run over; None if no axes have these groups."""
    wanted = {frozenset(g) for g in groups}
    real = [name for name, size in mesh if size > 1]
    size = len(groups[0]) if groups else 0
    sizes = dict(mesh)
    for num in range(len(real) + 1):
        for axes in itertools.combinations(real, num):
            if np.prod([sizes[a] for a in axes], dtype=int) != size:
                continue
            if {frozenset(g) for g in groups_of(mesh, axes)} == wanted:
                return axes
    return None


def axes_of_pairs(permuted: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes along which some source and its target differ."""
    shape = [n for _, n in mesh]
    if any(i >= math.prod(shape) for pair in permuted for i in pair):
        return None
    places = np.unravel_index(np.array(permuted, int).reshape(-1, 2), shape)
    return tuple(
        name for (name, _), at in zip(mesh, places, strict=True) if (at[:, 0] != at[:, 1]).any()
    )


def _num_devices(shape: Sequence[int]) -> int:
    """The devices of a mesh.

    Raises:
        ValueError: Above `MOST_DEVICES`, because their list would fill the memory.
    """
    num = math.prod(shape)
    if num > MOST_DEVICES:
        raise ValueError(f"a mesh of {num:.3g} devices, {MOST_DEVICES} are the most")
    return num


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]
