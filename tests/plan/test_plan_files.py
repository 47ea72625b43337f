"""A plan file is what runs: written by `hxla plan`, run by `hxla run --plan`, edited by hand."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import LayerTime, Profile, Setting
from support import lowering, models
from support.inside.graph import segments
from support.inside.launch import MEMORY_VARIABLE, Pinned, pin
from support.paths import PYTHONPATH

MODEL = """
import json, sys
import jax, numpy as np, optax, hxla
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)
    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))

jnp = jax.numpy

class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=1)

rng = np.random.default_rng(0)
data = {name: rng.normal(size=(512, 64)).astype(np.float32) for name in "xy"}
"""

# The first argument says how devices share the model, the second where to tell what ran.
SCRIPT = (
    MODEL
    + '''
WAYS = {
    "copies": {"mesh": {"data": 2}},
    "stages": {"stages": 2},
    "annotated": {},
    "rules": {"mesh": {"data": 1, "tensor": 2}, "rules": "decoder"},
    "mesh": {"mesh": {"data": 1, "fsdp": 1, "tensor": 2}},
    "cube": {"mesh": {"data": 2, "stage": 2, "tensor": 2}},
}
way, told = sys.argv[1:]
seen = {}

def firsts(session, spec):
    """Numbers of the equations with which the parts that run begin."""
    graph = session._programs.graph
    made = [op for op in graph.ops if any(graph.values[v].param is None for v in op.outputs)]
    own = [next(op for op in part.segment.ops if op in made) for part in spec.parts]
    return [made.index(op) for op in own]

def look(record, session):
    found = jax.tree_util.tree_flatten_with_path(session.state.params)[0]
    seen["counts"] = record.counts
    seen["shards"] = [x.addressable_shards[0].data.shape for _, x in found]
    runners = session._programs.pipelines.values()
    seen["parts"] = [firsts(session, own.spec) for own in runners]

job = hxla.Job(
    Net(nnx.Rngs(0)), data, hxla.split()(loss) if way in ("annotated", "mesh", "cube") else loss,
    optax.sgd(0.1, momentum=0.9), batch_size=512,
)
result = hxla.train(job, microbatch_size=64, steps=2, callbacks=[look], **WAYS[way])
if jax.process_index() == 0:
    seen |= {"plan": result.plan.to_json(), "sha256": result.sha256}
    with open(told, "w") as file:
        json.dump(seen, file)
'''
)


def command(tmp_path, *words, flags=""):
    """`hxla` with these words."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=env | {"PYTHONPATH": PYTHONPATH, "XLA_FLAGS": flags},
        cwd=tmp_path,
    )
    return ran


def mesh_file(folder, *shares):
    """Of processors with these shares of a core."""
    devices = "".join(f'[[device]]\nkind = "cpu"\ncore_share = {share}\n' for share in shares)
    path = folder / "mesh.toml"
    path.write_text(f'name = "mine"\n{devices}')
    return path


def planned(folder, way, *options):
    """A file of `hxla plan --write`, and the plan in it."""
    (folder / "script.py").write_text(SCRIPT)
    file = folder / f"{way}.json"
    words = ("plan", "--mesh", "mesh.toml", "--write", file, *options)
    ran = command(folder, *words, "script.py", way, "unused")
    assert ran.returncode == 0, ran.stderr
    assert f"written: {file}" in ran.stdout
    return file, hxla.Plan.read(file)


