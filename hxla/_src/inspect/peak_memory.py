"""Memory at its peak, by buffer and by owner.

The compiler gives each value's address, the schedule its lifetime. Together they name the buffers
at the peak. Loop bodies count once, at the place of their loop.
"""

import collections
import dataclasses
from collections.abc import Iterator, Set

from ..jax.xla_protos import BufferAssignment, Piece
from .annotated_module import AnnotatedModule
from .hlo_text import (
    Computation,
    Instruction,
    Module,
    arrays,
    shape_bytes,
    shape_text,
    tuple_elements,
)
from .program import Buffer, Memory, Origin

_PASSES = frozenset({"bitcast", "get-tuple-element", "tuple", "optimization-barrier"})
_RUN_IN_ORDER = frozenset({"while", "call", "conditional", "async-start"})


class InstructionOrder:
    """The places of all instructions in the order in which they run."""

    def __init__(self, module: Module):
        self._module = module
        self.place: dict[str, int] = {}
        self.home: dict[str, Computation] = {}
        self._caller: dict[str, str] = {}  # of a computation: the instruction that calls it
        if module.entry in module.computations:
            self._walk(module.computations[module.entry])

    def _walk(self, computation: Computation) -> None:
        called = collections.defaultdict(list)
        for instruction, _, name in computation.calls:
            if instruction.opcode in _RUN_IN_ORDER and name in self._module.computations:
                called[instruction.name].append(name)
        for instruction in computation.instructions.values():
            for name in called.get(instruction.name, ()):
                if name not in self._caller:
                    self._caller[name] = instruction.name
                    self._walk(self._module.computations[name])
            self.place[instruction.name] = len(self.place)
            self.home[instruction.name] = computation

    def last_use(self, name: str, element: int | None) -> int:
        """Place of the last instruction that reads a value, or an element of one."""
        last = self.place[name]
        waiting: list[tuple[str, int | None]] = [(name, element)]
        seen = set(waiting)
        while waiting:
            name, element = waiting.pop()
            home = self.home[name]
            if home.root is not None and home.root.name == name:
                caller = self._caller.get(home.name)
                # A computation's result lives until its caller ends; the caller's value is
                # another piece of memory, or the same one under the caller's name.
                last = max(last, self.place.get(caller or "", len(self.place)))
            for user in home.users.get(name, ()):
                for number, (operand, picked) in enumerate(user.operands):
                    is_other = None not in (element, picked) and picked != element
                    if operand != name or is_other:
                        continue
                    last = max(last, self.place[user.name])
                    passed = self._passed_on(user, number, element if picked is None else None)
                    if passed is not None and passed not in seen:
                        seen.add(passed)
                        waiting.append(passed)
        return last

    def _passed_on(
        self, user: Instruction, number: int, element: int | None
    ) -> tuple[str, int | None] | None:
        """The value of a reader that only passes its operand on; None if it computes."""
        if user.opcode not in _PASSES:
            return None
        if user.opcode == "tuple":
            return user.name, number
        if user.opcode == "get-tuple-element":
            return (user.name, None) if element in (None, user.index) else None
        return user.name, element


def peak(module: Module, pieces: tuple[Piece, ...]) -> list[tuple[Piece, Computation]]:
    """The pieces that live at the peak, each address once, with the computations that make them."""
    order = InstructionOrder(module)
    events: list[tuple[int, int, Piece]] = []
    for piece in pieces:
        if piece.name in order.place and piece.num_bytes:
            end = order.last_use(piece.name, piece.element)
            events.append((order.place[piece.name], 0, piece))
            events.append((end, 1, piece))
    events.sort(key=lambda e: e[:2])
    live: dict[tuple[int, int], list[Piece]] = collections.defaultdict(list)
    now = best = 0
    at_peak: list[Piece] = []
    for _, is_end, piece in events:
        place = live[piece.offset, piece.num_bytes]
        if is_end:
            place.remove(piece)
            now -= 0 if place else piece.num_bytes
            continue
        now += 0 if place else piece.num_bytes
        place.append(piece)
        if now > best:
            best = now
            at_peak = [pieces_there[0] for pieces_there in live.values() if pieces_there]
    return [(piece, order.home[piece.name]) for piece in at_peak]


def memory(read: AnnotatedModule, assignment: BufferAssignment) -> Memory:
    """The buffers at the peak and their owners."""
    buffers = [
        Buffer(name=a.path, owner=a.owner, num_bytes=a.num_bytes, array=a.local)
        for a in read.arrays
    ]
    outputs = assignment.output_bytes - assignment.alias_bytes
    temporaries = list(_temporaries(read, assignment))
    # Layouts may need more bytes than the elements, and there are gaps between buffers.
    layout = assignment.argument_bytes - sum(b.num_bytes for b in buffers)
    gaps = assignment.temp_bytes - sum(b.num_bytes for b in temporaries)
    rest = {
        ("results", "output"): outputs,
        ("(arguments: layout)", "temporary"): layout,
        ("(between buffers)" if temporaries else "(not broken down)", "temporary"): gaps,
    }
    buffers += [
        Buffer(name=name, owner=owner, num_bytes=n) for (name, owner), n in rest.items() if n
    ]
    return Memory(
        argument_bytes=assignment.argument_bytes,
        output_bytes=assignment.output_bytes,
        alias_bytes=assignment.alias_bytes,
        temp_bytes=assignment.temp_bytes,
        buffers=tuple(sorted([*buffers, *temporaries], key=lambda b: -b.num_bytes)),
        source=assignment.source,
    )


def _temporaries(read: AnnotatedModule, assignment: BufferAssignment) -> Iterator[Buffer]:
    parameters = {a.local_shape for a in read.arrays if a.owner == "parameter" and a.local_shape}
    for value, computation in peak(read.module, assignment.temporaries):
        instruction = computation.instructions[value.name]
        maker = read.flow.maker(computation, value.name, value.element)
        if maker is not None:
            instruction, computation, _ = maker
        shape = _element(instruction.shape, value)
        origin = read.origins.of(instruction, computation)
        argument = read.argument(computation, instruction.name)
        if argument is not None:
            owner = argument.owner
            origin = dataclasses.replace(origin, module=argument.path, missing="")
        else:
            owner = _owner(origin, shape, parameters)
        padding = min(_padding(read, instruction, computation), value.num_bytes)
        for num_bytes, piece_owner in ((value.num_bytes - padding, owner), (padding, "padding")):
            if num_bytes:
                yield Buffer(
                    name=instruction.name,
                    owner=piece_owner,
                    num_bytes=num_bytes,
                    array=shape_text(shape),
                    origin=origin,
                )


def _element(shape: str, value: Piece) -> str:
    elements = tuple_elements(shape)
    if value.element is not None and value.element < len(elements):
        return elements[value.element]
    fits = [e for e in elements if shape_bytes(e) == value.num_bytes]
    return fits[0] if fits else shape


def _owner(origin: Origin, shape: str, parameters: Set[tuple[int, ...]]) -> str:
    if origin.phase == "backward":
        is_gradient = any(dims in parameters for _, dims in arrays(shape))
        return "gradient" if is_gradient else "temporary"
    return "activation" if origin.phase in ("forward", "recomputation") else "temporary"


def _padding(read: AnnotatedModule, instruction: Instruction, computation: Computation) -> int:
    """Bytes that a `pad`, or a fusion that ends in one, adds."""
    pad, inside = read.module.root_of(instruction, computation)
    if pad.opcode != "pad" or not pad.operands:
        return 0
    before = inside.shape_of(*pad.operands[0])
    return max(0, shape_bytes(pad.shape) - shape_bytes(before)) if before else 0
