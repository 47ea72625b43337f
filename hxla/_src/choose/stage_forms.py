"""Unlike stages, as the user or the annotations ask for them.

References:
    Jia et al., "Whale", USENIX ATC 2022, figure 5 (TaskGraphs of unlike strategies and counts).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from ..core.config import Config
from ..core.errors import ConfigError, PlanError
from ..core.files import listed
from ..core.keywords import as_whole_number
from ..core.types import DATA_AXIS, TENSOR_AXIS
from ..graph.graph import Graph
from ..graph.parts import ChainPart, stacked_dims
from ..plan.axis_assignment import Axes
from ..plan.layout import Layout, dtype_name, from_spec
from ..plan.parts import Axis, PlannedStage, Role
from ..plan.rules import RuleSet
from ..plan.sharding import Sharded
from ..plan.unlike_stages import STAGE_AXES, shard_stage
from .mesh_axes import VirtualDevices, resolve_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageForm:
    """The devices of a stage.

    Attributes:
        axes: Names and sizes of its axes, those of one device left out.
        work: Its share of the work, in proportion to the other stages.
    """

    axes: Axes = ()
    work: float

    @property
    def num_devices(self) -> int:
        """The number of devices of the stage."""
        return math.prod(size for _, size in self.axes)


_KEYS = ("devices", *STAGE_AXES, "work")
_FORM = "write stages=[{'devices': 1}, {'tensor': 2}], a table for each stage"


def forms_asked(stages: Sequence[Any]) -> tuple[StageForm, ...]:
    """The forms of `stages=[{"devices": 1}, {"tensor": 2}]`.

    Raises:
        ConfigError: With every fault.
    """
    forms, faults = [], []
    for s, table in enumerate(stages):
        fault = _fault(table)
        if fault:
            faults.append(f"stages[{s}]: {fault}")
            continue
        axes = tuple((name, int(table[name])) for name in STAGE_AXES if table.get(name, 1) > 1)
        size = math.prod(n for _, n in axes)
        if table.get("devices", size) != size:
            needs = f"its axes take {size}" if axes else "nothing says what each computes"
            faults.append(
                f"stages[{s}]: {table['devices']} devices, but {needs}: write {{'tensor': n}}, "
                "{'data': n} or both"
            )
            continue
        forms.append(StageForm(axes=axes, work=float(table.get("work", size))))
    if len(stages) < 2 and not faults:
        faults.append("a pipeline has at least two stages: leave stages out, or use a mesh")
    if faults:
        raise ConfigError(f"stages cannot be read, {_FORM}:{listed(faults)}")
    return tuple(forms)


def _fault(table: Any) -> str:
    """What is wrong with the table of a stage; empty: nothing."""
    if not isinstance(table, Mapping):
        return f"{table!r} is no table; either all stages are tables, or all are shares of the work"
    unknown = [str(key) for key in table if key not in _KEYS]
    if unknown:
        return f"there is no key {', '.join(map(repr, unknown))}, use {', '.join(_KEYS)}"
    for name, value in ((name, as_whole_number(value)) for name, value in table.items()):
        if isinstance(value, tuple | list):
            return f"{name}={value!r}: shards inside a stage are alike, give one number"
        if name == "work":
            is_good = isinstance(value, int | float) and 0 < value < math.inf
        else:
            is_good = isinstance(value, int) and value >= 1
        if isinstance(value, bool) or not is_good:
            return f"{name}={value!r} is no {'number above 0' if name == 'work' else 'count'}"
    return ""


def forms_annotated(virtual: VirtualDevices, graph: Graph) -> tuple[StageForm, ...]:
    """The forms of TaskGraphs on distinct devices."""
    forms = []
    tasks = zip(graph.task_graphs, graph.nested, virtual.devices[0], strict=True)
    for task, copies, devices in tasks:
        num = len(devices)
        split = num // copies if task.strategy == "split" else 1
        axes = (DATA_AXIS, num // split), (TENSOR_AXIS, split)
        forms.append(StageForm(axes=tuple(a for a in axes if a[1] > 1), work=float(num)))
    return tuple(forms)


def check_settings(settings: Config) -> None:
    """Refuse settings that unlike stages do not have yet.

    Raises:
        ConfigError: With every such setting.
    """
    memory, offload = settings.memory, settings.memory.offload
    asked = {
        "memory.zero": memory.zero or None,
        "memory.shard_groups": memory.shard_groups,
        "memory.waves": memory.waves,
        "memory.segments": memory.segments,
        "memory.recompute": "auto" if memory.recompute == "auto" else None,
        "memory.offload.optimizer": offload.optimizer,
        "memory.offload.parameters": offload.parameters,
        "memory.offload.stash": offload.stash,
        "communication.sparse_embeddings": settings.communication.sparse_embeddings or None,
    }
    faults = [f"{name}={value!r}" for name, value in asked.items() if value not in (None, "device")]
    schedule = settings.pipeline.schedule
    if isinstance(schedule, str) and schedule not in ("gpipe", "1f1b"):
        faults.append(f"pipeline.schedule={schedule!r}")
    if faults:
        raise ConfigError(
            f"unlike stages do not run with {', '.join(faults)} yet: leave this "
            "out, or use stages of one form"
        )


def planned_stages(
    graph: Graph,
    ordered: Graph,
    parts: Sequence[ChainPart],
    forms: Sequence[StageForm],
    rules: RuleSet | None,
) -> tuple[tuple[PlannedStage, ...], list[str], float]:
    """The stages of a plan, lines for it, and the most bytes that a device sends inside its stage.

    Args:
        ordered: The graph in the order in which it is cut.
        parts: The part of each stage.
        rules: Decide which parameters the axes cut; None: the least communication.

    Raises:
        AnnotationError: If a parameter cannot be sharded by its annotation or rule.
        PlanError: If an axis cuts a stacked parameter between its layers.
    """
    stages, lines, sent = [], [], 0.0
    for s, (part, form) in enumerate(zip(parts, forms, strict=True)):
        num_tasks, by_rules = len(graph.task_graphs), rules is not None
        inner: Role = "rules" if by_rules else "split"
        roles: dict[str, tuple[Role, ...]] = {
            name: ("replicate" if name == DATA_AXIS else inner,) * num_tasks
            for name, _ in form.axes
        }
        dims: list[Mapping[str, int]] | None = None
        cutting = tuple(axis for axis in form.axes if axis[0] != DATA_AXIS)
        if rules is not None and cutting:
            resolved = resolve_rules(graph, rules, cutting)
            dims = list(resolved.dims)
            lines += [f"stage {s}: {line}" for line in resolved.report()]
        elif not cutting:
            dims = [{} for _ in graph.param_names]
        sharded = shard_stage(ordered, part, form.axes, roles, dims)
        sent = max(sent, sum(axis.sent_bytes for axis in sharded.axes.values()))
        layouts = _layouts(ordered, part, sharded)
        _check_layers(graph, s, layouts)
        axes = [Axis(name=name, size=size, roles=roles[name]) for name, size in form.axes]
        stages.append(PlannedStage(axes=tuple(axes), parameters=layouts))
    return tuple(stages), lines, sent


def _layouts(graph: Graph, part: ChainPart, sharded: Sharded) -> tuple[Layout, ...]:
    """The layouts inside a stage of the parameters that it reads."""
    specs: dict[int, P] = {}
    for entry in part.segment.params:
        v = graph.param_values[entry]
        specs.setdefault(graph.values[v].param or 0, sharded.spec_of(v))
    return tuple(
        Layout(
            name=graph.param_names[p],
            shape=graph.param_shapes[p],
            dtype=dtype_name(graph.values[graph.param_values[p]].dtype),
            spec=from_spec(spec, len(graph.param_shapes[p])),
        )
        for p, spec in sorted(specs.items())
    )


def _check_layers(graph: Graph, s: int, layouts: Sequence[Layout]) -> None:
    stacked = dict(zip(graph.param_names, stacked_dims(graph), strict=True))
    faults = [
        f"stage {s}: an axis cuts parameter {layout.name} in dimension {d}, in which a scan's "
        "layers are stacked: write rules that cut another dimension"
        for layout in layouts
        for d in stacked[layout.name]
        if layout.spec[d]
    ]
    if faults:
        raise PlanError("\n".join(faults))
