"""The ways to make a plan of a job, told apart by what the user asks."""

import os

import jax

from ..cluster.card_dtypes import missing_dtypes
from ..cluster.cluster import Cluster
from ..cluster.mesh_file import load_cluster
from ..core.errors import ConfigError, LaunchError, PlanError
from ..job.context import JobContext
from ..launch.join import uninitialised_cluster
from ..profile.profile import Profile
from ..profile.profile_file import load_profile
from ..profile.segment_times import model_name
from .measure import Measure
from .microbatch_sizes import default_sizes
from .planning import PlanRequest, plan_for, size_asked
from .search_plan import FoundPlan, SearchOptions, auto_plan, search_plan


def make_plan(
    job: JobContext,
    cluster: Cluster | str | None,
    wishes: PlanRequest,
    measure: Measure,
    *,
    auto: bool | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    search: SearchOptions | None = None,
) -> tuple[FoundPlan, bool]:
    """A plan, and whether its counts may follow measured times: see `Job.plan`."""
    described = load_cluster(cluster) if isinstance(cluster, str) else cluster
    mesh, size = wishes.mesh, size_asked(job, wishes)
    fixed = mesh is not None or wishes.stages is not None or wishes.rules is not None
    if auto is None:
        auto = not fixed and (
            job.settings.auto.auto_parallel
            if described is None
            else not _is_annotated(job, size or default_sizes(job.batch_size, 1)[0])
        )
    if described is None:
        check_joined()
    if isinstance(profile, str | os.PathLike):
        profile = load_profile(profile, model=model_name(job.functional(size or 1).params))
    if not auto:
        devices = None
        if described is None:
            devices = job.all_devices(mesh if isinstance(mesh, jax.sharding.Mesh) else None)
        target = described or job.cluster(devices or ())
        _check_dtypes(job, target)
        plan, balance = plan_for(job, wishes, target, devices, measure, profile)
        return FoundPlan(plan=plan), balance
    if fixed:
        raise ConfigError("a search chooses what mesh, rules and stages say: leave them out")
    sums, balance = job.sums(wishes.reduction), wishes.counts == "measured"
    _check_dtypes(job, described or job.cluster(job.all_devices()))
    if described is None and profile is None:
        return FoundPlan(plan=auto_plan(job, job.all_devices(), sums=sums, size=size)), balance
    target = described or job.cluster(job.all_devices())
    here = described is None
    search = search or SearchOptions()
    return search_plan(
        job, target, profile, search, sums=sums, size=size, all_devices=here
    ), balance


def _check_dtypes(job: JobContext, cluster: Cluster) -> None:
    """Refuse a precision that some device of a cluster cannot compute in.

    Raises:
        PlanError: With the kinds that lack it, and what all of them have.
    """
    kinds = [device.kind for device in cluster.devices]
    if missing := list(missing_dtypes(job.precision.low_dtypes, kinds)):
        raise PlanError("\n".join(missing))


def _is_annotated(job: JobContext, size: int) -> bool:
    """Whether annotations or settings say how devices share the model."""
    tasks = job.graph(size).task_graphs
    annotated = any(t.strategy == "split" or t.device_count for t in tasks)
    return annotated or job.settings.auto.num_stages is not None


def check_joined() -> None:
    """Refuse to go on alone in a job of several processes.

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
