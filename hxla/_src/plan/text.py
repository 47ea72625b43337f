"""A plan in words: its programs, the bytes of its devices, and its difference from another."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..core.format import num_bytes
from ..schedule.segment_sequence import sequence_from_texts
from .layout import Layout
from .parts import HeldBytes, PlannedChain, PlannedPipeline, Prediction, RunnerUp


def pipeline_in_words(pipeline: PlannedPipeline, num_stages: int) -> Iterator[str]:
    """Lines about the schedule and each stage's segments."""
    schedule = pipeline.schedule if isinstance(pipeline.schedule, str) else "a table"
    chunks = f" with {pipeline.num_chunks} chunks each" if pipeline.num_chunks > 1 else ""
    kept = "forwards run again" if pipeline.recompute else "residuals are kept"
    yield f"  pipeline of {num_stages} stages, {schedule}{chunks}: {kept}"
    for part in range(num_stages * pipeline.num_chunks):
        names = [s.name.split(" .. ") for s in pipeline.segments if s.part == part]
        first, last = names[0][0], names[-1][-1]
        between = first if first == last else f"{first} .. {last}"
        yield f"  stage {part % num_stages}: {between}"


def chain_in_words(chain: PlannedChain) -> Iterator[str]:
    """The number of segments, and how many forwards are recomputed."""
    num = len(chain.segments)
    sequence = sequence_from_texts(num, chain.sequence)
    again = sum(n - 1 for n in sequence.num_forwards if n > 1)
    kept = f"{again} forwards run again" if again else "all residuals are kept"
    kept += ", what waits goes to the host" * sequence.offloads
    yield f"  a microbatch runs as {num} segments: {kept}"


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
    yield f"  {'held at the peak (estimated)':<{width}}" + "".join(f"{c:>13}" for c in columns)
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
