"""What the pieces of a pipeline's step take on this process's devices."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from .._core._timing import middle_seconds
from .._core._types import PyTree
from .._schedule._schedules import BACKWARD, FORWARD, WEIGHT
from . import _actions
from ._actions import FIELDS
from ._pipeline import Pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceTimes:
    """Times of a pipeline's pieces.

    Attributes:
        seconds: Of each kind of action of each part.
        meeting_seconds: Of a forward on both sides of a boundary and the exchange after it;
            boundary b is below stage b.
        fixed_seconds: Of filling the slots and collecting the sums, once a step.
    """

    seconds: dict[tuple[str, int], float]
    meeting_seconds: dict[int, float]
    fixed_seconds: float

    def transfer_seconds(self, num_stages: int) -> dict[int, float]:
        """Of the exchange over each boundary, beyond the longer forward of its two sides.

        By itself, one after another, it would take a throttled process longer: there it has not
        waited for its neighbour, and so has used up what it may run.
        """

        def longer(boundary: int) -> float:
            sides = boundary, (boundary + 1) % num_stages
            return max(self.seconds.get((FORWARD, side), 0.0) for side in sides)

        return {b: max(0.0, took - longer(b)) for b, took in self.meeting_seconds.items()}


def piece_times(
    pipeline: Pipeline,
    fill: Callable[[], list[jax.Array]],
    aux: Sequence[jax.Array],
    exponents: jax.Array,
    batch: PyTree,
    *,
    repeats: int,
) -> PieceTimes:
    """Time everything that a step consists of.

    Args:
        pipeline: Compiled.
        fill: Fills all slots.
        aux: Other variables.
        exponents: Scales.
        batch: One microbatch.
        repeats: Of each.

    Returns:
        Times of this process's stages; those of others are not in it.
    """
    program = pipeline.program
    num_stages = pipeline.spec.slots.num_stages
    here = set(jax.local_devices())
    own = [s for s, devices in enumerate(pipeline.replica.rows) if here & set(devices)]
    kinds = (FORWARD, BACKWARD, WEIGHT) if program.halves else (FORWARD, BACKWARD)
    run_tick, once = pipeline.pieces(fill, aux, exponents, batch)

    def tick_seconds(actions: Sequence[int], exchange: int) -> float:
        table = np.zeros((1, num_stages, len(FIELDS)), np.int32)
        table[0, :, 0] = actions
        table[0, :, -1] = exchange
        return middle_seconds(run_tick(table), repeats)

    found: dict[tuple[str, int], float] = {}
    nothing = tick_seconds([0] * num_stages, 0)

    def numbers(first: int, kind: str) -> list[int]:
        return [_actions.number(p, kind) for p in program.programs[first : first + num_stages]]

    for kind in kinds:
        for first in range(0, len(program.stages), num_stages):
            took = tick_seconds(numbers(first, kind), 0)
            found |= {(kind, first + s): max(0.0, took - nothing) for s in own}
    meetings: dict[int, float] = {}
    for i, boundaries in enumerate(program.exchanges):
        new = set(boundaries) - meetings.keys()
        if new:  # the same for every process, as collectives must be
            took = tick_seconds(numbers(0, FORWARD), i)
            meetings |= dict.fromkeys(new, max(0.0, took - nothing))
    ours = {b for b in meetings for s in own if s in (b, (b + 1) % num_stages)}

    return PieceTimes(
        seconds=found,
        meeting_seconds={b: meetings[b] for b in sorted(ours)},
        fixed_seconds=middle_seconds(once, repeats),
    )
