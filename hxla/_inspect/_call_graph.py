"""How often each computation runs, and inside which loops."""

import dataclasses
import re

from ._dataflow import Flow
from ._hlo_text import Computation, Instruction, Module
from ._origin import module_path, op_name
from ._program import Loop

_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_MAX_CONTEXTS = 64  # of one computation: callers of callers multiply


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallContext:
    """One way to reach a computation.

    Attributes:
        loops: Around it, outermost first.
        is_conditional: In some branch only.
        is_async: Behind an `async-start`.
        is_fused: Inside a fusion.
    """

    loops: tuple[Loop, ...] = ()
    is_conditional: bool = False
    is_async: bool = False
    is_fused: bool = False

    @property
    def runs(self) -> int | None:
        """In one call of the program; None if some loop's trips are not known."""
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
        inner: dict[str, CallContext] = {}  # by what calls: most calls of a kind are alike
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
    trips = int(known[1]) if known else _counted(module, computation, loop, flow)
    return Loop(name=loop.name, where=where, trips=trips)


def _counted(module: Module, computation: Computation, loop: Instruction, flow: Flow) -> int | None:
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
    """What an iteration adds to an element of its carry, if it adds a constant."""
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
