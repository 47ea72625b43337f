"""A picture of TaskGraphs: a box for each, arrows for what flows between them."""

import os
import pathlib
from collections.abc import Sequence

from .._core._errors import ConfigError
from .._core._files import local_path
from .._core._format import si
from ._task_graphs import TaskGraph

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
