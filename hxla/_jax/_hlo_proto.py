"""What we read of XLA's protocol buffers; the only module that knows their numbers.

References:
    xla/service/hlo.proto (HloProto, BufferAssignmentProto).
"""

import collections
import importlib
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from ._buffer_assignment import Allocation, BufferAssignment, Piece, from_allocations


class Message:
    """The fields of a serialized message by their numbers, those of one number in order.

    Raises:
        ValueError: If the bytes are no message.
    """

    def __init__(self, data: bytes):
        # To a message without fields all of them are unknown, and kept.
        message = Empty()
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            raise ValueError("the bytes are no protocol buffer, or were cut off") from error
        self._fields: dict[int, list[Any]] = collections.defaultdict(list)
        for field in UnknownFieldSet(message):
            self._fields[field.field_number].append(field.data)

    def number(self, field: int) -> int:
        """The last whole number of a field; 0 if it is not there."""
        return next((v for v in reversed(self._fields[field]) if isinstance(v, int)), 0)

    def content(self, field: int) -> bytes:
        """What a field that is no number holds; empty if it is not there."""
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
            # Nor constant or of one thread.
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
