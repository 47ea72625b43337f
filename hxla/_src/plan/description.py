"""A plan in words, its difference from another, and its picture.

The picture has the work, time and memory of each device.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.errors import ConfigError
from ..core.files import local_path
from ..core.format import num_bytes, plural
from ..schedule.segment_sequence import sequence_from_texts
from .layout import Layout
from .parts import (
    Axis,
    DevicePrediction,
    HeldBytes,
    Islands,
    PlannedChain,
    PlannedPipeline,
    PlannedStage,
    Prediction,
    RunnerUp,
)


def pipelines_in_words(plan: Any) -> Iterator[str]:
    """Lines about the stages of a plan; none without a pipeline."""
    if plan.unlike_replicas:
        yield from _replicas_in_words(plan.pipeline, plan.stage_names)
    elif plan.pipeline is not None:
        yield from _pipeline_in_words(plan.pipeline, plan.num_stages)
        for stages in plan.stage_forms:
            yield from _stages_in_words(stages, plan.stage_names)


def _pipeline_in_words(pipeline: PlannedPipeline, num_stages: int) -> Iterator[str]:
    """Lines about the schedule and each stage's segments."""
    schedule = pipeline.schedule if isinstance(pipeline.schedule, str) else "a table"
    chunks = f" with {pipeline.num_chunks} chunks each" if pipeline.num_chunks > 1 else ""
    kept = "forwards are recomputed" if pipeline.recompute else "residuals are kept"
    yield f"  pipeline of {num_stages} stages, {schedule}{chunks}: {kept}"
    for part in range(num_stages * pipeline.num_chunks):
        names = [s.name.split(" .. ") for s in pipeline.segments if s.part == part]
        first, last = names[0][0], names[-1][-1]
        between = first if first == last else f"{first} .. {last}"
        yield f"  stage {part % num_stages}: {between}"


def _stages_in_words(
    stages: Sequence[PlannedStage], names: Sequence[Sequence[str]]
) -> Iterator[str]:
    """A line for each unlike stage.

    Args:
        names: For each replica the devices of each stage.
    """
    for s, stage in enumerate(stages):
        axes = ", ".join(map(_axis_in_words, stage.axes)) or "one device"
        sizes = stage.axis_sizes
        size = sum(layout.device_bytes(sizes) for layout in stage.parameters)
        where = "; ".join(replica[s] for replica in names[:4]) + "; ..." * (len(names) > 4)
        yield f"  stage {s} on {where}: {axes}, parameters {size:,} bytes on a device in a step"


