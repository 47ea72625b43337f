"""The arguments of a program on which a value depends, through loops, branches and fusions."""

from collections.abc import Iterable, Iterator

from .hlo_text import Computation, Instruction, Module

# A computation, the name of an instruction in it, and an element of its tuple; None: all of them.
_Value = tuple[str, str, int | None]
_PASSES = frozenset({"optimization-barrier", "copy", "copy-start", "copy-done", "domain"})


class Dependence:
    """Follows the values of one module back to the arguments of its entry."""

    def __init__(self, module: Module):
        self._module = module
        self._callers: dict[str, list[tuple[Instruction, str, str]]] = {}
        for outer in module.computations.values():
            for caller, key, inner in outer.calls:
                self._callers.setdefault(inner, []).append((caller, key, outer.name))

    def of(self, name: str) -> tuple[Instruction, list[Instruction]]:
        """An instruction, and the entry's parameters from which its value is computed.

        What decides whether a branch or an iteration runs is left out.
        """
        outer = next(c for c in self._module.computations.values() if name in c.instructions)
        return outer.instructions[name], self._arguments((outer.name, name, None))

    def of_result(self, element: int) -> list[Instruction]:
        """The entry's parameters from which one of its results is computed."""
        entry = self._module.computations[self._module.entry]
        if entry.root is None:
            return []
        picked = element if entry.root.shape.startswith("(") else None
        return self._arguments((entry.name, entry.root.name, picked))

    def _arguments(self, value: _Value) -> list[Instruction]:
        made: list[Instruction] = []
        waiting, seen = [value], {value}
        while waiting:
            name, instruction_name, picked = waiting.pop()
            inside = self._module.computations[name]
            instruction = inside.instructions.get(instruction_name)
            if instruction is None:
                continue
            if instruction.opcode == "parameter" and name == self._module.entry:
                made.append(instruction)
                continue
            before = set(self._before(instruction, inside, picked)) - seen
            seen |= before
            waiting += sorted(before, key=str)
        return made

    def _before(
        self, instruction: Instruction, inside: Computation, picked: int | None
    ) -> Iterator[_Value]:
        """The values from which an instruction computes a value, or an element of its tuple."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            yield from self._given(inside, instruction.number or 0, picked)
        elif opcode == "get-tuple-element":
            yield inside.name, operands[0][0], instruction.index
        elif opcode == "tuple" and picked is not None:
            yield inside.name, *operands[picked]
        elif opcode in _PASSES and picked is not None:
            yield inside.name, operands[0][0], picked
        elif opcode == "while":
            yield inside.name, operands[0][0], picked
            yield from self._roots(instruction.called("body"), picked)
        elif opcode in ("conditional", "fusion", "call"):
            yield from self._roots((n for c, _, n in inside.calls if c is instruction), picked)
        else:
            for name, element in operands:
                yield inside.name, name, element

    def _roots(self, names: Iterable[str], picked: int | None) -> Iterator[_Value]:
        for name in names:
            called = self._module.computations.get(name)
            if called is not None and called.root is not None:
                yield name, called.root.name, picked

    def _given(self, inside: Computation, number: int, picked: int | None) -> Iterator[_Value]:
        """What the callers of a computation give for one of its parameters."""
        for caller, key, outer in self._callers.get(inside.name, ()):
            operands = caller.operands
            if caller.opcode == "while":
                yield outer, operands[0][0], picked
                yield from self._roots(caller.called("body"), picked)  # of the iteration before
                continue
            if caller.opcode == "conditional":  # its first operand chooses the branch
                number = 1 + _branch(caller, key, inside.name)
            if number < len(operands):
                name, element = operands[number]
                yield outer, name, picked if element is None else element


def _branch(conditional: Instruction, key: str, name: str) -> int:
    """Which branch of a conditional a computation is."""
    if key == "branch_computations":
        return conditional.called(key).index(name)
    return int(key == "false_computation")
