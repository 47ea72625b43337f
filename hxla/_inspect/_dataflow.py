"""What a value is made of: an argument of the program seen through views, slices and loops."""

import collections
from collections.abc import Iterator

from . import _shapes
from ._hlo_text import Computation, Instruction, Module

_VIEWS = frozenset(
    {
        "copy",
        "bitcast",
        "convert",
        "reshape",
        "transpose",
        "optimization-barrier",
        "bitcast-convert",
    }
)
_SLICES = frozenset({"slice", "dynamic-slice"})
_DONE = frozenset({"copy-done", "copy-start", "all-gather-done", "async-done"})
_MAX_STEPS = 64


class Flow:
    """Follows operands of one module back to where they come from."""

    def __init__(self, module: Module):
        self._module = module
        self._loops: dict[str, tuple[Computation, Instruction]] = {}  # by body and condition
        for computation in module.computations.values():
            if not computation.opcodes & {"while", "call"}:
                continue
            for instruction in computation.instructions.values():
                if instruction.opcode == "while":
                    for body in (*instruction.called("body"), *instruction.called("condition")):
                        self._loops[body] = computation, instruction
                elif instruction.opcode == "call":
                    for body in instruction.called("to_apply"):
                        self._loops[body] = computation, instruction
        self._bare: dict[tuple[str, bool], bool] = {}
        self._users: dict[str, dict[str, list[Instruction]]] = {}

    def argument(
        self, computation: Computation, name: str, picked: int | None = None
    ) -> Instruction | None:
        """The program's argument that a value is a view, a cast or a slice of; None if none."""
        for _ in range(_MAX_STEPS):
            found = computation.instructions.get(name)
            if found is None:
                return None
            if found.opcode == "parameter":
                if computation.name == self._module.entry:
                    return found
                outer = self._outside(computation, found, picked)
                if outer is None:
                    return None
                computation, name, picked = outer
                continue
            before = self._before(computation, found, picked, slices=True)
            if before is None:
                return None
            name, picked = before
        return None

    def carried(self, computation: Computation, name: str, picked: int | None = None) -> int | None:
        """The element of a loop's carry that a value in its body is; None if it is not one."""
        for _ in range(_MAX_STEPS):
            found = computation.instructions.get(name)
            if found is None:
                return None
            if found.opcode == "parameter":
                return picked
            before = self._before(computation, found, picked, slices=False)
            if before is None:
                return None
            name, picked = before
        return None

    def is_invariant(self, body: Computation, element: int) -> bool:
        """Whether every iteration hands an element of the carry on as it got it."""
        root = body.root
        if root is None or root.opcode != "tuple" or element >= len(root.operands):
            return False
        return self.carried(body, *root.operands[element]) == element

    def maker(
        self, computation: Computation, name: str, picked: int | None
    ) -> tuple[Instruction, Computation] | None:
        """What first made a value that a loop carries: seen from its body or its result."""
        for _ in range(_MAX_STEPS):
            found = computation.instructions.get(name)
            if found is None:
                return None
            operands = found.operands
            if not operands and found.opcode != "parameter":
                return found, computation
            if found.opcode == "parameter" and computation.name in self._loops:
                computation, caller = self._loops[computation.name]
                if caller.opcode != "while" or picked is None or not caller.operands:
                    return None
                name, _ = caller.operands[0]
            elif (found.opcode == "while" and picked is not None) or found.opcode == "copy":
                name, picked = operands[0][0], operands[0][1] if found.opcode == "copy" else picked
            elif found.opcode == "tuple" and picked is not None and picked < len(operands):
                name, picked = operands[picked]
            elif found.opcode == "get-tuple-element":
                name, picked = operands[0][0], found.index
            else:
                return found, computation
        return None

    def readers(self, computation: Computation, start: Instruction) -> Iterator[Instruction]:
        """What reads a value, seen through tuples' elements and views."""
        users = self._users_in(computation)
        waiting, seen = [start.name], {start.name}
        while waiting:
            for user in users.get(waiting.pop(), ()):
                if user.name in seen:
                    continue
                seen.add(user.name)
                passes = user.opcode in _VIEWS or user.opcode == "get-tuple-element"
                if passes or user.opcode.endswith("-done"):
                    waiting.append(user.name)
                else:
                    yield user

    def only_reader(self, body: Computation, element: int) -> Instruction | None:
        """The one instruction that works on an element of a loop's carry; None if several do."""
        found: dict[str, Instruction] = {}
        for parameter in body.parameters:
            for user in self._users_in(body).get(parameter.name, []):
                if user.opcode == "get-tuple-element":
                    if user.index == element:
                        found |= {r.name: r for r in self.readers(body, user)}
                elif (parameter.name, element) in user.operands:
                    found[user.name] = user
        working = [r for r in found.values() if r.opcode != "tuple"]
        return working[0] if len(working) == 1 else None

    def _users_in(self, computation: Computation) -> dict[str, list[Instruction]]:
        if computation.name not in self._users:
            self._users[computation.name] = _users(computation)
        return self._users[computation.name]

    def in_loop(self, name: str) -> bool:
        """Whether a computation is the body of a `while`."""
        return name in self._loops and self._loops[name][1].opcode == "while"

    def _before(
        self, computation: Computation, found: Instruction, picked: int | None, *, slices: bool
    ) -> tuple[str, int | None] | None:
        """The operand that an instruction only passes on."""
        operands = found.operands
        if not operands:
            return None
        if found.opcode == "get-tuple-element":
            name, outer = operands[0]
            return name, found.index if outer is None else outer
        if found.opcode == "tuple" and picked is not None and picked < len(operands):
            return operands[picked]
        if found.opcode in _VIEWS or found.opcode in _DONE:
            return operands[0]
        if slices and found.opcode in _SLICES:
            return operands[0]
        if found.opcode == "while" and picked is not None:
            body = self._module.computations.get((found.called("body") or [""])[0])
            if body is not None and self.is_invariant(body, picked):
                return operands[0][0], picked
            return None
        if found.opcode == "fusion":
            large = [o for o in operands if not self._is_scalar(computation, *o)]
            called = (found.called("calls") or [""])[0]
            if len(large) == 1 and self._only_views(called, slices):
                return large[0]
        return None

    def _outside(
        self, computation: Computation, parameter: Instruction, picked: int | None
    ) -> tuple[Computation, str, int | None] | None:
        caller = self._loops.get(computation.name)
        if caller is None:
            return None
        outer, instruction = caller
        if instruction.opcode == "call":
            number = parameter.arguments
            if not number.isdigit() or int(number) >= len(instruction.operands):
                return None
            name, element = instruction.operands[int(number)]
            return outer, name, picked if element is None else element
        if picked is None or not self.is_invariant(computation, picked) or not instruction.operands:
            return None
        return outer, instruction.operands[0][0], picked

    def _is_scalar(self, computation: Computation, name: str, picked: int | None) -> bool:
        found = computation.instructions.get(name)
        if found is None:
            return False
        shape = found.shape
        if picked is not None:
            elements = _shapes.tuple_elements(shape)
            shape = elements[picked] if picked < len(elements) else shape
        return _shapes.is_scalar(shape)

    def _only_views(self, name: str, slices: bool) -> bool:
        key = name, slices
        if key not in self._bare:
            inner = self._module.computations.get(name)
            allowed = _VIEWS | _SLICES if slices else _VIEWS
            self._bare[key] = inner is not None and all(
                i.opcode in allowed
                or i.opcode in ("parameter", "constant")
                or _shapes.is_scalar(i.shape)
                for i in inner.instructions.values()
            )
        return self._bare[key]


def _users(computation: Computation) -> dict[str, list[Instruction]]:
    out: dict[str, list[Instruction]] = collections.defaultdict(list)
    for instruction in computation.instructions.values():
        for name, _ in instruction.operands:
            users = out[name]
            if not users or users[-1] is not instruction:
                users.append(instruction)
    return out
