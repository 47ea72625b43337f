"""One picture of the jobs' devices over time under each policy, of waiting and completion."""

import colorsys
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from .simulator import Hold, Simulation

_GOLDEN = 0.618033988749895  # such steps around the colour circle keep neighbours distinct
_LINES = ("#888888", "#c46a1b", "#8a4fbf", "#2f9e44", "#1c7ed6", "#d6336c")


def write_picture(simulations: Mapping[str, Simulation], path: str) -> None:
    """Draw simulations of the same jobs.

    Args:
        path: Of the file; its ending is the format.
    """
    from matplotlib.figure import Figure

    num = len(simulations)
    end = max(simulation.makespan for simulation in simulations.values())
    figure = Figure(figsize=(11, 1.7 * num + 2.6), layout="constrained")
    grid = figure.add_gridspec(num + 1, 2, height_ratios=[1.7] * num + [2.6])
    first = None
    for row, (name, simulation) in enumerate(simulations.items()):
        panel = figure.add_subplot(grid[row, :], sharex=first)
        first = first or panel
        _draw_holds(panel, simulation)
        title = f"{name}: mean completion {simulation.mean_completion:,.0f} s"
        panel.set_title(f"{title}, {simulation.num_moves} moves", loc="left", fontsize=9)
        panel.set_xlim(0, end)
        panel.tick_params(labelbottom=row == num - 1, labelsize=8)
    panel.set_xlabel("seconds; a row is a device, a colour a job", fontsize=8)
    _draw_waiting(figure.add_subplot(grid[num, 0]), simulations)
    _draw_completions(figure.add_subplot(grid[num, 1]), simulations)
    figure.savefig(path, dpi=110)


def _draw_holds(panel: Any, simulation: Simulation) -> None:
    """Draw a row for each device, grouped by kind; a job keeps its rows as far as possible."""
    colors = {job.name: _color(i) for i, job in enumerate(simulation.jobs)}
    base = 0
    for kind, num in enumerate(simulation.capacity):
        for hold, rows in _rows(simulation, kind, num):
            for start, count in _runs(rows):
                bar = [(hold.start_seconds, hold.end_seconds - hold.start_seconds)]
                where = (base + start, count)
                panel.broken_barh(bar, where, color=colors[hold.name], lw=0)
        base += num
        panel.axhline(base, color="black", lw=0.6)
    edges = [0, *itertools.accumulate(simulation.capacity)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    panel.set_ylim(0, base)
    panel.set_yticks(middles, simulation.kinds)


def _rows(simulation: Simulation, kind: int, num: int) -> Iterator[tuple[Hold, list[int]]]:
    free = set(range(num))
    taken: list[tuple[float, list[int]]] = []
    last: dict[str, list[int]] = {}
    holds = [h for h in simulation.holds if h.nums[kind]]
    for hold in sorted(holds, key=lambda h: h.start_seconds):
        ended = [t for t in taken if t[0] <= hold.start_seconds + 1e-9]
        taken = [t for t in taken if t[0] > hold.start_seconds + 1e-9]
        free |= {row for _, rows in ended for row in rows}
        same_rows = [row for row in last.get(hold.name, []) if row in free][: hold.nums[kind]]
        rows = same_rows + sorted(free - set(same_rows))[: hold.nums[kind] - len(same_rows)]
        free -= set(rows)
        taken.append((hold.end_seconds, rows))
        last[hold.name] = rows
        yield hold, rows


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    for _, group in itertools.groupby(enumerate(sorted(rows)), key=lambda pair: pair[1] - pair[0]):
        members = [row for _, row in group]
        yield members[0], len(members)


def _color(index: int) -> tuple[float, float, float]:
    return colorsys.hls_to_rgb(index * _GOLDEN % 1, 0.45 + 0.2 * (index % 3) / 2, 0.6)


def _draw_waiting(panel: Any, simulations: Mapping[str, Simulation]) -> None:
    for simulation, color in zip(simulations.values(), itertools.cycle(_LINES), strict=False):
        waiting: Counter[float] = Counter(job.arrival_seconds for job in simulation.jobs)
        waiting.update(hold.end_seconds for hold in simulation.holds)
        waiting.subtract(hold.start_seconds for hold in simulation.holds)
        waiting.subtract(simulation.ends)
        times = sorted(waiting)
        nums = list(itertools.accumulate(waiting[time] for time in times))
        panel.step(times, nums, where="post", lw=1, color=color)
    panel.set(xlabel="seconds", ylabel="jobs without devices")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def _draw_completions(panel: Any, simulations: Mapping[str, Simulation]) -> None:
    for (name, simulation), color in zip(
        simulations.items(), itertools.cycle(_LINES), strict=False
    ):
        ranks = sorted(simulation.completions)
        share = [(i + 1) / len(ranks) for i in range(len(ranks))]
        panel.step(ranks, share, where="post", lw=1.3, color=color, label=name)
    panel.set(xlabel="seconds from arrival to end", ylabel="share of jobs", xscale="log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
