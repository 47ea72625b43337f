"""`hxla profile` and `hxla plan`: what a script would train, measured or planned, not trained.

Both run the user's script up to its first `hxla.train`, which finds the request in the environment,
answers it and ends the script.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

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
from .._model import Functional
from .._planner._microbatch import candidate_sizes
from .._profile._file import dump_profile, load_profile, merge_profiles
from .._profile._values import Profile, Setting
from .._segments import segments
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


def requested() -> ProfileRequest | None:
    """What the environment asks for instead of training."""
    text = os.environ.get(VARIABLE)
    return None if text is None else ProfileRequest(**json.loads(text))


def answer(request: ProfileRequest, job: Job) -> None:
    """Measure, write, and say where."""
    sizes = request.microbatch_sizes or (
        (job.microbatch_size,)
        if job.microbatch_size
        else candidate_sizes(job.batch_size, len(job.devices))
    )
    wrong = [b for b in sizes if job.batch_size % b]
    if wrong:
        raise ConfigError(
            f"microbatch sizes {wrong} do not divide the script's batch_size={job.batch_size}"
        )
    own = next(d for d in job.devices if d.process_index == jax.process_index())
    label = device_label(own, job.known)
    profile: Profile | None = None
    if pathlib.Path(request.file).exists():
        profile = load_profile(request.file)
    for size in sorted(sizes):
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


def request_text(**fields: Any) -> str:
    """A request as the environment carries it."""
    return ProfileRequest(**fields).model_dump_json()
