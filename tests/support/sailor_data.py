"""Measured plans and profiles of others, read from their repository or from the shipped figures.

Source: eth-easl/sailor (Strati et al., SOSP 2025), MIT licence, commit cf2c8e3: Megatron-DeepSpeed
in float32 on nodes of 4 GH200. `data/sailor.json` holds what the predictions of its plans need.
`PYTHONPATH=tests python -m support.sailor_data FOLDER` writes it from the repository's data.
`data/aceso.json` holds what runs of another runtime, Aceso's, took of the same machines' memory,
from the same repository.
"""

import dataclasses
import gzip
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping

from hxla import LayerSize, LayerTime, Profile, Setting
from support.paths import DATA, ROOT

SHARED = ROOT.parent / "shared/data/sailor"
SHIPPED = DATA / "sailor.json"
OTHER = DATA / "aceso.json"
MEBI = 2**20
KIND, TENSOR, ZONE, FLOAT_BYTES = "GH-96", 4, "us-central1-a", 4
MODELS = {"GPT-NEO": "GPT-Neo-2.7", "OPT-350": "OPT-350"}
#: Transformer layers in the model that was profiled, besides embedding and head: the repository's
#: profiling scripts pass `--num_prof_layers 2`. The update was timed once, for all of it.
NUM_PROFILED_LAYERS = 2


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A tensor-parallel group: devices of one kind in one node."""

    kind: str
    tensor: int
    zone: str = ZONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan and what its run took; `places[stage][replica]`."""

    model: str
    cuts: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]
    microbatch_size: int
    batch_size: int
    step_seconds: float
    reduction_seconds: float
    peak_bytes: float

    @property
    def name(self):
        stages = "stage" if len(self.cuts) == 1 else "stages"
        return (
            f"{self.model} {self.num_replicas} x {len(self.cuts)} {stages}, "
            f"{self.num_microbatches} x {self.microbatch_size}"
        )

    @property
    def num_replicas(self):
        return max(map(len, self.places))

    @property
    def num_microbatches(self):
        return math.ceil(self.batch_size / (self.microbatch_size * self.num_replicas))

    def stages(self, num_layers):
        ends = (*self.cuts[1:], num_layers)
        return [range(a, b) for a, b in zip(self.cuts, ends, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Profiles by model, measured plans, and bandwidths: see `sailor_network`.

    `curves` are of devices of two nodes by the places of as many; `inside` are of one node by kind
    and number of devices.
    """

    profiles: Mapping[str, Profile]
    plans: tuple[Measured, ...]
    curves: Mapping[tuple[Place, Place], tuple[float, ...]]
    inside: Mapping[tuple[str, int], tuple[float, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Memory of one device under the other runtime.

    Attributes:
        used_bytes: What the driver shows.
        allocated_bytes: The most that PyTorch's allocator handed out at once.
        reserved_bytes: The most that it held.
    """

    used_bytes: float
    allocated_bytes: float
    reserved_bytes: float


def other_runs() -> tuple[Held, ...]:
    """The first rank of each stage of each of the other runtime's runs."""
    return tuple(
        Held(
            used_bytes=used * MEBI, allocated_bytes=allocated * MEBI, reserved_bytes=reserved * MEBI
        )
        for *_, used, allocated, reserved in json.loads(OTHER.read_text())["rows"]
    )


def read(folder: pathlib.Path) -> Data:
    """All of the repository's data: every kind of device, every pair, all measured plans."""
    with gzip.open(folder / "profiles.json.gz") as file:
        times = json.load(file)
    info = json.loads((folder / "llm_info.json").read_text())
    network = json.loads((folder / "network/multizone_bandwidths_het.json").read_text())
    fields = ("params_floats", "act_output_floats", "act_mem_floats")
    profiles = {
        model: profile_of(
            model,
            times[model],
            {t: {i: [v[f] for f in fields] for i, v in x.items()} for t, x in info[model].items()},
        )
        for model in times
    }
    curves = {
        (Place(a, int(n), x), Place(b, int(m), y)): tuple(curve[0])
        for x, x_kinds in network.items()
        for a, counts in x_kinds.items()
        for n, zones in counts.items()
        for y, y_kinds in zones.items()
        for b, others in y_kinds.items()
        for m, curve in others.items()
    }
    inside = {
        (kind, int(count)): tuple(curve[0])
        for kind, counts in json.loads(
            (folder / "network/intra_node_bandwidths.json").read_text()
        ).items()
        for count, curve in counts.items()
    }
    plans = tuple(
        read_plan(json.loads(path.read_text()), MODELS[path.parts[-3]])
        for path in sorted((folder / "validation").glob("*/*/*.json"))
    )
    return Data(profiles=profiles, plans=plans, curves=curves, inside=inside)


def read_plan(plan: Mapping, model: str) -> Measured:
    """A plan file of the repository; a place that spans nodes counts as its first."""
    pipeline = plan["pipeline_list"][0]
    return Measured(
        model=model,
        # One file lists a layer 29 between 18 and 20; the first layer of each stage is right.
        cuts=tuple(layers[0] for layers in pipeline["layers_per_stage"]),
        places=tuple(
            tuple(Place(nodes[0][0], tensor, nodes[0][2]) for nodes, tensor in stage)
            for stage in pipeline["tmp_per_stage"]
        ),
        microbatch_size=plan["mbs"],
        batch_size=plan["gbs"],
        step_seconds=plan["real"],
        reduction_seconds=plan["red_grads"],
        peak_bytes=plan["max_mem"],
    )


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
    """The figures that the predictions of the measured plans need."""
    with gzip.open(folder / "profiles.json.gz") as file:
        times = json.load(file)
    info = json.loads((folder / "llm_info.json").read_text())
    data = read(folder)
    fields = ("params_floats", "act_output_floats", "act_mem_floats")
    tensor = str(TENSOR)
    models = {}
    for model in MODELS.values():
        sizes = {layer: [v[f] for f in fields] for layer, v in info[model][tensor].items()}
        by_size = {b: x[tensor] for b, x in times[model][KIND].items() if tensor in x}
        models[model] = {
            "num_layers": len(sizes),
            "sizes": _ends(sizes),
            "times": {b: _ends(by_size[b]) for b in sorted(by_size, key=int)},
        }
    here = Place(KIND, TENSOR)
    assert {place for plan in data.plans for stage in plan.places for place in stage} == {here}
    return {
        "source": "https://github.com/eth-easl/sailor, commit cf2c8e3 (Strati et al., SOSP 2025)",
        "licence": "MIT License, Copyright (c) 2023 - present | ETH Zurich",
        "times": "seconds of forward, backward, update; of layers 0, 1, 2 and the last",
        "sizes": "numbers of parameters, outputs, stashed values; of the same layers",
        "models": models,
        "curve": list(data.curves[here, here]),
        "inside": list(data.inside[KIND, TENSOR]),
        "plans": [
            {
                "model": plan.model,
                "num_replicas": plan.num_replicas,
                "cuts": list(plan.cuts),
                "microbatch_size": plan.microbatch_size,
                "batch_size": plan.batch_size,
                "step_seconds": plan.step_seconds,
                "reduction_seconds": plan.reduction_seconds,
                "peak_bytes": plan.peak_bytes,
            }
            for plan in data.plans
        ],
    }


def load() -> Data:
    """The shipped figures."""
    shipped = json.loads(SHIPPED.read_text())
    tensor, here = str(TENSOR), Place(KIND, TENSOR)
    profiles = {}
    for model, table in shipped["models"].items():
        n = table["num_layers"]
        times = {KIND: {b: {tensor: _spread(x, n)} for b, x in table["times"].items()}}
        profiles[model] = profile_of(model, times, {tensor: _spread(table["sizes"], n)})
    plans = tuple(
        Measured(
            **{k: v for k, v in plan.items() if k not in ("cuts", "num_replicas")},
            cuts=tuple(plan["cuts"]),
            places=((here,) * plan["num_replicas"],) * len(plan["cuts"]),
        )
        for plan in shipped["plans"]
    )
    return Data(
        profiles=profiles,
        plans=plans,
        curves={(here, here): tuple(shipped["curve"])},
        inside={(KIND, TENSOR): tuple(shipped["inside"])},
    )


def _ends(table):
    """Layers 0, 1, 2 and the last; those from 2 to the last but one are alike."""
    last = len(table) - 1
    assert all(table[str(i)] == table["2"] for i in range(2, last))
    return [table[str(i)] for i in (0, 1, 2, last)]


def _spread(ends: Iterable, num_layers):
    first, second, rest, last = ends
    layers = [first, second, *[rest] * (num_layers - 3), last]
    return {str(i): value for i, value in enumerate(layers)}


if __name__ == "__main__":
    text = json.dumps(extract(pathlib.Path(sys.argv[1])), indent=1)
    short = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    SHIPPED.write_text(short + "\n")
