"""Optimized HLO text, and the shapes in it.

Only the text is kept, with the places of its computations. Instructions, operands and attributes
are parsed on demand, since most are never read. Lines that are not understood are counted and
reported; reading goes on.
"""

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterator, Set

MOST_DEVICES = 1 << 16  # of a program

_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")


def element_bits(dtype: str) -> int:
    """Bits of an element: 16 for `bf16`, 8 for `f8e4m3fn`; 0 for a token and the like."""
    number = re.match(r"[a-z]+(\d+)", dtype)
    if number:
        return int(number[1])
    return 8 if dtype == "pred" else 0


def split_outside(text: str, separator: str) -> list[str]:
    """Pieces of a text between separators that stand outside all brackets."""
    out, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth <= 0:
            out.append(text[start:i])
            start = i + 1
    return [*out, text[start:]]


@functools.lru_cache(maxsize=65536)
def tuple_elements(shape: str) -> tuple[str, ...]:
    """Outermost elements of a tuple; the shape itself if it is none."""
    if not shape.startswith("("):
        return (shape,)
    pieces = split_outside(_COMMENT.sub("", shape[1:].rpartition(")")[0]), ",")
    return tuple(stripped for piece in pieces if (stripped := piece.strip()))


@functools.lru_cache(maxsize=65536)
def arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dtype and dimensions of every array of a shape, tuples flattened."""
    matches = _ARRAY.findall(shape)
    return tuple(
        (dtype, tuple(int(n.strip(" <=?") or 0) for n in dims.split(",") if n.strip()))
        for dtype, dims in matches
    )


def first(shape: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and dimensions of the first array of a shape; without arrays those of a token."""
    flattened = arrays(shape)
    return flattened[0] if flattened else ("token", ())


@functools.lru_cache(maxsize=65536)
def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, without padding of layouts."""
    return sum(-(-element_bits(dtype) * math.prod(dims) // 8) for dtype, dims in arrays(shape))


@functools.lru_cache(maxsize=65536)
def is_scalar(shape: str) -> bool:
    """Whether no array of a shape has a dimension."""
    return all(not dims for _, dims in arrays(shape))


@functools.lru_cache(maxsize=65536)
def shape_text(shape: str) -> str:
    """Without layouts: `f32[8,16]`, `(f32[8], s32[])`."""
    names = [array_text(*array) for array in arrays(shape)]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def array_text(dtype: str, dims: tuple[int, ...]) -> str:
    """`f32[8,16]`."""
    return f"{dtype}[{','.join(map(str, dims))}]"


_INSTRUCTION = re.compile(
    r"^[ \t]++(ROOT )?+%?+(\S++) = (\(.*?\)|\S++) ([a-z][a-z0-9\-]*+)\((.*+)\n?+", re.MULTILINE
)
_OPCODE = re.compile(
    r"^[ \t]++(?:ROOT )?+\S++ = (?:\(.*?\)|\S++) ([a-z][a-z0-9\-]*+)\([^)\n]*+\).*+\n?+",
    re.MULTILINE,
)
_BLANK_LINES = re.compile(r"\n++")
_COMPUTATION = re.compile(r"(?!HloModule)(ENTRY )?%?([^\s(]++)[^\S\n].*\{.*\n?")
_OPERAND = re.compile(r"%([^\s,()]+)")
_OPENINGS = ("{", "[", "(", '"', "mesh")
_MARKS = re.compile(r'[{}\[\](),"]')
_NAME = re.compile(r"(%[\w.\-]++)")
_METADATA = re.compile(r", metadata=\{[^}\n]*+\}")
_TABLE_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_LEAVES = frozenset({"parameter", "constant", "iota"})  # their brackets hold no operands
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# Attributes that name the computations an instruction runs, without reducers and comparators.
_CALLS = {
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply", "calls"),
    "call-start": ("to_apply", "calls"),
    "async-start": ("calls", "called_computations"),
    "custom-call": ("calls", "called_computations"),
    "custom-call-start": ("calls", "called_computations"),
    "fusion": ("calls",),
    "fusion-start": ("calls",),
}


@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Without `%`.
        shape: Of its result, as text.
        opcode: `dot`, `all-reduce-start`, ...
        rest: The line after the opening parenthesis of the operands.
        is_root: Whether it is the computation's result.
    """

    name: str
    shape: str
    opcode: str
    rest: str
    is_root: bool
    _operands: tuple[tuple[str, int | None], ...] | None = None

    @property
    def arguments(self) -> str:
        """The text between the parentheses."""
        end = self.rest.find(")")
        if end < 0 or self.rest.find("(", 0, end) >= 0:
            end = _end(self.rest, 0, ")")
        return self.rest[:end]

    @property
    def operands(self) -> tuple[tuple[str, int | None], ...]:
        """Names of operands, with the element of a tuple where `%name#1` picks one."""
        if self._operands is None:
            text = "" if self.opcode in _LEAVES else self.arguments
            if "%" in text:
                names = _OPERAND.findall(text)
            else:
                names = [piece.split()[-1] for piece in text.split(",") if piece.strip()]
            if "#" in text:
                split = [name.partition("#") for name in names]
                operands = [(name, int(i) if i.isdigit() else None) for name, _, i in split]
            else:
                operands = [(name, None) for name in names]
            self._operands = tuple(operands)
        return self._operands

    @property
    def index(self) -> int | None:
        """The element that a `get-tuple-element` takes; None if the text does not say."""
        text = (self.attribute("index") or "").strip()
        return int(text) if text.isdigit() else None

    @property
    def number(self) -> int | None:
        """The parameter number in its computation; None if it is no parameter."""
        text = self.arguments if self.opcode == "parameter" else ""
        return int(text) if text.isdigit() else None

    def attribute(self, name: str) -> str | None:
        """Text of an attribute, with its brackets if it has any; None if there is none."""
        rest = self.rest
        start = rest.find(f", {name}=")
        if start < 0:
            return None
        start += len(name) + 3
        if rest.startswith(_OPENINGS, start):
            return rest[start : _end(rest, start, ",")]
        end = rest.find(",", start)
        return rest[start:] if end < 0 else rest[start:end]

    def called(self, name: str) -> list[str]:
        """Computations that an attribute names: one, or several in braces."""
        text = self.attribute(name)
        if text is None:
            return []
        if text.startswith("%"):
            return [text[1:]]
        return [n.strip(" %{}") for n in text.split(",")]