def check_run(folder, file, way, *options, flags=""):
    """Run a plan's file: what ran is what it says, as told and as the arrays and programs lie."""
    plan = hxla.Plan.read(file)
    told = folder / "told.json"
    told.unlink(missing_ok=True)
    ran = command(folder, "run", "--plan", file, *options, "script.py", way, told, flags=flags)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(told.read_text())
    ran_plan = hxla.Plan.from_json(seen["plan"])
    assert plan.diff(ran_plan) == ()
    assert ran_plan.decisions == plan.decisions
    assert tuple(seen["counts"]) == plan.counts
    for layout, shard in zip(plan.parameters, seen["shards"], strict=True):
        cuts = layout.cuts(plan.axis_sizes)
        assert [n // cut for n, cut in zip(layout.shape, cuts, strict=True)] == shard, layout
    if plan.pipeline is not None:
        own = [[s.first for s in plan.pipeline.segments if s.part == p] for p in range(2)]
        for parts in seen["parts"]:
            assert parts == [min(firsts) for firsts in own]
    return seen


@pytest.mark.slow
def test_a_plan_with_edited_counts_runs_as_written_in_two_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    script = {}
    exec(MODEL, script)
    own = hxla.Job(
        lambda: script["Net"](nnx.Rngs(0)),
        script["data"],
        script["loss"],
        optax.sgd(0.1, momentum=0.9),
        batch_size=512,
    )
    plan = own.plan(lowering.cpus(2), mesh={"data": 2}, microbatch_size=64)
    assert plan.counts == (4, 4)
    table = json.loads(plan.to_json())
    for replica, num in zip(table["replicas"], (1, 7), strict=True):
        replica["num_microbatches"] = num
    file = tmp_path / "copies.json"
    file.write_text(json.dumps(table))
    assert check_run(tmp_path, file, "copies", "-n", "2")["counts"] == [1, 7]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with a profile of a whole core and a part of one."""
    folder = tmp_path_factory.mktemp("measured")
    mesh_file(folder, 1.0, 0.6)
    (folder / "script.py").write_text(SCRIPT)
    words = ("profile", "--mesh", "mesh.toml", "--write", "profile.json")
    ran = command(folder, *words, "script.py", "copies", "unused")
    assert ran.returncode == 0, ran.stderr
    return folder


def seconds_of(folder, *parts):
    """For each device these parts of each segment's time, as the profile has them."""
    table = json.loads((folder / "profile.json").read_text())
    rows = {row["kind"]: row["layers"] for row in table["times"]}
    return [
        [sum(layer[part] for part in parts) for layer in rows[kind]] for kind in ("cpu", "cpu@0.6")
    ]


@pytest.mark.slow
def test_counts_come_from_a_profile_and_run_as_written_and_as_edited(measured):
    file, plan = planned(measured, "copies", "--profile", "profile.json")
    each = [sum(rows) for rows in seconds_of(measured, "forward", "backward")]
    fixed = [sum(rows) for rows in seconds_of(measured, "update")]

    def finish(counts):
        return max(c * s + f for c, s, f in zip(counts, each, fixed, strict=True))

    assert finish(plan.counts) == pytest.approx(min(finish((c, 8 - c)) for c in range(9)))
    whole = check_run(measured, file, "copies", "--mesh", "mesh.toml")
    table = json.loads(file.read_text())
    table["replicas"][0]["num_microbatches"] = 1
    table["replicas"][1]["num_microbatches"] = 7
    file.write_text(json.dumps(table))
    edited = check_run(measured, file, "copies", "--mesh", "mesh.toml")
    assert edited["counts"] == [1, 7]
    assert edited["sha256"] == whole["sha256"]


@pytest.mark.slow
def test_stages_are_cut_by_a_profile_and_run_as_written_and_as_edited(measured):
    file, plan = planned(measured, "stages", "--profile", "profile.json")
    seconds = seconds_of(measured, "forward", "backward")
    num = len(seconds[0])

    def step(order, first):  # fill and drain, and the slower stage for all other microbatches
        stages = [sum(seconds[order[0]][:first]), sum(seconds[order[1]][first:])]
        return sum(stages) + 7 * max(stages)

    (replica,) = plan.replicas
    parts = [segment.part for segment in plan.pipeline.segments]
    own = step(replica.devices, parts.count(0))
    best = min(step(order, k) for order in ((0, 1), (1, 0)) for k in range(1, num))
    assert own <= 1.1 * best
    assert "cut by measured times" in plan.explain()
    check_run(measured, file, "stages", "--mesh", "mesh.toml")
    table = json.loads(file.read_text())
    k = parts.count(0)
    moved = table["pipeline"]["segments"][k - 1 if k > 1 else k]
    moved["part"] = 1 - moved["part"]
    file.write_text(json.dumps(table))
    edited = hxla.Plan.read(file)
    assert edited.pipeline.points != plan.pipeline.points
    check_run(measured, file, "stages", "--mesh", "mesh.toml")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["annotated", "rules", "mesh"])
