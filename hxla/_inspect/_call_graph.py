"""How often each computation runs, and inside which loops."""

import dataclasses
import functools
import re

from ._hlo_text import Computation, Instruction, Module
from ._origin import module_path, op_name
from ._program import Loop

_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_CALLERS = frozenset({"while", "conditional", "call", "async-start", "fusion", "custom-call"})
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


def contexts(module: Module) -> dict[str, list[CallContext]]:
    """Every way to reach every computation from the entry; reducers are left out."""
    out: dict[str, list[CallContext]] = {}
    waiting = [(module.entry, CallContext())]
    edges: dict[str, list[tuple[str, str, Loop | None]]] = {}
    while waiting:
        name, context = waiting.pop()
        computation = module.computations.get(name)
        if computation is None:
            continue
        ways = out.setdefault(name, [])
        if len(ways) >= _MAX_CONTEXTS:
            continue
        ways.append(context)
        if not _has_callers(computation.opcodes):
            continue
        if name not in edges:
            edges[name] = _edges(module, computation)
        inner: dict[str, CallContext] = {}  # by how it is called, where no loop is
        for target, how, loop in edges[name]:
            if how not in inner or loop is not None:
                inner[how] = CallContext(
                    loops=(*context.loops, loop) if loop else context.loops,
                    is_conditional=context.is_conditional or how == "conditional",
                    is_async=context.is_async or how == "async",
                    is_fused=context.is_fused or how == "fusion",
                )
            waiting.append((target, inner[how]))
    return out


def total_runs(found: list[CallContext]) -> int | None:
    """Runs over all callers; None if one is not known."""
    each = [c.runs for c in found]
    return None if None in each else sum(r for r in each if r is not None)


@functools.lru_cache(maxsize=1024)
def _has_callers(opcodes: frozenset[str]) -> bool:
    return any(o in _CALLERS or o.endswith("-start") for o in opcodes)


def _edges(module: Module, computation: Computation) -> list[tuple[str, str, Loop | None]]:
    out: list[tuple[str, str, Loop | None]] = []
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode not in _CALLERS and not opcode.endswith("-start"):
            continue
        if opcode == "while":
            where, _ = module_path(op_name(instruction))
            trips = _trips(module, computation, instruction)
            loop = Loop(name=instruction.name, where=where, trips=trips)
            out += [(body, "while", loop) for body in instruction.called("body")]
        elif opcode == "conditional":
            for key in ("branch_computations", "true_computation", "false_computation"):
                out += [(c, "conditional", None) for c in instruction.called(key)]
        elif opcode == "call":
            out += [(c, "call", None) for c in instruction.called("to_apply")]
            out += [(c, "call", None) for c in instruction.called("calls")]
        elif opcode == "fusion":
            out += [(c, "fusion", None) for c in instruction.called("calls")]
        else:
            how = "async" if opcode.endswith("-start") else "call"
            out += [(c, how, None) for c in instruction.called("calls")]
            out += [(c, how, None) for c in instruction.called("called_computations")]
    return out


def _trips(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """As the compiler says, else of a counter from a constant to a constant by constant steps."""
    known = _TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    condition = module.computations.get((loop.called("condition") or [""])[0])
    body = module.computations.get((loop.called("body") or [""])[0])
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    bound = _comparison(module, condition)
    if bound is None:
        return None
    index, limit, is_inclusive = bound
    operands = loop.operands
    start_tuple = computation.instructions.get(operands[0][0]) if operands else None
    if start_tuple is None or start_tuple.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    if index >= min(len(start_tuple.operands), len(body.root.operands)):
        return None
    start = _constant(computation, start_tuple.operands[index][0])
    step = _step(module, body, body.root.operands[index][0], index)
    if start is None or not step or step < 0:
        return None
    return max(0, -(-(limit - start + is_inclusive) // step))


def _comparison(module: Module, condition: Computation) -> tuple[int, int, bool] | None:
    """Index of the counter, its limit, and whether the limit itself still runs."""
    root = condition.root
    assert root is not None
    compare, inner = root, None
    if root.opcode in ("fusion", "call"):
        inner = module.computations.get(
            (root.called("calls") or root.called("to_apply") or [""])[0]
        )
        if inner is None or inner.root is None:
            return None
        compare = inner.root
    direction = (compare.attribute("direction") or "").strip()
    if compare.opcode != "compare" or direction not in ("LT", "LE") or len(root.operands) < 2:
        return None
    index = _element(condition, *root.operands[0])
    limit = _constant(condition, root.operands[1][0])
    if inner is not None and [n for n, _ in compare.operands] != [p.name for p in inner.parameters]:
        return None
    return None if index is None or limit is None else (index, limit, direction == "LE")


def _element(computation: Computation, name: str, picked: int | None) -> int | None:
    """Which element of the computation's parameter an operand is."""
    for _ in range(_DEPTH):
        found = computation.instructions.get(name)
        if found is None:
            return None
        if found.opcode == "parameter":
            return picked
        if not found.operands:
            return None
        if found.opcode == "get-tuple-element":
            picked = found.index
            name = found.operands[0][0]
        elif found.opcode in ("copy", "bitcast", "convert"):
            name, picked = found.operands[0]
        else:
            return None
    return None


_DEPTH = 8


def _constant(computation: Computation, name: str) -> int | None:
    for _ in range(_DEPTH):
        found = computation.instructions.get(name)
        if found is None:
            return None
        if found.opcode == "constant":
            text = found.arguments
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        if found.opcode not in ("copy", "bitcast") or not found.operands:
            return None
        name = found.operands[0][0]
    return None


def _step(module: Module, body: Computation, name: str, index: int) -> int | None:
    """What an iteration adds to the counter, if it is the counter plus a constant."""
    found = body.instructions.get(name)
    while found is not None and found.opcode in ("copy", "bitcast") and found.operands:
        found = body.instructions.get(found.operands[0][0])
    if found is None:
        return None
    add, inner = found, None
    if found.opcode in ("fusion", "call"):
        called = found.called("calls") or found.called("to_apply")
        inner = module.computations.get((called or [""])[0])
        if inner is None or inner.root is None:
            return None
        add = inner.root
    if add.opcode != "add":
        return None
    counters = [o for o in found.operands if _element(body, *o) == index]
    steps = [c for o in found.operands if (c := _constant(body, o[0])) is not None]
    if not steps and inner is not None:
        steps = [c for o in add.operands if (c := _constant(inner, o[0])) is not None]
    return steps[0] if len(counters) == 1 and len(steps) == 1 else None
