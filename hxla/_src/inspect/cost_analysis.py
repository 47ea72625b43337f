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

# They only name memory that exists already.
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
    """The costs of one run of a fused computation.

    Attributes:
        read_bytes: Of operands that are read in slices only, by operand number.
        written_bytes: Of a result that is updated in place; None: all of it is written.
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
        """FLOPs, and bytes read and written; of sliced operands only the slices count."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return 0.0, 0
        inside = self._fused_costs(instruction) if opcode == "fusion" else None
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
        """FLOPs of matrix products and convolutions, also inside a fusion."""
        opcode = instruction.opcode
        if opcode == "fusion":
            return self._fused_costs(instruction).flops
        if opcode == "convolution":
            return _convolution_flops(instruction, computation)
        is_product = opcode == "dot" or (opcode == "custom-call" and "gemm" in instruction.rest)
        return _product_flops(instruction, computation) if is_product else 0.0

    def _fused_costs(self, fusion: Instruction) -> "_Fused":
        """Costs of a fusion, computed once for like computations: layers have many of them."""
        inner = self._module.called(fusion)
        if inner is None or inner.opcodes.isdisjoint(_TAKEN_APART):
            return _PLAIN
        # The text of a computation with calls or custom calls does not determine its costs.
        key = inner.name if inner.opcodes & {"fusion", "custom-call"} else inner.likeness
        if key not in self._fused:
            self._fused[key] = _PLAIN  # should it call itself
            self._fused[key] = self._add_up(inner)
        return self._fused[key]

    def _add_up(self, inner: Computation) -> "_Fused":
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
    """FLOPs of a dot, or of a library call whose JSON names the contracted dimensions."""
    match = _CONTRACTED.search(product.rest)
    dims = _operand_dims(product, 0, computation)
    contracted = [int(i) for i in re.findall(r"\d+", match[1])] if match else []
    if any(i >= len(dims) for i in contracted) or not (match or product.opcode == "dot"):
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
            run_flops, run_bytes = costs.of(instruction, computation)
            if not run_flops and not run_bytes:
                continue
            origin = read.origins.of(instruction, computation)
            task = origin.task_graph
            flops[task] += run_flops * times
            moved[task] += run_bytes * times
            if runs is None:
                inexact.add(task)
            if instruction.opcode == "fusion":
                fusions.append((run_bytes * times, instruction, run_flops, run_bytes, runs, origin))
    biggest = tuple(
        Fusion(
            name=i.name,
            array=shape_text(i.shape),
            flops=run_flops,
            num_bytes=run_bytes,
            runs=runs,
            origin=origin,
        )
        for _, i, run_flops, run_bytes, runs, origin in heapq.nlargest(
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
    task: str,
    flops: float,
    moved: float,
    collectives: Sequence[Collective],
    inexact: Container[str],
) -> TaskGraphWork:
    runs = [1 if c.runs is None else c.runs for c in collectives]
    with_runs = list(zip(collectives, runs, strict=True))
    seconds = [c.seconds * n for c, n in with_runs if c.seconds is not None]
    return TaskGraphWork(
        task_graph=task,
        flops=flops,
        num_bytes=moved,
        num_collectives=sum(runs),
        collective_bytes=sum(c.sent_bytes * n for c, n in with_runs),
        collective_seconds=sum(seconds) if runs and len(seconds) == len(runs) else None,
        is_exact=task not in inexact and all(c.runs is not None for c in collectives),
    )
