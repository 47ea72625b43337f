"""Which memory the compiler gave to which values."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*?):?\s*$")
_VALUE = re.compile(
    r"\s+value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_PARAMETER = re.compile(r", parameter (\d+)")


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
    parameter: int | None
    is_output: bool
    is_constant: bool
    is_thread_local: bool
    pieces: Sequence[Piece] = ()

    @property
    def is_temp(self) -> bool:
        """Whether it holds neither argument, output, nor constant."""
        known = self.parameter is not None or self.is_output or self.is_constant
        return not known and not self.is_thread_local


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferAssignment:
    """All memory of a program."""

    allocations: tuple[Allocation, ...]

    @property
    def argument_bytes(self) -> int:
        """Of arguments."""
        return sum(a.num_bytes for a in self.allocations if a.parameter is not None)

    @property
    def alias_bytes(self) -> int:
        """Of arguments whose memory results take over."""
        return sum(a.num_bytes for a in self.allocations if a.parameter is not None and a.is_output)

    @property
    def own_output_bytes(self) -> int:
        """Of results that take over no argument's memory."""
        return sum(a.num_bytes for a in self.allocations if a.parameter is None and a.is_output)

    @property
    def temporaries(self) -> tuple[Piece, ...]:
        """Values between, their offsets counted through all blocks."""
        out: list[Piece] = []
        start = 0
        for allocation in self.allocations:
            if allocation.is_temp:
                out += [p._replace(offset=p.offset + start) for p in allocation.pieces]
                start += allocation.num_bytes
        return tuple(out)

    @property
    def temp_bytes(self) -> int:
        """Of everything between."""
        return sum(a.num_bytes for a in self.allocations if a.is_temp)


def from_text(lines: Iterable[str]) -> BufferAssignment:
    """Read a dump's `buffer-assignment.txt`.

    Raises:
        ValueError: If it has no allocation.
    """
    allocations: list[Allocation] = []
    pieces: list[Piece] = []
    for line in lines:
        found = _ALLOCATION.match(line)
        if found:
            pieces = []
            parameter = _PARAMETER.search(found[3])
            allocations.append(
                Allocation(
                    num_bytes=int(found[2]),
                    parameter=int(parameter[1]) if parameter else None,
                    is_output="maybe-live-out" in found[3],
                    is_constant=", constant" in found[3],
                    is_thread_local="thread-local" in found[3],
                    pieces=pieces,
                )
            )
        elif value := _VALUE.match(line):
            element = int(value[2].split(",")[0]) if value[2] else None
            pieces.append(Piece(value[1], element, int(value[4]), int(value[3])))
    if not allocations:
        raise ValueError("it has no line `allocation N: size ...`")
    return BufferAssignment(allocations=tuple(allocations))
