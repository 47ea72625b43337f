"""What a run leaves behind: metrics, events, the page, the live line."""

import contextlib
import json
import re
import shutil

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.report import MetricsWriter, line
from support.metrics import read_metrics
from support.training import train_with


def loss(model, batch):
    values = models.squared_error(model, batch)
    return values, {"absolute": abs(model(batch["x"])).mean(axis=-1)}


def train(folder, *, steps, **more):
    half = nnx.initializers.constant(0.5)
    return train_with(
        nnx.Linear(6, 3, use_bias=False, kernel_init=half, rngs=nnx.Rngs(0)),
        models.regression(),
        loss,
        optax.sgd(1e-2),
        batch_size=24,
        microbatch_size=3,
        steps=steps,
        mesh=models.mesh(data=2),
        run_dir=folder,
        **more,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    evaluated = {"eval_data": models.regression(), "eval_every": 3}
    return folder, train(folder, steps=6, tensorboard=True, **evaluated)


def test_metrics_on_disk_are_the_history(run):
    folder, result = run
    history = read_metrics(folder / "metrics.jsonl")
    assert history.steps == result.history.steps
    assert history.evaluations == result.history.evaluations
    assert len(history.steps) == 6
    assert set(history.steps[0].metrics) == {"absolute"}


def test_a_run_that_begins_anew_keeps_the_lines_of_the_one_before_under_another_name(
    run, tmp_path, capsys
):
    shutil.copy(run[0] / "metrics.jsonl", tmp_path)
    texts = []
    for _ in range(2):
        texts.append((tmp_path / "metrics.jsonl").read_text())
        train(tmp_path, steps=2, counts="even")
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "metrics.1.jsonl").read_text() == texts[0]
    assert (tmp_path / "metrics.2.jsonl").read_text() == texts[1]
    assert f"an earlier run are now in {tmp_path / 'metrics.2.jsonl'}" in capsys.readouterr().err


def test_a_torn_last_line_is_cut_off_by_the_next_run(run, tmp_path):
    text = (run[0] / "metrics.jsonl").read_bytes()
    torn = tmp_path / "metrics.jsonl"
    torn.write_bytes(text + b'{"kind": "step", "st')
    MetricsWriter(tmp_path, first_step=6).close()
    assert torn.read_bytes() == text


def test_a_loss_that_is_not_finite_is_strict_json(tmp_path, run):
    record = run[1].history.steps[0]
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(type(record)(**{**vars(record), "loss": float("nan")}))
    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    assert np.isnan(read_metrics(tmp_path / "metrics.jsonl").steps[0].loss)


def test_tensorboard_reads_the_losses(run):
    from tensorboardX.proto.event_pb2 import Event

    folder, result = run
    (path,) = folder.glob("events.out.tfevents.*")
    data, losses = path.read_bytes(), {}
    while data:  # TFRecord: length, its checksum, the record, its checksum
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found = [v.simple_value for v in event.summary.value if v.tag == "train/loss"]
        for value in found:
            losses[event.step] = value
        data = data[16 + size :]
    expected = [s.loss for s in result.history.steps]
    np.testing.assert_allclose([losses[s] for s in sorted(losses)], expected, rtol=1e-6)


def test_the_page_is_whole_and_needs_no_network(run):
    folder, result = run
    page = (folder / "report.html").read_text()
    for name in result.history.device_names:
        assert name in page
    assert page.count("<svg") >= 3
    loads = re.findall(r"(?:src|href)=[\"']?(?!#|data:)([^\"' >]+)|url\((?!#|data:)", page)
    assert not loads
    assert "<script src" not in page


def test_the_live_line_tells_step_loss_speed_time_and_shares(run):
    history = run[1].history
    text = line(history.steps[-1], 6, history.device_names, 0.01)
    counts = history.steps[-1].counts
    for part in ["step 6/6", "loss", "/s", "left", f"{counts[0]}/8", f"{counts[1]}/8", "idle"]:
        assert part in text


def test_an_unwritable_run_folder_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(hxla.ConfigError, match="cannot be written"):
        train(tmp_path / "file" / "run", steps=1)
