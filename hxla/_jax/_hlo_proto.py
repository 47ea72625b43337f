"""What we read of XLA's protocol buffers; the only module that knows their numbers.

References:
    xla/service/hlo.proto (HloProto, BufferAssignmentProto).
"""

import importlib
from collections.abc import Iterator

from ._buffer_assignment import Allocation, BufferAssignment, Piece


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields.

    Raises:
        ValueError: If the bytes are no message.
    """
    position, end = 0, len(data)

    def varint() -> int:
        nonlocal position
        shift = value = 0
        while True:
            if position >= end or shift > 63:
                raise ValueError("the bytes end inside a number")
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < end:
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or position + size > end or number == 0:
            raise ValueError("the bytes are no protocol buffer, or were cut off")
        yield number, data[position : position + size]
        position += size


def parts_of_dump(data: bytes) -> tuple[bytes, bytes]:
    """The module and the buffer assignment (empty if there is none) of a `.hlo.pb` file.

    Raises:
        ValueError: If the bytes are no HloProto.
    """
    module = assignment = b""
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            module = value
        elif number == 3 and isinstance(value, bytes):
            assignment = value
    if not module:
        raise ValueError("it holds no module")
    return module, assignment


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


def _ints(data: bytes) -> dict[int, int]:
    return {n: v for n, v in fields(data) if isinstance(v, int)}


def instruction_names(module: bytes) -> dict[int, str]:
    """Names of a serialized module's instructions, by their numbers."""
    out: dict[int, str] = {}
    for number, computation in fields(module):
        if number != 3 or not isinstance(computation, bytes):
            continue
        for inner, instruction in fields(computation):
            if inner == 2 and isinstance(instruction, bytes):
                own = dict(fields(instruction))
                name, key = own.get(1), own.get(35)
                if isinstance(name, bytes) and isinstance(key, int):
                    out[key] = name.decode(errors="replace")
    return out


def buffer_assignment(data: bytes, module: bytes) -> BufferAssignment:
    """A serialized buffer assignment, with names from its serialized module.

    Raises:
        ValueError: If the bytes are none.
    """
    named = instruction_names(module)
    values: dict[int, tuple[str, int | None]] = {}
    allocations: list[Allocation] = []
    for number, value in fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            buffer = dict(fields(value))
            where = buffer.get(3, b"")
            place = dict(fields(where)) if isinstance(where, bytes) else {}
            key, index, own_key = buffer.get(1, 0), place.get(3, b""), place.get(4, 0)
            if isinstance(key, int) and isinstance(own_key, int):
                element = index[0] if isinstance(index, bytes) and index else None
                values[key] = named.get(own_key, f"value {key}"), element
        elif number == 3:
            allocations.append(_allocation(value, values))
    return BufferAssignment(allocations=tuple(allocations))


def _allocation(data: bytes, values: dict[int, tuple[str, int | None]]) -> Allocation:
    own = _ints(data)
    pieces = []
    for number, value in fields(data):
        if number == 9 and isinstance(value, bytes):
            piece = _ints(value)
            name, element = values.get(piece.get(1, 0), (f"value {piece.get(1, 0)}", None))
            pieces.append(Piece(name, element, piece.get(2, 0), piece.get(3, 0)))
    return Allocation(
        num_bytes=own.get(2, 0),
        parameter=own.get(6, 0) if own.get(5) else None,
        is_output=bool(own.get(7)),
        is_constant=bool(own.get(12)),
        is_thread_local=bool(own.get(3)),
        pieces=pieces,
    )