def test_a_tensor_parallel_plan_runs_as_written(tmp_path, way):
    mesh_file(tmp_path, 1.0, 1.0)
    file, plan = planned(tmp_path, way)
    assert plan.axis_sizes["tensor"] == 2
    assert plan.device_parameter_bytes < 0.6 * plan.parameter_bytes
    check_run(tmp_path, file, way, "--mesh", "mesh.toml")


@pytest.mark.slow
def test_data_by_stage_by_tensor_runs_as_written(tmp_path):
    """Eight fake devices of one process."""
    mesh_file(tmp_path, *[1.0] * 8)
    file, plan = planned(tmp_path, "cube")
    assert (len(plan.replicas), plan.axis_sizes) == (2, {"stage": 2, "tensor": 2})
    check_run(tmp_path, file, "cube", "-n", "1", flags="--xla_force_host_platform_device_count=8")


# -- planned with a profile, without processes ---------------------------------------------------


def job(layers=4, **changes):
    """Like layers on eight fake devices, or on described ones."""
    arguments = {"batch_size": 32, "default": hxla.split()} | changes
    return hxla.Job(
        lambda: Chain(layers, nnx.Rngs(0)),
        {"x": np.zeros((64, 8), np.float32), "y": np.zeros((64, 8), np.float32)},
        models.squared_error,
        optax.sgd(0.1),
        **arguments,
    )


class Chain(nnx.Module):
    def __init__(self, num, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(num)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def profile_of(own, kinds):
    """A profile in which every segment takes so many seconds on a kind of device."""
    graph = own.graph(4)
    names = tuple(segment.name for segment in segments(graph, 8))
    return Profile(
        model="chain",
        layers=names,
        sizes={},
        times={
            Setting(kind, 4): (LayerTime(forward=seconds / 3, backward=2 * seconds / 3),)
            * len(names)
            for kind, seconds in kinds.items()
        },
    )


def test_a_described_clusters_counts_and_stages_follow_a_given_profile():
    own = job(default=None)
    known = profile_of(own, {"cpu": 1.0, "cpu@0.33": 3.0})
    assert len(known.layers) == 4
    copies = own.plan("cpu-1.0-0.33", profile=known, mesh={"data": 2}, microbatch_size=4)
    assert copies.counts == (6, 2)
    assert copies.prediction.step_seconds == pytest.approx(6 * 4 * 1.0)
    stages = own.plan("cpu-1.0-0.33", profile=known, stages=2, microbatch_size=4)
    (replica,) = stages.replicas
    parts = [segment.part for segment in stages.pipeline.segments]
    assert parts.count(replica.devices.index(0)) == 3  # three times as fast
    blind = own.plan("cpu-1.0-0.33", stages=2, microbatch_size=4)
    assert "cut by measured times" in stages.explain()
    assert "cut by measured times" not in blind.explain()
    other = dataclasses.replace(known, layers=(*known.layers[:-1], "elsewhere"))
    with pytest.raises(hxla.PlanError, match="elsewhere"):
        own.plan("cpu-1.0-0.33", profile=other, stages=2, microbatch_size=4)


def test_what_was_measured_first_is_kept_by_later_generations(tmp_path, monkeypatch):
    """Of an elastic job: other devices would suggest other sizes and stages, so other bits."""
    own = job(default=None)
    known = profile_of(own, {"cpu": 1.0, "cpu@0.33": 3.0})
    free = own.plan("cpu-1.0-0.33", profile=known, stages=2)
    assert free.pipeline.cut != (1, 3)
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path))
    pin(Pinned(microbatch_size=2, cut=(1, 3)))
    later = own.plan("cpu-1.0-0.33", profile=known, stages=2)
    assert (later.microbatch_size, later.pipeline.cut) == (2, (1, 3))
    assert free.microbatch_size != 2
    split = hxla.Job(
        lambda: models.NnxNet(nnx.Rngs(0), heads=8),
        models.tokens(),
        models.token_loss,
        optax.sgd(0.1),
        batch_size=8,
    )
    arguments = {"mesh": {"data": 1, "tensor": 2}, "rules": "decoder"}
    pin(Pinned(microbatch_size=2, shares=(3, 1)))
    assert split.plan("cpu-1.0-0.33", **arguments).axes[0].shares == (3, 1)
    pin(Pinned(microbatch_size=2, shares=(1, 1)))
    assert not split.plan("cpu-1.0-0.33", **arguments).is_uneven


