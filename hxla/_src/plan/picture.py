"""A picture of a plan: the work, time and memory of each device."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ..core.errors import ConfigError
from ..core.files import local_path
from .parts import DevicePrediction

_PARTS = (
    ("compute_seconds", "compute", "#2f6fdb"),
    ("reduction_seconds", "sum", "#e39a1d"),
    ("update_seconds", "update", "#2a9d78"),
    ("wait_seconds", "wait", "#d3d9e2"),
)
#: Owners of a device's bytes; `held` stands for all of them where they are not known.
_OWNERS = {
    "held": "#b48ad6",
    "parameters": "#2f6fdb",
    "sums": "#e39a1d",
    "optimizer": "#2a9d78",
    "gradients": "#c65f8a",
    "activations": "#9aa5b8",
}
_MOST_ROWS = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device.

    Attributes:
        num_microbatches: Of its replica in a step.
        prediction: None if nothing is known.
    """

    label: str
    replica: int
    stage: int
    num_microbatches: int
    prediction: DevicePrediction | None


def draw_devices(
    rows: Sequence[DeviceRow], path: str | os.PathLike[str], *, num_stages: int, title: str
) -> None:
    """Write the picture of `Plan.draw`: a row for each device, up to a limit."""
    from matplotlib.figure import Figure

    shown = list(rows[:_MOST_ROWS])
    known = [row.prediction for row in shown if row.prediction is not None]
    timed = [p for p in known if p.compute_seconds]
    sized = [p for p in known if p.memory_bytes]
    panels = [_work, *([_time] if timed else []), *([_memory] if sized else [])]
    figure = Figure(
        figsize=(3.2 + 3.0 * len(panels), 1.2 + 0.3 * len(shown)), dpi=130, layout="constrained"
    )
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, shown, num_stages)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False)
    places = range(len(shown))
    axes[0].set_yticks(places, [row.label for row in shown], fontsize=8)
    axes[0].set_ylim(len(shown) - 0.4, -0.6)
    more = f" (the first {len(shown)} of {len(rows)} devices)" if len(rows) > len(shown) else ""
    figure.suptitle(title + more, fontsize=9)
    file = local_path(path, "path", ConfigError)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _work(ax: Any, rows: Sequence[DeviceRow], num_stages: int) -> None:
    counts = [row.num_microbatches for row in rows]
    ax.barh(range(len(rows)), counts, color="#7fa9ea", height=0.7)
    for i, row in enumerate(rows):
        stage = f", stage {row.stage}" if num_stages > 1 else ""
        ax.text(
            0, i, f" copy {row.replica}{stage}: {row.num_microbatches}", va="center", fontsize=7
        )
    ax.set_xlim(0, max(max(counts, default=1), 1) * 1.02)
    ax.set_xlabel("microbatches a step", fontsize=8)


def _time(ax: Any, rows: Sequence[DeviceRow], _num_stages: int) -> None:
    left = [0.0] * len(rows)
    for field, label, color in _PARTS:
        took = [getattr(row.prediction, field) if row.prediction else 0.0 for row in rows]
        ax.barh(range(len(rows)), took, left=left, color=color, label=label, height=0.7)
        left = [a + b for a, b in zip(left, took, strict=True)]
    ax.set_xlabel("seconds of a step", fontsize=8)
    ax.legend(fontsize=7, frameon=False, ncols=2, loc="lower right")


def _memory(ax: Any, rows: Sequence[DeviceRow], _num_stages: int) -> None:
    unit = 2.0**30
    left = [0.0] * len(rows)
    for owner, color in _OWNERS.items():
        sizes = [_owned_bytes(row.prediction, owner) / unit for row in rows]
        if any(sizes):
            ax.barh(range(len(rows)), sizes, left=left, color=color, label=owner, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, row in enumerate(rows):
        if row.prediction is not None and row.prediction.capacity_bytes:
            at = row.prediction.capacity_bytes / unit
            ax.plot([at, at], [i - 0.42, i + 0.42], color="#1f2430", linewidth=1.2)
    if any(row.prediction is not None and row.prediction.held is not None for row in rows):
        ax.legend(fontsize=7, frameon=False, ncols=2, loc="lower right")
    ax.set_xlabel("GiB of memory (mark: capacity)", fontsize=8)


def _owned_bytes(known: DevicePrediction | None, owner: str) -> float:
    """Bytes of one owner on a device; `held` is all of them where owners are not known."""
    if known is None or known.held is None:
        return known.memory_bytes if known is not None and owner == "held" else 0.0
    return known.held.by_owner.get(owner, 0.0)
