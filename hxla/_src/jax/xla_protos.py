"""XLA's protocol buffers: HLO modules and buffer assignments, by field numbers.

References:
    xla/service/hlo.proto (HloProto, BufferAssignmentProto).
"""

import collections
import dataclasses
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*?):?\s*$")
_VALUE = re.compile(
    r"\s+value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_NOT_TEMPORARY = (", parameter ", "maybe-live-out", ", constant", "thread-local")


class Piece(NamedTuple):
    """A value's place in an allocation.

    Attributes:
        name: The name of the instruction that makes the value.
        element: The index in the tuple that the instruction makes; None: the value is no element.
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
        output_bytes: Bytes of results, donated arguments included.
        alias_bytes: Bytes of results in donated arguments.
        source: Where it was read, in words.
        temporaries: Intermediate values, their offsets counted through all blocks; empty: unknown.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    source: str
    temporaries: tuple[Piece, ...] = ()


def from_allocations(allocations: Iterable[Allocation], source: str) -> BufferAssignment:
    """Sum blocks of memory.

    Args:
        source: Where they were read, in words.
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
        match = _ALLOCATION.match(line)
        if match:
            pieces = []
            allocations.append(
                Allocation(
                    num_bytes=int(match[2]),
                    is_argument=", parameter " in match[3],
                    is_output="maybe-live-out" in match[3],
                    is_temporary=not any(word in match[3] for word in _NOT_TEMPORARY),
                    pieces=pieces,
                )
            )
        elif value := _VALUE.match(line):
            element = int(value[2].split(",")[0]) if value[2] else None
            pieces.append(Piece(value[1], element, int(value[4]), int(value[3])))
    if not allocations:
        raise ValueError("it has no line `allocation N: size ...`")
    return from_allocations(allocations, source)


class Message:
    """The fields of a serialized message by number; repeated ones in order.

    Raises:
        ValueError: If the bytes are no message.
    """

    def __init__(self, data: bytes):
        # For a message type without fields all of them are unknown, and kept.
        message = Empty()
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            raise ValueError("the bytes are no protocol buffer, or were cut off") from error
        self._fields: dict[int, list[Any]] = collections.defaultdict(list)
        for field in UnknownFieldSet(message):
            self._fields[field.field_number].append(field.data)

    def number(self, field: int) -> int:
        """The last integer of a field; 0 if it is absent."""
        return next((v for v in reversed(self._fields[field]) if isinstance(v, int)), 0)

    def content(self, field: int) -> bytes:
        """The last bytes of a field; empty if it is absent."""
        return next((v for v in reversed(self._fields[field]) if isinstance(v, bytes)), b"")

    def messages(self, field: int) -> "list[Message]":
        """The messages of a repeated field."""
        return [Message(value) for value in self._fields[field] if isinstance(value, bytes)]


def parts_of_dump(data: bytes) -> tuple[bytes, bytes]:
    """The module and the buffer assignment (empty if there is none) of a `.hlo.pb` file.

    Raises:
        ValueError: If the bytes are no HloProto.
    """
    dump = Message(data)
    if not dump.content(1):
        raise ValueError("it holds no module")
    return dump.content(1), dump.content(3)


def module_text(module: bytes) -> str:
    """HLO text of a serialized module.

    Raises:
        ValueError: If jaxlib cannot read it.
    """
    try:
        # Private: jaxlib has no public reader of modules.
        reader = importlib.import_module("jaxlib._hlo")
        return str(reader.HloModule.from_serialized_hlo_module_proto(module).to_string())
    except (ImportError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"jaxlib cannot turn it into text: {error}") from error


def buffer_assignment(data: bytes, module: bytes) -> BufferAssignment:
    """A serialized buffer assignment, with names from its serialized module.

    Raises:
        ValueError: If the bytes are none.
    """
    names = {
        instruction.number(35): instruction.content(1).decode(errors="replace")
        for computation in Message(module).messages(3)
        for instruction in computation.messages(2)
    }
    assignment = Message(data)
    values: dict[int, tuple[str, int | None]] = {}
    for buffer in assignment.messages(1):
        key, place = buffer.number(1), Message(buffer.content(3))
        index = place.content(3)
        values[key] = names.get(place.number(4), f"value {key}"), index[0] if index else None
    blocks = (
        Allocation(
            num_bytes=block.number(2),
            is_argument=bool(block.number(5)),
            is_output=bool(block.number(7)),
            # Neither constant nor thread-local.
            is_temporary=not any(map(block.number, (5, 7, 12, 3))),
            pieces=[
                Piece(*values[piece.number(1)], piece.number(2), piece.number(3))
                for piece in block.messages(9)
                if piece.number(1) in values
            ],
        )
        for block in assignment.messages(3)
    )
    return from_allocations(blocks, "the dump's buffer assignment")
