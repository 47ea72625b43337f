"""TaskGraphs: consecutive operations of one strategy, with their inputs, outputs and costs."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Literal

from ..core.errors import ConfigError
from ..core.files import local_path
from ..core.format import si
from ..model.annotations import Scope, written
from .operations import Input, Op, Value, leaves, origins


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """Consecutive operations of one strategy, the unit that Whale places and splits.

    Attributes:
        index: The place in the order of execution, from 0.
        strategy: The annotation's kind, `replicate` or `split`.
        device_count: The number of devices that the annotation asks for; None means all.
        scope: The annotation's name in equations and HLO, `(default)` where there is none.
        source: The file and line of the first operation.
        num_equations: The number of equations.
        params: The paths of the parameters it reads.
        shared_params: The paths of its parameters that other TaskGraphs read too.
        inputs: The values from other TaskGraphs or the batch, as `float32[8,128]`.
        outputs: The values that other TaskGraphs read, or the loss.
        flops: The floating-point operations of a forward pass over the traced batch.
        param_bytes: The bytes of its parameters.
        input_bytes: The bytes of `inputs`.
        output_bytes: The bytes of `outputs`.
        activation_bytes: The bytes of all differentiable results of its equations.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.1.2 (TaskGraphs).
    """

    index: int
    strategy: Literal["replicate", "split"]
    device_count: int | None
    scope: str
    source: str
    num_equations: int
    params: tuple[str, ...]
    shared_params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: int
    param_bytes: int
    input_bytes: int
    output_bytes: int
    activation_bytes: int

    @property
    def label(self) -> str:
        """The annotation as a person would write it: `split(4)`."""
        return written(self.strategy, self.device_count)


def make_task_graphs(
    scopes: Sequence[Scope],
    ops: tuple[Op, ...],
    values: tuple[Value, ...],
    params: Sequence[int],
    results: tuple[Input, ...],
    names: tuple[str, ...],
) -> tuple[TaskGraph, ...]:
    """Group operations by TaskGraph.

    Args:
        params: Value numbers of the parameters.
        results: Values that the program returns.
    """
    num = len(scopes)
    read: list[set[int]] = [set() for _ in range(num)]
    made: list[set[int]] = [set() for _ in range(num)]
    task_params: list[set[int]] = [set() for _ in range(num)]
    maker: dict[int, int] = {}
    all_ops = [list[Op]() for _ in range(num)]
    for op in leaves(ops):
        all_ops[op.task].append(op)
        for v in op.outputs:
            maker[v] = op.task
    origin = origins(ops)
    for op in leaves(ops):
        made[op.task].update(op.outputs)
        for v in op.inputs:
            if not isinstance(v, int):
                continue
            source = origin(v)
            param = values[source].param
            if param is not None and source in params:
                task_params[op.task].add(param)
            elif maker.get(source) != op.task:
                read[op.task].add(source)
    wanted = {origin(v) for v in results if isinstance(v, int)}
    for task in range(num):
        wanted |= read[task]
    shared = {
        p for p in range(len(params)) if sum(p in task_params[task] for task in range(num)) > 1
    }
    out = []
    for task, scope in enumerate(scopes):
        outputs = sorted(made[task] & wanted)
        inputs = sorted(read[task])
        group = all_ops[task]
        out.append(
            TaskGraph(
                index=task,
                strategy=scope.kind,
                device_count=scope.device_count,
                scope="(default)" if scope.entry < 0 else scope.name,
                source=next((op.source for op in group if op.source), ""),
                num_equations=len(group),
                params=tuple(names[p] for p in sorted(task_params[task])),
                shared_params=tuple(names[p] for p in sorted(task_params[task] & shared)),
                inputs=tuple(str(values[v]) for v in inputs),
                outputs=tuple(str(values[v]) for v in outputs),
                flops=sum(op.flops for op in group),
                param_bytes=sum(values[params[p]].num_bytes for p in task_params[task]),
                input_bytes=sum(values[v].num_bytes for v in inputs),
                output_bytes=sum(values[v].num_bytes for v in outputs),
                activation_bytes=sum(
                    values[v].num_bytes * op.times
                    for op in group
                    for v in op.outputs
                    if values[v].differentiable and values[v].param is None
                ),
            )
        )
    return tuple(out)


def table(task_graphs: Sequence[TaskGraph]) -> str:
    """The TaskGraphs as a table of text, one line each."""
    head = ("", "TaskGraph", "equations", "params", "shared", "param bytes", "FLOPs", "activations")
    rows = [
        (
            str(t.index),
            t.label,
            str(t.num_equations),
            str(len(t.params)),
            str(len(t.shared_params)),
            si(t.param_bytes),
            si(t.flops),
            si(t.activation_bytes),
        )
        for t in task_graphs
    ]
    widths = [max(len(r[c]) for r in (head, *rows)) for c in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        first = f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}"
        return "  ".join([first, *(f"{x:>{w}}" for x, w in zip(row[2:], widths[2:], strict=True))])

    return "\n".join(line(r) for r in (head, *rows))


_COLOURS = {"replicate": "#dbe9f6", "split": "#fbe3d0"}
_MAX_SHOWN = 24


def draw_task_graphs(task_graphs: Sequence[TaskGraph], path: str | os.PathLike[str]) -> None:
    """Write the TaskGraphs as a picture; see `Graph.draw`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    shown = task_graphs[:_MAX_SHOWN]
    height = 1.15 * len(shown) + 0.4
    figure = Figure(figsize=(8.5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    axes.set_ylim(-len(shown) - 0.1, 0.3)
    largest = max((t.flops for t in shown), default=1) or 1
    for i, task in enumerate(shown):
        top = -i
        box = FancyBboxPatch(
            (0.2, top - 0.72),
            6.6,
            0.64,
            boxstyle="round,pad=0.04",
            facecolor=_COLOURS[task.strategy],
            edgecolor="#555555",
            linewidth=0.8,
        )
        axes.add_patch(box)
        axes.text(0.35, top - 0.27, f"{task.index}  {task.label}", fontsize=10, weight="bold")
        axes.text(0.35, top - 0.58, _facts(task), fontsize=8, color="#333333")
        axes.barh(top - 0.4, 2.6 * task.flops / largest, left=7.1, height=0.22, color="#5b87b5")
        axes.text(7.1, top - 0.19, f"{si(task.flops)} FLOPs", fontsize=8, va="bottom")
        if i + 1 < len(shown):
            arrow = dict(arrowstyle="->", color="#555555")
            axes.annotate("", (3.5, top - 1.05), (3.5, top - 0.78), arrowprops=arrow)
            axes.text(3.65, top - 0.97, f"{si(task.output_bytes)}B", fontsize=8)
    rest = len(task_graphs) - len(shown)
    flops = si(sum(t.flops for t in task_graphs))
    title = f"{len(task_graphs)} TaskGraphs, {flops} FLOPs forward"
    axes.set_title(title + (f" (the first {_MAX_SHOWN})" if rest else ""), fontsize=10)
    file = local_path(path, "path", ConfigError)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _facts(task: TaskGraph) -> str:
    where = pathlib.Path(task.source).name if task.source else ""
    parts = [
        f"{task.num_equations} equations",
        f"{len(task.params)} parameters, {si(task.param_bytes)}B",
        f"activations {si(task.activation_bytes)}B",
        where,
    ]
    return "   ".join(p for p in parts if p)
