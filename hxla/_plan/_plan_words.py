"""What a plan says of the programs of a copy of the model: its stages, or its segments."""

from collections.abc import Iterator

from .._schedule._segment_sequence import sequence_from_texts
from ._plan_parts import PlannedChain, PlannedPipeline


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
    runs = sequence_from_texts(num, chain.sequence).num_forwards
    again = sum(n - 1 for n in runs if n > 1)
    kept = f"{again} forwards run again" if again else "all residuals are kept"
    yield f"  a microbatch runs as {num} segments: {kept}"
