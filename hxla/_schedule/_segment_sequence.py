"""The gradient of a chain of segments as a sequence of programs: which run, and in what order.

Each segment has a program for its forward and one for its backward. Everything that is called
recomputation, checkpointing or offload of activations is a choice of what a forward leaves behind
and of which forwards run again.
"""

import dataclasses
import re
from collections.abc import Sequence

from .._core._errors import PlanError
from .._core._faults import listed, shown
from ._schedules import BACKWARD, FORWARD

OFFLOAD, FETCH = "offload", "fetch"
#: The residuals of a plan's chain: the fewest bytes; and those of the last segment, its input.
CUT, INPUT = "cut", "input"

_LETTERS = {"F": FORWARD, "B": BACKWARD, "O": OFFLOAD, "I": FETCH}
_TEXT = re.compile(r"([FBOI])([0-9]{1,7})(\+?)(?::([\w.-]+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentOperation:
    """One program, or one copy of what a segment keeps to or from host memory.

    A forward frees its segment's input unless it keeps it or its residuals need it; its outputs
    become the next segment's input, or are dropped where that one's residuals are there already or
    its backward has run. A backward
    frees residuals, input and the gradient of the outputs. Offloading takes the segment's input, or
    residuals together with an input that is kept, and frees the device's copy; the host's stays
    until the segment's backward.

    Attributes:
        kind: The kind: `forward`, `backward`, `offload` or `fetch`.
        segment: The segment of the chain, from 0.
        residuals: The name of the residuals that a forward keeps, empty for none, that a backward
            reads, or that are copied; empty if the input is copied alone.
        keeps_input: Whether a forward keeps its input, besides what its residuals need.
    """

    kind: str
    segment: int
    residuals: str = ""
    keeps_input: bool = False

    def __str__(self) -> str:
        """As written: `F0`, `F0+` if it keeps its input, `F3:dots`, `B3:dots`, `O1`, `I3:dots`."""
        letter = next(letter for letter, kind in _LETTERS.items() if kind == self.kind)
        kept = f":{self.residuals}" if self.residuals else ""
        return f"{letter}{self.segment}{'+' * self.keeps_input}{kept}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentSequence:
    """What runs for one microbatch's gradient.

    Attributes:
        num_segments: The length of the chain.
        operations: What runs, in its order. Whether it can is `replay_sequence`'s to say.
    """

    num_segments: int
    operations: tuple[SegmentOperation, ...]

    @property
    def written(self) -> tuple[str, ...]:
        """The operations as `sequence_from_texts` reads them."""
        return tuple(map(str, self.operations))

    @property
    def offloads(self) -> bool:
        """Whether anything goes to host memory."""
        return any(op.kind == OFFLOAD for op in self.operations)

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """How often each segment's forward runs; a backward that includes one is not counted."""
        runs = [op.segment for op in self.operations if op.kind == FORWARD]
        return tuple(map(runs.count, range(self.num_segments)))


def sequence_from_texts(num_segments: int, texts: Sequence[str]) -> SegmentSequence:
    """The sequence that `SegmentSequence.written` wrote.

    Args:
        num_segments: The length of the chain.
        texts: One per operation: `F2` is the forward of segment 2, `F2+` keeps its input, `F2:dots`
            the residuals of that name, `B2:dots` is the backward that reads them, `O2` takes the
            input of segment 2 to host memory and `I2` back, `O2:dots` and `I2:dots` its residuals.

    Raises:
        PlanError: With every text that is no operation of such a chain.
    """
    operations, faults = [], []
    for place, text in enumerate(texts):
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        kind = _LETTERS[found[1]] if found else ""
        if found is None or int(found[2]) >= num_segments:
            faults.append(
                f"operation {place}: {shown(text)} is none of a chain of {num_segments} segments, "
                'counted from 0; write "F2", "F2+", "F2:dots", "B2:dots", "O2" or "I2"'
            )
        elif found[3] and kind != FORWARD:
            faults.append(
                f"operation {place}: {shown(text)}: a {kind} keeps no input; only a forward has '+'"
            )
        else:
            operations.append(SegmentOperation(kind, int(found[2]), found[4] or "", bool(found[3])))
    if faults:
        raise PlanError(f"the sequence of segments cannot be read:{listed(faults)}")
    return SegmentSequence(num_segments=num_segments, operations=tuple(operations))
