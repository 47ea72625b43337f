"""`hxla plan` and `hxla profile`: plan, or measure, the job of a script.

A profile has the job's links, and the segments of its model, alone and in training.
"""

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax

from ..choose.apportionment import candidate_sizes
from ..choose.device_times import split_time
from ..choose.make_plan import plan_job, workloads
from ..choose.planning import PlanRequest, check_enough, plan_for, size_asked
from ..choose.workload import SearchOptions
from ..cluster.cluster import Cluster
from ..cluster.job_devices import resolve
from ..cluster.mesh_file import load_cluster
from ..core.errors import ConfigError, PlanError
from ..core.files import local_path
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..jax.devices import is_here
from ..job.context import JobContext, sums_form
from ..lower.determinism import determinism
from ..plan.plan import Plan
from ..profile.profile import (
    LayerSize,
    LayerTime,
    Profile,
    Setting,
    SplitTime,
    dump_profile,
    link_in_words,
    load_profile,
    merge_profiles,
    together_key,
)
from ..profile.segment_times import model_name
from ..report.lanes import lanes_of_timeline, write_picture
from ..report.terminal import LOGGER, print_result
from ..schedule.replay import Timeline, perfetto
from .job import job_of
from .measure import (
    ObservedSteps,
    SessionMeasure,
    everywhere,
    measured_links,
    run_trial,
    segment_profile,
)


def plan_script(
    command: Sequence[str],
    *,
    meshes: Sequence[str | None],
    search: SearchOptions,
    profile: str | None = None,
    write: str | None = None,
    draw: str | None = None,
) -> None:
    """Plan the job of a script; print the plan, write it and draw it.

    A script with annotations, a mesh or stages is planned by them, any other by search. For this
    machine a search needs measured times; without them the plan is the one that training makes.

    Args:
        command: A Python script and its arguments.
        meshes: One cluster, or two to compare; None: the devices of this machine.
        write: File for the first cluster's plan.
        draw: Folder for pictures and traces.

    Raises:
        HxlaError: If the script has no job, or no plan fits.
    """
    # Before a script that may take long.
    described = [None if mesh is None else load_cluster(mesh) for mesh in meshes]
    job, request = job_of(command)
    plans = []
    for cluster in described:
        auto = None
        if cluster is None:
            cluster = _this_machine(job, request)
            kinds = Counter(device.label for device in cluster.devices).items()
            devices = ", ".join(f"{num} x {kind}" for kind, num in kinds)
            print(f"--mesh is not given: the plan is for the devices of this machine, {devices}")
            if profile is None:
                auto = job.settings.auto.auto_parallel
        made = plan_job(
            job, cluster, request, SessionMeasure, auto=auto, profile=profile, search=search
        )
        plans.append(made.plan)
        print(f"{_name(made.plan)}: {made.plan.explain()}")
        print(f"  {determinism(job.graph(made.plan.microbatch_size), made.plan)}")
        if draw is not None:
            _draw(local_path(draw, "--draw", ConfigError), made.plan, made.timelines)
    if len(plans) == 2:
        print(plans[0].compare(plans[1]))
    if write is not None:
        plans[0].write(write)
        print(f"written: {write}")


def _this_machine(job: JobContext, request: PlanRequest) -> Cluster:
    """The devices of `hxla.train` on this machine, and of `hxla run` if they are unlike."""
    mesh = request.mesh if isinstance(request.mesh, jax.sharding.Mesh) else None
    visible = job.settings.cluster.visible_devices
    devices = resolve(mesh, None, visible, runs=False)
    return job.cluster(devices)


def _name(plan: Plan) -> str:
    return plan.cluster or "this machine"


