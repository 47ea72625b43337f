"""How arrays lie on the mesh, as numbers and as pictures."""

import dataclasses
import html
import itertools
import math
from collections.abc import Iterator, Sequence

from .._core._format import num_bytes
from ._alike_names import alike, group, ranges
from ._program import Array, Program
from ._replica_groups import Mesh

_WIDTH, _HEIGHT = 210.0, 210.0  # pixels, of a square array
_LEAST_CELL = (24.0, 17.0)
_MAX_CELLS = 64  # along a side; more are said, not drawn
_CHARACTER = 6.3  # pixels
_NUM_COLORS = 8
_MAX_PICTURES = 24
_MAX_NAMES = 6  # below a picture
_LEAST_PICTURE = 0.002  # of all arguments' bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayShard:
    """One part of an array.

    Attributes:
        index: Which part along each dimension.
        devices: Those that hold it, by place in the mesh.
        used: Of each dimension the share that is not padding.
    """

    index: tuple[int, ...]
    devices: tuple[int, ...]
    used: tuple[float, ...]


def mesh_and_shards(program: Program) -> Iterator[str]:
    """The mesh, and how the large arrays of a program lie on it, those that lie alike once."""
    drawn = mesh_picture(program.mesh)
    if drawn:
        words = "<p>The devices by their places in the mesh.</p>"
        yield f'<div class="meshes cells">{words}{drawn}</div>'
    known = [a for a in program.arrays if a.spec is not None]
    whole = sum(a.num_bytes for a in program.arrays)
    layouts: dict[object, list[Array]] = {}
    for array in known:
        layouts.setdefault((array.dtype, array.shape, array.local_shape, array.spec), []).append(
            array
        )
    alikes = sorted(layouts.values(), key=lambda own: -len(own) * own[0].num_bytes)
    large = [
        own
        for own in alikes
        if len(own) * own[0].num_bytes >= _LEAST_PICTURE * whole and math.prod(own[0].shape) > 1
    ][:_MAX_PICTURES]
    yield f'<div class="cards cells">{"".join(_card(own, program) for own in large)}</div>'
    if any(padded_share(own[0], program.mesh) for own in large):
        yield "<p>Hatched: padding.</p>"
    rest = sum(map(len, alikes)) - sum(map(len, large))
    if rest:
        yield f"<p>{rest} smaller arrays are not drawn.</p>"
    if len(known) < len(program.arrays):
        num = len(program.arrays) - len(known)
        yield f"<p>Of {num} arrays it is not known how they lie on the mesh.</p>"


def shards(array: Array, mesh: Mesh) -> tuple[ArrayShard, ...]:
    """The parts of an array, the last dimension running fastest; nothing if its spec is not known.

    A dimension that its parts do not divide ends in padding.
    """
    if array.spec is None:
        return ()
    sizes = dict(mesh)
    names = [name for name, _ in mesh]
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(n) for _, n in mesh))):
        at = dict(zip(names, place, strict=True))
        index = []
        for axes in array.spec:
            number = 0
            for axis in axes:
                number = number * sizes[axis] + at[axis]
            index.append(number)
        holders.setdefault(tuple(index), []).append(device)
    return tuple(
        ArrayShard(
            index=index,
            devices=tuple(devices),
            used=tuple(
                min(1.0, max(0.0, (size - i * local) / local)) if local else 1.0
                for i, size, local in zip(index, array.shape, array.local_shape, strict=True)
            ),
        )
        for index, devices in sorted(holders.items())
    )


def padded_share(array: Array, mesh: Mesh) -> float:
    """Share of all parts of an array that is padding."""
    found = shards(array, mesh)
    used = sum(math.prod(shard.used) for shard in found)
    return 1 - used / len(found) if found else 0.0


def array_picture(array: Array, mesh: Mesh) -> str:
    """An array as a drawing, each part with the devices that hold it; padding is hatched."""
    found = shards(array, mesh)
    rank = len(array.shape)
    counts = [max(shard.index[d] for shard in found) + 1 for d in range(rank)]
    across, down = _sides(counts)
    num_across = counts[across] if rank else 1
    num_down = math.prod(counts[d] for d in down)
    size_across = array.shape[across] if rank else 1
    size_down = math.prod(array.shape[d] for d in range(rank) if d != across) if rank > 1 else 1
    width, height = _frame(size_across, size_down, num_across, num_down)
    if max(num_across, num_down) > _MAX_CELLS:
        cells = [_box(0, 0, width, height, 0, f"{len(found)} parts", "")]
    else:
        cells, labels = [], []
        for shard in found:
            row = 0
            for d in down:
                row = row * counts[d] + shard.index[d]
            column = shard.index[across] if rank else 0
            w, h = width / num_across, height / num_down
            x, y = column * w, row * h
            cells.append(_box(x, y, w, h, row * num_across + column, "", _said(shard, array)))
            labels.append(_text(x, y, w, h, _label(shard.devices, w)))
            inner = down[-1] if down else None
            used = (
                shard.used[across] if rank else 1.0,
                shard.used[inner] if inner is not None else 1,
            )
            cells += _hatched(x, y, w, h, *used)
        cells += labels  # above the hatching
    return (
        f'<svg width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}" role="img" '
        f'aria-label="{html.escape(array.path)} in {len(found)} parts">' + "".join(cells) + "</svg>"
    )


