"""Predictions of the measured plans: what is known of the runtime that they ran on.

`PYTHONPATH=tests python -m support.sailor` prints the table, and with PLAN MODEL FOLDER what a plan
file of the repository's form, mixed or not, is predicted to take, with the repository's data in a
folder.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Collection, Iterable, Sequence

from hxla import LayerTime, PlanError, Profile, Setting, make_schedule
from support.device_memory import DeviceMemory, MemoryRule, pipeline_memory
from support.inside.schedule import blocking_replay
from support.sailor_data import KIND, Data, Measured, Place, load, other_runs, read, read_plan
from support.sailor_network import (
    NOT_DUPLEX,
    Hop,
    boundary_seconds,
    gather_seconds,
    nodes_of,
    reduction_seconds,
)

OTHER_RUNS = other_runs()

#: Bytes a parameter as in the repository's own simulator (`get_memory_footprint_on_gpu`): 24, of
#: which 4 are the parameter, 4 the gradient, 8 Adam's moments, 4 the flat buffer that gradients are
#: reduced in and 4 DeepSpeed's copy. One layer of workspace is the bound that `MemoryRule` states.
#: Context and allocator are what 15 runs of another runtime took on the same machine: the most of
#: the first, as a measured peak is the fullest device's, and the mean of the second. The margin is
#: ours.
RULE = MemoryRule(
    gradient_factor=1.0,
    optimizer_factor=2.0,
    buffer_factor=2.0,
    workspace_layers=1.0,
    context_bytes=max(run.used_bytes - run.reserved_bytes for run in OTHER_RUNS),
    allocator_share=statistics.mean(
        run.reserved_bytes / run.allocated_bytes - 1 for run in OTHER_RUNS
    ),
    margin=0.05,
)
#: What the repository's simulator has instead: bytes "for fused kernel loading", no fragments.
THEIRS = dataclasses.replace(RULE, context_bytes=4.76e9 + 300e6, allocator_share=0.0)
#: On other machines the same source has 2e9 bytes for one device and 3e9 for a tensor-parallel
#: group (`check_config_fits`).
OTHER_CONTEXT_BYTES = (2e9, 3e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What one stage of one replica has to do, in a microbatch and once a step."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    gradient_bytes: float
    send_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSeconds:
    compute_seconds: float
    reduction_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The step, and its stages by replica."""

    step_seconds: float
    stages: tuple[tuple[StageSeconds, ...], ...]


def rule_of(place: Place, rule: MemoryRule = RULE) -> MemoryRule:
    """The rule on the place's machine."""
    if place.kind == KIND:
        return rule
    return dataclasses.replace(rule, context_bytes=OTHER_CONTEXT_BYTES[place.tensor > 1])


def monotone(profile: Profile) -> Profile:
    """The profile in which no layer's time falls when its microbatch grows.

    More examples are never less work, so the least time over the larger microbatches bounds the
    time of a smaller one, and where a measurement is above it, that measurement was disturbed.
    """
    times: dict[Setting, tuple[LayerTime, ...]] = {}
    for setting, own in profile.times.items():
        larger = [
            layers
            for other, layers in profile.times.items()
            if (other.kind, other.tensor) == (setting.kind, setting.tensor)
            and other.microbatch_size >= setting.microbatch_size
        ]
        times[setting] = tuple(
            dataclasses.replace(
                time,
                forward=min(layers[i].forward for layers in larger),
                backward=min(layers[i].backward for layers in larger),
            )
            for i, time in enumerate(own)
        )
    return dataclasses.replace(profile, times=times)


def was_set(profile: Profile, setting: Setting) -> bool:
    """Whether somebody set the forwards of the inner layers, rather than measured them.

    The profiles have microseconds; one measured time in a hundred is whole tenths of a
    millisecond by chance, all of a setting's are not.
    """
    inner = {time.forward for time in profile.times[setting][1:-1]}
    return all(math.isclose(time * 1e4, round(time * 1e4), rel_tol=1e-6) for time in inner)


