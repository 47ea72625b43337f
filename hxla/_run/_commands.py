"""`hxla plan`: what a script would train, planned for any cluster and not trained."""

import pathlib
from collections.abc import Mapping, Sequence

import pydantic

from .._cluster._cluster import Cluster
from .._cluster._mesh_file import load_cluster
from .._plan._plan import Plan
from .._profile._profile_file import load_profile
from .._profile._segment_times import model_name
from .._report._lanes import lanes_of_timeline
from .._report._lanes_picture import write_picture
from .._schedule._replay import Timeline
from .._schedule._timeline import perfetto
from ._capture import job_of
from ._planning import Wishes, plan_for
from ._search_plan import SearchWishes, search_plan
from ._traced_job import TracedJob


class PlanRequest(pydantic.BaseModel):
    """`hxla plan`.

    Attributes:
        meshes: Clusters to plan for; two are compared.
        profile: Measured times.
        write: File for the first cluster's plan.
        draw: Folder for pictures and traces.
        search: What is searched.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    meshes: tuple[str, ...] = pydantic.Field(min_length=1, max_length=2)
    profile: str | None = None
    write: str | None = None
    draw: str | None = None
    search: SearchWishes = SearchWishes()


def plan_script(request: PlanRequest, command: Sequence[str]) -> None:
    """Plan what a script would train; print, write, draw.

    A script that says how its devices share the model, by annotations, a mesh or stages, is planned
    so; any other by search.

    Args:
        request: For what, and where to.
        command: A Python script and its arguments.

    Raises:
        HxlaError: If the script has no job, or nothing fits.
    """
    job, wishes = job_of(command)
    plans = []
    for mesh in request.meshes:
        cluster = load_cluster(mesh)
        plan, timelines = _planned(job, wishes, cluster, request)
        plans.append(plan)
        print(f"{cluster.name}: {plan.explain()}")
        if request.draw is not None:
            _draw(pathlib.Path(request.draw), plan, timelines)
    if len(plans) == 2:
        print(plans[0].compare(plans[1]))
    if request.write is not None:
        plans[0].write(request.write)
        print(f"written: {request.write}")


def _planned(
    job: TracedJob, wishes: Wishes, cluster: Cluster, request: PlanRequest
) -> tuple[Plan, Mapping[int, Timeline]]:
    size = wishes.microbatch_size
    graph = job.graph(size or max(1, job.batch_size // len(cluster.devices)))
    annotated = any(t.strategy == "split" or t.device_count for t in graph.task_graphs)
    asked = wishes.mesh is not None or wishes.stages is not None or wishes.rules is not None
    if asked or annotated or job.settings.auto.num_stages is not None:
        return plan_for(job, wishes, cluster, None)[0], {}
    profile = None
    if request.profile is not None:
        own = model_name(job.functional(size or 1).params)
        profile = load_profile(request.profile, model=own)
    sums = job.sums(wishes.reduction)
    found = search_plan(job, cluster, profile, request.search, sums=sums, size=size)
    return found.plan, found.timelines


def _draw(folder: pathlib.Path, plan: Plan, timelines: Mapping[int, Timeline]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{plan.cluster}.png"]
    plan.draw(files[0])
    step = plan.prediction.step_seconds if plan.prediction is not None else 0.0
    for replica, timeline in timelines.items():
        names = plan.stage_names[replica]
        name = f"{plan.cluster}-replica{replica}"
        picture, trace = folder / f"{name}.svg", folder / f"{name}.perfetto.json"
        title = f"{plan.cluster}, replica {replica}: step {step:.4g} s"
        lanes = lanes_of_timeline(timeline, names, title=title, end_seconds=step)
        write_picture(lanes, picture)
        trace.write_text(perfetto(timeline, names))
        files += [picture, trace]
    print("drawn: " + ", ".join(map(str, files)))
