"""A measured step and a predicted one, side by side."""

import html
import pathlib

from .._core._errors import InspectError
from .._core._files import MOST_JSON_BYTES, named, read_text
from .._core._format import span
from .._plan._plan import Plan
from .._plan._plan_parts import Prediction
from .._report._lanes import COLLECTIVE, COMPUTATION, Bar, Lanes, lanes_of_timeline
from .._report._lanes_picture import step_picture
from .._report._page import figure, fold, section, table
from .._schedule._timeline import from_perfetto

_MAX_LONGEST = 15  # operations that are listed


def step_section(measured: Lanes | None, predicted: Lanes | None) -> str:
    """A section of a page: one step in time, and its longest operations if it was measured."""
    steps = [step for step in (measured, predicted) if step is not None]
    titles = "; ".join(step.title for step in steps)
    parts = [figure(step_picture(steps), f"{titles}. A line marks where a step ends.")]
    if measured is not None:
        rows = [
            (
                name,
                span(measured.busy_seconds(lane, COMPUTATION)),
                span(measured.busy_seconds(lane, COLLECTIVE)),
                span(max(bar.end_seconds for bar in measured.bars if bar.lane == lane)),
            )
            for lane, name in enumerate(measured.names)
        ]
        heads = ("measured", "computation", "collectives and waiting in them", "until")
        parts.append(fold("Each device", table(heads, rows)))
        took = sorted(measured.mean_seconds().items(), key=lambda item: -item[1])
        heads = ("operation", "kind", "program", "a step, mean over devices")
        rows = [(*names, span(seconds)) for names, seconds in took[:_MAX_LONGEST]]
        parts.append(fold("Longest operations", table(heads, rows, left=(0, 1, 2))))
        parts.append(f"<p>{html.escape(measured.note)}</p>")
    return section("One step in time", *parts)


def lanes_of_file(path: pathlib.Path) -> Lanes:
    """A file of `hxla plan --write` as lanes: the plan or the timeline of one replica.

    Raises:
        PlanError: If it is neither.
        InspectError: If it cannot be read.
    """
    text = read_text(path, MOST_JSON_BYTES, named("prediction", path, InspectError))
    if '"traceEvents"' not in text:
        return lanes_of_plan(Plan.from_json(text))
    timeline, names = from_perfetto(text)
    title = f"predicted, without reduction and update: {span(timeline.makespan_seconds)}"
    return lanes_of_timeline(timeline, names, title=title)


def lanes_of_plan(plan: Plan) -> Lanes:
    """A plan as lanes: what each device's step is made of, not in which order."""
    bars = []
    known = plan.prediction or Prediction()
    kinds = {device.rank: device.kind for device in plan.devices}
    for lane, device in enumerate(known.devices):
        at = 0.0
        for kind, took in (
            ("forward and backward", device.compute_seconds),
            ("waiting", device.wait_seconds),
            ("reduction", device.reduction_seconds),
            ("update", device.update_seconds),
        ):
            if took > 0:
                label = f"{kind} {span(took)}"
                bars.append(
                    Bar(lane=lane, kind=kind, label=label, start_seconds=at, end_seconds=at + took)
                )
                at += took
    return Lanes(
        title=f"predicted: {span(known.step_seconds)}, sums of each device",
        names=tuple(f"{kinds[d.rank]} (device {d.rank})" for d in known.devices),
        bars=tuple(bars),
    )
