"""Which memory the compiler gave to which values."""

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*?):?\s*$")
_VALUE = re.compile(r"\s+value: <\d+ (.*?) @\d+> \(size=(\d+),offset=(\d+)\)")
_PARAMETER = re.compile(r", parameter (\d+)")
_PEAK_ROW = re.compile(r"\s+(\S+?)\{([\d,]*)\}: (\d+) bytes \(cumulative")
_NAME = re.compile(r"(.+?)(?:\{([\d,]*)\})?(?: \(phi\))?$")


class Piece(NamedTuple):
    """A value's place in an allocation."""

    name: str
    offset: int
    num_bytes: int


class Held(NamedTuple):
    """A value that lives at the peak.

    Attributes:
        name: Of its instruction.
        element: Of the tuple that the instruction makes; None for the value itself.
        num_bytes: Of it.
    """

    name: str
    element: int | None
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """One block of memory."""

    index: int
    num_bytes: int
    parameter: int | None
    is_output: bool
    is_constant: bool
    is_thread_local: bool
    pieces: tuple[Piece, ...] = ()

    @property
    def is_temp(self) -> bool:
        """Whether it holds neither argument, output, nor constant."""
        known = self.parameter is not None or self.is_output or self.is_constant
        return not known and not self.is_thread_local


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """All memory of a program.

    Attributes:
        allocations: Blocks.
        peak: Temporary values that live at the peak.
    """

    allocations: tuple[Allocation, ...]
    peak: tuple[Held, ...]

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
    def temp_bytes(self) -> int:
        """Of everything between."""
        return sum(a.num_bytes for a in self.allocations if a.is_temp)


def from_text(buffers: Iterable[str], live: Iterable[str] = ()) -> Assignment:
    """Read a dump's `buffer-assignment.txt` and `live-range.txt`.

    Args:
        buffers: Lines of the first.
        live: Lines of the second.

    Raises:
        ValueError: If the first has no allocation.
    """
    allocations: list[Allocation] = []
    pieces: list[Piece] = []
    for line in buffers:
        found = _ALLOCATION.match(line)
        if found:
            pieces = []
            parameter = _PARAMETER.search(found[3])
            allocations.append(
                Allocation(
                    index=int(found[1]),
                    num_bytes=int(found[2]),
                    parameter=int(parameter[1]) if parameter else None,
                    is_output="maybe-live-out" in found[3],
                    is_constant=", constant" in found[3],
                    is_thread_local="thread-local" in found[3],
                )
            )
        elif value := _VALUE.match(line):
            pieces.append(Piece(value[1], int(value[3]), int(value[2])))
            allocations[-1] = dataclasses.replace(allocations[-1], pieces=tuple(pieces))
    if not allocations:
        raise ValueError("it has no line `allocation N: size ...`")
    temp = {_plain(p.name) for a in allocations if a.is_temp for p in a.pieces}
    peak: list[Held] = []
    is_peak = False
    for line in live:
        if "(peak):" in line:
            is_peak = True
        elif is_peak and (row := _PEAK_ROW.match(line)):
            element = int(row[2].split(",")[0]) if row[2] else None
            if (row[1], element) in temp:
                peak.append(Held(row[1], element, int(row[3])))
        elif is_peak:
            break
    return Assignment(allocations=tuple(allocations), peak=tuple(peak))


def _plain(name: str) -> tuple[str, int | None]:
    found = _NAME.match(name)
    assert found is not None
    return found[1], int(found[2].split(",")[0]) if found[2] else None
