"""`hxla.make_plan`: a plan of a traced graph, without data, devices or an optimizer."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .._cluster._cluster import Cluster, Device
from .._cluster._mesh_file import load_cluster
from .._core._config import Config, as_config
from .._core._errors import PlanError
from .._graph._graph import Graph
from .._plan._plan import Plan
from .._plan._plan_parts import SumsForm
from .._plan._rules import RuleSet, load_rules
from ._complete import complete
from ._pipeline_request import asked
from ._structures import grid_of, structure_of


def make_plan(
    graph: Graph,
    cluster: int | Cluster | str | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    rules: str | RuleSet | None = None,
    stages: int | Sequence[float] | None = None,
    batch_size: int | None = None,
    reduction: Literal["exact", "float"] = "exact",
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Plan:
    """Lay a traced loss over devices that need not be here.

    Args:
        graph: From `hxla.trace`, over one microbatch.
        cluster: How many devices, or which; None: those that the mesh takes.
        mesh: Mesh axes and sizes, such as `{"data": 4, "tensor": 2}`; None: the model's annotations
            say how devices are used.
        rules: Rule set, or the name or file of one, that says what the inner axes cut.
        stages: Of a pipeline, or the shares of the work of each.
        batch_size: Examples of a global batch; None: one microbatch for each copy of the model.
        reduction: `exact` or `float`.
        config: Further settings.

    Returns:
        The plan; `print(plan.explain())` shows it.

    Raises:
        ConfigError: Arguments that contradict each other.
        PlanError: If the devices do not fit the annotations, or nothing explains an axis.
        AnnotationError: If a parameter cannot be cut as annotated or as a rule says.

    Example:
        >>> print(hxla.make_plan(hxla.trace(model, loss, batch), 8).explain())
    """
    settings = as_config(config)
    if cluster is None:
        if mesh is None:
            raise PlanError("hxla.make_plan needs a cluster, a number of devices, or a mesh")
        cluster = int(np.prod(list(mesh.values())))
    if isinstance(cluster, str):
        cluster = load_cluster(cluster)
    if not isinstance(cluster, Cluster):
        cluster = Cluster(name="", devices=(Device(kind="device"),) * cluster)
    axes, grid = None, np.arange(len(cluster.devices))
    if mesh is not None:
        axes, grid = grid_of(mesh, len(cluster.devices))
    structure = structure_of(
        graph,
        cluster,
        settings.cluster,
        asked(stages, settings.pipeline),
        axes,
        grid,
        load_rules(rules) if isinstance(rules, str) else rules,
    )
    size = graph.values[graph.batch_values[0]].shape[0]
    return complete(
        graph,
        structure,
        cluster=cluster,
        batch_size=batch_size or size * len(structure.replicas),
        microbatch_size=size,
        sums=SumsForm(kind=reduction),
    )
