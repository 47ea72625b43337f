"""Measured plans of others, and what is known of the runtime that they ran on.

Plans and profiles: eth-easl/sailor (Strati et al., SOSP 2025), MIT licence, commit cf2c8e3:
Megatron-DeepSpeed in float32 on nodes of 4 GH200. `sailor.json` holds the figures that the
predictions need; where the repository's own data are beside the checkout, they are read instead and
must say the same.

    python -m tests.sailor            # the table of predictions
    python -m tests.sailor --write    # sailor.json from the repository's data
"""

import dataclasses
import gzip
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping

import numpy as np

from hxla._planner._cost import Link, StepCost, monotone, ring_all_reduce_seconds, stage_loads
from hxla._planner._cost import step_cost as cost_of
from hxla._planner._memory import DeviceMemory, MemoryRule, pipeline_memory
from hxla._profile._values import LayerSize, LayerTime, Profile, Setting
from hxla._schedules import one_f_one_b

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared/data/sailor"
SHIPPED = pathlib.Path(__file__).parent / "data/sailor.json"
KIND, TENSOR, FLOAT_BYTES = "GH-96", 4, 4
MODELS = {"GPT-NEO": "GPT-Neo-2.7", "OPT-350": "OPT-350"}
#: Transformer layers in the model that was profiled, besides embedding and head: the repository's
#: profiling scripts pass `--num_prof_layers 2`. The update was timed once, for all of it.
NUM_PROFILED_LAYERS = 2

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan and what its run took; every replica's stage is one node, split 4 ways."""

    model: str
    num_nodes: int
    num_replicas: int
    cuts: tuple[int, ...]
    microbatch_size: int
    batch_size: int
    step_seconds: float
    peak_bytes: float

    @property
    def name(self):
        stages = "stage" if len(self.cuts) == 1 else "stages"
        return (
            f"{self.model} {self.num_replicas} x {len(self.cuts)} {stages}, "
            f"{self.num_microbatches} x {self.microbatch_size}"
        )

    @property
    def num_microbatches(self):
        return self.batch_size // (self.microbatch_size * self.num_replicas)

    def stages(self, num_layers):
        return [range(a, b) for a, b in zip(self.cuts, (*self.cuts[1:], num_layers), strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Profiles by model, the plans, and the network's curve."""

    profiles: Mapping[str, Profile]
    plans: tuple[Measured, ...]
    curve: tuple[float, ...]


def share_of_curve(coefficients: Iterable[float], num_senders: int) -> Link:
    """Seconds of one device's bytes while all `num_senders` of its node send as many.

    The curve is the node's bandwidth in GB/s, a polynomial in log2 of one device's megabytes.
    """
    powers = list(coefficients)[::-1]

    def seconds(num_bytes):
        log = math.log2(num_bytes / 1e6)
        gigabytes_per_second = sum(c * log**i for i, c in enumerate(powers))
        return num_senders * num_bytes / 1e9 / gigabytes_per_second

    return seconds


def profile_of(model, times, sizes) -> Profile:
    """A profile from the repository's tables.

    Args:
        model: Name.
        times: kind, microbatch size, tensor, layer to (forward, backward, update of the whole
            profiled model).
        sizes: tensor, layer to (parameters, outputs, stashed values), numbers of one example.
    """
    layers = tuple(str(i) for i in range(len(next(iter(sizes.values())))))
    ends = (*range(1 + NUM_PROFILED_LAYERS), len(layers) - 1)

    def layer_times(tensor, table):
        profiled = sum(sizes[tensor][layers[i]][0] for i in ends)
        return tuple(
            LayerTime(
                forward=table[layer][0],
                backward=table[layer][1],
                update=table[layer][2] * sizes[tensor][layer][0] / profiled,
            )
            for layer in layers
        )

    def layer_sizes(tensor, microbatch_size):
        return tuple(
            LayerSize(
                parameter_bytes=sizes[tensor][layer][0] * FLOAT_BYTES,
                output_bytes=sizes[tensor][layer][1] * FLOAT_BYTES * microbatch_size,
                stash_bytes=sizes[tensor][layer][2] * FLOAT_BYTES * microbatch_size,
            )
            for layer in layers
        )

    keys = [(k, b, t) for k, x in times.items() for b, y in x.items() for t in y if t in sizes]
    return Profile(
        model=model,
        layers=layers,
        sizes={(int(b), int(t)): layer_sizes(t, int(b)) for _, b, t in keys},
        times={Setting(k, int(b), int(t)): layer_times(t, times[k][b][t]) for k, b, t in keys},
    )


def extract(folder: pathlib.Path) -> dict:
    """The figures of the repository's data that the predictions need."""
    with gzip.open(folder / "profiles.json.gz") as file:
        times = json.load(file)
    info = json.loads((folder / "llm_info.json").read_text())
    network = json.loads((folder / "network/network_coeffs_all_homo.json").read_text())
    fields = ("params_floats", "act_output_floats", "act_mem_floats")
    tensor = str(TENSOR)
    models = {}
    for model in MODELS.values():
        sizes = {layer: [v[f] for f in fields] for layer, v in info[model][tensor].items()}
        by_size = {b: x[tensor] for b, x in times[model][KIND].items() if tensor in x}
        models[model] = {
            "num_layers": len(sizes),
            # Layers 2 to the last but one are alike, of which the first is kept.
            "sizes": _ends(sizes),
            "times": {b: _ends(by_size[b]) for b in sorted(by_size, key=int)},
        }
    plans = []
    for path in sorted((folder / "validation").glob("*/*/*.json")):
        plan = json.loads(path.read_text())
        pipeline = plan["pipeline_list"][0]
        plans.append(
            {
                "model": MODELS[path.parts[-3]],
                "num_nodes": plan["N"],
                "num_replicas": pipeline["dp"][0],
                "cuts": [layers[0] for layers in pipeline["layers_per_stage"]],
                "microbatch_size": plan["mbs"],
                "batch_size": plan["gbs"],
                "step_seconds": plan["real"],
                "peak_bytes": plan["max_mem"],
            }
        )
    return {
        "source": "https://github.com/eth-easl/sailor, commit cf2c8e3 (Strati et al., SOSP 2025)",
        "licence": "MIT, Copyright the authors of eth-easl/sailor",
        "times": "seconds of forward, backward, update; of layers 0, 1, 2 and the last",
        "sizes": "numbers of parameters, outputs, stashed values; of the same layers",
        "models": models,
        "node_curve": network["inter"][KIND][str(TENSOR)][0],
        "plans": plans,
    }


def _ends(table):
    last = len(table) - 1
    assert all(table[str(i)] == table["2"] for i in range(2, last))
    return [table[str(i)] for i in (0, 1, 2, last)]


def _spread(ends, num_layers):
    first, second, rest, last = ends
    return {
        str(i): value for i, value in enumerate([first, second, *[rest] * (num_layers - 3), last])
    }


def load() -> Data:
    """The shipped figures, which `test_sailor.py` holds against the repository's own."""
    shipped = json.loads(SHIPPED.read_text())
    tensor = str(TENSOR)
    profiles = {}
    for model, table in shipped["models"].items():
        n = table["num_layers"]
        times = {KIND: {b: {tensor: _spread(x, n)} for b, x in table["times"].items()}}
        profiles[model] = profile_of(model, times, {tensor: _spread(table["sizes"], n)})
    plans = tuple(Measured(**{**p, "cuts": tuple(p["cuts"])}) for p in shipped["plans"])
    return Data(profiles=profiles, plans=plans, curve=tuple(shipped["node_curve"]))


def predict_time(data: Data, plan: Measured) -> StepCost:
    """The step, as this runtime does it.

    What is known of it (DeepSpeed 0.16.5 with the repository's pipeline engine): 1F1B; activations
    and their gradients are replicated over the 4 tensor ranks, each of which moves them over its
    own network card; transfers are issued on the stream that computes, so they hold up both
    stages; gradients are reduced once, after all microbatches and a barrier, in buckets of 500
    million values (one here), nothing overlapped. The ring shares each card between sending and
    receiving, as the repository's `mul_factor` of 2 for NCCL says.
    """
    profile = monotone(data.profiles[plan.model])
    stages = plan.stages(len(profile.layers))
    setting = Setting(KIND, plan.microbatch_size, TENSOR)
    loads = stage_loads(profile, [setting] * len(stages), stages)
    link = share_of_curve(data.curve, TENSOR)
    reduction = [
        ring_all_reduce_seconds(load.gradient_bytes, plan.num_replicas, link, duplex=False)
        for load in loads
    ]
    return cost_of(
        [loads],
        [plan.num_microbatches],
        [[link] * (len(loads) - 1)],
        reduction,
        blocking=True,
        barrier=True,
    )


def predict_memory(
    data: Data, plan: Measured, rule: MemoryRule = PUBLISHED
) -> tuple[DeviceMemory, ...]:
    """Peak of one device of each stage."""
    profile = data.profiles[plan.model]
    sizes = profile.sizes[plan.microbatch_size, TENSOR]
    stages = plan.stages(len(sizes))
    return pipeline_memory(
        [[sizes[i] for i in layers] for layers in stages],
        one_f_one_b(len(stages), plan.num_microbatches),
        rule,
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
    context, communicator, layers = np.linalg.lstsq(np.array(rows), np.array(rest))[0]
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
    if "--write" in sys.argv:
        SHIPPED.parent.mkdir(exist_ok=True)
        text = json.dumps(extract(SHARED), indent=1)
        # One line per row of numbers.
        SHIPPED.write_text(_short_rows(text) + "\n")
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


def _short_rows(text):
    return re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)


if __name__ == "__main__":
    main()