def stage_loads(
    profile: Profile, settings: Sequence[Setting], stages: Sequence[Sequence[int]]
) -> tuple[StageLoad, ...]:
    """Loads of the stages of a pipeline.

    Args:
        profile: Sizes and times of the layers.
        settings: Device kind, microbatch size and tensor parallelism of each stage.
        stages: Indices of the layers of each stage.

    Raises:
        PlanError: If the profile has no times or sizes for a setting, naming what there is.
    """
    loads = []
    for setting, layers in zip(settings, stages, strict=True):
        times = _lookup(profile.times, setting, profile.model, "times")
        key = (setting.microbatch_size, setting.tensor)
        sizes = _lookup(profile.sizes, key, profile.model, "sizes")
        loads.append(
            StageLoad(
                forward_seconds=sum(times[i].forward for i in layers),
                backward_seconds=sum(times[i].backward for i in layers),
                update_seconds=sum(times[i].update for i in layers),
                gradient_bytes=sum(sizes[i].parameter_bytes for i in layers),
                send_bytes=sizes[layers[-1]].output_bytes,
            )
        )
    return tuple(loads)


def _lookup(table, key, model, what):
    if key not in table:
        known = ", ".join(sorted(map(str, table))) or "none"
        raise PlanError(
            f"the profile of {model} has no {what} for {key}, only for: {known}; profile it"
        )
    return table[key]


def predict_time(
    data: Data,
    plan: Measured,
    *,
    host_bytes_per_second: float | None = None,
    not_duplex: Collection[str] = NOT_DUPLEX,
) -> StepSeconds:
    """The step, as this runtime does it.

    What is known of it (DeepSpeed 0.16.5 with the repository's pipeline engine): 1F1B. A tensor
    rank sends its part of an activation or gradient; the transfer is issued on the stream that
    computes, so it holds up both stages. Before it goes on, every rank of the receiving group
    rebuilds the whole tensor (`reconstruct_tensor`): it makes zeros of that size in the host's
    memory, copies them to its device, and gathers the parts of the group. Gradients are reduced
    once, after all microbatches and a barrier, in buckets of 500 million values, nothing
    overlapped. Devices of a node share its network card: see `sailor_network`.

    Args:
        data: Profiles and curves.
        plan: What to predict.
        host_bytes_per_second: What rebuilding gets of the host; None: `host_rate` of each machine.
        not_duplex: Kinds whose cards carry both directions together.
    """
    profile = monotone(data.profiles[plan.model])
    stages = plan.stages(len(profile.layers))
    nodes = nodes_of(data, plan)
    columns = _by_replica(plan.places, plan.num_replicas)
    loads = [
        stage_loads(
            profile,
            [Setting(place.kind, plan.microbatch_size, place.tensor) for place in places],
            stages,
        )
        for places in columns
    ]
    sent_bytes = [load.send_bytes for load in loads[0][:-1]]
    sends = _send_seconds(data, plan, nodes, sent_bytes)
    reduction = reduction_seconds(
        data,
        plan,
        nodes,
        [min(load.gradient_bytes for load in like) for like in zip(*loads, strict=True)],
        not_duplex,
    )

    def rebuilding(place, num_bytes):
        host = num_bytes / (host_bytes_per_second or host_rate(place.kind))
        return (host + gather_seconds(data, place, num_bytes)) if num_bytes else 0.0

    timelines = [
        blocking_replay(
            make_schedule("1f1b", len(own), plan.num_microbatches),
            [
                load.forward_seconds + rebuilding(place, num_bytes)
                for load, place, num_bytes in zip(own, places, (0, *sent_bytes), strict=True)
            ],
            [
                load.backward_seconds + rebuilding(place, num_bytes)
                for load, place, num_bytes in zip(own, places, (*sent_bytes, 0), strict=True)
            ],
            between,
        )
        for places, own, between in zip(columns, loads, sends, strict=True)
    ]
    barrier = max(max(timeline.finish_seconds) for timeline in timelines)
    tail = max(
        seconds + load.update_seconds
        for own in loads
        for seconds, load in zip(reduction, own, strict=True)
    )
    return StepSeconds(
        step_seconds=barrier + tail,
        stages=tuple(
            tuple(
                StageSeconds(
                    compute_seconds=plan.num_microbatches
                    * (load.forward_seconds + load.backward_seconds),
                    reduction_seconds=seconds,
                )
                for load, seconds in zip(own, reduction, strict=True)
            )
            for own in loads
        ),
    )


