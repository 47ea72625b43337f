"""A plan file is what runs: written by `hxla plan`, run by `hxla run --plan`, edited by hand."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import hxla

ROOT = pathlib.Path(__file__).parent.parent

# The first argument says how devices share the model, the second where to tell what ran.
SCRIPT = '''
import json, sys
import jax, numpy as np, optax, hxla
from flax import nnx

WAYS = {
    "copies": {"mesh": {"data": 2}},
    "stages": {"stages": 2},
    "annotated": {},
    "rules": {"mesh": {"data": 1, "tensor": 2}, "rules": "decoder"},
    "mesh": {"mesh": {"data": 1, "fsdp": 1, "tensor": 2}},
    "cube": {"mesh": {"data": 2, "stage": 2, "tensor": 2}},
}

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

way, told = sys.argv[1:]
rng = np.random.default_rng(0)
data = {name: rng.normal(size=(512, 64)).astype(np.float32) for name in "xy"}
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

result = hxla.train(
    Net(nnx.Rngs(0)), data, hxla.split()(loss) if way in ("annotated", "mesh", "cube") else loss,
    optax.sgd(0.1, momentum=0.9), batch_size=512, microbatch_size=64, steps=2, callbacks=[look], **WAYS[way],
)
if jax.process_index() == 0:
    seen |= {"plan": result.plan.to_json(), "sha256": result.sha256}
    with open(told, "w") as file:
        json.dump(seen, file)
'''


def command(tmp_path, *words, flags=""):
    """`hxla` with these words."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=env | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
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
