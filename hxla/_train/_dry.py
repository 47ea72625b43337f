"""`hxla profile` and `hxla plan`: what a script would train, measured or planned, not trained.

Both run the user's script up to its first `hxla.train`, which finds the request in the environment,
answers it and ends the script.
"""

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

from .._cluster import Device
from .._errors import ConfigError, PlanError
from .._launch import _coordination
from .._lower._devices import device_label
from .._lower._replicate import Reduction, compiler_options
from .._measure import fingerprint, layer_sizes, measure
from .._mesh_file import load_cluster
from .._model import Functional
from .._planner._microbatch import candidate_sizes
from .._planner._propose import Work, propose
from .._profile._file import dump_profile, load_profile, merge_profiles
from .._profile._values import Profile, Setting
from .._proposal import Proposal, compare
from .._replay import Timeline
from .._segments import segments
from .._timeline import draw, perfetto
from .._trace import trace_functional
from .._types import PyTree

VARIABLE = "HXLA_DRY"


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
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    meshes: tuple[str, ...] = pydantic.Field(min_length=1, max_length=2)
    profile: str | None = None
    folder: str | None = None
    microbatch_sizes: tuple[pydantic.PositiveInt, ...] = ()
    num_segments: pydantic.PositiveInt = 8
    seconds: pydantic.PositiveFloat = 10.0


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


def answer(request: Request, job: Job) -> None:
    """Measure or plan, write, and say where."""
    if isinstance(request, ProfileRequest):
        _profile(request, job)
    else:
        _plan(request, job)


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


def _plan(request: PlanRequest, job: Job) -> None:
    profile = load_profile(request.profile) if request.profile else None
    clusters = [load_cluster(mesh) for mesh in request.meshes]
    asked = request.microbatch_sizes
    if profile is not None and not asked and not job.microbatch_size:
        asked = tuple({s.microbatch_size for s in profile.times})
    num_segments = len(profile.layers) if profile is not None else request.num_segments
    chains = {}
    for size in _sizes(asked, job, len(clusters[0].devices)):
        graph = trace_functional(job.model, job.batch(size))
        chains[size] = segments(graph, num_segments)
    model = fingerprint(graph)
    if profile is not None and profile.model != model:
        raise PlanError(
            f"profile {request.profile} is of another model ({profile.model}, this one is "
            f"{model}): measure this one with hxla profile"
        )
    state = jax.eval_shape(job.optimizer.init, job.model.params)
    param_bytes = sum(x.nbytes for x in jax.tree.leaves(job.model.params))
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    exact = job.reduction == "exact"
    work = Work(
        model=model,
        layers=tuple(s.name for s in next(iter(chains.values()))),
        sizes={size: layer_sizes(chain) for size, chain in chains.items()},
        batch_size=job.batch_size,
        # Itself, its gradient, what gradients are summed in, the optimizer's state.
        state_factor=2 + (2 if exact else 1) + state_bytes / max(1, param_bytes),
        reduce_factor=1.5 if exact else 1.0,
    )
    proposals = []
    for cluster in clusters:
        proposal, timelines = propose(work, cluster, profile, time_budget_seconds=request.seconds)
        proposals.append(proposal)
        print(proposal.explain())
        if request.folder is not None:
            _write(pathlib.Path(request.folder), proposal, timelines)
    if len(proposals) == 2:
        print(compare(*proposals))


def _write(folder: pathlib.Path, proposal: Proposal, timelines: Sequence[Timeline]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{proposal.cluster}.json"]
    files[0].write_text(proposal.to_json() + "\n")
    first = {d.num_microbatches: d.replica for d in reversed(proposal.devices)}
    for i, timeline in enumerate(timelines):
        replica = sorted(first.values())[i] if i < len(first) else i
        names = [f"{d.kind} (device {d.device})" for d in proposal.devices if d.replica == replica]
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


def _profile(request: ProfileRequest, job: Job) -> None:
    sizes = _sizes(request.microbatch_sizes, job, len(job.devices))
    own = next(d for d in job.devices if d.process_index == jax.process_index())
    label = device_label(own, job.known)
    profile: Profile | None = None
    if pathlib.Path(request.file).exists():
        profile = load_profile(request.file)
    for size in sizes:
        mine = _measured(request, job, profile, own, Setting(label, size))
        parts = _coordination.gather(
            "profile",
            json.dumps(mine.to_table()),
            rank=jax.process_index(),
            num_processes=jax.process_count(),
            timeout_seconds=3600.0,
        )
        profile = merge_profiles(Profile.from_table(json.loads(p)) for p in parts)
        if jax.process_index() == 0:
            dump_profile(profile, request.file)  # after each size: an interrupted run resumes
    assert profile is not None
    if jax.process_index() == 0:
        _show(profile, request.file)


def _measured(
    request: ProfileRequest, job: Job, before: Profile | None, device: jax.Device, setting: Setting
) -> Profile:
    """The profile so far with one setting more."""
    batch = job.batch(setting.microbatch_size)
    graph = trace_functional(job.model, batch)
    model = fingerprint(graph)
    chain = segments(graph, request.num_segments)
    names = tuple(s.name for s in chain)
    if before is not None and before.model != model:
        raise PlanError(
            f"profile {request.file} is of another model ({before.model}, this one is {model}): "
            "write to another file"
        )
    if before is not None and len(before.layers) != len(names):
        raise PlanError(
            f"profile {request.file} has {len(before.layers)} segments, now there are "
            f"{len(names)}: use the same number, or write to another file"
        )
    if before is not None and setting in before.times:
        return before

    def said(num: int) -> None:
        where = f"{setting.kind}, microbatch of {setting.microbatch_size}"
        print(f"{where}: {num} of {len(chain)} segments", file=sys.stderr, flush=True)

    times = measure(
        graph,
        chain,
        params=job.model.params,
        aux=job.model.aux,
        batch=jax.tree.map(np.asarray, batch),
        optimizer=job.optimizer,
        device=device,
        options=compiler_options(device.platform, job.reduction),
        done=said,
    )
    own = Profile(
        model=model,
        layers=names if before is None else before.layers,
        sizes={(setting.microbatch_size, 1): layer_sizes(chain)},
        times={setting: times},
    )
    return own if before is None else merge_profiles([before, own])


def _show(profile: Profile, file: str) -> None:
    print(f"{'kind':<24} {'microbatch':>10} {'forward':>10} {'backward':>10} {'update':>10}")
    for setting, times in sorted(profile.times.items()):
        row = [sum(getattr(t, part) for t in times) for part in ("forward", "backward", "update")]
        seconds = " ".join(f"{1e3 * s:>7.2f} ms" for s in row)
        print(f"{setting.kind:<24} {setting.microbatch_size:>10} {seconds}")
    print(f"{len(profile.layers)} segments of model {profile.model}, written to {file}")