def _replicas_in_words(pipeline: PlannedPipeline, names: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines about replicas of unlike form, and a line for each of their stages.

    Args:
        names: For each replica the devices of each stage.
    """
    kept = "forwards are recomputed" if pipeline.recompute else "residuals are kept"
    num = len(pipeline.cut)
    yield f"  unlike replicas of {num} parts of the model, {pipeline.schedule}: {kept}"
    for i, (replica, devices) in enumerate(zip(pipeline.replicas, names, strict=True)):
        parts = iter(range(num))
        yield f"  replica {i}:"
        for stage, name in zip(replica.stages, devices, strict=True):
            numbers = list(itertools.islice(parts, stage.num_parts))
            segments = [s.name.split(" .. ") for s in pipeline.segments if s.part in numbers]
            first, last = segments[0][0], segments[-1][-1]
            runs = "the whole model" if stage.num_parts == num else f"{first} .. {last}"
            axes = ", ".join(map(_axis_in_words, stage.axes))
            size = sum(layout.device_bytes(stage.axis_sizes) for layout in stage.parameters)
            yield (
                f"    {name}{f' ({axes})' if axes else ''}: "
                f"{runs}, parameters {size:,} bytes on a device in a step"
            )


def _axis_in_words(axis: Axis) -> str:
    return f"{axis.name} {':'.join(map(str, axis.shares)) or axis.size}"


def chain_in_words(chain: PlannedChain) -> Iterator[str]:
    """The number of segments, and how many forwards are recomputed."""
    num = len(chain.segments)
    sequence = sequence_from_texts(num, chain.sequence)
    again = sum(n - 1 for n in sequence.num_forwards if n > 1)
    kept = f"{again} forwards are recomputed" if again else "all residuals are kept"
    kept += ", what waits goes to the host" * sequence.offloads
    yield f"  a microbatch runs as {num} segments: {kept}"


def islands_in_words(islands: Islands, counts: Sequence[int]) -> Iterator[str]:
    """A line about the islands, and how they meet.

    Args:
        counts: The microbatches of each replica.
    """
    each = "+".join(map(str, islands.counts(counts)))
    outer = "the average"
    if islands.learning_rate != 1 or islands.momentum:
        outer = f"an outer step of {islands.learning_rate:g}, momentum {islands.momentum:g}"
    yield (
        f"  {len(islands.replicas)} islands of {each} microbatches update apart, and meet every "
        f"{plural(islands.every, 'step')}: {outer}"
    )


def runners_up_in_words(others: Sequence[RunnerUp]) -> Iterator[str]:
    """A line for each runner-up with a predicted time."""
    for other in others:
        if other.step_seconds:
            yield f"  runner-up: {other.description}, {other.step_seconds:.4g} s"


def held_in_words(known: Prediction | None, others: Sequence[RunnerUp]) -> Iterator[str]:
    """A table of bytes by owner: one row per group of equal devices, then one per runner-up."""
    rows: list[tuple[str, HeldBytes, str]] = []
    alike: dict[tuple[HeldBytes, float], list[int]] = {}
    for device in known.devices if known is not None else ():
        if device.held is not None:
            alike.setdefault((device.held, device.capacity_bytes), []).append(device.rank)
    for (held, capacity), ranks in alike.items():
        name = f"devices {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"device {ranks[0]}"
        rows.append((name, held, f"of {num_bytes(capacity)}" if capacity else ""))
    for other in others:
        if other.held is not None:
            lack = f"lacks {num_bytes(other.lack_bytes)}" if other.lack_bytes else "fits"
            rows.append((f"instead {other.description}", other.held, lack))
    if not rows:
        return
    columns = [*HeldBytes.model_fields, "in all"]
    width = max(len(name) for name, *_ in rows)
    yield f"  {'memory at the peak (estimated)':<{width}}" + "".join(f"{c:>13}" for c in columns)
    for name, held, end in rows:
        cells = [*held.by_owner.values(), held.total]
        yield f"  {name:<{width}}" + "".join(f"{num_bytes(c):>13}" for c in cells) + f"  {end}"


def differences(a: Any, b: Any, key: str = "") -> Iterator[str]:
    """Lines on where two plans differ, given as nested dictionaries and tuples."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys((*a, *b)):
            yield from differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and key != "spec":
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            named = x.get("name", i) if isinstance(x, dict) else i
            yield from differences(x, y, f"{key}.{named}")
    elif a != b:
        yield f"{key}: {_shortened(a)} here, {_shortened(b)} there"


def _shortened(value: Any) -> str:
    text = f"{len(value)} entries" if isinstance(value, tuple) and len(value) > 8 else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def part_bytes(parameters: Sequence[Layout], axis: str, num_devices: int) -> tuple[int, ...]:
    """Bytes of the parameters on each device of a replica with one axis, without padding."""
    totals = [0] * num_devices
    for layout in parameters:
        dim = layout.dim_of(axis)
        for d in range(num_devices):
            if dim is None:
                totals[d] += layout.num_bytes
            elif layout.shape[dim]:
                size = layout.parts(dim, num_devices)[d]
                totals[d] += layout.num_bytes // layout.shape[dim] * size
    return tuple(totals)


def parts_in_words(parameters: Sequence[Layout], axis: str, num_devices: int) -> Iterator[str]:
    """A line for each device of a replica: bytes of parameters, and of padding."""
    padded = sum(layout.device_bytes({axis: num_devices}) for layout in parameters)
    for d, size in enumerate(part_bytes(parameters, axis, num_devices)):
        yield (
            f"  device {d} of a replica: {size:,} bytes of parameters and {padded - size:,} of "
            "padding"
        )


_PARTS = (
    ("compute_seconds", "compute", "#2f6fdb"),
    ("reduction_seconds", "sum", "#e39a1d"),
    ("update_seconds", "update", "#2a9d78"),
    ("wait_seconds", "wait", "#d3d9e2"),
)
#: Owners of a device's bytes; `held` stands for all of them where they are not known.
_OWNERS = {
    "held": "#b48ad6",
    "parameters": "#2f6fdb",
    "sums": "#e39a1d",
    "optimizer": "#2a9d78",
    "gradients": "#c65f8a",
    "activations": "#9aa5b8",
}
_MOST_ROWS = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device.

    Attributes:
        num_microbatches: Of its replica in a step.
        prediction: None if nothing is known.
    """

    label: str
    replica: int
    stage: int
    num_microbatches: int
    prediction: DevicePrediction | None


def device_rows(plan: Any, stage_ranks: Sequence[Sequence[Sequence[int]]]) -> list[DeviceRow]:
    """A row for each device of a plan, from the devices of each stage of each replica."""
    known = {d.rank: d for d in plan.prediction.devices} if plan.prediction else {}
    kinds = {device.rank: device.kind for device in plan.devices}
    replicas = plan.unlike_replicas or plan.replicas
    return [
        DeviceRow(
            label=f"{rank} {kinds[rank]}",
            replica=r,
            stage=s,
            num_microbatches=replica.num_microbatches,
            prediction=known.get(rank),
        )
        for r, (replica, stages) in enumerate(zip(replicas, stage_ranks, strict=True))
        for s, ranks in enumerate(stages)
        for rank in ranks
    ]


def draw_devices(
    rows: Sequence[DeviceRow], path: str | os.PathLike[str], *, num_stages: int, title: str
) -> None:
    """Write the picture of `Plan.draw`: a row for each device, up to a limit."""
    from matplotlib.figure import Figure

    shown = list(rows[:_MOST_ROWS])
    known = [row.prediction for row in shown if row.prediction is not None]
    timed = [p for p in known if p.compute_seconds]
    sized = [p for p in known if p.memory_bytes]
    panels = [_work, *([_time] if timed else []), *([_memory] if sized else [])]
    figure = Figure(
        figsize=(3.2 + 3.0 * len(panels), 1.2 + 0.3 * len(shown)), dpi=130, layout="constrained"
    )
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, shown, num_stages)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False)
    places = range(len(shown))
    axes[0].set_yticks(places, [row.label for row in shown], fontsize=8)
    axes[0].set_ylim(len(shown) - 0.4, -0.6)
    more = f" (the first {len(shown)} of {len(rows)} devices)" if len(rows) > len(shown) else ""
    figure.suptitle(title + more, fontsize=9)
    file = local_path(path, "path", ConfigError)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _work(ax: Any, rows: Sequence[DeviceRow], num_stages: int) -> None:
    counts = [row.num_microbatches for row in rows]
    ax.barh(range(len(rows)), counts, color="#7fa9ea", height=0.7)
    for i, row in enumerate(rows):
        stage = f", stage {row.stage}" if num_stages > 1 else ""
        ax.text(
            0, i, f" copy {row.replica}{stage}: {row.num_microbatches}", va="center", fontsize=7
        )
    ax.set_xlim(0, max(max(counts, default=1), 1) * 1.02)
    ax.set_xlabel("microbatches a step", fontsize=8)


def _time(ax: Any, rows: Sequence[DeviceRow], _num_stages: int) -> None:
    left = [0.0] * len(rows)
    for field, label, color in _PARTS:
        took = [getattr(row.prediction, field) if row.prediction else 0.0 for row in rows]
        ax.barh(range(len(rows)), took, left=left, color=color, label=label, height=0.7)
        left = [a + b for a, b in zip(left, took, strict=True)]
    ax.set_xlabel("seconds of a step", fontsize=8)
    ax.legend(fontsize=7, frameon=False, ncols=2, loc="lower right")


def _memory(ax: Any, rows: Sequence[DeviceRow], _num_stages: int) -> None:
    unit = 2.0**30
    left = [0.0] * len(rows)
    for owner, color in _OWNERS.items():
        sizes = [_owned_bytes(row.prediction, owner) / unit for row in rows]
        if any(sizes):
            ax.barh(range(len(rows)), sizes, left=left, color=color, label=owner, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, row in enumerate(rows):
        if row.prediction is not None and row.prediction.capacity_bytes:
            at = row.prediction.capacity_bytes / unit
            ax.plot([at, at], [i - 0.42, i + 0.42], color="#1f2430", linewidth=1.2)
    if any(row.prediction is not None and row.prediction.held is not None for row in rows):
        ax.legend(fontsize=7, frameon=False, ncols=2, loc="lower right")
    ax.set_xlabel("GiB of memory (mark: capacity)", fontsize=8)


def _owned_bytes(known: DevicePrediction | None, owner: str) -> float:
    """Bytes of one owner on a device; `held` is all of them where owners are not known."""
    if known is None or known.held is None:
        return known.memory_bytes if known is not None and owner == "held" else 0.0
    return known.held.by_owner.get(owner, 0.0)
