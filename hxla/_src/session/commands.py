"""`hxla plan`: plan the job of a script for any cluster."""

import pathlib
from collections.abc import Mapping, Sequence

from ..choose.make_plan import make_plan
from ..choose.search_options import SearchOptions
from ..cluster.mesh_file import load_cluster
from ..core.errors import ConfigError
from ..core.files import local_path
from ..lower.determinism import determinism
from ..plan.plan import Plan
from ..report.lanes import lanes_of_timeline, write_picture
from ..schedule.replay import Timeline, perfetto
from .capture import job_of
from .measure import SessionMeasure


def plan_script(
    command: Sequence[str],
    *,
    meshes: Sequence[str],
    search: SearchOptions,
    profile: str | None = None,
    write: str | None = None,
    draw: str | None = None,
) -> None:
    """Plan the job of a script; print the plan, write it and draw it.

    A script with annotations, a mesh or stages is planned by them, any other by search.

    Args:
        command: A Python script and its arguments.
        meshes: One cluster, or two to compare.
        write: File for the first cluster's plan.
        draw: Folder for pictures and traces.

    Raises:
        HxlaError: If the script has no job, or no plan fits.
    """
    clusters = [load_cluster(mesh) for mesh in meshes]  # before a script that may take long
    job, request = job_of(command)
    plans = []
    for cluster in clusters:
        made = make_plan(job, cluster, request, SessionMeasure, profile=profile, search=search)
        plans.append(made.plan)
        print(f"{made.plan.cluster}: {made.plan.explain()}")
        print(f"  {determinism(job.graph(made.plan.microbatch_size), made.plan)}")
        if draw is not None:
            _draw(local_path(draw, "--draw", ConfigError), made.plan, made.timelines)
    if len(plans) == 2:
        print(plans[0].compare(plans[1]))
    if write is not None:
        plans[0].write(write)
        print(f"written: {write}")


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
