"""A split in tables: the parts of devices with their padding, and who waits for whom."""

from .._core._format import num_bytes, percent, span
from .._plan._plan import Plan
from .._report._lanes import COLLECTIVE, COMPUTATION, Lanes
from .._report._tables import Table


def parts_table(plan: Plan) -> Table:
    """Parameters that are cut into parts of unlike sizes, and what pads them; the largest first."""
    rows = []
    for layout in sorted(plan.parameters, key=lambda p: -p.num_bytes):
        for dim, parts in enumerate(layout.sizes):
            if parts:
                padding = max(parts) * len(parts) - sum(parts)
                rows.append(
                    (
                        layout.name,
                        str(dim),
                        " + ".join(map(str, parts)),
                        f"{max(parts)} on each",
                        percent(padding / layout.shape[dim]),
                        num_bytes(layout.num_bytes // layout.shape[dim] * padding),
                    )
                )
    heads = ("parameter", "dimension", "parts", "padded to", "padding", "of all devices")
    return Table(heads, rows)


def waiting_table(step: Lanes) -> Table:
    """What each device of a measured step did.

    Collectives take those who come first as long as those who come last take for all: what a device
    spends in them beyond the one that spends least, it waits.
    """
    lanes = range(len(step.names))
    computing = [step.busy_seconds(lane, COMPUTATION) for lane in lanes]
    joining = [step.busy_seconds(lane, COLLECTIVE) for lane in lanes]
    rows = [
        (
            step.names[lane],
            span(computing[lane]),
            span(joining[lane]),
            span(joining[lane] - min(joining)),
            percent((joining[lane] - min(joining)) / step.seconds),
        )
        for lane in lanes
    ]
    return Table(("device", "computes", "in collectives", "waits there", "of the step"), rows)
