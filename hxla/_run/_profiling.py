"""`hxla profile`: the segments of a job's model, measured on its devices and by training steps."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import pydantic

from .._core._config import BalanceConfig
from .._core._errors import PlanError
from .._graph._graph import Graph
from .._graph._segments import Segment, segments
from .._lower._options import compiler_options
from .._planner._axes import shard_graph
from .._planner._microbatch_sizes import candidate_sizes
from .._profile._profile import LayerSize, LayerTime, Profile, Setting, together_key
from .._profile._profile_file import dump_profile, load_profile, merge_profiles
from .._profile._segment_times import layer_sizes, measure, model_name
from ._planning import Wishes, check_enough, plan_for, size_asked
from ._session import Session
from ._session_values import SessionOptions
from ._traced_job import TracedJob
from ._trial import MOST_STEPS, Observer, Trial


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


def profile(job: TracedJob, size: int | None, reduction: str, request: ProfileRequest) -> None:
    """Measure, write, and say where; every process of the job takes part.

    Args:
        job: What is trained.
        size: Examples of a microbatch, if the job's script says.
        reduction: `exact` or `float`.
        request: What to measure.

    Raises:
        PlanError: If a copy of the model takes several devices, or the file is of another model.
    """
    devices = job.all_devices()
    cluster = job.cluster(devices)
    asked = size_asked(job, size)
    sizes = tuple(sorted(request.microbatch_sizes)) or (
        (asked,) if asked else tuple(sorted(candidate_sizes(job.batch_size, len(devices))))
    )
    for own_size in sizes:
        size_asked(job, own_size)
        check_enough(job.batch_size, own_size, len(devices))
    labels = [device.label for device in cluster.devices]
    rank = next(i for i, d in enumerate(devices) if d.process_index == jax.process_index())
    model = model_name(job.functional(sizes[0]).params)
    found: Profile | None = None
    if pathlib.Path(request.file).exists():
        found = load_profile(request.file, model=model)
    batches = {b: job.first_batch(0, b) for b in sizes}  # trials may read an iterable past them
    next_step = 0
    for own_size, batch in batches.items():
        graph = job.graph(own_size)
        chain = segments(graph, request.num_segments)
        if found is not None and len(found.layers) != len(chain):
            raise PlanError(
                f"profile {request.file} has {len(found.layers)} segments, now there are "
                f"{len(chain)}: use the same number, or write to another file"
            )
        if found is not None and not _is_new(found, labels, own_size):
            continue
        trial = _trial(job, own_size, reduction, next_step).by_kind(labels)
        next_step = trial.end_step
        setting = Setting(labels[rank], own_size)
        mine = Profile(
            model=model,
            layers=tuple(s.name for s in chain),
            num_segments=request.num_segments,
            sizes={},
            times={},
            reductions={together_key(labels): trial.rest_seconds},
        )
        mine = merge_profiles([*([found] if found is not None else []), mine])
        if setting not in mine.times:
            whole = layer_sizes(graph, chain, shard_graph(graph, (), {}))
            alone = _measured(job, graph, chain, batch, devices[rank], setting, reduction)
            times = _scaled(alone, whole, trial, rank)
            mine = dataclasses.replace(
                mine,
                sizes={**mine.sizes, (own_size, 1): whole},
                times={**mine.times, setting: times},
                peaks={**mine.peaks, setting: trial.peak_bytes},
            )
        parts = job.gather("profile", json.dumps(mine.to_table()))
        found = merge_profiles(Profile.from_table(json.loads(p)) for p in parts)
        if jax.process_index() == 0:
            dump_profile(found, request.file)  # after each size: an interrupted run resumes
    assert found is not None
    if jax.process_index() == 0:
        _show(found, request.file)


def _trial(job: TracedJob, size: int, reduction: str, start: int) -> Trial:
    """Train with microbatches of a size until the times of a step are known."""
    devices = job.all_devices()
    wishes = Wishes(microbatch_size=size, reduction=reduction)
    plan, _ = plan_for(job, wishes, job.cluster(devices), devices)
    if plan.axes:
        raise PlanError(
            "hxla profile measures a model on one device, but annotations or stages put a copy of "
            f"this one on {len(plan.replicas[0].devices)}: profile it without them"
        )
    # Counts that follow every breath of a device would leave too few steps of each.
    moves = job.settings.balance
    calm = BalanceConfig(
        min_gain=max(0.1, moves.min_gain),
        patience_steps=moves.patience_steps,
        window_steps=MOST_STEPS,
        retry_steps=moves.retry_steps,
    )
    observer = Observer()
    options = SessionOptions(
        steps=start + MOST_STEPS, balance=calm, first_step=start, is_trial=True
    )
    with Session(job, plan, devices, options) as session:
        for record in session:
            if observer.has_told_enough(record):
                session.stop()
        counts, seconds = observer.most
        return Trial(
            micro_seconds=session.balancer.seconds,
            update_seconds=session.balancer.fixed,
            counts=counts,
            step_seconds=seconds,
            peak_bytes=session.memory_bytes,
            end_step=session.step_number + job.settings.data.prefetch_steps,
        )


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
    job: TracedJob,
    graph: Graph,
    chain: Sequence[Segment],
    batch: Any,
    device: jax.Device,
    setting: Setting,
    reduction: str,
) -> tuple[LayerTime, ...]:
    """The segments on one device, with progress on stderr."""

    def said(num: int) -> None:
        where = f"{setting.kind}, microbatch of {setting.microbatch_size}"
        print(f"{where}: {num} of {len(chain)} segments", file=sys.stderr, flush=True)

    model = job.functional(setting.microbatch_size)
    return measure(
        graph,
        chain,
        params=model.params,
        aux=model.aux,
        batch=batch,
        device=device,
        options=compiler_options(device.platform, job.sums(reduction)),
        done=said,
    )


def _show(profile: Profile, file: str) -> None:
    print(f"{'kind':<24} {'microbatch':>10} {'forward':>10} {'backward':>10} {'update':>10}")
    for setting, times in sorted(profile.times.items()):
        row = [sum(getattr(t, part) for t in times) for part in ("forward", "backward", "update")]
        seconds = " ".join(f"{1e3 * s:>7.2f} ms" for s in row)
        print(f"{setting.kind:<24} {setting.microbatch_size:>10} {seconds}")
    print(f"{len(profile.layers)} segments of model {profile.model}, written to {file}")
