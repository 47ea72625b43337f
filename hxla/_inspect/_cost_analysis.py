"""FLOPs and bytes of instructions, of fusions and of TaskGraphs."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping

from . import _shapes
from ._call_graph import CallContext, total_runs
from ._collectives import OPCODES
from ._hlo_text import Computation, Instruction, Module
from ._origin import Origins
from ._program import Collective, Fusion, TaskGraphWork

# They name memory that is there already.
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-start"),
        *("while", "conditional", "call", "after-all", "optimization-barrier", "opt-barrier"),
        *("partition-id", "replica-id"),
    }
)
_PASSED_OVER = _FREE | OPCODES.keys()
_WITH_FLOPS = frozenset({"dot", "convolution", "custom-call", "fusion"})
_PARTIAL = frozenset({"dynamic-slice", "dynamic-update-slice"})
_TAKEN_APART = _WITH_FLOPS | _PARTIAL
_NUM_FUSIONS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fused:
    """What one run of a fused computation does.

    Attributes:
        flops: Of all that is in it.
        read_bytes: Of operands that it reads slices of only, by their numbers.
        written_bytes: Of a result that it updates in place; None: it writes the whole.
    """

    flops: float = 0.0
    read_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    written_bytes: int | None = None


_PLAIN = _Fused()


class Costs:
    """FLOPs and bytes of one run of any instruction of a module."""

    def __init__(self, module: Module):
        self._module = module
        self._fused: dict[object, _Fused] = {}

    def of(self, instruction: Instruction, computation: Computation) -> tuple[float, int]:
        """FLOPs, and bytes read and written as far as it touches its operands."""
        if instruction.opcode != "fusion":
            flops = self._flops(instruction, computation)
            return flops, self._num_bytes(instruction, computation)
        inside = self._inside(instruction)
        written = inside.written_bytes
        if written is None:
            written = _shapes.shape_bytes(instruction.shape)
        read = [_shapes.shape_bytes(s) for s in self._operand_shapes(instruction, computation)]
        for number, num_bytes in inside.read_bytes.items():
            if number < len(read):
                read[number] = num_bytes
        return inside.flops, written + sum(read)

    def _flops(self, instruction: Instruction, computation: Computation) -> float:
        """Of matrix products and convolutions, those inside a fusion included."""
        opcode = instruction.opcode
        if opcode not in _WITH_FLOPS:
            return 0.0
        if opcode == "fusion":
            return self._inside(instruction).flops
        if opcode == "dot":
            return self._dot(instruction, computation)
        if opcode == "convolution":
            return self._convolution(instruction, computation)
        return self._gemm(instruction, computation) if "gemm" in instruction.rest else 0.0

    def _inside(self, fusion: Instruction) -> "_Fused":
        """Of what it calls: a model's layers have many computations that are alike."""
        name = (fusion.called("calls") or [""])[0]
        inner = self._module.computations.get(name)
        if inner is None or inner.opcodes.isdisjoint(_TAKEN_APART):
            return _PLAIN
        # What others call, or say in words, their own text does not tell.
        key = name if inner.opcodes & {"fusion", "custom-call"} else inner.likeness
        if key not in self._fused:
            self._fused[key] = _PLAIN  # should it call itself
            self._fused[key] = self._read_inside(inner)
        return self._fused[key]

    def _dot(self, dot: Instruction, computation: Computation) -> float:
        dims = self._operand_dims(dot, 0, computation)
        contracted = [
            int(i) for i in re.findall(r"\d+", dot.attribute("lhs_contracting_dims") or "")
        ]
        if any(i >= len(dims) for i in contracted):
            return 0.0
        return 2.0 * _size(dot.shape) * math.prod(dims[i] for i in contracted)

    def _convolution(self, convolution: Instruction, computation: Computation) -> float:
        kernel = self._operand_dims(convolution, 1, computation)
        labels = (convolution.attribute("dim_labels") or "").replace("->", "_").split("_")
        if len(labels) < 2 or "o" not in labels[1] or len(kernel) != len(labels[1]):
            return 0.0
        return 2.0 * _size(convolution.shape) * math.prod(kernel) / kernel[labels[1].index("o")]

    def _gemm(self, gemm: Instruction, computation: Computation) -> float:
        found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', gemm.rest)
        dims = self._operand_dims(gemm, 0, computation)
        contracted = [int(i) for i in json.loads(found[1])] if found else []
        if not contracted or any(i >= len(dims) for i in contracted):
            return 0.0
        first = _shapes.tuple_elements(gemm.shape)[0]
        return 2.0 * _size(first) * math.prod(dims[i] for i in contracted)

    def _operand_shape(
        self, instruction: Instruction, number: int, computation: Computation
    ) -> str:
        """Shape of an operand; empty if it is not known."""
        shapes = self._operand_shapes(instruction, computation)
        return shapes[number] if number < len(shapes) else ""

    def _operand_shapes(self, instruction: Instruction, computation: Computation) -> list[str]:
        out = []
        for name, picked in instruction.operands:
            found = computation.instructions.get(name)
            shape = found.shape if found is not None else ""
            if picked is not None:
                elements = _shapes.tuple_elements(shape)
                shape = elements[picked] if picked < len(elements) else ""
            out.append(shape)
        return out

    def _operand_dims(
        self, instruction: Instruction, number: int, computation: Computation
    ) -> tuple[int, ...]:
        """Dimensions of an operand."""
        arrays = _shapes.arrays(self._operand_shape(instruction, number, computation))
        return arrays[0][1] if arrays else ()

    def _num_bytes(self, instruction: Instruction, computation: Computation) -> int:
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return 0
        if opcode == "dynamic-slice":
            return 2 * _shapes.shape_bytes(instruction.shape)
        read = [_shapes.shape_bytes(s) for s in self._operand_shapes(instruction, computation)]
        if opcode == "dynamic-update-slice":
            return 2 * read[1] if len(read) > 1 else 0
        return _shapes.shape_bytes(instruction.shape) + sum(read)

    def _read_inside(self, inner: Computation) -> "_Fused":
        flops = sum(self._flops(i, inner) for i in inner.instructions.values())
        if inner.opcodes.isdisjoint(_PARTIAL):
            return _Fused(flops=flops)
        parameters = inner.numbers
        sliced: dict[str, int] = {}
        whole: set[str] = set()
        for i in inner.instructions.values():
            names = [n for n, _ in i.operands]
            for place, name in enumerate(names):
                if name not in parameters:
                    continue
                if i.opcode == "dynamic-slice" and place == 0:
                    sliced[name] = sliced.get(name, 0) + _shapes.shape_bytes(i.shape)
                elif i.opcode == "dynamic-update-slice" and place == 0:
                    sliced.setdefault(name, 0)
                else:
                    whole.add(name)
        root, written = inner.root, None
        if root is not None and root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
            written = _shapes.shape_bytes(self._operand_shape(root, 1, inner))
        return _Fused(
            flops=flops,
            read_bytes={parameters[name]: sliced[name] for name in sliced.keys() - whole},
            written_bytes=written,
        )


