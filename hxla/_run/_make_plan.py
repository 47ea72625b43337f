"""The ways to make a plan of a job, told apart by what the user asks."""

import os

import jax

from .._cluster._cluster import Cluster
from .._cluster._mesh_file import load_cluster
from .._core._errors import ConfigError, LaunchError
from .._launch._join import uninitialised_cluster
from .._plan._plan import Plan
from .._profile._profile import Profile
from .._profile._profile_file import load_profile
from .._profile._segment_times import model_name
from . import _capture
from ._planning import Wishes, plan_for
from ._search_plan import SearchWishes, auto_plan, search_plan
from ._traced_job import TracedJob


def make_plan(
    job: TracedJob,
    cluster: Cluster | str | None,
    wishes: Wishes,
    *,
    auto: bool | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
) -> tuple[Plan, bool]:
    """A plan, and whether its counts may follow measured times: see `Job.plan`."""
    _capture.offer(job, wishes)
    described = load_cluster(cluster) if isinstance(cluster, str) else cluster
    mesh = wishes.mesh
    fixed = mesh is not None or wishes.stages is not None or wishes.rules is not None
    if auto is None:
        auto = not fixed and (described is not None or job.settings.auto.auto_parallel)
    if described is None:
        check_joined()
    if not auto:
        if described is not None:
            return plan_for(job, wishes, described, None)
        devices = job.all_devices(mesh if isinstance(mesh, jax.sharding.Mesh) else None)
        return plan_for(job, wishes, job.cluster(devices), devices)
    if fixed:
        raise ConfigError("a search chooses what mesh, rules and stages say: leave them out")
    sums, size = job.sums(wishes.reduction), wishes.microbatch_size
    balance = wishes.counts == "measured"
    if described is None and profile is None:
        return auto_plan(job, job.all_devices(), sums=sums, size=size), balance
    if isinstance(profile, str | os.PathLike):
        profile = load_profile(profile, model=model_name(job.functional(size or 1).params))
    target = described or job.cluster(job.all_devices())
    found = search_plan(
        job,
        target,
        profile,
        SearchWishes(),
        sums=sums,
        size=size,
        all_devices=described is None,
    )
    return found.plan, balance


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
