"""What a plan says of the programs of a copy of the model, and of what its devices hold."""

from collections.abc import Iterator, Sequence

from .._core._format import num_bytes
from .._schedule._segment_sequence import sequence_from_texts
from ._plan_parts import HeldBytes, PlannedChain, PlannedPipeline, Prediction, RunnerUp


def pipeline_in_words(pipeline: PlannedPipeline, num_stages: int) -> Iterator[str]:
    """The schedule, and a line for each part of the model."""
    schedule = pipeline.schedule if isinstance(pipeline.schedule, str) else "a table"
    chunks = f" with {pipeline.num_chunks} chunks each" if pipeline.num_chunks > 1 else ""
    kept = "forwards run again" if pipeline.recompute else "residuals are kept"
    yield f"  pipeline of {num_stages} stages, {schedule}{chunks}: {kept}"
    for part in range(num_stages * pipeline.num_chunks):
        own = [s.name for s in pipeline.segments if s.part == part]
        between = f"{own[0]} .. {own[-1]}" if len(own) > 1 else own[0]
        yield f"  stage {part % num_stages}: {between}"


def chain_in_words(chain: PlannedChain) -> Iterator[str]:
    """How many segments there are, and which forwards run more than once."""
    num = len(chain.segments)
    sequence = sequence_from_texts(num, chain.sequence)
    again = sum(n - 1 for n in sequence.num_forwards if n > 1)
    kept = f"{again} forwards run again" if again else "all residuals are kept"
    kept += ", what waits goes to the host" * sequence.offloads
    yield f"  a microbatch runs as {num} segments: {kept}"


def runners_up_in_words(others: Sequence[RunnerUp]) -> Iterator[str]:
    """A line for each plan that a search found and timed."""
    for other in others:
        if other.step_seconds:
            yield f"  runner-up: {other.description}, {other.step_seconds:.4g} s"


def held_in_words(known: Prediction | None, others: Sequence[RunnerUp]) -> Iterator[str]:
    """A table of the bytes on each sort of device by owner, and on the fullest of other forms.

    Args:
        known: What is known of the plan's devices; alike ones share a line.
        others: What else was looked at.
    """
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
