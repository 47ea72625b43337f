"""Pictures of sharded arrays, and of a measured step beside a predicted one."""

import dataclasses
import html
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence

from ..core.errors import InspectError
from ..core.files import MOST_JSON_BYTES, named, read_text
from ..core.format import num_bytes, span
from ..plan.parts import Prediction
from ..plan.plan import Plan
from ..report.lanes import (
    COLLECTIVE,
    COMPUTATION,
    Bar,
    Lanes,
    lanes_of_timeline,
    step_legend,
    step_picture,
)
from ..report.page import box, figure, fold, section, table
from ..schedule.replay import from_perfetto
from .collectives import Mesh
from .program import Program, ProgramArray
from .tables import alike, group, ranges

_WIDTH, _HEIGHT = 210.0, 210.0  # pixels, of a square array
_LEAST_CELL = (24.0, 17.0)
_MAX_CELLS = 64  # along a side; more are counted, not drawn
_CHARACTER = 6.3  # pixels
_NUM_COLORS = 8
_MAX_PICTURES = 24
_MAX_NAMES = 6  # below a picture
_LEAST_PICTURE = 0.002  # of all arguments' bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayShard:
    """One shard of an array.

    Attributes:
        index: Along each dimension.
        devices: With this shard, by place in the mesh.
        used: The share of each dimension that is not padding.
    """

    index: tuple[int, ...]
    devices: tuple[int, ...]
    used: tuple[float, ...]


def mesh_and_shards(program: Program) -> Iterator[str]:
    """Draw the mesh, and each sharding of the program's large arrays once."""
    if drawn := mesh_picture(program.mesh):
        *down, across = [f"{name} = {n}" for name, n in program.mesh]
        words = f"across: {across}" + (f"; down: {', then '.join(down)}" if down else "")
        yield (
            '<div class="table cells"><p>The devices by their places in the mesh, '
            f"{html.escape(words)}.</p>{drawn}</div>"
        )
    known = [a for a in program.arrays if a.spec is not None]
    whole = sum(a.num_bytes for a in program.arrays)
    layouts = group(known, lambda _: "", lambda a: (a.dtype, a.shape, a.local_shape, a.spec))
    alikes = sorted(layouts, key=lambda members: -len(members) * members[0].num_bytes)
    large = [
        members
        for members in alikes
        if len(members) * members[0].num_bytes >= _LEAST_PICTURE * whole
        and math.prod(members[0].shape) > 1
    ][:_MAX_PICTURES]
    cards = "".join(_card(members, program.mesh) for members in large)
    yield f'<div class="cards cells">{cards}</div>'
    if any(padded_share(members[0], program.mesh) for members in large):
        yield "<p>Hatched: padding.</p>"
    rest = sum(map(len, alikes)) - sum(map(len, large))
    if rest:
        yield f"<p>{rest} smaller arrays are not drawn.</p>"
    if len(known) < len(program.arrays):
        num = len(program.arrays) - len(known)
        yield f"<p>How {num} arrays are sharded is not known.</p>"


def shards(array: ProgramArray, mesh: Mesh) -> tuple[ArrayShard, ...]:
    """The shards of an array, the last dimension fastest; empty if its spec is not known.

    A dimension that does not divide by its number of shards ends in padding.
    """
    if array.spec is None:
        return ()
    sizes = dict(mesh)
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(n) for _, n in mesh))):
        at = dict(zip(sizes, place, strict=True))
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


def padded_share(array: ProgramArray, mesh: Mesh) -> float:
    """Share of padding in all shards of an array."""
    all_shards = shards(array, mesh)
    used = sum(math.prod(shard.used) for shard in all_shards)
    return 1 - used / len(all_shards) if all_shards else 0.0


def array_picture(array: ProgramArray, mesh: Mesh) -> str:
    """Draw an array, each shard with its devices; padding is hatched."""
    if not array.shape:  # one number is drawn as an array of one
        array = dataclasses.replace(array, shape=(1,), local_shape=(1,), spec=((),))
    all_shards = shards(array, mesh)
    rank = len(array.shape)
    counts = [max(shard.index[d] for shard in all_shards) + 1 for d in range(rank)]
    cut = [d for d in range(rank) if counts[d] > 1]
    *down, across = cut if len(cut) > 1 else sorted({*cut, rank - 1})
    num_across, num_down = counts[across], math.prod(counts[d] for d in down)
    size_down = math.prod(array.shape[d] for d in range(rank) if d != across)
    width, height = _frame(array.shape[across], size_down, num_across, num_down)
    w, h = width / num_across, height / num_down
    cells = []
    is_drawn = max(num_across, num_down) <= _MAX_CELLS
    for shard in all_shards if is_drawn else ():
        row = 0
        for d in down:
            row = row * counts[d] + shard.index[d]
        column = shard.index[across]
        tooltip = _tooltip(shard, array)
        left, top = column * w, row * h
        width_used = w * shard.used[across]
        height_used = h * shard.used[down[-1]] if down else h
        if math.prod(shard.used) < 1:  # the used part is a hole in the hatched one
            whole = f"M{left:.1f} {top:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z"
            used = f"M{left:.1f} {top:.1f}v{height_used:.1f}h{width_used:.1f}v{-height_used:.1f}z"
            path = f'<path class="pad" d="{whole}{used}"/>'
            cells.append(f"<g><title>{html.escape(tooltip)}</title>{path}</g>")
        cells.append(
            box(
                f"k{(row * num_across + column) % _NUM_COLORS}",
                (left, top, width_used, height_used),
                tooltip=tooltip,
                label=_label(shard.devices, width_used),
            )
        )
    if not is_drawn:
        words = f"{len(all_shards)} parts"
        cells = [box("k0", (0, 0, width, height), tooltip=words, label=words)]
    return (
        f'<svg width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}" role="img" '
        f'aria-label="{html.escape(array.path)} in {len(all_shards)} parts">{"".join(cells)}</svg>'
    )


