"""`hxla.make_plan`: a plan of a traced graph, without data, devices or an optimizer."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..cluster.cluster import Cluster, Device
from ..cluster.mesh_file import load_cluster
from ..core.config import Config, as_config
from ..core.errors import PlanError
from ..graph.graph import Graph
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..plan.rules import RuleSet, as_rules
from .complete import complete
from .pipeline_request import asked
from .stage_forms import check_settings
from .structures import grid_of, shares_of, structure_of


def make_plan(
    graph: Graph,
    cluster: int | Cluster | str | None = None,
    *,
    mesh: Mapping[str, int | tuple[int, ...]] | None = None,
    rules: str | RuleSet | None = None,
    stages: int | Sequence[float] | Sequence[Mapping[str, float]] | None = None,
    batch_size: int | None = None,
    reduction: Literal["exact", "float"] = "exact",
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Plan:
    """Lay a traced loss over devices that need not be here, as annotated or asked; no search.

    Args:
        graph: The loss, traced by `hxla.trace` for one microbatch.
        cluster: The number of devices, or a described cluster, or a mesh file or its name; None: as
            many devices as the mesh takes.
        mesh: The mesh axes and sizes, such as `{"data": 4, "tensor": 2}`, or for one axis the ratio
            in which its devices share the work, `{"tensor": (2, 1)}`; None: the model's annotations
            say how devices are used.
        rules: The rule set, or the name or file of one, that decides what the inner axes shard.
        stages: The number of stages of a pipeline, the share of the work of each, or a table of
            devices for each, see `Job.plan`.
        batch_size: The examples of a global batch; None: one microbatch for each replica.
        reduction: The form of the sums of gradients, `exact` or `float`.
        config: Further settings.

    Returns:
        The plan; `print(plan.explain())` shows it.

    Raises:
        ConfigError: If arguments contradict each other.
        MeshError: If a mesh file cannot be read.
        PlanError: If the devices do not fit the annotations, or nothing explains an axis.
        AnnotationError: If a parameter cannot be sharded by its annotation or rule.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((16, 1024), "float32")}
        >>> graph = hxla.trace(model, lambda model, batch: model(batch["x"]).mean(), batch)
        >>> hxla.make_plan(graph, 8).counts
        (1, 1, 1, 1, 1, 1, 1, 1)
    """
    settings = as_config(config)
    if cluster is None:
        if mesh is None:
            raise PlanError("hxla.make_plan needs a cluster, a number of devices, or a mesh")
        sizes = (len(s) if isinstance(s, tuple | list) else s for s in mesh.values())
        cluster = math.prod(sizes)
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
        asked(stages, settings),
        axes,
        grid,
        as_rules(rules),
    )
    if structure.pipeline is not None and structure.pipeline.forms:
        check_settings(settings)
    if stated := shares_of(mesh):
        structure = dataclasses.replace(structure, shares=stated)
    size = graph.values[graph.batch_values[0]].shape[0]
    return complete(
        graph,
        structure,
        cluster=cluster,
        batch_size=batch_size or size * len(structure.replicas),
        microbatch_size=size,
        sums=SumsForm(kind=reduction),
    )