def _draw(folder: pathlib.Path, plan: Plan, timelines: Mapping[int, Timeline]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = _name(plan).replace(" ", "-")
    files = [folder / f"{stem}.png"]
    plan.draw(files[0])
    step = plan.prediction.step_seconds if plan.prediction is not None else 0.0
    for replica, timeline in timelines.items():
        names = plan.stage_names[replica]
        name = f"{stem}-replica{replica}"
        picture, trace = folder / f"{name}.svg", folder / f"{name}.perfetto.json"
        title = f"{_name(plan)}, replica {replica}: step {step:.4g} s"
        lanes = lanes_of_timeline(timeline, names, title=title, end_seconds=step)
        write_picture(lanes, picture)
        trace.write_text(perfetto(timeline, names))
        files += [picture, trace]
    print("drawn: " + ", ".join(map(str, files)))


def profile(
    job: JobContext,
    request: PlanRequest,
    *,
    file: str,
    microbatch_sizes: Sequence[int],
    num_segments: int,
) -> None:
    """Measure links and segments and write a profile; every process of the job must call this.

    Args:
        request: If its mesh shards a replica over one axis, that split is measured too.
        file: Profile to write, and to resume from.
        microbatch_sizes: If empty, the sizes that the planner would try.
        num_segments: Most segments of the chain.

    Raises:
        PlanError: If a replica needs several devices, or the file is of another model.
    """
    devices = job.all_devices()
    cluster = job.cluster(devices)
    asked = size_asked(workloads(job), request)
    sizes = tuple(sorted(microbatch_sizes)) or (
        (asked,) if asked else tuple(sorted(candidate_sizes(job.batch_size, len(devices))))
    )
    for size in sizes:
        size_asked(workloads(job), PlanRequest(microbatch_size=size))
        check_enough(job.batch_size, size, len(devices))
    labels = [device.label for device in cluster.devices]
    rank = next(i for i, d in enumerate(devices) if is_here(d))
    model = model_name(job.functional(sizes[0]).params)
    measured: Profile | None = None
    if pathlib.Path(file).exists():
        measured = load_profile(file, model=model)

    def write(local: Profile) -> Profile:
        """Merge the profiles of all processes and write them, so that a run can resume."""
        local = everywhere(job, local)
        if jax.process_index() == 0:
            dump_profile(local, file)
        return local

    next_step = 0
    for size in sizes:
        chain = segments(graph_of(job.graph(size)), num_segments)
        if measured is not None and len(measured.layers) != len(chain):
            raise PlanError(
                f"profile {file} has {len(measured.layers)} segments, now there are "
                f"{len(chain)}: use the same number, or write to another file"
            )
        sized = dataclasses.replace(request, microbatch_size=size)
        if measured is None or _is_new(measured, labels, size):
            trial = run_trial(
                job, _single_device_plan(job, sized, cluster), devices, start=next_step
            ).by_kind(labels)
            next_step = trial.end_step
            setting = Setting(labels[rank], size)
            local = Profile(
                model=model,
                layers=tuple(s.name for s in chain),
                num_segments=num_segments,
                sizes={},
                times={},
                reductions={together_key(labels): trial.rest_seconds},
                form=trial.form,
            )
            local = merge_profiles([*([measured] if measured is not None else []), local])
            if setting not in local.times:
                show_progress = _progress(setting, len(chain))
                sums = sums_form(job.settings, job.precision, request.reduction)
                alone = segment_profile(
                    job, setting, num_segments, devices[rank], sums, show_progress
                )
                scaled = _scaled(alone.times[setting], alone.sizes[size, 1], trial, rank)
                peaks = {setting: trial.peak_bytes}
                alone = dataclasses.replace(alone, times={setting: scaled}, peaks=peaks)
                local = merge_profiles([local, alone])
            measured = write(local)
        split = _new_split(job, sized, cluster, measured) if request.mesh is not None else None
        if split is not None:
            plan, split_times = split
            trial = run_trial(job, plan, devices, start=next_step)
            next_step = trial.end_step
            timed = dataclasses.replace(split_times, seconds=max(trial.micro_seconds))
            measured = write(dataclasses.replace(measured, splits=(*measured.splits, timed)))
    assert measured is not None
    if len(devices) > 1 and not any(link.mesh == cluster.name for link in measured.links):
        links = measured_links(job, cluster, devices)
        measured = write(merge_profiles([measured, dataclasses.replace(measured, links=links)]))
    if jax.process_index() == 0:
        _show(measured, file)


def _single_device_plan(job: JobContext, request: PlanRequest, cluster: Cluster) -> Plan:
    """A plan with replicas of one device each."""
    single = PlanRequest(microbatch_size=request.microbatch_size, reduction=request.reduction)
    plan = _make_plan(job, single, cluster)
    if plan.axes:
        raise PlanError(
            "hxla profile measures a model on one device, but annotations or stages put a replica "
            f"of this one on {len(plan.replicas[0].devices)}: profile it without them"
        )
    return plan


def _make_plan(
    job: JobContext, request: PlanRequest, cluster: Cluster, profile: Profile | None = None
) -> Plan:
    sums = sums_form(job.settings, job.precision, request.reduction)
    measure = SessionMeasure(job, job.all_devices())
    plan = plan_for(workloads(job), request, cluster, sums, measure, profile)
    return plan


def _new_split(
    job: JobContext, request: PlanRequest, cluster: Cluster, profile: Profile
) -> tuple[Plan, SplitTime] | None:
    """The plan of a requested split that the profile lacks, and its entry without seconds."""
    plan = _make_plan(job, request, cluster, profile)
    if plan.pipeline is not None or len(plan.axes) != 1:
        return None
    timed = split_time(plan, cluster, 0.0)
    if timed is None or timed.split in {known.split for known in profile.splits}:
        return None
    return plan, timed


def _is_new(profile: Profile, labels: Sequence[str], size: int) -> bool:
    settings = {Setting(label, size) for label in labels}
    return not settings <= profile.times.keys() or together_key(labels) not in profile.reductions


def _scaled(
    times: Sequence[LayerTime], sizes: Sequence[LayerSize], trial: ObservedSteps, rank: int
) -> tuple[LayerTime, ...]:
    """Scale times of segments measured alone to their time in a training step.

    The update is divided by bytes of parameters. A device that trains alone has no all-reduce, so
    the rest of its step counts as update.
    """
    total_seconds = sum(t.forward + t.backward for t in times) or 1.0
    total_bytes = sum(s.parameter_bytes for s in sizes) or 1.0
    micro, update = trial.micro_seconds[rank], trial.update_seconds[rank]
    if len(trial.micro_seconds) == 1:
        update += trial.rest_seconds
    return tuple(
        LayerTime(
            forward=t.forward * micro / total_seconds,
            backward=t.backward * micro / total_seconds,
            update=update * s.parameter_bytes / total_bytes,
        )
        for t, s in zip(times, sizes, strict=True)
    )


def _progress(setting: Setting, num: int) -> Callable[[int], None]:
    where = f"{setting.kind}, microbatch of {setting.microbatch_size}"
    return lambda done: LOGGER.info("%s: %d of %d segments", where, done, num)


def _show(profile: Profile, file: str) -> None:
    print_result(f"{'kind':<24} {'microbatch':>10} {'forward':>10} {'backward':>10} {'update':>10}")
    for setting, times in sorted(profile.times.items()):
        row = [sum(getattr(t, part) for t in times) for part in ("forward", "backward", "update")]
        seconds = " ".join(f"{1e3 * s:>7.2f} ms" for s in row)
        print_result(f"{setting.kind:<24} {setting.microbatch_size:>10} {seconds}")
    for split in profile.splits:
        parts = ", ".join(
            f"{kind} {p:.0%}" for kind, p in zip(split.kinds, split.parts, strict=True)
        )
        seconds = f"{1e3 * split.seconds:.2f} ms a microbatch of {split.microbatch_size}"
        print_result(f"cut over {parts}: {seconds}")
    for measured in profile.links:
        where = "in a node" if measured.in_node else "between nodes"
        ends = " and ".join(measured.kinds)
        print_result(f"link of {ends}, {where}: {link_in_words(measured.link)}")
    print_result(f"{len(profile.layers)} segments of model {profile.model}, written to {file}")
