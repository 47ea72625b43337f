"""Predictions of the measured plans: what is known of the runtime that they ran on.

`python tests/sailor.py` prints the table, and with PLAN MODEL FOLDER what a plan file of the
repository's form, mixed or not, is predicted to take, with the repository's data in a folder.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from sailor_data import KIND, Data, Measured, Place, load, read, read_plan

from hxla._errors import PlanError
from hxla._planner._cost import (
    Link,
    StageLoad,
    StepCost,
    ring_all_reduce_seconds,
    step_cost,
)
from hxla._planner._memory import DeviceMemory, MemoryRule, pipeline_memory
from hxla._profile._values import LayerTime, Profile, Setting
from hxla._schedules import one_f_one_b

#: All from the repository's own simulator (`get_memory_footprint_on_gpu`), whose authors found them
#: on this platform before we came: 24 bytes a parameter, of which 4 are the parameter, 4 the
#: gradient, 8 Adam's moments, 4 the flat buffer that gradients are reduced in and 4 DeepSpeed's
#: copy, and 4.76e9 + 300e6 bytes that the driver shows but PyTorch does not count.
#: One layer of workspace is the bound that `MemoryRule` states. The margin is ours.
PUBLISHED = MemoryRule(
    gradient_factor=1.0,
    optimizer_factor=2.0,
    buffer_factor=2.0,
    workspace_layers=1.0,
    context_bytes=4.76e9 + 300e6,
    margin=0.05,
)
#: On other machines the same source has 2e9 bytes for one device and 3e9 for a tensor-parallel
#: group (`check_config_fits`).
OTHER_CONTEXT_BYTES = (2e9, 3e9)


def rule_of(place: Place, rule: MemoryRule = PUBLISHED) -> MemoryRule:
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


def excess_per_example(profile: Profile, setting: Setting) -> float | None:
    """How much more time an example takes than in twice the microbatch, as a share of the latter.

    Near 0 the device is the limit and the profile can be trusted; well above it the host that
    launches kernels is, and then a run's times depend on what else the host does: on a profiler's
    hooks, on other processes, on logging. None if twice the microbatch was not measured.
    """
    double = dataclasses.replace(setting, microbatch_size=2 * setting.microbatch_size)
    if double not in profile.times:
        return None
    own, twice = (
        sum(time.forward + time.backward for time in profile.times[s]) for s in (setting, double)
    )
    return 2 * own / twice - 1


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
) -> StepCost:
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
            max(
                ring_all_reduce_seconds(num_bytes, len(places), data.link(a, b), duplex=duplex)
                for a, b in pairs
            )
        )
    return step_cost(
        loads,
        [plan.num_microbatches] * len(loads),
        links,
        reduction,
        blocking=True,
        barrier=True,
    )


def transfer(link: Link, num_parts: int) -> Link:
    """The link of a transfer of which each rank moves one part."""
    return lambda num_bytes: link(num_bytes / num_parts)


def predict_memory(
    data: Data, plan: Measured, rule: MemoryRule = PUBLISHED
) -> tuple[DeviceMemory, ...]:
    """Peak of one device of each stage, of the smallest tensor-parallel group where they differ."""
    profile = data.profiles[plan.model]
    stages = plan.stages(len(profile.layers))
    places = [min(stage, key=lambda place: (place.tensor, place)) for stage in plan.places]
    parts = [
        [profile.sizes[plan.microbatch_size, place.tensor][i] for i in layers]
        for place, layers in zip(places, stages, strict=True)
    ]
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


def fitted(data: Data, plans: Iterable[Measured]) -> MemoryRule:
    """The published rule with context, communicators and workspace fitted to some plans.

    A fallback: these three are the machine's, and one would measure them on it.
    """
    bare = dataclasses.replace(PUBLISHED, workspace_layers=0.0, context_bytes=0.0)
    unit = dataclasses.replace(bare, workspace_layers=1.0)
    rows, rest = [], []
    for plan in plans:
        stages = predict_memory(data, plan, PUBLISHED)
        at = stages.index(fullest(stages))
        base = predict_memory(data, plan, bare)[at].total_bytes
        largest = predict_memory(data, plan, unit)[at].workspace_bytes
        rows.append(np.array([1e9, 1e9 * (len(stages) > 1), largest]) / plan.peak_bytes)
        rest.append((plan.peak_bytes - base) / plan.peak_bytes)
    table = np.array(rows)
    pipelined = table[:, 1] > 0
    if pipelined.all() or not pipelined.any():
        table[:, 1] = 0.0  # what communicators take cannot be told from these plans
    context, communicator, layers = map(float, np.linalg.lstsq(table, np.array(rest))[0])
    return dataclasses.replace(
        PUBLISHED,
        context_bytes=context * 1e9,
        communicator_bytes=max(0.0, communicator * 1e9),
        workspace_layers=layers,
    )


def leave_one_out(data: Data) -> dict[Measured, DeviceMemory]:
    """Each possible plan's peak, predicted by the rule fitted to all the others."""
    possible = [plan for plan in data.plans if is_possible(data, plan)]
    return {
        plan: fullest(
            predict_memory(data, plan, fitted(data, [p for p in possible if p is not plan]))
        )
        for plan in possible
    }


def main():
    data = load()
    left_out = leave_one_out(data)
    columns = ("plan", "s", "predicted", "", "GB", "predicted", "", "left out")
    rows = [columns]
    for plan in data.plans:
        step = predict_time(data, plan).step_seconds
        peak = fullest(predict_memory(data, plan)).total_bytes
        other = left_out[plan].total_bytes if plan in left_out else math.nan
        rows.append(
            (
                plan.name,
                f"{plan.step_seconds:.3f}",
                f"{step:.3f}",
                f"{step / plan.step_seconds - 1:+.1%}",
                f"{plan.peak_bytes / 1e9:.2f}",
                f"{peak / 1e9:.2f}",
                f"{peak / plan.peak_bytes - 1:+.1%}",
                f"{other / plan.peak_bytes - 1:+.1%}",
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