# -- refused -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    """A job, and a plan of it with everything in it that can be wrong."""
    own = job()
    return own, own.plan(mesh={"data": 2, "stage": 2, "tensor": 2}, microbatch_size=4)


def test_a_plan_is_drawn_with_every_device(tmp_path, whole):
    _, plan = whole
    plan.draw(tmp_path / "pictures" / "plan.svg")
    comments = (tmp_path / "pictures" / "plan.svg").read_text()  # matplotlib's, of every text
    assert all(f"{rank} cpu" in comments for rank in range(8))


def at(path, value):
    """Set the value at a path of keys."""

    def edit(table):
        *above, last = path.split(".")
        for key in above:
            table = table[int(key) if key.isdigit() else key]
        table[int(last) if last.isdigit() else last] = value

    return edit


def without(key):
    return lambda table: table.pop(key)


def also(*edits):
    def edit(table):
        for one in edits:
            one(table)

    return edit


BROKEN = {
    "unknown key": (at("colour", 1), ["colour: there is no such key"]),
    "unknown key inside": (at("axes.1.colour", 1), [r"axes\.1\.colour: there is no such key"]),
    "missing key": (without("microbatch_size"), ["microbatch_size: Field required"]),
    "text for a number": (at("batch_size", "32"), ["batch_size: .*valid integer, not '32'"]),
    "fraction": (
        at("replicas.0.num_microbatches", 4.5),
        [r"replicas\.0\.num_microbatches: .*valid integer.*4\.5"],
    ),
    "negative": (
        at("replicas.1.num_microbatches", -4),
        [r"replicas\.1\.num_microbatches: .*greater than or equal to 0, not -4"],
    ),
    "not a number": (
        at("prediction", {"step_seconds": math.nan}),
        [r"prediction\.step_seconds: .*finite number, not nan"],
    ),
    "endless": (
        at("prediction", {"step_seconds": math.inf}),
        [r"prediction\.step_seconds: .*finite number, not inf"],
    ),
    "format": (at("format", 2), ["format: Input should be 1, not 2"]),
    "counts": (
        at("replicas.0.num_microbatches", 5),
        ["replicas: num_microbatches 5, 4 add up to 9, a batch of 32 has 8"],
    ),
    "microbatches": (
        at("microbatch_size", 5),
        ["microbatch_size: 5 does not divide batch_size 32"],
    ),
    "device that is not listed": (
        at("replicas.1.devices.3", 9),
        ["replicas: device 9 is not one of `devices`", "devices: rank 7 is in no replica"],
    ),
    "device in two places": (
        at("replicas.1.devices.3", 0),
        ["replicas: device 0 is listed twice", "devices: rank 7 is in no replica"],
    ),
    "device listed twice": (
        at("devices.3.rank", 2),
        ["devices: rank 2 is listed twice", "replicas: device 3 is not one of `devices`"],
    ),
    "too few devices": (
        at("replicas.0.devices", [0, 1, 2]),
        [r"replicas\.0\.devices: 3 devices, the axes take 4", "devices: rank 3 is in no replica"],
    ),
    "stages inside": (
        also(at("axes.0.name", "tensor"), at("axes.1.name", "stage")),
        ["axes: 'stage' must be the first"],
    ),
    "no such axis": (
        at("parameters.0.spec", [["expert"]]),
        [r"parameters\.layers/0/bias\.spec: there is no axis 'expert'"],
    ),
    "dimension that does not divide": (
        at("parameters.0.shape", [7]),
        [r"parameters\.layers/0/bias\.spec: dimension 0 of size 7 does not divide into [24]"],
    ),
    "cut twice": (
        at("parameters.1.spec", [["tensor"], ["tensor"]]),
        [r"parameters\.layers/0/kernel\.spec: 'tensor' cuts it twice"],
    ),
    "too many dimensions": (
        at("parameters.0.spec", [["tensor"], []]),
        [r"parameters\.layers/0/bias\.spec: 2 entries for 1 dimensions"],
    ),
    "cut out of range": (
        at("pipeline.segments.3.part", 2),
        [r"pipeline\.segments: their parts are .* must go from 0 to 1 in order"],
    ),
    "cut beyond the loss": (
        at("pipeline.segments.3.first", 999),
        [
            r"pipeline\.segments\.2: .* begins at equation \d+ in the plan",
            r"pipeline\.segments\.3: the loss has no equation 999",
        ],
    ),
    "cut that goes back": (
        at("pipeline.segments.2.first", 0),
        [r"pipeline\.segments: their first equations .* must grow from 0"],
    ),
    "unknown schedule": (
        at("pipeline.schedule", "2f2b"),
        [r"pipeline\.schedule: .*2f2b"],
    ),
    "unknown sums": (at("sums.kind", "about"), [r"sums\.kind: .*'exact' or 'float', not 'about'"]),
    "rounded exact sums": (at("sums.dtype", "bfloat16"), [r"sums\.dtype: bfloat16 rounds"]),
    "several at once": (
        also(
            at("colour", 1),
            at("replicas.0.num_microbatches", 5),
            at("axes.1.colour", 1),
            at("parameters.0.spec", [["expert"]]),
        ),
        [
            "colour: there is no such key",
            r"axes\.1\.colour: there is no such key",
            "add up to 9",
            "there is no axis 'expert'",
        ],
    ),
    "another batch": (
        also(at("batch_size", 64), *(at(f"replicas.{i}.num_microbatches", 8) for i in (0, 1))),
        ["batch_size: 64 in the plan, 32 in the job"],
    ),
    "another hxla": (at("made_with.hxla", "9.9"), [r"made_with\.hxla: 9\.9 in the plan, .* here"]),
    "another processor": (
        at("made_with.processor", "abacus"),
        [r"made_with\.processor: abacus in the plan"],
    ),
    "another kind of device": (
        at("devices.2.kind", "gpu"),
        [r"devices\.2: gpu in the plan, cpu here"],
    ),
    "a device that is not here": (
        also(at("devices.7.rank", 11), at("replicas.1.devices.3", 11)),
        ["devices: the plan uses 11, here are 0 to 7"],
    ),
    "another parameter": (
        at("parameters.0.name", "elsewhere"),
        [
            r"parameters\.elsewhere: float32\[8\] in the plan, none in the model",
            r"parameters\.layers/0/bias: none in the plan, float32\[8\] in the model",
        ],
    ),
    "another dtype": (
        at("parameters.0.dtype", "bfloat16"),
        [r"parameters\.layers/0/bias: bfloat16\[8\] in the plan, float32\[8\] in the model"],
    ),
    "other TaskGraphs": (
        at("axes.1.roles", ["split", "split"]),
        ["axes: 2 TaskGraphs have roles in the plan, the model has 1"],
    ),
    "another segment": (
        at("pipeline.segments.2.name", "elsewhere"),
        [r"pipeline\.segments\.2: 'elsewhere' begins at equation \d+ in the plan, '.*' in"],
    ),
}


