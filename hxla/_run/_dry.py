"""`hxla profile` and `hxla plan`: what a script would train, measured or planned, not trained.

Both run the user's script up to its first `hxla.train`, which finds the request in the environment,
answers it and ends the script.
"""

import collections
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import optax
import pydantic

from .._cluster._cluster import Cluster, Device
from .._cluster._job_devices import device_label
from .._cluster._mesh_file import load_cluster
from .._core._errors import AnnotationError, ConfigError, PlanError
from .._core._types import PyTree
from .._graph._graph import Graph
from .._graph._segments import Segment, segments
from .._graph._trace import trace_functional
from .._jax import _coordination
from .._lower._reduce import Reducer
from .._lower._replicate import Reduction, compiler_options, num_parts
from .._model._functional import Functional
from .._plan._proposal import Proposal, compare
from .._planner._microbatch import candidate_sizes
from .._planner._partition import shard_graph, split_over
from .._planner._propose import Work, propose
from .._profile._profile import LayerSize, LayerTime, Profile, Setting, together_key
from .._profile._profile_file import dump_profile, load_profile, merge_profiles
from .._profile._segment_times import fingerprint, layer_sizes, measure
from .._profile._trial import Trial
from .._schedule._replay import Timeline
from .._schedule._timeline import draw, perfetto
from ._setup import check_batch, optimizer_bytes

VARIABLE = "HXLA_DRY"
_MAX_TENSOR = 8  # a node of NVLinked cards


class ProfileRequest(pydantic.BaseModel):
    """`hxla profile`.

    Attributes:
        file: Profile to write, and to resume from.
        microbatch_sizes: To measure; empty: those that the planner would try.
        num_segments: Most segments of the chain.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    file: str
    microbatch_sizes: tuple[pydantic.PositiveInt, ...] = ()
    num_segments: pydantic.PositiveInt = 8


class PlanRequest(pydantic.BaseModel):
    """`hxla plan`.

    Attributes:
        meshes: Clusters to plan for; two are compared.
        profile: Measured times.
        folder: Where plans, pictures and traces go.
        microbatch_sizes: To try; empty: those of the profile, or some that suit the cluster.
        num_segments: Most segments of the chain, where no profile says.
        seconds: Time budget of the search.
        max_stages: Most stages of a plan; None: any number.
        tensors: Sizes of tensor-parallel groups to try besides 1, also over links that are not
            described; empty: powers of two that a node has like devices for.
        recompute: Whether to try plans that run forwards again.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    meshes: tuple[str, ...] = pydantic.Field(min_length=1, max_length=2)
    profile: str | None = None
    folder: str | None = None
    microbatch_sizes: tuple[pydantic.PositiveInt, ...] = ()
    num_segments: pydantic.PositiveInt = 8
    seconds: pydantic.PositiveFloat = 10.0
    max_stages: pydantic.PositiveInt | None = None
    tensors: tuple[pydantic.PositiveInt, ...] = ()
    recompute: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a script asked `hxla.train` for.

    Attributes:
        model: As pure functions.
        optimizer: The user's own.
        batch: Microbatch size to the first microbatch.
        batch_size: Examples of a global batch.
        microbatch_size: The user's, or None.
        devices: Of the run.
        known: What the mesh file says of them.
        reduction: `exact` or `float`.
    """

    model: Functional
    optimizer: optax.GradientTransformation
    batch: Callable[[int], PyTree]
    batch_size: int
    microbatch_size: int | None
    devices: tuple[jax.Device, ...]
    known: Mapping[jax.Device, Device]
    reduction: Reduction


Request = ProfileRequest | PlanRequest


def requested() -> Request | None:
    """What the environment asks for instead of training."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    return pydantic.TypeAdapter[Request](Request).validate_json(text)


def _sizes(asked: tuple[int, ...], job: Job, num_devices: int) -> tuple[int, ...]:
    sizes = asked or (
        (job.microbatch_size,)
        if job.microbatch_size
        else candidate_sizes(job.batch_size, num_devices)
    )
    wrong = [b for b in sizes if job.batch_size % b]
    if wrong:
        raise ConfigError(
            f"microbatch sizes {wrong} do not divide the script's batch_size={job.batch_size}"
        )
    return tuple(sorted(sizes))


