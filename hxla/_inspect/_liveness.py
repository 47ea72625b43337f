"""Which temporary values live when most of their memory is in use.

The compiler says where each value lies; the schedule says when. Together they name what fills the
memory at the peak. Loop bodies count once, at the place of their loop.
"""

import collections

from .._jax._buffer_assignment import Piece
from ._hlo_text import Computation, Instruction, Module

_PASSES = frozenset({"bitcast", "get-tuple-element", "tuple", "optimization-barrier"})
_RUN_IN_ORDER = frozenset({"while", "call", "conditional", "async-start"})


class InstructionOrder:
    """Places of all instructions of control flow in the one order they run in."""

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
                # What a computation returns is read by whoever reads its caller; the caller's own
                # value is another piece of memory, or the same one under its own name.
                last = max(last, self.place.get(caller or "", len(self.place)))
            for user in home.users.get(name, ()):
                for number, (operand, picked) in enumerate(user.operands):
                    is_other = None not in (element, picked) and picked != element
                    if operand != name or is_other:
                        continue
                    last = max(last, self.place[user.name])
                    passed = self._passed(user, number, element if picked is None else None)
                    if passed is not None and passed not in seen:
                        seen.add(passed)
                        waiting.append(passed)
        return last

    def _passed(
        self, user: Instruction, number: int, element: int | None
    ) -> tuple[str, int | None] | None:
        """The value that a reader only hands on."""
        if user.opcode not in _PASSES:
            return None
        if user.opcode == "tuple":
            return user.name, number
        if user.opcode == "get-tuple-element":
            return (user.name, None) if element in (None, user.index) else None
        return user.name, element


def peak(module: Module, pieces: tuple[Piece, ...]) -> list[tuple[Piece, Computation]]:
    """The pieces that live when together they fill most, each place in memory once.

    Returns:
        Each with the computation that makes it.
    """
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
    found: list[Piece] = []
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
            found = [own[0] for own in live.values() if own]
    return [(piece, order.home[piece.name]) for piece in found]