BROKEN |= {
    "copies of several devices over the host": (
        at("sums.over", "host"),
        ["sums.over: only replicas of one device .* the host, .* stage, tensor: use 'device'"],
    ),
    "executors of several devices": (
        at("replicas.0.executors", 2),
        ["replicas: executors run .* on one device, a copy has axes here: use executors 1"],
    ),
    "several microbatches in a call of a pipeline": (
        at("microbatches_per_call", 2),
        ["microbatches_per_call: one call of a pipeline runs all microbatches .*: use 1"],
    ),
    "segments that keep unlike things": (
        at("pipeline.segments.0.keep", "residuals"),
        ["pipeline.segments: all must `keep` the same"],
    ),
    "weight gradients of recomputed stages": (
        at("pipeline.schedule", "zb-h1"),
        ["pipeline.segments: separate weight gradients need `residuals`"],
    ),
    "waves of stages": (
        also(at("placement.zero", 2), at("placement.waves", 2)),
        ["placement.waves: replicas are sharded over stage, tensor, .* in one wave: use 1"],
    ),
    "a copy that begins later with shared sums": (
        also(at("placement.zero", 2), at("replicas.1.start_seconds", 1.0)),
        [r"replicas\.1\.start_seconds: with placement.zero of 2 .*: leave it 0"],
    ),
}
ZERO = at("placement.zero", 1)
BROKEN_COPIES = {
    "executors in no order": (
        also(at("replicas.0.executors", 2), at("sums.kind", "float")),
        ["replicas: executors take microbatches in no fixed order"],
    ),
    "a copy that begins later": (
        at("replicas.1.start_seconds", 1.0),
        [r"replicas\.1\.start_seconds: only pipelines can start at different times"],
    ),
    "a pipeline without an axis": (
        at("axes", [{"name": "stage", "size": 1, "roles": []}]),
        ["pipeline: needed if and only if 'stage' is one of the axes"],
    ),
    "an axis of copies": (
        at("axes", [{"name": "data", "size": 1, "roles": ["replicate"]}]),
        ["axes: 'data' is the axis of `replicas`, leave it out"],
    ),
    "a parameter twice": (
        lambda table: table["parameters"].append(table["parameters"][0]),
        ["parameters: 'layers/0/bias' is listed twice"],
    ),
    "float sums over the host": (
        also(at("sums.over", "host"), at("sums.kind", "float")),
        ["sums.over: hosts add integers only, and these are float sums"],
    ),
    "waves of nothing": (at("placement.waves", 2), ["placement.waves: only ZeRO's stages 2 and 3"]),
    "parameters elsewhere": (
        also(ZERO, at("placement.parameters", "host")),
        ["placement.parameters: only ZeRO's stage 3"],
    ),
    "groups of nothing": (
        at("placement.shard_groups", 2),
        ["placement.shard_groups: only ZeRO's stages"],
    ),
    "whole parameters of nothing": (
        at("placement.whole", ["layers/0/bias"]),
        ["placement.whole: only ZeRO's stages"],
    ),
    "state elsewhere": (
        at("placement.optimizer", "host"),
        ["placement.optimizer: state in host memory is updated as in ZeRO's stages"],
    ),
    "an unknown whole parameter": (
        also(ZERO, at("placement.whole", ["elsewhere"])),
        ["placement.whole: there is no parameter 'elsewhere'"],
    ),
    "groups of unlike sizes": (
        also(ZERO, at("placement.shard_groups", 3)),
        ["placement.shard_groups: 8 replicas do not make 3 groups"],
    ),
    "groups of one": (
        also(ZERO, at("placement.shard_groups", 8)),
        ["placement.shard_groups: 8 replicas do not make 8 groups"],
    ),
    "shares of another number": (
        also(ZERO, at("placement.shard_groups", 4), at("placement.shares", [1, 2, 3])),
        ["placement.shares: 3 for 2 replicas in each of 4 groups"],
    ),
    "groups over the host": (
        also(ZERO, at("placement.shard_groups", 4), at("sums.over", "host")),
        ["placement.shard_groups: sums over the host need all replicas of a process"],
    ),
    "groups of unlike kinds": (
        also(ZERO, at("placement.shard_groups", 4), at("devices.2.kind", "gpu")),
        ["placement.shard_groups: replicas 0, 2, 4, 6 update the same parameters on unlike kinds"],
    ),
    "a stash of nothing": (
        at("placement.stash", "host"),
        ["placement.stash: only segments have a stash to offload, set `chain`, or use 'device'"],
    ),
    "a prediction for other copies": (
        at(
            "prediction",
            {"step_seconds": 1.0, "microbatch_seconds": [1.0], "fixed_seconds": []},
        ),
        [
            r"prediction\.microbatch_seconds: 1 values for 8 replicas",
            "prediction: microbatch_seconds and fixed_seconds come together",
        ],
    ),
}