def _size(shape: str) -> int:
    arrays = _shapes.arrays(shape)
    return math.prod(arrays[0][1]) if arrays else 0


def work(
    module: Module,
    contexts: dict[str, list[CallContext]],
    origins: Origins,
    collectives: tuple[Collective, ...],
) -> tuple[tuple[TaskGraphWork, ...], tuple[Fusion, ...]]:
    """FLOPs, bytes and collectives per TaskGraph, and the biggest fusions."""
    costs = Costs(module)
    flops: dict[str, float] = {}
    moved: dict[str, float] = {}
    inexact: set[str] = set()
    fusions = []
    for name, ways in contexts.items():
        if all(c.is_fused for c in ways):
            continue
        computation = module.computations[name]
        runs = total_runs(ways)
        for instruction in computation.instructions.values():
            if instruction.opcode in _PASSED_OVER:
                continue
            own_flops, own_bytes = costs.of(instruction, computation)
            if not own_flops and not own_bytes:
                continue
            origin = origins.of(instruction, computation)
            task = origin.task_graph
            times = len(ways) if runs is None else runs
            flops[task] = flops.get(task, 0.0) + own_flops * times
            moved[task] = moved.get(task, 0.0) + own_bytes * times
            if runs is None:
                inexact.add(task)
            if instruction.opcode == "fusion":
                fusions.append((own_bytes * times, instruction, own_flops, own_bytes, runs, origin))
    fusions.sort(key=lambda f: -f[0])
    biggest = tuple(
        Fusion(
            name=i.name,
            array=_shapes.shape_text(i.shape),
            flops=own_flops,
            num_bytes=own_bytes,
            runs=runs,
            origin=origin,
        )
        for _, i, own_flops, own_bytes, runs, origin in fusions[:_NUM_FUSIONS]
    )
    tasks = {*flops, *(c.origin.task_graph for c in collectives)}
    each = tuple(
        _work(t, flops, moved, collectives, t in inexact)
        for t in sorted(tasks, key=lambda t: (not t, _rank(t)))
    )
    return each, biggest


def _rank(task_graph: str) -> int:
    return int(task_graph.rpartition("#")[2] or 0)


def _work(
    task: str,
    flops: dict[str, float],
    moved: dict[str, float],
    collectives: tuple[Collective, ...],
    is_inexact: bool,
) -> TaskGraphWork:
    own = [(c, 1 if c.runs is None else c.runs) for c in collectives if c.origin.task_graph == task]
    seconds = [None if c.seconds is None else c.seconds * runs for c, runs in own]
    known = [s for s in seconds if s is not None]
    return TaskGraphWork(
        task_graph=task,
        flops=flops.get(task, 0.0),
        num_bytes=moved.get(task, 0.0),
        num_collectives=sum(runs for _, runs in own),
        collective_bytes=sum(c.sent_bytes * runs for c, runs in own),
        collective_seconds=sum(known) if seconds and len(known) == len(seconds) else None,
        is_exact=not is_inexact and all(c.runs is not None for c, _ in own),
    )
