"""Predictions of the measured plans: what is known of the runtime that they ran on.

`python tests/sailor.py` prints the table, and with PLAN MODEL FOLDER what a plan file of the
repository's form, mixed or not, is predicted to take, with the repository's data in a folder.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence

from device_memory import DeviceMemory, MemoryRule, pipeline_memory
from sailor_data import KIND, Data, Measured, Place, load, other_runs, read, read_plan

from hxla._core._errors import PlanError
from hxla._planner._cost import LinkSeconds, ring_all_reduce_seconds
from hxla._profile._profile import LayerTime, Profile, Setting
from hxla._schedule._blocking_replay import blocking_replay
from hxla._schedule._schedules import one_f_one_b

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
    data: Data, plan: Measured, *, whole: bool = True, duplex: bool = False
) -> StepSeconds:
    """The step, as this runtime does it.

    What is known of it (DeepSpeed 0.16.5 with the repository's pipeline engine): 1F1B; transfers
    are issued on the stream that computes, so they hold up both stages; every tensor rank uses its
    own share of the node's network; gradients are reduced once, after all microbatches and a
    barrier, in buckets of 500 million values, nothing overlapped.

    Two things are not known. The runs of either model alone choose `whole`, and the times that the
    reductions took by themselves choose `duplex`.

    Args:
        data: Profiles and curves.
        plan: What to predict.
        whole: Whether a transfer costs a rank what the whole activation would. The engine cuts it
            over the tensor ranks, sends the parts, and gathers them again with the host waiting
            in between; False counts only the sending of the parts.
        duplex: Whether a ring sends and receives at once at full bandwidth. The repository's
            `estimate_ar_time` has a factor of 2 for it that is switched off.
    """
    profile = monotone(data.profiles[plan.model])
    stages = plan.stages(len(profile.layers))
    replicas = sorted(
        {tuple(stage[r % len(stage)] for stage in plan.places) for r in range(plan.num_replicas)}
    )
    loads = [
        stage_loads(
            profile,
            [Setting(place.kind, plan.microbatch_size, place.tensor) for place in places],
            stages,
        )
        for places in replicas
    ]
    links = [
        [transfer(data.link(a, b), 1 if whole else a.tensor) for a, b in itertools.pairwise(places)]
        for places in replicas
    ]
    reduction = []
    for s, places in enumerate(plan.places):
        # Shards of the smallest tensor-parallel group are the largest, and the slowest pair of the
        # ring sets its pace.
        num_bytes = max(stage_loads[s].gradient_bytes for stage_loads in loads)
        pairs = set(zip(places, (*places[1:], places[0]), strict=True))
        reduction.append(
            max(ring_all_reduce_seconds(num_bytes, len(places), data.link(a, b)) for a, b in pairs)
            * (1 if duplex else 2)
        )
    timelines = [
        blocking_replay(
            one_f_one_b(len(own), plan.num_microbatches),
            [load.forward_seconds for load in own],
            [load.backward_seconds for load in own],
            [link(load.send_bytes) for link, load in zip(between, own[:-1], strict=True)],
        )
        for own, between in zip(loads, links, strict=True)
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
                StageSeconds(compute_seconds=busy, reduction_seconds=seconds)
                for busy, seconds in zip(timeline.busy_seconds, reduction, strict=True)
            )
            for timeline in timelines
        ),
    )


def transfer(link: LinkSeconds, num_parts: int) -> LinkSeconds:
    """The link of a transfer of which each rank moves one part."""
    return lambda num_bytes: link(num_bytes / num_parts)


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
    schedule = one_f_one_b(len(stages), plan.num_microbatches)
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