@pytest.fixture(scope="module")
def copies():
    """A job, and a plan of it for copies of one device."""
    own = job(default=None)
    return own, own.plan(mesh={"data": 8}, microbatch_size=4)


@pytest.mark.parametrize("name", BROKEN_COPIES)
def test_a_broken_file_of_copies_is_refused_with_key_and_reason(tmp_path, copies, name):
    refused_with(tmp_path, copies, *BROKEN_COPIES[name])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_key_and_reason(tmp_path, whole, name):
    refused_with(tmp_path, whole, *BROKEN[name])


def refused_with(tmp_path, planned_job, edit, reasons):
    own, plan = planned_job
    table = json.loads(plan.to_json())
    edit(table)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    with pytest.raises(hxla.PlanError) as refused:
        own.open(path, steps=1)
    faults = [line for line in str(refused.value).splitlines() if line.startswith("  ")]
    for reason in reasons:
        assert re.search(reason, str(refused.value)), refused.value
    assert len(faults) == len(reasons)  # and none of what is right


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "the file is no JSON: .* line"),
        (lambda text: "", "the file is no JSON"),
        (lambda text: "[]", "the file: Input should be an object"),
        (
            lambda text: text.replace('"batch_size": 32', '"batch_size": 64, "batch_size": 32'),
            "batch_size: given 2 times",
        ),
    ],
    ids=["truncated", "empty", "list", "key twice"],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, whole, change, reason):
    own, plan = whole
    path = tmp_path / "plan.json"
    path.write_text(change(plan.to_json()))
    with pytest.raises(hxla.PlanError, match=reason) as refused:
        own.open(path, steps=1)
    assert str(path) in str(refused.value)


