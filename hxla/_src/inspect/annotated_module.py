"""An HLO module with its data flow, its loops and the arguments that values come from.

Each instruction has a TaskGraph, a module of the model and a source line.
"""

import dataclasses
import functools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from ..model.annotations import Scope, scopes_of, written
from .hlo_text import Computation, Instruction, Module, is_scalar, split_outside
from .program import Loop, Origin, ProgramArray

_NAME = re.compile(r'op_name="([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_TRANSFORM = re.compile(r"^(?:jvp|transpose|vmap|shmap|remat|checkpoint)\((.*)\)$")
# Scopes that jax and hxla write between the user's.
_MACHINERY = re.compile(
    r"|while|body|cond|scan|closed_call|core_call|eval_jaxpr|pjit|checkpoint|remat|remat2"
    r"|rematted_computation|shard_map|run_state|custom_jvp_call|custom_vjp_call"
    r"|custom_vjp_call_jaxpr|custom_partitioning|branch_\d+_fun"
    r"|(?:jit|pjit|xla_call|core_call|custom_jvp_call|custom_vjp_call)\(.*\)"
    r"|hxla\.(?:replicate|split|tokens)\[\w+\]\.\d+|hxla\.part\.\d+"
)
_INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")
_LIBRARIES = (*_INSTALLED, "site-packages", "dist-packages", "/hxla/_")
_NAMELESS = Origin(missing="XLA kept no name, here or in what it reads")
_MAX_JOINED = 4  # names shown of one operation
_DEPTH = 4  # operands looked through for a name that XLA lost


def op_name(instruction: Instruction) -> str:
    """The name that jax gave an operation: scopes and transforms, then the primitive."""
    match = _NAME.search(instruction.rest)
    if match is None:
        return ""
    return re.sub(r"\\(.)", r"\1", match[1]) if "\\" in match[1] else match[1]


def joined(name: str) -> list[str]:
    """The names of the operations that XLA joined, `a/(b:c)` or `a;b`; mostly one."""
    name = name.split(";")[0]
    *scopes, last = split_outside(name, "/")
    if not (last.startswith("(") and last.endswith(")")):
        return [name]
    pieces = split_outside(last[1:-1], ":")
    return [each for piece in pieces for each in joined("/".join([*scopes, piece]))]


@functools.lru_cache(maxsize=65536)
def module_path(name: str) -> tuple[str, str]:
    """The user's scopes in a name, and the primitive at its end."""
    *scopes, primitive = split_outside(joined(name)[0], "/")
    user_scopes: list[str] = []
    for scope in scopes:
        while inner := _TRANSFORM.match(scope):
            scope = inner[1]
        parts = split_outside(scope, "/")
        user_scopes += [part for part in parts if not _MACHINERY.fullmatch(part)]
    return "/".join(user_scopes), primitive


class Origins:
    """The origins of one module's instructions; equal names are parsed once."""

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[str, Origin] = {}
        named = {
            op_name(instruction)
            for computation in module.computations.values()
            if "hxla." in computation
            for instruction in computation.instructions.values()
            if "hxla." in instruction.rest
        }
        entries = {tuple(scopes_of(piece)) for name in named for piece in joined(name)}
        # Entries are numbered throughout the process; from 0 they can be compared.
        ordered = sorted((e for e in entries if e), key=lambda key: key[-1].entry)
        self._numbers = {key: i for i, key in enumerate(ordered)}

    def of(self, instruction: Instruction, computation: Computation) -> Origin:
        """The origin of an instruction, by its name or that of its operands."""
        named = self._with_name(instruction, computation, _DEPTH)
        return _NAMELESS if named is None else self._origin(named)

    def _with_name(
        self, instruction: Instruction, computation: Computation, depth: int
    ) -> Instruction | None:
        if 'op_name="' in instruction.rest:
            return instruction
        if depth == 0:
            return None
        for name, _ in instruction.operands:
            operand = computation.instructions.get(name)
            if operand is not None and operand.opcode != "parameter":
                named = self._with_name(operand, computation, depth - 1)
                if named is not None:
                    return named
        return None

    def _origin(self, instruction: Instruction) -> Origin:
        rest = instruction.rest
        start = rest.find("metadata={")
        end = rest.find("}, ", start)
        key = rest[start:] if end < 0 else rest[start:end]
        if key not in self._known:
            frame, file = _FRAME.search(key), _FILE.search(key)
            self._known[key] = self._make(op_name(instruction), int(frame[1]) if frame else 0, file)
        return self._known[key]

    def _make(self, name: str, frame: int, file: re.Match[str] | None) -> Origin:
        pieces = joined(name)
        paths = [module_path(piece) for piece in pieces]
        path, primitive = _several(p for p, _ in paths), paths[0][1]
        labels = (self._label(tuple(scopes_of(piece))) for piece in pieces)
        task_graph = _several(labels)
        places = self._module.source(frame) if frame else []
        if file:
            places = [(file[1], int(file[2] or 0), "")]
        user_place = next((p for p in places if not any(lib in p[0] for lib in _LIBRARIES)), None)
        source = user_place or (places[0] if places else None)
        function = source[2] if source and not source[2].startswith("<") else ""
        missing = ""
        if not task_graph and not path and not function:
            missing = "no scope surrounds it and the text does not name its function"
        return Origin(
            task_graph=task_graph,
            module=path,
            function=function.replace(".<locals>", ""),
            phase=_phase(name),
            primitive=primitive,
            source=f"{source[0]}:{source[1]}" if source else "",
            missing=missing,
        )

    def _label(self, scopes: tuple[Scope, ...]) -> str:
        if not scopes:
            return ""
        kinds = " > ".join(written(s.kind, s.device_count) for s in scopes)
        return f"{kinds} #{self._numbers[scopes]}"


def _several(names: Iterable[str]) -> str:
    """The first few distinct names of joined operations."""
    distinct = [n for n in dict.fromkeys(names) if n]
    if len(distinct) <= _MAX_JOINED:
        return " + ".join(distinct)
    return f"{' + '.join(distinct[:_MAX_JOINED])} + {len(distinct) - _MAX_JOINED} others"


def _phase(name: str) -> str:
    if "rematted_computation" in name:
        return "recomputation"
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else ""


_VIEWS = frozenset(
    {
        *("copy", "bitcast", "convert", "reshape", "transpose", "optimization-barrier"),
        "bitcast-convert",
    }
)
_Value = tuple[Computation, str, int | None]  # computation, name, and element of a tuple
_SLICES = frozenset({"slice", "dynamic-slice"})
_DONE = frozenset({"copy-done", "copy-start", "all-gather-done", "async-done"})
_MAX_STEPS = 64


class Viewed(NamedTuple):
    """The instruction that made a value, its computation, and the element picked of its tuple."""

    instruction: Instruction
    computation: Computation
    picked: int | None


class Flow:
    """Follows operands of one module back to their origin."""

    def __init__(self, module: Module):
        self._module = module
        self._callers: dict[str, tuple[Instruction, Computation]] = {}
        for computation in module.computations.values():
            for instruction, _, name in computation.calls:
                self._callers[name] = instruction, computation
        self._is_view: dict[tuple[str, bool], bool] = {}

    def argument(
        self, computation: Computation, name: str, picked: int | None = None
    ) -> Instruction | None:
        """The program's argument of which a value is a view, a cast or a slice; None if none."""
        for _ in range(_MAX_STEPS):
            source = self.source(computation, name, picked, slices=True)
            if source is None or source.instruction.opcode != "parameter":
                return None
            computation, picked = source.computation, source.picked
            if computation.name == self._module.entry:
                return source.instruction
            outer = self._caller_operand(computation, source.instruction, picked)
            if outer is None or not self.is_invariant(computation, picked):
                return None
            computation, name, picked = outer
        return None

    def carried(self, computation: Computation, name: str, picked: int | None = None) -> int | None:
        """The index of a value in its loop's carry; None if it is not carried."""
        source = self.source(computation, name, picked)
        return source.picked if source and source.instruction.opcode == "parameter" else None

    def constant(
        self, computation: Computation, name: str, picked: int | None = None
    ) -> int | None:
        """The value of an integer constant; None if it is not constant."""
        source = self.source(computation, name, picked)
        if source is None or source.instruction.opcode != "constant":
            return None
        text = source.instruction.arguments
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def is_invariant(self, body: Computation, element: int | None) -> bool:
        """Whether every iteration passes an element of the carry on unchanged."""
        root = body.root
        if element is None or root is None or root.opcode != "tuple":
            return False
        if element >= len(root.operands):
            return False
        return self.carried(body, *root.operands[element]) == element

    def maker(self, computation: Computation, name: str, picked: int | None) -> Viewed | None:
        """The first maker of a value, followed through the loops that carry it."""
        return self._follow((computation, name, picked), {"copy"}, first_trip=True)

    def readers(self, computation: Computation, start: Instruction) -> Iterator[Instruction]:
        """Instructions that read a value, also through tuples and views."""
        waiting, seen = [start.name], {start.name}
        while waiting:
            for user in computation.users.get(waiting.pop(), ()):
                if user.name in seen:
                    continue
                seen.add(user.name)
                passes = user.opcode in _VIEWS or user.opcode == "get-tuple-element"
                if passes or user.opcode.endswith("-done"):
                    waiting.append(user.name)
                else:
                    yield user

    def only_reader(self, body: Computation, element: int | None) -> Instruction | None:
        """The only instruction that reads an element of a loop's carry; None if several do."""
        readers: dict[str, Instruction] = {}
        for parameter in body.parameters:
            for user in body.users.get(parameter.name, ()):
                if user.opcode == "get-tuple-element":
                    if user.index == element:
                        readers |= {r.name: r for r in self.readers(body, user)}
                elif (parameter.name, element) in user.operands:
                    readers[user.name] = user
        working = [r for r in readers.values() if r.opcode != "tuple"]
        return working[0] if len(working) == 1 else None

    def in_loop(self, computation: Computation) -> bool:
        """Whether a computation is the body or the condition of a `while`."""
        caller = self._callers.get(computation.name)
        return caller is not None and caller[0].opcode == "while"

    def source(
        self, computation: Computation, name: str, picked: int | None, *, slices: bool = False
    ) -> Viewed | None:
        """The maker of a value, followed through views and out of fusions, within its loop."""
        views = _VIEWS | _SLICES if slices else _VIEWS
        return self._follow((computation, name, picked), views)

    def _follow(self, value: _Value, views: Set[str], *, first_trip: bool = False) -> Viewed | None:
        """The maker of a value behind its views; `first_trip`: also through loops."""
        for _ in range(_MAX_STEPS):
            computation, name, picked = value
            if name not in computation.instructions:
                return None
            seen = Viewed(computation.instructions[name], computation, picked)
            before = self._before(seen, views, first_trip=first_trip)
            if before is None:
                return seen
            value = before
        return None

    def _before(self, seen: Viewed, views: Set[str], *, first_trip: bool) -> _Value | None:
        """The value that an instruction only passes on; None if it computes."""
        instruction, computation, picked = seen
        operands = instruction.operands
        if instruction.opcode == "parameter" and (first_trip or not self.in_loop(computation)):
            return self._caller_operand(computation, instruction, picked)
        if not operands:
            return None
        if instruction.opcode == "get-tuple-element":
            name, outer = operands[0]
            return computation, name, instruction.index if outer is None else outer
        if instruction.opcode == "tuple" and picked is not None and picked < len(operands):
            return computation, *operands[picked]
        if instruction.opcode in views or (instruction.opcode in _DONE and not first_trip):
            return computation, *operands[0]
        if instruction.opcode == "while" and picked is not None:
            body = self._module.called(instruction, "body")
            is_kept = body is not None and self.is_invariant(body, picked)
            return (computation, operands[0][0], picked) if first_trip or is_kept else None
        if instruction.opcode == "fusion" and not first_trip:
            large = [o for o in operands if not is_scalar(computation.shape_of(*o))]
            inner = self._module.called(instruction)
            if inner is not None and len(large) == 1 and self._only_views(inner, views):
                return computation, *large[0]
        return None

    def _caller_operand(
        self, computation: Computation, parameter: Instruction, picked: int | None
    ) -> _Value | None:
        """The caller's operand for a parameter; of a loop, the one of its first iteration."""
        if computation.name not in self._callers:
            return None
        caller, outer = self._callers[computation.name]
        number = parameter.number
        if caller.opcode == "while":
            number = None if picked is None else 0
        if caller.opcode == "conditional" or number is None or number >= len(caller.operands):
            return None
        name, element = caller.operands[number]
        return outer, name, picked if element is None else element

    def _only_views(self, inner: Computation, views: Set[str]) -> bool:
        key = inner.name, "slice" in views
        if key not in self._is_view:
            self._is_view[key] = all(
                i.opcode in views or i.opcode in ("parameter", "constant") or is_scalar(i.shape)
                for i in inner.instructions.values()
            )
        return self._is_view[key]


_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_MAX_CONTEXTS = 64  # of one computation: callers of callers multiply


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallContext:
    """One way to reach a computation.

    Attributes:
        loops: Outermost first.
    """

    loops: tuple[Loop, ...] = ()
    is_conditional: bool = False
    is_async: bool = False
    is_fused: bool = False

    @property
    def runs(self) -> int | None:
        """Runs in one call of the program; None if a loop's trip count is not known."""
        total = 1
        for loop in self.loops:
            if loop.trips is None:
                return None
            total *= loop.trips
        return total


def contexts(module: Module, flow: Flow) -> dict[str, list[CallContext]]:
    """Every way to reach every computation from the entry; reducers are left out."""
    out: dict[str, list[CallContext]] = {}
    waiting = [(module.entry, CallContext())]
    loops: dict[str, Loop] = {}
    while waiting:
        name, context = waiting.pop()
        computation = module.computations.get(name)
        if computation is None:
            continue
        ways = out.setdefault(name, [])
        if len(ways) >= _MAX_CONTEXTS:
            continue
        ways.append(context)
        inner: dict[str, CallContext] = {}  # by opcode: most calls of one opcode are alike
        for instruction, key, target in computation.calls:
            opcode = instruction.opcode
            if key == "condition":
                continue
            if opcode == "while":
                if instruction.name not in loops:
                    loops[instruction.name] = _loop(module, computation, instruction, flow)
                around = (*context.loops, loops[instruction.name])
                inner[opcode] = dataclasses.replace(context, loops=around)
            elif opcode not in inner:
                inner[opcode] = dataclasses.replace(
                    context,
                    is_conditional=context.is_conditional or opcode == "conditional",
                    is_async=context.is_async or opcode.endswith("-start"),
                    is_fused=context.is_fused or opcode.startswith("fusion"),
                )
            waiting.append((target, inner[opcode]))
    return out


def _loop(module: Module, computation: Computation, loop: Instruction, flow: Flow) -> Loop:
    where, _ = module_path(op_name(loop))
    known = _TRIPS.search(loop.rest)
    trips = int(known[1]) if known else _count_trips(module, computation, loop, flow)
    return Loop(name=loop.name, where=where, trips=trips)


def _count_trips(
    module: Module, computation: Computation, loop: Instruction, flow: Flow
) -> int | None:
    """Trips of a counter that goes from a constant to a constant by constant steps."""
    condition, body = module.called(loop, "condition"), module.called(loop, "body")
    if condition is None or condition.root is None or body is None or body.root is None:
        return None
    compare, inside = module.root_of(condition.root, condition)
    direction = (compare.attribute("direction") or "").strip()
    is_comparison = compare.opcode == "compare" and direction in ("LT", "LE")
    if not is_comparison or len(compare.operands) != 2 or not loop.operands:
        return None
    counter, limit = compare.operands
    index, stop = flow.carried(inside, *counter), flow.constant(inside, *limit)
    if index is None or stop is None or index >= len(body.root.operands):
        return None
    start = flow.constant(computation, loop.operands[0][0], index)
    step = _step(module, body, index, flow)
    if start is None or step is None or step <= 0:
        return None
    return max(0, -(-(stop - start + (direction == "LE")) // step))


def _step(module: Module, body: Computation, index: int, flow: Flow) -> int | None:
    """The constant that an iteration adds to an element of its carry; None if it adds none."""
    assert body.root is not None
    made = flow.source(body, *body.root.operands[index])
    if made is None:
        return None
    add, inside = module.root_of(made.instruction, made.computation)
    if add.opcode != "add":
        return None
    counters = [o for o in add.operands if flow.carried(inside, *o) == index]
    steps = [c for o in add.operands if (c := flow.constant(inside, *o)) is not None]
    return steps[0] if len(counters) == 1 and len(steps) == 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnnotatedModule:
    """A module with its data flow, the origins of its values and its call contexts.

    Attributes:
        arguments: In order, by the names of their instructions.
        contexts: Every way to reach a computation, by its name.
    """

    module: Module
    arguments: Mapping[str, ProgramArray]
    origins: Origins
    flow: Flow
    contexts: Mapping[str, list[CallContext]]

    @property
    def arrays(self) -> tuple[ProgramArray, ...]:
        """The arguments in order."""
        return tuple(self.arguments.values())

    def argument(
        self, computation: Computation, name: str, picked: int | None = None
    ) -> ProgramArray | None:
        """The argument of which a value is a view, a cast or a slice; None if none."""
        parameter = self.flow.argument(computation, name, picked)
        return None if parameter is None else self.arguments.get(parameter.name)

    def runs(self, computation: Computation) -> int | None:
        """Runs of a computation in one program call; None if a loop's trip count is not known."""
        each = [context.runs for context in self.contexts.get(computation.name, [])]
        return None if None in each else sum(r for r in each if r is not None)


def annotate(module: Module, arguments: Mapping[str, ProgramArray]) -> AnnotatedModule:
    """Follow a module's values and calls."""
    flow = Flow(module)
    return AnnotatedModule(
        module=module,
        arguments=arguments,
        origins=Origins(module),
        flow=flow,
        contexts=contexts(module, flow),
    )