def plan(request: PlanRequest, job: Job) -> None:
    """Plan, print, write."""
    model = fingerprint(job.model.params)
    profile = load_profile(request.profile, model=model) if request.profile else None
    clusters = [load_cluster(mesh) for mesh in request.meshes]
    asked = request.microbatch_sizes
    if profile is not None and not asked and not job.microbatch_size:
        asked = tuple({s.microbatch_size for s in profile.times})
    num_segments = len(profile.layers) if profile is not None else request.num_segments
    sizes: dict[tuple[int, int], tuple[LayerSize, ...]] = {}
    sent: dict[tuple[int, int], tuple[float, ...]] = {}
    inputs: dict[int, int] = {}
    names: tuple[str, ...] = ()
    for size in _sizes(asked, job, len(clusters[0].devices)):
        batch = job.batch(size)
        inputs[size] = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
        graph = trace_functional(job.model, batch)
        chain = segments(graph, num_segments)
        names = names or tuple(s.name for s in chain)
        for tensor in _tensors(request, clusters):
            try:
                cut = shard_graph(graph, *split_over(graph, tensor), None)
            except (AnnotationError, PlanError) as error:
                print(f"tensor {tensor}: not tried: {error}", file=sys.stderr)
                continue
            sizes[size, tensor] = layer_sizes(graph, chain, cut)
            total = sum(s.flops for s in chain) or 1.0
            bytes_sent = sum(axis.sent_bytes for axis in cut.axes.values())
            sent[size, tensor] = tuple(bytes_sent * s.flops / total for s in chain)
    param_bytes = sum(x.nbytes for x in jax.tree.leaves(job.model.params))
    state_bytes = optimizer_bytes(job.optimizer, job.model.params)
    work = Work(
        model=model,
        layers=names,
        sizes=sizes,
        sent_bytes=sent,
        input_bytes=inputs,
        batch_size=job.batch_size,
        # Itself, its gradient, what gradients are summed in, the optimizer's state.
        state_factor=2 + num_parts(job.reduction) + state_bytes / max(1, param_bytes),
        reduce_factor=1.5 if job.reduction == "exact" else 1.0,
    )
    proposals = []
    for cluster in clusters:
        proposal, timelines = propose(
            work,
            cluster,
            profile,
            max_stages=request.max_stages,
            recompute=request.recompute,
            uncounted=bool(request.tensors),
            time_budget_seconds=request.seconds,
        )
        proposals.append(proposal)
        print(proposal.explain())
        if request.folder is not None:
            _write(pathlib.Path(request.folder), proposal, timelines)
    if len(proposals) == 2:
        print(compare(*proposals))


def _tensors(request: PlanRequest, clusters: Sequence[Cluster]) -> tuple[int, ...]:
    """Sizes of tensor-parallel groups: powers of two of like devices of a node."""
    if request.tensors:
        return tuple(sorted({1, *request.tensors}))
    largest = max(
        max(collections.Counter((d.label, d.memory_bytes, d.node) for d in c.devices).values())
        for c in clusters
    )
    return tuple(2**k for k in range(min(largest, _MAX_TENSOR).bit_length()))


