"""A step of ZeRO 2 and 3 as instructions: segment by segment, all microbatches of a wave in each.

Sharded state is then gathered and reduced once for a segment, whatever the number of microbatches
and however unequal their counts. The instructions are the same on every process, so all run the
same collectives in the same order; operations run for the replica's number of microbatches.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
    Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism", 2021, section 3.
"""

import dataclasses
from collections.abc import Sequence

from .schedules import BACKWARD
from .segment_sequence import SegmentOperation, SegmentSequence, runs_by_segment

GATHER, PREFETCH, RUN, ADD, REDUCE = "gather", "prefetch", "run", "add", "reduce"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepInstruction:
    """A collective of all replicas, or the work of each for its microbatches of a wave.

    Attributes:
        kind: `gather`: all-gather of the segment's parameters; `prefetch`: those of another begin
            to come from host memory; `run`: operations run, and gathered parameters are freed;
            `add`: the group's sums join those of earlier waves; `reduce`: reduction over replicas.
        segment: Of the chain, from 0.
        wave: Of the step, from 0.
        operations: Of `run`, for each microbatch.
        group: The group of sums of `add` and `reduce`.
    """

    kind: str
    segment: int
    wave: int
    operations: tuple[SegmentOperation, ...] = ()
    group: int = 0

    @property
    def is_backward(self) -> bool:
        """Whether a backward is among its operations."""
        return any(op.kind == BACKWARD for op in self.operations)


def layerwise_order(
    sequence: SegmentSequence, group_segments: Sequence[int], num_waves: int
) -> tuple[StepInstruction, ...]:
    """The instructions of a step.

    Args:
        sequence: The operations of a microbatch.
        group_segments: For each group of sums the segment whose backward completes it.
    """
    runs = [(wave, *run) for wave in range(num_waves) for run in runs_by_segment(sequence)]
    out = []
    for k, (wave, segment, operations) in enumerate(runs):
        out.append(StepInstruction(kind=GATHER, segment=segment, wave=wave))
        if k + 1 < len(runs):
            out.append(StepInstruction(kind=PREFETCH, segment=runs[k + 1][1], wave=wave))
        run = StepInstruction(kind=RUN, segment=segment, wave=wave, operations=operations)
        out.append(run)
        kind = REDUCE if wave + 1 == num_waves else ADD
        groups = [g for g, last in enumerate(group_segments) if last == segment]
        for group in groups if run.is_backward else ():
            out.append(StepInstruction(kind=kind, segment=segment, wave=wave, group=group))
    return tuple(out)
