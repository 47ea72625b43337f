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
from ..core.types import DATA_AXIS, TENSOR_AXIS, TOKEN_AXIS
from ..graph.graph import Graph
from ..graph.parts import ChainPart, stacked_dims
from ..plan.axis_assignment import Axes
from ..plan.layout import Layout, dtype_name, from_spec
from ..plan.parts import Axis, PlannedStage, Role
from ..plan.rules import RuleSet
from ..plan.sharding import Sharded
from ..plan.unlike_stages import ACTIVATION_AXES, STAGE_AXES, shard_stage, stage_graph
from .mesh_axes import VirtualDevices, resolve_rules
from .uneven_sizes import Sizes, sizes_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageForm:
    """The devices of a stage.

    Attributes:
        axes: Names and sizes of its axes, those of one device left out.
        work: Its share of the work, in proportion to the other stages.
        is_stated: Whether the user gave this share.
        shares: The ratio of the shards of its one axis, where they are unlike.
    """

    axes: Axes = ()
    work: float
    is_stated: bool = False
    shares: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        """The number of devices of the stage."""
        return math.prod(size for _, size in self.axes)


_KEYS = ("devices", *STAGE_AXES, "work")
_FORM = "write stages=[{'devices': 1}, {'tensor': 2}], a table for each stage"
_LISTS = (
    "write stages=[[{'devices': 1}], [{'devices': 1}, {'devices': 1}]], a list for each replica"
)


def forms_asked(stages: Sequence[Any]) -> tuple[StageForm, ...]:
    """The forms of `stages=[{"devices": 1}, {"tensor": 2}]`.

    Raises:
        ConfigError: With every fault.
    """
    forms, faults = _forms(stages, "stages")
    if len(stages) < 2 and not faults:
        faults.append("a pipeline has at least two stages: leave stages out, or use a mesh")
    if faults:
        raise ConfigError(f"stages cannot be read, {_FORM}:{listed(faults)}")
    return tuple(forms)


def replica_forms_asked(replicas: Sequence[Any]) -> tuple[tuple[StageForm, ...], ...]:
    """The forms of `stages=[[{"devices": 1}], [{"devices": 1}, {"devices": 1}]]`.

    Raises:
        ConfigError: With every fault.
    """
    out, faults = [], []
    for r, stages in enumerate(replicas):
        if isinstance(stages, list | tuple) and stages:
            forms, wrong = _forms(stages, f"stages[{r}]")
            out.append(tuple(forms))
            faults += wrong
        else:
            faults.append(f"stages[{r}]: {stages!r} is no list of tables, one for each stage")
    if len(replicas) < 2 and not faults:
        faults.append("a list of lists has a list for each of several replicas, write the tables")
    if faults:
        raise ConfigError(f"stages cannot be read, {_LISTS}:{listed(faults)}")
    return tuple(out)


def _forms(stages: Sequence[Any], key: str) -> tuple[list[StageForm], list[str]]:
    """The forms of one replica's stages, and what is wrong with them."""
    forms, faults = [], []
    for s, table in enumerate(stages):
        fault = _fault(table)
        if fault:
            faults.append(f"{key}[{s}]: {fault}")
            continue
        asked = {name: as_whole_number(table.get(name, 1)) for name in STAGE_AXES}
        ratios = [tuple(map(as_whole_number, _ratio(n))) for n in asked.values() if _ratio(n)]
        shares = next((ratio for ratio in ratios if len(set(ratio)) > 1), ())
        sizes = {name: len(_ratio(n)) or int(n) for name, n in asked.items()}
        axes = tuple((name, n) for name, n in sizes.items() if n > 1)
        size = math.prod(n for _, n in axes)
        if table.get("devices", size) != size:
            needs = f"its axes take {size}" if axes else "nothing says what each computes"
            faults.append(
                f"{key}[{s}]: {table['devices']} devices, but {needs}: write {{'tensor': n}}, "
                "{'data': n} or both"
            )
            continue
        if shares and len(axes) > 1:
            faults.append(
                f"{key}[{s}]: uneven shards need a stage with one axis, leave "
                f"{' or '.join(repr(name) for name, _ in axes)} out"
            )
            continue
        work = float(table.get("work", size))
        forms.append(
            StageForm(
                axes=axes,
                work=work,
                is_stated="work" in table,
                shares=shares,
            )
        )
    return forms, faults


def _fault(table: Any) -> str:
    """What is wrong with the table of a stage; empty: nothing."""
    if not isinstance(table, Mapping):
        return f"{table!r} is no table; either all stages are tables, or all are shares of the work"
    unknown = [str(key) for key in table if key not in _KEYS]
    if unknown:
        return f"there is no key {', '.join(map(repr, unknown))}, use {', '.join(_KEYS)}"
    for name, value in ((name, as_whole_number(value)) for name, value in table.items()):
        if _ratio(value) and name in ("devices", DATA_AXIS, "work"):
            return f"{name}={value!r}: {name} has no ratio of shards, give one number"
        counts = [as_whole_number(n) for n in _ratio(value) or (value,)]
        if name == "work":
            is_good = isinstance(value, int | float) and 0 < value < math.inf
        else:
            is_good = all(isinstance(n, int) and n >= 1 for n in counts)
        if not is_good or any(isinstance(n, bool) for n in counts):
            return f"{name}={value!r} is no {'number above 0' if name == 'work' else 'count'}"
    return ""