def test_a_plan_for_something_else_is_refused_with_every_difference_at_once(tmp_path, whole):
    _, plan = whole
    table = json.loads(plan.to_json())
    at("made_with.hxla", "9.9")(table)
    at("devices.0.kind", "gpu")(table)
    also(at("devices.7.rank", 11), at("replicas.1.devices.3", 11))(table)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    with pytest.raises(hxla.PlanError) as refused:
        job(layers=1, batch_size=64).open(path, steps=1)
    for words in (
        "batch_size: 32 in the plan, 64 in the job",
        "made_with.hxla: 9.9 in the plan",
        "devices.0: gpu in the plan, cpu here",
        "devices: the plan uses 11, here are 0 to 7",
        "parameters.layers/3/kernel: float32[8, 8] in the plan, none in the model",
        "pipeline.segments.3",
    ):
        assert words in str(refused.value)


def test_the_command_refuses_a_broken_file_before_it_starts_processes(tmp_path, whole):
    _, plan = whole
    table = json.loads(plan.to_json())
    table["replicas"][0]["num_microbatches"] = 5
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(table))
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    ran = command(tmp_path, "run", "-n", "2", "--plan", file, "script.py")
    assert ran.returncode == 2
    assert f"hxla: {file}: this is no plan" in ran.stderr
    assert "replicas: num_microbatches 5, 4 add up to 9" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_the_processes_refuse_what_is_for_something_else(tmp_path, whole):
    _, plan = whole
    (tmp_path / "script.py").write_text(SCRIPT)
    table = json.loads(plan.to_json())
    at("made_with.hxla", "9.9")(table)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(table))
    ran = command(tmp_path, "run", "-n", "2", "--plan", file, "script.py", "copies", "unused")
    assert ran.returncode == 1
    for difference in (
        "batch_size: 32 in the plan, 512 in the job",
        "made_with.hxla: 9.9 in the plan",
        "devices: the plan uses 2, 3, 4, 5, 6, 7, here are 0 to 1",
        "parameters.layers/0/bias: float32[8] in the plan, none in the model",
        "parameters.blocks/0/up/kernel: none in the plan, float32[64, 256] in the model",
    ):
        assert f"[0]   {difference}" in ran.stderr, ran.stderr


# -- chosen, and chosen anew ---------------------------------------------------------------------

AUTO = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax, hxla
from flax import nnx

class Net(nnx.Module):  # two like layers on a fast device and a slow one: one waits as a stage
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(128, 128, rngs=rngs) for _ in range(2)])
    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x

