"""A job that starts again without devices that would make its steps longer."""

import json
import re

import pytest

from hxla import Device
from support.inside.launch import AGAIN_VARIABLES, process_environment
from support.launched import end_of, start

#: Of every start of the script one line. Of two microbatches the second device, which has a third
#: of a core, could take one: the step would take half as long again as without it.
TRAINS = """
import json
import jax, numpy as np, optax
from flax import nnx
import hxla

hxla.join()
data = {"x": np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)}
model = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
loss = lambda model, batch: (model(batch["x"]) ** 2).mean(-1)
job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=512)
begun = [jax.process_index(), jax.process_count()]
print(json.dumps(["begun", *begun]), flush=True)
result = hxla.train(job, steps=2, microbatch_size=256, plan="auto", quiet=True)
kinds = [device.kind for device in result.plan.devices]
print(json.dumps(["trained", *begun, kinds]), flush=True)
"""


def said(job):
    """The script's lines without their ranks, and what else was printed."""
    out, error = end_of(job)
    assert job.returncode == 0, error
    return [json.loads(re.sub(r"^\[\d\] ", "", line)) for line in out.splitlines()], error


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """Of the shares of cores, the path of a mesh file."""

    def write(*shares):
        path = tmp_path_factory.mktemp("mesh") / "mesh.toml"
        tables = [f'[[device]]\nkind = "cpu"\ncore_share = {share}\n' for share in shares]
        path.write_text('name = "mesh"\n' + "".join(tables))
        return str(path)

    return write


def test_a_search_leaves_out_a_device_that_makes_a_step_longer(tmp_path, mesh):
    job = start(tmp_path, TRAINS, "--mesh", mesh(1.0, 0.33))
    lines, error = said(job)
    lines.sort(key=lambda line: line[:3])
    *begun, [word, rank, num, kinds] = lines
    assert begun == [["begun", 0, 1], ["begun", 0, 2], ["begun", 1, 2]]
    assert (word, rank, num, kinds) == ("trained", 0, 1, ["cpu"])
    assert "without cpu@0.33 #1 and" in error
    assert "the job starts again without" in error


@pytest.mark.slow
def test_a_setting_keeps_every_device(tmp_path, mesh):
    env = {"HXLA_AUTO_ALL_DEVICES": "true"}
    lines, error = said(start(tmp_path, TRAINS, "--mesh", mesh(1.0, 0.33), env=env))
    assert sorted(line[:3] for line in lines) == [
        [word, rank, 2] for word in ("begun", "trained") for rank in (0, 1)
    ]
    assert "again" not in error


FEWER = """
import json, os
import jax, numpy as np, optax
from flax import nnx
import hxla
from support.inside.launch import start_again_on

hxla.join()
model, data = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), {"x": np.ones((8, 4), np.float32)}
loss = lambda model, batch: model(batch["x"]).mean(-1)
job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
plan = job.plan(microbatch_size=1)
if jax.process_index() == 0:
    print(json.dumps([device.kind for device in plan.devices]), flush=True)
if jax.process_count() > 1:
    start_again_on([0, 2] if jax.process_count() == 3 else [1], f"{jax.process_count() - 1} go on")
"""


@pytest.mark.slow
def test_a_job_may_start_again_more_than_once(tmp_path, mesh):
    """Ranks are those of the job that asks, and dumps those of the last start."""
    dump = tmp_path / "dump"
    job = start(tmp_path, FEWER, "--mesh", mesh(0.8, 0.5, 0.45), "--dump", str(dump))
    lines, error = said(job)
    assert lines == [
        ["cpu@0.8", "cpu@0.5", "cpu@0.45"],
        ["cpu@0.8", "cpu@0.45"],
        ["cpu@0.45"],
    ]
    assert [line for line in error.splitlines() if "go on" in line] == [
        "hxla: 2 go on",
        "hxla: 1 go on",
    ]
    assert [path.name for path in dump.iterdir()] == ["process-0"]


def test_a_launcher_inside_a_job_takes_nothing_from_it(monkeypatch):
    for name in AGAIN_VARIABLES:
        monkeypatch.setenv(name, "1")
    device = Device(kind="cpu")
    assert not process_environment(0, device, (device,), None).keys() & set(AGAIN_VARIABLES)