def _write(folder: pathlib.Path, proposal: Proposal, timelines: Mapping[int, Timeline]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{proposal.cluster}.json"]
    files[0].write_text(proposal.to_json() + "\n")
    for replica, timeline in timelines.items():
        own = {d.stage: d for d in reversed(proposal.devices) if d.replica == replica}
        names = [f"{own[s].kind} (device {own[s].device})" for s in sorted(own)]
        name = f"{proposal.cluster}-replica{replica}"
        picture, trace = folder / f"{name}.png", folder / f"{name}.perfetto.json"
        title = f"{proposal.cluster}, replica {replica}: step {proposal.step_seconds:.4g} s"
        draw(
            timeline,
            picture,
            names=names,
            title=title,
            step_seconds=proposal.step_seconds,
        )
        trace.write_text(perfetto(timeline, names))
        files += [picture, trace]
    print("written: " + ", ".join(map(str, files)))


def profile(
    request: ProfileRequest, job: Job, reducer: Reducer, run_trial: Callable[[int, int], Trial]
) -> None:
    """Measure, write, and say where; every process of the job takes part.

    Args:
        request: What to measure.
        job: What the script trains.
        reducer: Knows all devices.
        run_trial: Trains from a step on with microbatches of a size.

    Raises:
        PlanError: If a copy of the model takes several devices, or the file is of another model.
    """
    if reducer.replicas[0].axes:
        raise PlanError(
            "hxla profile measures a model on one device, but annotations, rules or "
            f"auto.auto_parallel put a copy of this one on {len(reducer.replicas[0].devices)}: "
            "profile it without them"
        )
    sizes = _sizes(request.microbatch_sizes, job, len(job.devices))
    for size in sizes:
        check_batch(job.batch_size, size, len(job.devices))
    own = next(d for d in job.devices if d.process_index == jax.process_index())
    label = device_label(own, job.known)
    index = next(r.index for r in reducer.replicas if r.is_led_here)
    here = json.dumps([device_label(r.devices[0], job.known) for r in reducer.local])
    labels = [label for text in _everywhere("labels", here) for label in json.loads(text)]
    model = fingerprint(job.model.params)
    found: Profile | None = None
    if pathlib.Path(request.file).exists():
        found = load_profile(request.file, model=model)
    batches = {size: job.batch(size) for size in sizes}  # trials may read an iterable past them
    next_step = 0
    for size, batch in batches.items():
        graph = trace_functional(job.model, batch)
        chain = segments(graph, request.num_segments)
        if found is not None and len(found.layers) != len(chain):
            raise PlanError(
                f"profile {request.file} has {len(found.layers)} segments, now there are "
                f"{len(chain)}: use the same number, or write to another file"
            )
        if found is not None and not _is_new(found, labels, size):
            continue
        trial = run_trial(next_step, size).by_kind(labels)
        next_step = trial.end_step
        setting = Setting(label, size)
        mine = Profile(
            model=model,
            layers=tuple(s.name for s in chain),
            sizes={},
            times={},
            reductions={together_key(labels): trial.rest_seconds},
        )
        mine = merge_profiles([*([found] if found is not None else []), mine])
        if setting not in mine.times:
            whole = layer_sizes(graph, chain, shard_graph(graph, (), {}, None))
            alone = _measured(job, graph, chain, batch, own, setting)
            times = _scaled(alone, whole, trial, index)
            mine = dataclasses.replace(
                mine,
                sizes={**mine.sizes, (size, 1): whole},
                times={**mine.times, setting: times},
                peaks={**mine.peaks, setting: trial.peak_bytes},
            )
        parts = _everywhere("profile", json.dumps(mine.to_table()))
        found = merge_profiles(Profile.from_table(json.loads(p)) for p in parts)
        if jax.process_index() == 0:
            dump_profile(found, request.file)  # after each size: an interrupted run resumes
    assert found is not None
    if jax.process_index() == 0:
        _show(found, request.file)


def _everywhere(what: str, text: str) -> tuple[str, ...]:
    return _coordination.gather(what, text, timeout_seconds=3600.0)


def _is_new(profile: Profile, labels: Sequence[str], size: int) -> bool:
    settings = {Setting(label, size) for label in labels}
    return not settings <= profile.times.keys() or together_key(labels) not in profile.reductions


def _scaled(
    times: Sequence[LayerTime], sizes: Sequence[LayerSize], trial: Trial, own: int
) -> tuple[LayerTime, ...]:
    """Segments measured alone, in proportion to what all of them take together.

    The update is shared out by bytes of parameters. A device that trains alone has no sum over
    devices: the rest of its step comes with its update.
    """
    alone = sum(t.forward + t.backward for t in times) or 1.0
    whole_bytes = sum(s.parameter_bytes for s in sizes) or 1.0
    micro, update = trial.micro_seconds[own], trial.update_seconds[own]
    if len(trial.micro_seconds) == 1:
        update += trial.rest_seconds
    return tuple(
        LayerTime(
            forward=t.forward * micro / alone,
            backward=t.backward * micro / alone,
            update=update * s.parameter_bytes / whole_bytes,
        )
        for t, s in zip(times, sizes, strict=True)
    )


def _measured(
    job: Job,
    graph: Graph,
    chain: Sequence[Segment],
    batch: PyTree,
    device: jax.Device,
    setting: Setting,
) -> tuple[LayerTime, ...]:
    """The segments on one device, with progress on stderr."""

    def said(num: int) -> None:
        where = f"{setting.kind}, microbatch of {setting.microbatch_size}"
        print(f"{where}: {num} of {len(chain)} segments", file=sys.stderr, flush=True)

    return measure(
        graph,
        chain,
        params=job.model.params,
        aux=job.model.aux,
        batch=jax.tree.map(np.asarray, batch),
        device=device,
        options=compiler_options(device.platform, job.reduction),
        done=said,
    )


def _show(profile: Profile, file: str) -> None:
    print(f"{'kind':<24} {'microbatch':>10} {'forward':>10} {'backward':>10} {'update':>10}")
    for setting, times in sorted(profile.times.items()):
        row = [sum(getattr(t, part) for t in times) for part in ("forward", "backward", "update")]
        seconds = " ".join(f"{1e3 * s:>7.2f} ms" for s in row)
        print(f"{setting.kind:<24} {setting.microbatch_size:>10} {seconds}")
    print(f"{len(profile.layers)} segments of model {profile.model}, written to {file}")