def mesh_picture(mesh: Mesh) -> str:
    """The mesh's devices, its last axis across; nothing if it is too large to draw."""
    num_across = mesh[-1][1]
    num = math.prod(n for _, n in mesh)
    num_down = num // num_across
    if max(num_across, num_down) > _MAX_CELLS:
        return ""
    w, h = 34.0, 24.0
    cells = [
        _box(n % num_across * w, n // num_across * h, w, h, 0, str(n), f"device {n}")
        for n in range(num)
    ]
    down = ", then ".join(f"{name} = {n}" for name, n in mesh[:-1])
    words = f"across: {mesh[-1][0]} = {num_across}" + (f"; down: {down}" if down else "")
    width, height = num_across * w, num_down * h
    return (
        f'<svg width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}" role="img" aria-label="the mesh">'
        + "".join(cells)
        + f"</svg><p>{html.escape(words)}</p>"
    )


def _card(own: Sequence[Array], program: Program) -> str:
    array = own[0]
    dims = [
        f"{n} over {'+'.join(axes)}" if axes else str(n)
        for n, axes in zip(array.shape, array.spec or (), strict=True)
    ]
    copies = len(shards(array, program.mesh)[0].devices)
    padded = padded_share(array, program.mesh)
    words = [
        f"{num_bytes(array.num_bytes)} on a device, "
        + ("one copy" if copies == 1 else f"{copies} copies"),
        *([f"{padded:.1%} padding"] if padded else []),
    ]
    names = [
        alike(a.path for a in alikes) + (f", {len(alikes)} arrays" if len(alikes) > 1 else "")
        for alikes in group(own, lambda a: a.path)
    ]
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    listed = "<br>".join(html.escape(name) for name in (*names[:_MAX_NAMES], *more))
    head = f"{array.dtype}[{', '.join(dims)}]"
    return (
        f"<div><b>{html.escape(head)}</b>"
        f"<span>{html.escape('; '.join(words))}</span>"
        f"{array_picture(array, program.mesh)}<span>{listed}</span></div>"
    )


def _sides(counts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The dimension that runs across, and those that run down."""
    cut = [d for d, n in enumerate(counts) if n > 1]
    last = len(counts) - 1
    if len(cut) > 1:
        return cut[-1], tuple(cut[:-1])
    if len(cut) == 1 and cut[0] != last:
        return last, (cut[0],)
    return max(last, 0), (last - 1,) if last > 0 else ()


def _frame(across: int, down: int, num_across: int, num_down: int) -> tuple[float, float]:
    """Width and height: unlike sides look so, but none gets too thin for its labels."""
    ratio = min(2.5, max(0.4, math.sqrt(down / across))) if across and down else 1.0
    width = _WIDTH / max(1.0, ratio)
    height = _HEIGHT * min(1.0, ratio)
    least_width = min(num_across, _MAX_CELLS) * _LEAST_CELL[0]
    least_height = min(num_down, _MAX_CELLS) * _LEAST_CELL[1]
    return max(width, least_width), max(height / 1.6, least_height)


def _box(x: float, y: float, w: float, h: float, color: int, label: str, said: str) -> str:
    title = f"<title>{html.escape(said)}</title>" if said else ""
    return (
        f'<g>{title}<rect class="k{color % _NUM_COLORS}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{w:.1f}" height="{h:.1f}"/>{_text(x, y, w, h, label)}</g>'
    )


def _text(x: float, y: float, w: float, h: float, label: str) -> str:
    if not label:
        return ""
    return f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}">{html.escape(label)}</text>'


def _hatched(
    x: float, y: float, w: float, h: float, used_across: float, used_down: float
) -> list[str]:
    out = []
    if used_across < 1:
        out.append((x + w * used_across, y, w * (1 - used_across), h))
    if used_down < 1:
        out.append((x, y + h * used_down, w * used_across, h * (1 - used_down)))
    return [
        f'<rect class="pad" x="{a:.1f}" y="{b:.1f}" width="{c:.1f}" height="{d:.1f}"/>'
        for a, b, c, d in out
        if c > 0 and d > 0
    ]


def _label(devices: Sequence[int], width: float) -> str:
    for label in (ranges(devices), f"x{len(devices)}"):
        if len(label) * _CHARACTER < width - 2:
            return label
    return ""


def _said(shard: ArrayShard, array: Array) -> str:
    bounds = []
    for d, (i, local, size) in enumerate(
        zip(shard.index, array.local_shape, array.shape, strict=True)
    ):
        if local == size:
            continue
        start, stop = min(size, i * local), min(size, (i + 1) * local)
        words = f"{start} to {stop - 1}" if stop > start else "padding only"
        more = f" and {local - (stop - start)} of padding" if start < stop < (i + 1) * local else ""
        bounds.append(f"dimension {d}: {words}{more}")
    noun = "device" if len(shard.devices) == 1 else "devices"
    return f"{noun} {ranges(shard.devices)}: {'; '.join(bounds) or 'all of it'}"
