"""What we read of XLA's protocol buffers; the only module that knows their numbers.

References:
    xla/service/hlo.proto (HloProto, BufferAssignmentProto, HeapSimulatorTrace).
"""

import importlib
from collections.abc import Iterator

from ._assignment import Allocation, Assignment, Held, Piece


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


def assignment(data: bytes) -> Assignment:
    """A serialized buffer assignment.

    Raises:
        ValueError: If the bytes are none.
    """
    sizes: dict[int, int] = {}
    allocations: list[Allocation] = []
    traces: list[bytes] = []
    for number, value in fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            buffer = _ints(value)
            sizes[buffer.get(1, 0)] = buffer.get(2, 0)
        elif number == 3:
            own = _ints(value)
            pieces = tuple(
                Piece(str(p.get(1, 0)), p.get(2, 0), p.get(3, 0))
                for n, v in fields(value)
                if n == 9 and isinstance(v, bytes)
                for p in [_ints(v)]
            )
            allocations.append(
                Allocation(
                    index=own.get(1, 0),
                    num_bytes=own.get(2, 0),
                    parameter=own.get(6, 0) if own.get(5) else None,
                    is_output=bool(own.get(7)),
                    is_constant=bool(own.get(12)),
                    is_thread_local=bool(own.get(3)),
                    pieces=pieces,
                )
            )
        elif number == 4:
            traces.append(value)
    peaks = [peak for trace in traces if (peak := _peak(trace, sizes))]
    return Assignment(
        allocations=tuple(allocations),
        peak=tuple(held for peak in peaks for held in peak),
    )


def _peak(trace: bytes, sizes: dict[int, int]) -> tuple[Held, ...]:
    """Buffers that live when most bytes do; one shared by several values lives until the last."""
    live: dict[int, set[int]] = {}
    shared: dict[int, int] = {}
    held: dict[int, Held] = {}
    now = best = 0
    peak: tuple[Held, ...] = ()
    for number, value in fields(trace):
        if number != 1 or not isinstance(value, bytes):
            continue
        event = dict(fields(value))
        kind, buffer = event.get(1, 0), event.get(2, 0)
        name = event.get(4, b"")
        assert isinstance(buffer, int)
        if kind == 2:
            other = event.get(5, 0)
            assert isinstance(other, int)
            root = shared.get(other, other)
            shared[buffer] = root
            live.setdefault(root, set()).add(buffer)
        elif kind == 0:
            shared[buffer] = buffer
            live[buffer] = {buffer}
            text = name.decode(errors="replace") if isinstance(name, bytes) else ""
            held[buffer] = Held(text, None, sizes.get(buffer, 0))
            now += held[buffer].num_bytes
            if now > best:
                best = now
                peak = tuple(held[b] for b in live if b in held)
        else:
            root = shared.get(buffer, buffer)
            users = live.get(root, set())
            users.discard(buffer)
            if not users and live.pop(root, None) is not None and root in held:
                now -= held[root].num_bytes
    return peak
