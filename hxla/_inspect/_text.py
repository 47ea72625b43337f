"""Optimized HLO text, read line by line.

Nothing but the lines themselves is kept: operands and attributes of an instruction are taken apart
when they are asked for, as most never are. What is not understood is counted and said, and never
ends the reading.
"""

import dataclasses
import re
import sys
from collections.abc import Iterable

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+)\s.*\{")
_OPERAND = re.compile(r"%([^\s,()]+)")
_TABLE_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class Instruction:
    """One line of a computation.

    Attributes:
        name: Without `%`.
        shape: Of its result, as text.
        opcode: `dot`, `all-reduce-start`, ...
        rest: The line after the opening parenthesis of the operands.
        is_root: Whether it is the computation's result.
    """

    __slots__ = ("_operands", "is_root", "name", "opcode", "rest", "shape")

    def __init__(self, name: str, shape: str, opcode: str, rest: str, is_root: bool):
        self.name = name
        self.shape = shape
        self.opcode = opcode
        self.rest = rest
        self.is_root = is_root
        self._operands: tuple[tuple[str, int | None], ...] | None = None

    def _end_of_operands(self) -> int:
        end = self.rest.find(")")
        if end >= 0 and self.rest.find("(", 0, end) < 0:
            return end
        depth = 1
        for i, char in enumerate(self.rest):
            if char in "({":
                depth += 1
            elif char in ")}":
                depth -= 1
                if depth == 0:
                    return i
        return len(self.rest)

    @property
    def arguments(self) -> str:
        """The text between the parentheses."""
        return self.rest[: self._end_of_operands()]

    @property
    def operands(self) -> tuple[tuple[str, int | None], ...]:
        """Names of operands, with the element of a tuple where `%name#1` picks one."""
        if self._operands is None:
            self._operands = self._read_operands()
        return self._operands

    def _read_operands(self) -> tuple[tuple[str, int | None], ...]:
        text = self.arguments
        if "%" in text:
            names = _OPERAND.findall(text)
        elif self.opcode in ("parameter", "constant", "iota"):
            return ()
        else:
            names = [piece.split()[-1] for piece in text.split(",") if piece.strip()]
        if "#" not in text:
            return tuple([(name, None) for name in names])
        split = [name.partition("#") for name in names]
        return tuple([(name, int(i) if i.isdigit() else None) for name, _, i in split])

    @property
    def index(self) -> int | None:
        """Which element a `get-tuple-element` takes; None if the text does not say."""
        text = (self.attribute("index") or "").strip()
        return int(text) if text.isdigit() else None

    def attribute(self, name: str) -> str | None:
        """Text of an attribute, with its brackets if it has any; None if there is none."""
        start = self.rest.find(f", {name}=")
        if start < 0:
            return None
        start += len(name) + 3
        if self.rest[start : start + 1] not in ("{", "[", "(", '"', "m"):
            end = self.rest.find(",", start)
            return self.rest[start:] if end < 0 else self.rest[start:end]
        depth, quoted = 0, False
        for i in range(start, len(self.rest)):
            char = self.rest[i]
            if char == '"' and self.rest[i - 1] != "\\":
                quoted = not quoted
            elif quoted:
                continue
            elif char in "{[(":
                depth += 1
            elif char in "}])":
                depth -= 1
            elif char == "," and depth == 0:
                return self.rest[start:i]
        return self.rest[start:]

    def called(self, name: str) -> list[str]:
        """Computations that an attribute names: one, or several in braces."""
        text = self.attribute(name)
        if text is None:
            return []
        if text.startswith("%"):
            return [text[1:]]
        return [n.strip(" %{}") for n in text.split(",")]


@dataclasses.dataclass(kw_only=True)
class Computation:
    """Instructions by name, in the order of the text (the schedule, where the module has one).

    Attributes:
        name: Without `%`.
        instructions: By name.
        opcodes: Of all of them: most questions are answered by what is not there.
    """

    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    opcodes: set[str] = dataclasses.field(default_factory=set)

    @property
    def root(self) -> Instruction | None:
        """The computation's result."""
        found = next((i for i in reversed(self.instructions.values()) if i.is_root), None)
        return found or next(reversed(self.instructions.values()), None)

    def parameter(self, number: int) -> Instruction | None:
        """The parameter of a number."""
        wanted = f"{number})"
        return next(
            (
                i
                for i in self.instructions.values()
                if i.opcode == "parameter" and i.rest.startswith(wanted)
            ),
            None,
        )

    @property
    def parameters(self) -> list[Instruction]:
        """In order of their numbers."""
        found = [
            i
            for i in self.instructions.values()
            if i.opcode == "parameter" and i.arguments.isdigit()
        ]
        return sorted(found, key=lambda i: int(i.arguments))


@dataclasses.dataclass(kw_only=True)
class Module:
    """One HLO module.

    Attributes:
        name: `jit_step`.
        header: The first line.
        computations: By name.
        entry: Name of the one that is run; empty if the text has none.
        tables: File names, functions, locations and frames by number, as newer texts have them.
        problems: What could not be read.
    """

    name: str = ""
    header: str = ""
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    entry: str = ""
    tables: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def number(self, key: str, default: int) -> int:
        """A number of the header."""
        found = re.search(rf"\b{key}=(\d+)", self.header)
        return int(found[1]) if found else default

    @property
    def num_partitions(self) -> int:
        """Devices that one copy of the program is cut over."""
        return self.number("num_partitions", 1)

    @property
    def num_replicas(self) -> int:
        """Copies of the program."""
        return self.number("replica_count", 1)

    @property
    def aliased(self) -> frozenset[int]:
        """Parameters whose memory results take over."""
        found = re.search(r"input_output_alias=\{(.*?)\}(?:, \w+=|$)", self.header)
        return (
            frozenset(int(n) for n in re.findall(r": \((\d+),", found[1])) if found else frozenset()
        )

    @property
    def donors(self) -> frozenset[int]:
        """Parameters that were donated and that no result took over when the text was written."""
        found = re.search(r"buffer_donor=\{(.*?)\}(?:, \w+=|$)", self.header)
        return (
            frozenset(int(n) for n in re.findall(r"\((\d+),", found[1])) if found else frozenset()
        )

    def source(self, frame: int) -> list[tuple[str, int, str]]:
        """Files, lines and functions of a stack frame, innermost first."""
        files, places = self.tables.get("FileNames", {}), self.tables.get("FileLocations", {})
        functions = self.tables.get("FunctionNames", {})
        frames = self.tables.get("StackFrames", {})
        out, seen = [], set()
        while frame in frames and frame not in seen:
            seen.add(frame)
            row = _numbers(frames[frame])
            place = _numbers(places.get(row.get("file_location_id", 0), ""))
            name = files.get(place.get("file_name_id", 0))
            if name:
                function = functions.get(place.get("function_name_id", 0), "")
                out.append((name, place.get("line", 0), function))
            # The text counts parents from 1, 0 and the frame's own number being none.
            frame = row.get("parent_frame_id", 1) - 1
        return out


def _numbers(text: str) -> dict[str, int]:
    return {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", text)}


def read(lines: Iterable[str]) -> Module:
    """Read one module.

    Args:
        lines: Of its text.

    Returns:
        All that could be read; `problems` says what could not.
    """
    module = Module()
    current: dict[str, Instruction] | None = None
    opcodes: set[str] = set()
    table: dict[int, str] | None = None
    match, intern = _INSTRUCTION.match, sys.intern
    odd: list[str] = []
    num_odd = 0
    for line in lines:
        if current is not None:
            found = match(line)
            if found is not None and ")" in line:
                root, name, shape, opcode = found.groups()
                rest = line[found.end() :].rstrip("\n")
                opcode = intern(opcode)
                opcodes.add(opcode)
                current[name] = Instruction(name, intern(shape), opcode, rest, root is not None)
            elif line.startswith("}"):
                current = None
            elif line.strip():
                num_odd += 1
                odd = odd or [line.strip()[:80]]
            continue
        if line.startswith("HloModule"):
            module.header = line.strip()
            module.name = line.split(None, 2)[1].strip(",")
            continue
        word = line.strip()
        if not word:
            table = None
        elif word in _TABLES:
            table = module.tables.setdefault(word, {})
        elif table is not None:
            row = _TABLE_ROW.match(word)
            if row:
                table[int(row[1])] = row[2] if row[2] is not None else row[3]
        elif opening := _COMPUTATION.match(line):
            computation = Computation(name=opening[2])
            module.computations[opening[2]] = computation
            current, opcodes = computation.instructions, computation.opcodes
            if opening[1]:
                module.entry = opening[2]
        else:
            num_odd += 1
            odd = odd or [word[:80]]
    _complain(module, current is not None, num_odd, odd)
    return module


def _complain(module: Module, is_open: bool, num_odd: int, odd: list[str]) -> None:
    say = module.problems.append
    if not module.header:
        say("there is no HloModule line: this is no HLO text, or its beginning is missing")
    if is_open:
        last = next(reversed(module.computations))
        num = len(module.computations[last].instructions)
        say(f"the text ends inside {last}, after {num} instructions of it: it was cut off")
    elif module.header and not module.entry:
        say("there is no ENTRY computation: the text was cut off, or is of a format not known")
    if num_odd:
        say(f"{num_odd} lines were not understood, the first: {odd[0]}")
