"""Makes a plan of a job, or of a traced loss without data, devices and an optimizer."""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ..cluster.cluster import Cluster, Device
from ..cluster.kinds import missing_attention, missing_dtypes
from ..cluster.mesh_file import load_cluster
from ..core.config import Config, IslandsConfig, as_config
from ..core.errors import ConfigError, LaunchError, PlanError
from ..graph.graph import Graph
from ..graph.trace import largest_head
from ..jax.devices import process_of
from ..job.context import JobContext, sums_form
from ..launch.join import uninitialised_cluster
from ..plan.parts import Islands, SumsForm
from ..plan.plan import Plan
from ..plan.rules import RuleSet, as_rules
from ..profile.profile import Profile, load_profile
from ..profile.segment_times import model_name
from .apportionment import default_sizes
from .complete import complete
from .planning import PlanRequest, plan_for, size_asked
from .structures import grid_of, shares_of, structure_of
from .workload import Measure, PlanResult, SearchOptions, Workload, Workloads

MakeMeasure = Callable[[JobContext, tuple[jax.Device, ...]], Measure]


def plan_job(
    job: JobContext,
    cluster: Cluster | str | None,
    request: PlanRequest,
    measure: MakeMeasure,
    *,
    auto: bool | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    search: SearchOptions | None = None,
) -> PlanResult:
    """A plan: see `Job.plan`."""
    described = load_cluster(cluster) if isinstance(cluster, str) else cluster
    jobs, sums = workloads(job), sums_form(job.settings, job.precision, request.reduction)
    mesh, size = request.mesh, size_asked(jobs, request)
    is_fixed = mesh is not None or request.stages is not None or request.rules is not None
    if auto is None:
        auto = not is_fixed and (
            job.settings.auto.auto_parallel
            if described is None
            else not _is_annotated(jobs.at(size or default_sizes(job.batch_size, 1)[0]))
        )
    if described is None:
        check_joined()
    if isinstance(profile, str | os.PathLike):
        profile = load_profile(profile, model=model_name(job.functional(size or 1).params))
    is_here = described is None
    if not auto:
        devices = None
        if is_here:
            devices = job.all_devices(mesh if isinstance(mesh, jax.sharding.Mesh) else None)
        target = described or job.cluster(devices or ())
        _check_devices(job, size, target)
        here = None if devices is None else measure(job, devices)
        plan = plan_for(jobs, request, target, sums, here, profile)
        return PlanResult(plan=_with_islands(plan, job.settings.islands, target))
    if is_fixed:
        raise ConfigError("a search chooses what mesh, rules and stages say: leave them out")
    if job.settings.numerics.cut == "any":
        raise ConfigError(
            "numerics.cut of 'any' needs a mesh and rules, which a search chooses: pass both, such "
            "as mesh={'data': 2, 'tensor': 2} and rules='decoder', or set it to 'planned'"
        )
    if job.settings.islands.every is not None:
        raise ConfigError(
            "islands.every: a search prices steps that sum over all replicas: pass "
            "mesh={'data': n} for n devices, or leave islands out"
        )
    from .search_plan import auto_plan, search_plan  # most scripts search nothing

    target = described or job.cluster(job.all_devices())
    _check_devices(job, size, target)
    # A process without a device in the plan could not take part in training.
    all_devices = is_here and len(set(map(process_of, job.all_devices()))) > 1
    if is_here and profile is None:
        here = measure(job, job.all_devices())
        plan = auto_plan(jobs, target, here, sums=sums, size=size, all_devices=all_devices)
        return PlanResult(plan=plan)
    return search_plan(
        jobs,
        target,
        profile,
        search or SearchOptions(),
        sums=sums,
        size=size,
        all_devices=all_devices,
    )


def workloads(job: JobContext) -> Workloads:
    """The job's graph, model and settings at every microbatch size."""
    settings = _settings_of_islands(job.settings)

    def at(size: int) -> Workload:
        return Workload(
            settings=settings,
            batch_size=job.batch_size,
            microbatch_size=size,
            graph=job.graph(size),
            model=job.functional(size),
            input_bytes=job.batch_bytes(size),
            optimizer_bytes=job.optimizer_bytes(size),
            trace_update=lambda: job.traced_update(size),
        )

    return Workloads(settings=settings, batch_size=job.batch_size, at=at)


def _check_devices(job: JobContext, size: int | None, cluster: Cluster) -> None:
    """Refuse a precision or an attention that some device of a cluster lacks.

    Args:
        size: The microbatch size; None: the default.

    Raises:
        PlanError: With the kinds that lack it, and the remedy.
    """
    kinds = [device.kind for device in cluster.devices]
    missing = list(missing_dtypes(job.precision.low_dtypes, kinds))
    graph = job.graph(size or default_sizes(job.batch_size, 1)[0])
    if missing := [*missing, *missing_attention(largest_head(graph), kinds)]:
        raise PlanError("\n".join(missing))


def _is_annotated(work: Workload) -> bool:
    """Whether annotations or settings decide how devices share the model."""
    annotated = any(task.asks_for_devices for task in work.graph.task_graphs)
    return annotated or work.settings.auto.num_stages is not None


def check_joined() -> None:
    """Refuse to run alone in a job of several processes.

    Raises:
        LaunchError: If this process has not joined the others.
    """
    alone = uninitialised_cluster()
    if alone:
        raise LaunchError(
            f"this is one of several processes ({alone}) but they have not joined: each would "
            "train a model of its own. Start the script with hxla run, or call hxla.join() before "
            "anything else uses JAX"
        )


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
        graph, cluster, settings, stages, axes, grid, as_rules(rules), shares_of(mesh)
    )
    size = graph.values[graph.batch_values[0]].shape[0]
    plan = complete(
        graph,
        structure,
        cluster=cluster,
        batch_size=batch_size or size * len(structure.replicas),
        microbatch_size=size,
        sums=SumsForm(kind=reduction),
    )
    return _with_islands(plan, settings.islands, cluster)


def _settings_of_islands(settings: Config) -> Config:
    """The settings, with the whole state on each replica where there are islands."""
    if settings.islands.every is None or settings.memory.zero is not None:
        return settings
    memory = settings.memory.model_copy(update={"zero": 0})
    return settings.model_copy(update={"memory": memory})


def _with_islands(plan: Plan, settings: IslandsConfig, cluster: Cluster) -> Plan:
    """The plan with the islands of the settings, if they ask for any.

    Raises:
        ConfigError: If there is one replica, the replicas of a node are not consecutive, or there
            are settings of islands and no period.
        PlanError: If the plan cannot run in islands, with every fault.
    """
    if settings.every is None:
        if settings.model_fields_set - {"every"}:
            raise ConfigError("islands: there are none without islands.every: set it, or no other")
        return plan
    num = len(plan.replicas)
    if num < 2:
        raise ConfigError(
            "islands.every: one replica is one island, and has no other to meet: use more devices, "
            "or leave islands out"
        )
    sizes = settings.replicas
    if isinstance(sizes, str):
        nodes = [
            tuple(sorted({cluster.devices[rank].node for rank in replica.devices}))
            for replica in plan.replicas
        ]
        groups = [(node, len([*each])) for node, each in itertools.groupby(nodes)]
        if len(groups) > len({node for node, _ in groups}):
            raise ConfigError(
                "islands.replicas: the replicas of a node are not consecutive: give the number of "
                "replicas of each island, such as [2, 1]"
            )
        sizes = [size for _, size in groups] if len(groups) > 1 else [1] * num
    islands = Islands(
        every=settings.every,
        replicas=tuple(sizes),
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
    )
    return plan.replaced(islands=islands)