def mesh_picture(mesh: Mesh) -> str:
    """The mesh's devices, its last axis across; nothing if it is too large to draw."""
    sizes = tuple(n for _, n in mesh)
    if max(sizes[-1], math.prod(sizes[:-1])) > _MAX_CELLS:
        return ""
    devices = ProgramArray(
        path="the mesh",
        owner="",
        dtype="",
        shape=sizes,
        local_shape=(1,) * len(sizes),
        spec=tuple((name,) for name, _ in mesh),
    )
    return array_picture(devices, mesh)


def _card(members: Sequence[ProgramArray], mesh: Mesh) -> str:
    array = members[0]
    dims = [
        f"{n} over {'+'.join(axes)}" if axes else str(n)
        for n, axes in zip(array.shape, array.spec or (), strict=True)
    ]
    num_replicas = len(shards(array, mesh)[0].devices)
    words = f"{num_bytes(array.num_bytes)} on a device, "
    words += "one replica" if num_replicas == 1 else f"{num_replicas} replicas"
    padded = padded_share(array, mesh)
    words += f"; {padded:.1%} padding" if padded else ""
    names = [
        alike(a.path for a in alikes) + (f", {len(alikes)} arrays" if len(alikes) > 1 else "")
        for alikes in group(members, lambda a: a.path)
    ]
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    listed = "<br>".join(html.escape(name) for name in (*names[:_MAX_NAMES], *more))
    head = f"{array.dtype}[{', '.join(dims)}]"
    return (
        f"<div><b>{html.escape(head)}</b><span>{html.escape(words)}</span>"
        f"{array_picture(array, mesh)}<span>{listed}</span></div>"
    )


def _frame(across: int, down: int, num_across: int, num_down: int) -> tuple[float, float]:
    """Width and height in the array's proportions, but none too thin for its labels."""
    ratio = min(2.5, max(0.4, math.sqrt(down / across))) if across and down else 1.0
    width = _WIDTH / max(1.0, ratio)
    height = _HEIGHT * min(1.0, ratio)
    least_width = min(num_across, _MAX_CELLS) * _LEAST_CELL[0]
    least_height = min(num_down, _MAX_CELLS) * _LEAST_CELL[1]
    return max(width, least_width), max(height / 1.6, least_height)


def _label(devices: Sequence[int], width: float) -> str:
    for label in (ranges(devices), f"x{len(devices)}"):
        if len(label) * _CHARACTER < width - 2:
            return label
    return ""


def _tooltip(shard: ArrayShard, array: ProgramArray) -> str:
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


_MAX_LONGEST = 15  # operations listed


def step_section(measured: Lanes | None, predicted: Lanes | None) -> str:
    """A section on one step in time, with its longest operations if it was measured."""
    steps = [step for step in (measured, predicted) if step is not None]
    titles = "; ".join(step.title for step in steps)
    picture = figure(step_picture(steps), f"{titles}. A line marks where a step ends.")
    parts = [picture, step_legend(steps)]
    if measured is not None:
        rows = [
            (
                name,
                span(measured.busy_seconds(lane, COMPUTATION)),
                span(measured.busy_seconds(lane, COLLECTIVE)),
                span(max(bar.end_seconds for bar in measured.bars if bar.lane == lane)),
            )
            for lane, name in enumerate(measured.names)
        ]
        heads = ("measured", "computation", "collectives and waiting in them", "until")
        parts.append(fold("Each device", table(heads, rows)))
        took = sorted(measured.mean_seconds().items(), key=lambda item: -item[1])
        heads = ("operation", "kind", "program", "a step, mean over devices")
        rows = [(*names, span(seconds)) for names, seconds in took[:_MAX_LONGEST]]
        parts.append(fold("Longest operations", table(heads, rows, left=(0, 1, 2))))
        parts.append(f"<p>{html.escape(measured.note)}</p>")
    return section("One step in time", *parts)


def lanes_of_file(path: pathlib.Path) -> Lanes:
    """A file of `hxla plan --write` as lanes: the plan or the timeline of one replica.

    Raises:
        PlanError: If it is neither.
        InspectError: If it cannot be read.
    """
    text = read_text(path, MOST_JSON_BYTES, named("prediction", path, InspectError))
    if '"traceEvents"' not in text:
        return lanes_of_plan(Plan.from_json(text))
    timeline, names = from_perfetto(text)
    title = f"predicted, without reduction and update: {span(timeline.makespan_seconds)}"
    return lanes_of_timeline(timeline, names, title=title)


def lanes_of_plan(plan: Plan) -> Lanes:
    """A plan as lanes: the seconds of each kind of work of a device, in no true order."""
    bars = []
    known = plan.prediction or Prediction()
    kinds = {device.rank: device.kind for device in plan.devices}
    for lane, device in enumerate(known.devices):
        at = 0.0
        for kind, took in (
            ("forward and backward", device.compute_seconds),
            ("waiting", device.wait_seconds),
            ("reduction", device.reduction_seconds),
            ("update", device.update_seconds),
        ):
            if took > 0:
                label = f"{kind} {span(took)}"
                bars.append(
                    Bar(lane=lane, kind=kind, label=label, start_seconds=at, end_seconds=at + took)
                )
                at += took
    return Lanes(
        title=f"predicted: {span(known.step_seconds)}, sums of each device",
        names=tuple(f"{kinds[d.rank]} (device {d.rank})" for d in known.devices),
        bars=tuple(bars),
    )