def host_rate(kind: str) -> float:
    """Bytes a second of zeros that one process makes in its host's memory and copies to a device.

    New memory comes page by page. A workstation with a GV100 took 0.3266 s to touch every page of
    1 GiB (rapidsai/dask-cuda, pull request 98), and to copy 1 GiB that is not page-locked to a V100
    takes 0.2093 s (numba issue 4336): one after the other, 2.0 GB/s. On a GH200 the copy takes
    10.754 ms (vortex-data/vortex, pull request 7815); what its pages take, which are 16 times as
    large, nobody stated. So its rate is between the workstation's and that of the copy alone, 100
    GB/s, and the geometric mean of these bounds is assumed, 14 GB/s. It was assumed after the
    measured plans had been predicted with rates from 8 to 100: 12 to 24 does about as well.
    """
    workstation = 2**30 / (0.3266 + 0.2093)
    return math.sqrt(workstation * 2**30 / 0.010754) if kind == KIND else workstation


def _by_replica(rows, num_replicas):
    """From rows by stage, of one or more replicas, to columns by replica."""
    return [tuple(row[r % len(row)] for row in rows) for r in range(num_replicas)]


def _send_seconds(data, plan, nodes, sent_bytes) -> list[list[float]]:
    """Of each replica and boundary, one transfer: the mean of activations' and gradients'."""
    groups = _by_replica(plan.places, plan.num_replicas)
    machines = _by_replica(nodes, plan.num_replicas)
    boundaries = []
    for s, num_bytes in enumerate(sent_bytes):
        there = [
            Hop(own[s], at[s], own[s + 1], at[s + 1])
            for own, at in zip(groups, machines, strict=True)
        ]
        back = [Hop(hop.b, hop.node_b, hop.a, hop.node_a) for hop in there]
        both = (boundary_seconds(data, hops, num_bytes) for hops in (there, back))
        boundaries.append([statistics.mean(pair) for pair in zip(*both, strict=True)])
    return [[row[r] for row in boundaries] for r in range(plan.num_replicas)]


def predict_memory(data: Data, plan: Measured, rule: MemoryRule = RULE) -> tuple[DeviceMemory, ...]:
    """Peak of one device of each stage, of the smallest tensor-parallel group where they differ.

    This runtime drops the gradients after a step (DeepSpeed's `zero_grad` sets them to None), so
    the next backward makes them as it frees the stash: the whole stash and all gradients are only
    there together from a second microbatch on.
    """
    profile = data.profiles[plan.model]
    stages = plan.stages(len(profile.layers))
    places = [min(stage, key=lambda place: (place.tensor, place)) for stage in plan.places]
    parts = [
        [profile.sizes[plan.microbatch_size, place.tensor][i] for i in layers]
        for place, layers in zip(places, stages, strict=True)
    ]
    if plan.num_microbatches == 1:
        rule = dataclasses.replace(rule, gradient_factor=0.0)
    schedule = make_schedule("1f1b", len(stages), plan.num_microbatches)
    return tuple(
        pipeline_memory(parts, schedule, rule_of(place, rule))[s] for s, place in enumerate(places)
    )


def fullest(stages: Iterable[DeviceMemory]) -> DeviceMemory:
    return max(stages, key=lambda memory: memory.total_bytes)


def is_possible(data: Data, plan: Measured) -> bool:
    """Whether the measured peak holds what every run must: parameters, gradients, Adam, stash."""
    least = MemoryRule(workspace_layers=0.0)
    return plan.peak_bytes >= fullest(predict_memory(data, plan, least)).total_bytes


def main():
    data = load()
    columns = ("plan", "s", "predicted", "", "GB", "predicted", "")
    rows = [columns]
    for plan in data.plans:
        step = predict_time(data, plan).step_seconds
        peak = fullest(predict_memory(data, plan)).total_bytes
        rows.append(
            (
                plan.name,
                f"{plan.step_seconds:.3f}",
                f"{step:.3f}",
                f"{step / plan.step_seconds - 1:+.1%}",
                f"{plan.peak_bytes / 1e9:.2f}",
                f"{peak / 1e9:.2f}",
                f"{peak / plan.peak_bytes - 1:+.1%}",
            )
        )
    for name, *cells in rows:
        print(f"{name:40}" + "".join(f"{cell:>11}" for cell in cells))


def predict(path, model, folder):
    data = read(pathlib.Path(folder))
    plan = dict.fromkeys(("real", "red_grads", "max_mem"), math.nan)
    plan |= json.loads(pathlib.Path(path).read_text())
    measured = read_plan(plan, model)
    print(f"{measured.name}: {predict_time(data, measured).step_seconds:.3f} s")
    for s, memory in enumerate(predict_memory(data, measured)):
        print(f"  stage {s}: {memory.total_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    predict(*sys.argv[1:]) if len(sys.argv) > 1 else main()