def _ratio(value: Any) -> Sequence[Any]:
    """The ratio of the shards along an axis; empty: a number of devices."""
    return value if isinstance(value, tuple | list) else ()


def stages_in_granules(
    forms: Sequence[StageForm], granules: int, key: str
) -> tuple[tuple[StageForm, ...], list[str]]:
    """The forms with the axis `tensor`, also for one device, and the faults."""
    out, faults = [], []
    for s, form in enumerate(forms):
        others = [name for name, _ in form.axes if name != TENSOR_AXIS]
        if others:
            faults.append(f"{key}[{s}]: use {TENSOR_AXIS!r} instead of {' and '.join(others)}")
        elif form.shares:
            faults.append(f"{key}[{s}]: granules are of one size, write {{'tensor': n}}")
        elif granules % form.num_devices:
            faults.append(
                f"{key}[{s}]: {form.num_devices} devices do not divide {granules} granules "
                "(numerics.granules)"
            )
        out.append(dataclasses.replace(form, axes=((TENSOR_AXIS, form.num_devices),)))
    return tuple(out), faults


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


def faults_of(settings: Config) -> list[str]:
    """The settings that unlike stages do not have yet."""
    memory, offload = settings.memory, settings.memory.offload
    asked = {
        "memory.zero": memory.zero if (memory.zero or 0) > 1 else None,
        "memory.shard_groups": memory.shard_groups,
        "memory.waves": memory.waves,
        "memory.segments": memory.segments,
        "memory.offload.parameters": offload.parameters,
        "memory.offload.stash": offload.stash,
    }
    faults = [f"{name}={value!r}" for name, value in asked.items() if value not in (None, "device")]
    schedule = settings.pipeline.schedule
    if isinstance(schedule, str) and schedule not in ("gpipe", "1f1b"):
        faults.append(f"pipeline.schedule={schedule!r}")
    return faults


def check_settings(settings: Config) -> None:
    """Refuse settings that unlike stages do not have yet.

    Raises:
        ConfigError: With every such setting.
    """
    if faults := faults_of(settings):
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
    granules: int | None = None,
) -> tuple[tuple[PlannedStage, ...], list[str], float]:
    """The stages of a plan, lines for it, and the most bytes that a device sends inside its stage.

    Args:
        ordered: The graph in the order in which it is cut.
        parts: The part of each stage.
        rules: Decide which parameters the axes cut; None: the least communication.
        granules: See `Axis.granules`.

    Raises:
        AnnotationError: If a parameter cannot be sharded by its annotation or rule.
        PlanError: If an axis cuts a stacked parameter between its layers.
    """
    stages, lines, sent = [], [], 0.0
    for s, (part, form) in enumerate(zip(parts, forms, strict=True)):
        num_tasks, by_rules = len(graph.task_graphs), rules is not None
        inner: Role = "rules" if by_rules else "split"
        of_activations: dict[str, Role] = {DATA_AXIS: "replicate", TOKEN_AXIS: "tokens"}
        roles: dict[str, tuple[Role, ...]] = {
            name: (of_activations.get(name, inner),) * num_tasks for name, _ in form.axes
        }
        dims: list[Mapping[str, int]] | None = None
        cutting = tuple(axis for axis in form.axes if axis[0] not in ACTIVATION_AXES)
        is_uneven = bool(form.shares)
        if rules is not None and cutting:
            cut_in = tuple((name, granules or n) for name, n in cutting)
            resolved = resolve_rules(graph, rules, cut_in, unlike=is_uneven)
            dims = list(resolved.dims)
            lines += [f"stage {s}: {line}" for line in resolved.report()]
        elif not cutting:
            dims = [{} for _ in graph.param_names]
        cut = graph, ordered, part, form.axes, roles, dims
        sharded = shard_stage(*cut, unlike=is_uneven, granules=granules)
        sent = max(sent, sum(axis.sent_bytes for axis in sharded.axes.values()))
        axes = [
            Axis(name=name, size=size, roles=roles[name], shares=form.shares, granules=granules)
            for name, size in form.axes
        ]
        sizes: Sequence[Sizes] = [()] * len(graph.param_names)
        if is_uneven:
            sizes, of_sizes = _stage_sizes(ordered, part, sharded, form.shares)
            lines += [f"stage {s}: {line}" for line in of_sizes]
        layouts = _layouts(ordered, part, sharded, sizes)
        _check_layers(graph, s, layouts)
        stages.append(PlannedStage(axes=tuple(axes), parameters=layouts))
    return tuple(stages), lines, sent


def _stage_sizes(
    graph: Graph, part: ChainPart, sharded: Sharded, shares: Sequence[int]
) -> tuple[Sequence[Sizes], list[str]]:
    """The shard sizes of each parameter in a stage of unlike devices, and lines for the plan."""
    [(axis, assigned)] = sharded.axes.items()
    alone = stage_graph(graph, part)
    rows = (graph.values[graph.param_values[entry]].rows for entry in part.segment.params)
    if any(op.iterations for op in alone.ops) or any(rows):
        raise PlanError(
            "a stage begins or ends inside a scan over layers, which shards of unlike sizes run "
            "whole: give each scan to one stage, or let the shards be alike"
        )
    return sizes_of(alone, assigned, axis, shares, stated=True)


def _layouts(
    graph: Graph, part: ChainPart, sharded: Sharded, sizes: Sequence[Sizes]
) -> tuple[Layout, ...]:
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
            sizes=sizes[p],
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
