"""Sharded parameters that compiled programs gather although their plan does not.

A plan foresees how operations read a parameter itself. Values derived from a parameter, such as a
normalized kernel, may be gathered by XLA's partitioner. It also partitions the stages of a
pipeline, where only the axis of stages is manual.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..graph.graph import Graph
from ..lower.lower import Programs
from .analyze import UNREADABLE, arguments, path_of
from .annotated_module import annotate, op_name
from .collectives import collectives
from .hlo_text import Computation, Instruction, Module, arrays, read_module
from .program import Collective

# The first words of arguments that depend on no example.
_CONSTANT = frozenset({"params", "slots", "starts", "aux", "exponents", "exponents_T", "where"})
_HEAD = re.compile(r"\w+")
_PART = re.compile(r"hxla\.part\.\d+")
_INTENDED = frozenset({"fsdp"})  # axes over which a plan gathers parameters


def unplanned_gathers(programs: Programs) -> tuple[str, ...]:
    """Unplanned all-gathers of a sharded parameter, or of a value derived from it.

    Returns:
        A line for each, with the bytes that a device receives in a microbatch.
    """
    sharded, plan = programs.sharded, programs.plan
    is_cut = [{axis for names in p.spec for axis in names} for p in plan.parameters]
    if sharded is None or set[str]().union(*is_cut) <= _INTENDED:
        return ()
    planned = sharded.gathered_params()
    received, where = dict[tuple[str, int], int](), dict[tuple[str, int], str]()
    try:
        gathers = list(_gathers(programs))
    except UNREADABLE:  # text of another XLA: a mere warning may not keep a session from training
        return ()
    for gather, params in gathers:
        for axis in sorted(set(gather.axes or ()) - _INTENDED):
            size = plan.axis_sizes[axis]
            for key in ((axis, p) for p in params if axis in is_cut[p]):
                num_bytes = gather.num_bytes * (gather.runs or 1) * (size - 1) // size
                received[key] = received.get(key, 0) + num_bytes
                words = f"{gather.origin.primitive} at {gather.origin.source}"
                where.setdefault(key, words.removesuffix(" at "))
    return tuple(
        f"parameter {plan.parameters[param].name} is cut over {axis}, and the compiled program "
        f"gathers a value derived from it whole in each microbatch, {num_bytes:,} bytes to a "
        f"device: {where[axis, param]}"
        for (axis, param), num_bytes in received.items()
        if (axis, param) not in planned
    )


def _gathers(programs: Programs) -> Iterator[tuple[Collective, Sequence[int]]]:
    """The gathers of a microbatch, each with the parameters that it makes whole."""
    programs_of_microbatch = list(programs.runners[0].texts())
    if not any("all-gather" in program.text for program in programs_of_microbatch):
        return  # to read the texts takes seconds
    axes = programs.reducer.local[0].axes
    shapes = _shapes(programs.graph)
    flows, listed = dict[str, Dependence](), dict[str, tuple[Collective, ...]]()
    before: tuple[Dependence, Mapping[str, tuple[int, ...]]] | None = None
    for program in programs_of_microbatch:
        text, params = program.text, dict(program.params)
        if text not in flows:
            module = read_module(text)
            flows[text], listed[text] = Dependence(module), ()
            if "all-gather" in text:
                read = annotate(module, arguments(module, {}, {}))
                listed[text] = collectives(read, axes, None)
        flow = flows[text]
        if before is not None:  # what a forward saved for its backward, perhaps of parameters only
            params |= {
                path: known
                for path, result in program.saved.items()
                if (known := _only_params(before[0].of_result(result), before[1]))
            }
        for gather in listed[text]:
            if gather.kind != "all-gather":
                continue
            instruction, derived = flow.of(gather.name)
            scope = _PART.search(op_name(instruction))
            read_here = program.scopes.get(scope[0]) if scope else None
            known = _only_params(derived, params)
            if read_here is not None:
                known = tuple(p for p in known if p in read_here)
            yield gather, [p for p in known if _is_whole(instruction, shapes[p])]
        before = flow, params


def _only_params(
    derived: Iterable[Instruction], params: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The parameters among the arguments of a value; none if it depends on an example."""
    paths = [path_of(instruction) for instruction in derived]
    read = [path for path in paths if path in params]
    heads = (_HEAD.match(path) for path in paths if path not in params)
    if any(head is None or head[0] not in _CONSTANT for head in heads):
        return ()  # activations, or gradients
    return tuple(sorted({p for path in read for p in params[path]}))


def _is_whole(gather: Instruction, shapes: set[tuple[int, ...]]) -> bool:
    """Whether a gather has a result of one of some shapes, in any order of dimensions."""
    results = {_order(dims) for _, dims in arrays(gather.shape)}
    return not results.isdisjoint(shapes)


def _order(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))


def _shapes(graph: Graph) -> list[set[tuple[int, ...]]]:
    """For each parameter the shapes in which programs read it: whole, some rows, or one row."""
    shapes = [{_order(shape), _order(shape[1:])} for shape in graph.param_shapes]
    for v in graph.param_values:
        param = graph.values[v].param
        assert param is not None
        shapes[param].add(_order(graph.values[v].shape))
    return shapes


# A computation, the name of an instruction in it, and an element of its tuple; None: all of them.
_Value = tuple[str, str, int | None]
_PASSES = frozenset({"optimization-barrier", "copy", "copy-start", "copy-done", "domain"})


class Dependence:
    """Follows values of a module back to its arguments, through loops, branches and fusions."""

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
