"""Which memory the compiler gave to which values."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*?):?\s*$")
_VALUE = re.compile(
    r"\s+value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_NOT_TEMPORARY = (", parameter ", "maybe-live-out", ", constant", "thread-local")


class Piece(NamedTuple):
    """A value's place in an allocation.

    Attributes:
        name: Of the instruction that makes it.
        element: Of the tuple that the instruction makes; None for the value itself.
        offset: In the allocation.
        num_bytes: Of it.
    """

    name: str
    element: int | None
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """One block of memory."""

    num_bytes: int
    is_argument: bool
    is_output: bool
    is_temporary: bool
    pieces: Sequence[Piece] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferAssignment:
    """Memory of a program.

    Attributes:
        argument_bytes: Of arguments.
        output_bytes: Of results, those that take over an argument's memory included.
        alias_bytes: Of results that take over an argument's memory.
        temp_bytes: Of everything between.
        source: What they were read from.
        temporaries: Values between, their offsets counted through all blocks; empty if not known.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    source: str
    temporaries: tuple[Piece, ...] = ()


def from_allocations(allocations: Iterable[Allocation], source: str) -> BufferAssignment:
    """What blocks of memory are together.

    Args:
        allocations: All blocks.
        source: What they were read from.
    """
    sums: Counter[str] = Counter()
    temporaries: list[Piece] = []
    for block in allocations:
        if block.is_argument:
            sums["argument"] += block.num_bytes
        if block.is_output:
            sums["output"] += block.num_bytes
        if block.is_argument and block.is_output:
            sums["alias"] += block.num_bytes
        if block.is_temporary:
            start = sums["temp"]
            temporaries += [p._replace(offset=p.offset + start) for p in block.pieces]
            sums["temp"] += block.num_bytes
    return BufferAssignment(
        argument_bytes=sums["argument"],
        output_bytes=sums["output"],
        alias_bytes=sums["alias"],
        temp_bytes=sums["temp"],
        source=source,
        temporaries=tuple(temporaries),
    )


def from_text(lines: Iterable[str], source: str) -> BufferAssignment:
    """Read a dump's `buffer-assignment.txt`, the file `source`.

    Raises:
        ValueError: If it has no allocation.
    """
    allocations: list[Allocation] = []
    pieces: list[Piece] = []
    for line in lines:
        found = _ALLOCATION.match(line)
        if found:
            pieces = []
            allocations.append(
                Allocation(
                    num_bytes=int(found[2]),
                    is_argument=", parameter " in found[3],
                    is_output="maybe-live-out" in found[3],
                    is_temporary=not any(word in found[3] for word in _NOT_TEMPORARY),
                    pieces=pieces,
                )
            )
        elif value := _VALUE.match(line):
            element = int(value[2].split(",")[0]) if value[2] else None
            pieces.append(Piece(value[1], element, int(value[4]), int(value[3])))
    if not allocations:
        raise ValueError("it has no line `allocation N: size ...`")
    return from_allocations(allocations, source)
