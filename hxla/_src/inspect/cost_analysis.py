"""FLOPs and bytes of instructions, of fusions and of TaskGraphs."""

import collections
import dataclasses
import heapq
import math
import re
from collections.abc import Container, Mapping, Sequence

from .annotated_module import AnnotatedModule
from .collectives import OPCODES
from .hlo_text import Computation, Instruction, Module, first, shape_bytes, shape_text
from .program import Collective, Fusion, TaskGraphWork

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
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:]([{\[][\d",]*)')


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
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return 0.0, 0
        inside = self._inside(instruction) if opcode == "fusion" else None
        flops = inside.flops if inside else self._flops(instruction, computation)
        written = shape_bytes(instruction.shape)
        if opcode == "dynamic-slice":
            return flops, 2 * written
        read = _operand_bytes(instruction, computation)
        if opcode == "dynamic-update-slice":
            return flops, 2 * read[1] if len(read) > 1 else 0
        if inside:
            for number, num_bytes in inside.read_bytes.items():
                if number < len(read):
                    read[number] = num_bytes
            written = written if inside.written_bytes is None else inside.written_bytes
        return flops, written + sum(read)

    def _flops(self, instruction: Instruction, computation: Computation) -> float:
        """Of matrix products and convolutions, those inside a fusion included."""
        opcode = instruction.opcode
        if opcode == "fusion":
            return self._inside(instruction).flops
        if opcode == "convolution":
            return _convolution_flops(instruction, computation)
        is_product = opcode == "dot" or (opcode == "custom-call" and "gemm" in instruction.rest)
        return _product_flops(instruction, computation) if is_product else 0.0

    def _inside(self, fusion: Instruction) -> "_Fused":
        """Of what it calls: a model's layers have many computations that are alike."""
        inner = self._module.called(fusion)
        if inner is None or inner.opcodes.isdisjoint(_TAKEN_APART):
            return _PLAIN
        # What others call, or say in words, their own text does not tell.
        key = inner.name if inner.opcodes & {"fusion", "custom-call"} else inner.likeness
        if key not in self._fused:
            self._fused[key] = _PLAIN  # should it call itself
            self._fused[key] = self._read_inside(inner)
        return self._fused[key]

    def _read_inside(self, inner: Computation) -> "_Fused":
        flops = sum(self._flops(i, inner) for i in inner.instructions.values())
        if inner.opcodes.isdisjoint(_PARTIAL):
            return _Fused(flops=flops)
        parameters = {p.name: number for number, p in enumerate(inner.parameters)}
        sliced: dict[str, int] = {}
        whole: set[str] = set()
        for i in inner.instructions.values():
            names = [n for n, _ in i.operands]
            for place, name in enumerate(names):
                if name not in parameters:
                    continue
                if i.opcode == "dynamic-slice" and place == 0:
                    sliced[name] = sliced.get(name, 0) + shape_bytes(i.shape)
                elif i.opcode == "dynamic-update-slice" and place == 0:
                    sliced.setdefault(name, 0)
                else:
                    whole.add(name)
        root, written = inner.root, None
        if root is not None and root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
            written = _operand_bytes(root, inner)[1]
        return _Fused(
            flops=flops,
            read_bytes={parameters[name]: sliced[name] for name in sliced.keys() - whole},
            written_bytes=written,
        )


def _operand_bytes(instruction: Instruction, computation: Computation) -> list[int]:
    return [shape_bytes(computation.shape_of(*o)) for o in instruction.operands]


def _operand_dims(
    instruction: Instruction, number: int, computation: Computation
) -> tuple[int, ...]:
    operands = instruction.operands
    shape = computation.shape_of(*operands[number]) if number < len(operands) else ""
    return first(shape)[1]


def _product_flops(product: Instruction, computation: Computation) -> float:
    """Of a dot, or of a library's product, whose dimensions JSON names."""
    found = _CONTRACTED.search(product.rest)
    dims = _operand_dims(product, 0, computation)
    contracted = [int(i) for i in re.findall(r"\d+", found[1])] if found else []
    if any(i >= len(dims) for i in contracted) or not (found or product.opcode == "dot"):
        return 0.0
    result = first(product.shape)[1]
    return 2.0 * math.prod(result) * math.prod(dims[i] for i in contracted)


def _convolution_flops(convolution: Instruction, computation: Computation) -> float:
    kernel = _operand_dims(convolution, 1, computation)
    labels = (convolution.attribute("dim_labels") or "").replace("->", "_").split("_")
    if len(labels) < 2 or "o" not in labels[1] or len(kernel) != len(labels[1]):
        return 0.0
    result = first(convolution.shape)[1]
    return 2.0 * math.prod(result) * math.prod(kernel) / kernel[labels[1].index("o")]


def work(
    read: AnnotatedModule, collectives: Sequence[Collective]
) -> tuple[tuple[TaskGraphWork, ...], tuple[Fusion, ...]]:
    """FLOPs, bytes and collectives per TaskGraph, and the biggest fusions."""
    costs = Costs(read.module)
    flops: dict[str, float] = collections.defaultdict(float)
    moved: dict[str, float] = collections.defaultdict(float)
    inexact: set[str] = set()
    fusions = []
    for name, ways in read.contexts.items():
        if all(c.is_fused for c in ways):
            continue
        computation = read.module.computations[name]
        runs = read.runs(computation)
        times = len(ways) if runs is None else runs
        for instruction in computation.instructions.values():
            if instruction.opcode in _PASSED_OVER:
                continue
            own_flops, own_bytes = costs.of(instruction, computation)
            if not own_flops and not own_bytes:
                continue
            origin = read.origins.of(instruction, computation)
            task = origin.task_graph
            flops[task] += own_flops * times
            moved[task] += own_bytes * times
            if runs is None:
                inexact.add(task)
            if instruction.opcode == "fusion":
                fusions.append((own_bytes * times, instruction, own_flops, own_bytes, runs, origin))
    biggest = tuple(
        Fusion(
            name=i.name,
            array=shape_text(i.shape),
            flops=own_flops,
            num_bytes=own_bytes,
            runs=runs,
            origin=origin,
        )
        for _, i, own_flops, own_bytes, runs, origin in heapq.nlargest(
            _NUM_FUSIONS, fusions, key=lambda f: f[0]
        )
    )
    tasks = {*flops, *(c.origin.task_graph for c in collectives)}
    each = tuple(
        _work(t, flops[t], moved[t], [c for c in collectives if c.origin.task_graph == t], inexact)
        for t in sorted(tasks, key=lambda t: (not t, _rank(t)))
    )
    return each, biggest


def _rank(task_graph: str) -> int:
    return int(task_graph.rpartition("#")[2] or 0)


def _work(
    task: str, flops: float, moved: float, own: Sequence[Collective], inexact: Container[str]
) -> TaskGraphWork:
    runs = [1 if c.runs is None else c.runs for c in own]
    seconds = [c.seconds * n for c, n in zip(own, runs, strict=True) if c.seconds is not None]
    return TaskGraphWork(
        task_graph=task,
        flops=flops,
        num_bytes=moved,
        num_collectives=sum(runs),
        collective_bytes=sum(c.sent_bytes * n for c, n in zip(own, runs, strict=True)),
        collective_seconds=sum(seconds) if own and len(seconds) == len(own) else None,
        is_exact=task not in inexact and all(c.runs is not None for c in own),
    )