def loss(model, batch):
    return ((model(batch["x"]) - 0.5) ** 2).mean(axis=(1, 2))

plan = sys.argv[1] if sys.argv[1:] else None
data = {"x": np.random.default_rng(0).normal(size=(32, 1024, 128)).astype(np.float32)}
result = hxla.train(
    hxla.Job(Net(nnx.Rngs(0)), data, loss, optax.sgd(0.1), batch_size=32),
    microbatch_size=2, steps=6, plan=plan,
)
if jax.process_index() == 0:
    first = result.history.plans[0]
    print("told", json.dumps({
        "sha256": result.sha256,
        "counts": first.counts,
        "stages": first.num_stages,
        "seconds": first.prediction.microbatch_seconds,
        "runners_up": [r.description for r in first.runners_up],
    }))
"""


def told(ran):
    assert ran.returncode == 0, ran.stderr
    return json.loads(re.search(r"told (.*)", ran.stdout).group(1))


@pytest.mark.slow
def test_an_automatic_plan_is_measured_says_its_runners_up_and_trains_to_the_same_bits(tmp_path):
    """Two processes, one of them held to a third of its core."""
    (tmp_path / "script.py").write_text(AUTO)
    mesh_file(tmp_path, 1.0, 0.33)
    ran = command(tmp_path, "run", "--mesh", "mesh.toml", "script.py", "auto")
    found = told(ran)
    assert found["stages"] == 1

    def finish(*counts):
        return max(c * s for c, s in zip(counts, found["seconds"], strict=True))

    if len(found["counts"]) == 1:  # beside other work the slow process may not be worth its sums
        assert "the job starts again without" in ran.stderr
    else:
        assert finish(*found["counts"]) == min(finish(c, 16 - c) for c in range(17))
    assert found["runners_up"]
    for description in found["runners_up"]:
        assert f"runner-up: {description}" in ran.stderr
    assert "chosen by search" in ran.stderr
    assert told(command(tmp_path, "run", "-n", "1", "script.py"))["sha256"] == found["sha256"]


def uneven_work(model, batch):
    """Examples that say so take a long time, whatever the parameters are."""

    def work(_):
        matrix = jnp.ones((128, 128)) / 128
        return jax.lax.fori_loop(0, 400, lambda _, x: x @ matrix, matrix).sum()

    extra = jax.lax.cond(jnp.any(batch["slow"]), work, lambda _: 0.0, None)
    return models.squared_error(model, batch) + 0 * extra


def test_plans_are_kept_with_their_first_step_also_in_checkpoints(tmp_path):
    data = models.regression(num=32)
    data["slow"] = np.arange(32) < 8
    own = hxla.Job(
        lambda: models.Dense(nnx.Rngs(0)),
        {name: data[name] for name in ("x", "y", "slow")},
        uneven_work,
        optax.sgd(0.1),
        batch_size=32,
        shuffle=False,
        mixes_examples=True,  # whether to work at all is asked of a microbatch
        config={
            "cluster": {"visible_devices": [0, 1]},
            "balance": {"patience_steps": 2, "min_gain": 0.1},
        },
    )
    plan = own.plan(microbatch_size=2)
    assert plan.counts == (8, 8)
    with own.open(plan, balance=True, checkpoint_dir=tmp_path) as session:
        for _ in range(100):
            session.step()
            if session.history.rebalances:
                break
        session.step()  # with the new counts
        session.save()
        before = session.history
    change = before.rebalances[0]
    assert set(before.plans) == {0, *(c.step for c in before.rebalances)}
    assert before.plans[change.step].counts == change.after
    for record in before.steps:
        assert before.plans[max(s for s in before.plans if s < record.step)].counts == record.counts
    other = plan.with_counts((3, 13))
    with own.open(other, checkpoint_dir=tmp_path) as session:
        session.step()
        after = session.history.plans
        assert list(after) == [*before.plans, session.step_number - 1]
        for step, earlier in before.plans.items():
            assert after[step].decisions == earlier.decisions
        assert after[session.step_number - 1].decisions == other.decisions