def _end(text: str, start: int, stop: str) -> int:
    """Index of the first `stop` outside all brackets and quotes, or the end of the text."""
    depth, is_quoted = 0, False
    for mark in _MARKS.finditer(text, start):
        char, place = mark[0], mark.start()
        if char == '"':
            is_quoted ^= text[place - 1] != "\\"
        elif is_quoted:
            continue
        elif depth == 0 and char == stop:
            return place
        else:
            depth += (char in "{[(") - (char in "}])")
    return len(text)


@dataclasses.dataclass(kw_only=True, eq=False)
class Computation:
    """Instructions by name, in the order of the text (the schedule, where the module has one).

    Attributes:
        name: Without `%`.
        start: Where the instructions begin in `text`.
        opcodes: Of all instructions: an opcode that is missing here needs no parsing.
    """

    name: str
    text: str
    start: int
    end: int
    opcodes: frozenset[str]

    def __contains__(self, words: str) -> bool:
        """Whether the computation's text contains these words."""
        return self.text.find(words, self.start, self.end) >= 0

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """By name."""
        intern = sys.intern
        return {
            name: Instruction(name, intern(shape), intern(opcode), rest, bool(root))
            for root, name, shape, opcode, rest in _INSTRUCTION.findall(
                self.text, self.start, self.end
            )
            if ")" in rest
        }

    @property
    def likeness(self) -> tuple[str, tuple[int, ...]]:
        """Equal for computations that differ only in names of values and in metadata."""
        pieces = _NAME.split(_METADATA.sub("", self.text[self.start : self.end]))
        numbers: dict[str, int] = {}
        order = [numbers.setdefault(name, len(numbers)) for name in pieces[1::2]]
        return "%".join(pieces[::2]), tuple(order)

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The computation's result."""
        marked = next((i for i in reversed(self.instructions.values()) if i.is_root), None)
        return marked or next(reversed(self.instructions.values()), None)

    @functools.cached_property
    def calls(self) -> list[tuple[Instruction, str, str]]:
        """Instructions that run other computations, the attribute, and the computation's name."""
        if self.opcodes.isdisjoint(_CALLS):
            return []
        return [
            (instruction, key, name)
            for instruction in self.instructions.values()
            for key in _CALLS.get(instruction.opcode, ())
            for name in instruction.called(key)
        ]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that read a value, each once."""
        out: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in {name for name, _ in instruction.operands}:
                out.setdefault(name, []).append(instruction)
        return out

    def shape_of(self, name: str, picked: int | None = None) -> str:
        """Shape of a value, or of an element of it; empty if it is not known."""
        instruction = self.instructions.get(name)
        if instruction is None or picked is None:
            return "" if instruction is None else instruction.shape
        elements = tuple_elements(instruction.shape)
        return elements[picked] if picked < len(elements) else ""

    @property
    def parameters(self) -> list[Instruction]:
        """In order of their numbers."""
        parameters = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(parameters, key=lambda i: i.number or 0)


@dataclasses.dataclass(kw_only=True)
class Module:
    """One HLO module.

    Attributes:
        num_partitions: Devices that one replica of the program is sharded over.
        computations: By name.
        entry: Name of the entry computation; empty if the text has none.
        tables: File names, functions, locations and frames by number, as newer texts have them.
        problems: What could not be read.
    """

    name: str = ""
    header: str = ""
    num_partitions: int = 1
    num_replicas: int = 1
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    entry: str = ""
    tables: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_devices(self) -> int:
        """Devices that run the program together."""
        return self.num_partitions * self.num_replicas

    @property
    def aliased(self) -> frozenset[int]:
        """Parameters whose memory results take over."""
        return self._listed("input_output_alias", r": \((\d+),")

    @property
    def donors(self) -> frozenset[int]:
        """Donated parameters whose memory no result had taken over when the text was written."""
        return self._listed("buffer_donor", r"\((\d+),")

    def _listed(self, attribute: str, parameter: str) -> frozenset[int]:
        match = re.search(rf"{attribute}=\{{(.*?)\}}(?:, \w+=|$)", self.header)
        return frozenset(map(int, re.findall(parameter, match[1]))) if match else frozenset()

    def find(self, opcodes: Set[str]) -> Iterator[tuple[Instruction, Computation]]:
        """Instructions of some opcodes with their computations, in the order of the text."""
        for computation in self.computations.values():
            if computation.opcodes.isdisjoint(opcodes):
                continue
            for instruction in computation.instructions.values():
                if instruction.opcode in opcodes:
                    yield instruction, computation

    def called(self, instruction: Instruction, key: str = "calls") -> Computation | None:
        """The first computation that an attribute names; None if there is none."""
        names = instruction.called(key)
        return self.computations.get(names[0]) if names else None

    def root_of(
        self, instruction: Instruction, computation: Computation
    ) -> tuple[Instruction, Computation]:
        """The root of a fusion or a call with its computation; other instructions themselves."""
        keys = _CALLS[instruction.opcode] if instruction.opcode in ("fusion", "call") else ()
        for key in keys:
            inner = self.called(instruction, key)
            if inner is not None and inner.root is not None:
                return inner.root, inner
        return instruction, computation

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
            # The text counts parents from 1; 0, and the frame's number itself, stand for none.
            frame = row.get("parent_frame_id", 1) - 1
        return out


def _numbers(text: str) -> dict[str, int]:
    return {key: int(n) for key, n in re.findall(r"\b(\w+)=(\d{1,18})\b", text)}


def read_module(text: str) -> Module:
    """Read one module; `problems` says what could not be read.

    Args:
        text: Lines that end in a newline only.
    """
    module = Module()
    unparsed: list[str] = []
    table: dict[int, str] | None = None
    opcodes: dict[frozenset[str], frozenset[str]] = {}
    start, is_open = 0, False
    while start < len(text):
        if table is None and (blank := _BLANK_LINES.match(text, start)):
            start = blank.end()
            continue
        if table is None and (opening := _COMPUTATION.match(text, start)):
            is_entry, name = opening.groups()
            start = opening.end()
            # A closing bracket may follow at once.
            end = text.find("\n}", start - 1)
            is_open = end < 0
            end = len(text) if is_open else end + 1
            listed = _OPCODE.findall(text, start, end)
            if is_open or len(listed) != text.count("\n", start, end):
                unparsed += _unparsed(text[start:end])
            distinct = frozenset(listed)
            module.computations[name] = Computation(
                name=name,
                text=text,
                start=start,
                end=end,
                opcodes=opcodes.setdefault(distinct, distinct),
            )
            if is_entry:
                module.entry = name
            start = text.find("\n", end) + 1 or len(text)
            continue
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line, start = text[start:end], end + 1
        if line.startswith("HloModule"):
            module.header = line.strip()
            module.name = (line.split(None, 2)[1:2] or ["?"])[0].strip(",")
            numbers = _numbers(line)
            counts = numbers.get("num_partitions", 1), numbers.get("replica_count", 1)
            if math.prod(counts) <= MOST_DEVICES and min(counts) > 0:
                module.num_partitions, module.num_replicas = counts
            else:
                module.problems.append(
                    f"it is for {counts[0]} partitions of {counts[1]} replicas, and 1 to "
                    f"{MOST_DEVICES} devices are possible: it is read as one device's"
                )
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
        else:
            unparsed.append(word)
    _report_problems(module, is_open, unparsed)
    return module


def _unparsed(text: str) -> list[str]:
    """Lines of a computation that are no instructions."""
    lines = [line for line in text.split("\n") if not _OPCODE.match(line)]
    return [line.strip() for line in lines if line.strip()]


def _report_problems(module: Module, is_open: bool, unparsed: list[str]) -> None:
    say = module.problems.append
    if not module.header:
        say("there is no HloModule line: this is no HLO text, or its beginning is missing")
    if is_open:
        last = next(reversed(module.computations))
        num = len(module.computations[last].instructions)
        say(f"the text ends inside {last}, after {num} of its instructions: it was cut off")
    elif module.header and not module.entry:
        say("there is no ENTRY computation: the text was cut off, or is of a format not known")
    if unparsed:
        say(f"{len(unparsed)} lines were not understood, the first: {unparsed[0][:80]}")
