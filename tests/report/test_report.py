"""What a run leaves behind: metrics, events, the page, the live line."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.lower import Determinism, PieceTimes
from support.inside.report import (
    Curve,
    MetricsWriter,
    Rebalance,
    RunState,
    band_chart,
    curve_chart,
    html_report,
    lanes_of_timeline,
    line,
    read_metrics,
    run_start,
    summarise,
)
from support.inside.schedule import BACKWARD, FORWARD, measured_timeline, one_f_one_b
from support.inside.session import (
    PredictedStep,
    pipeline_in_words,
    times_as_text,
    times_from_texts,
)
from support.overlapped_replay import replay
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
    history, starts = read_metrics(folder / "metrics.jsonl")
    assert history.steps == result.history.steps
    assert history.evaluations == result.history.evaluations
    assert [start.step for start in starts] == [0]
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
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["kind"] for line in lines] == ["run", "step", "step"]
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
    history, _ = read_metrics(tmp_path / "metrics.jsonl")
    assert np.isnan(history.steps[0].loss)


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


class Page(HTMLParser):
    """A report as a reader sees it.

    Attributes:
        text: All text.
        facts: The values of definition lists, by name.
        charts: The descriptions of the pictures.
    """

    def __init__(self, path):
        super().__init__()
        self.text, self.facts, self.charts = "", {}, []
        self._tag = self._name = ""
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self._tag = tag
        if label := dict(attributes).get("aria-label"):
            self.charts.append(label)

    def handle_data(self, data):
        self.text += data
        if self._tag == "dt":
            self._name = data
        elif self._name and data.strip():
            self.facts.setdefault(self._name, data)


def test_the_page_needs_no_network_and_no_script(run):
    source = Page(run[0] / "report.html").source
    assert not re.findall(r"(?:src|href)=[\"']?(?!#|data:)([^\"' >]+)|url\((?!#|data:)", source)
    assert "<script" not in source


def test_the_page_shows_each_metric_of_training_and_evaluation(run):
    folder, result = run
    page, steps = Page(folder / "report.html"), result.history.steps
    assert page.facts["Final loss"] == f"{steps[-1].loss:#.4g}"
    assert page.facts["Steps"] == "6"
    (loss,) = (text for text in page.charts if text.startswith("Mean loss"))
    (absolute,) = (text for text in page.charts if text.startswith("absolute"))
    for text in loss, absolute:
        assert {"training", "evaluation"} <= set(re.findall(r"; (\w+): first", text))
    assert f"training: first {steps[0].loss:#.4g}, last {steps[-1].loss:#.4g}" in loss
    for name in result.history.device_names:
        assert name in page.text


def test_the_page_says_what_ran_and_how_it_was_started(run):
    folder, result = run
    page, (start,) = Page(folder / "report.html"), read_metrics(folder / "metrics.jsonl")[1]
    assert page.facts["command"] == start.command
    assert page.facts["git commit"] == (start.commit or "the script is in no git repository")
    assert page.facts["devices"] == "2 × cpu"
    assert page.facts["processes"] == f"1 on {start.hosts[0]}"
    assert page.facts["batch size"] == "24"
    assert page.facts["model"] == "Linear"
    for name, version in start.versions.items():
        assert f"{name} {version}" in page.text
    assert result.plan.explain() in page.text
    assert "D1. Devices of this kind give the same bits" in page.text


def test_a_start_has_the_commit_of_the_script_and_says_if_it_was_changed(tmp_path):
    code = (
        "from support.inside.report import run_start\n"
        "print(run_start(0, 1, hosts=['a'], devices=['cpu'], job={}).commit)"
    )
    script = tmp_path / "script.py"
    script.write_text(code)

    def commit():
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, script]
        return subprocess.check_output(command, env=environment, text=True).strip()

    def git(*words):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.check_output(command, text=True)

    assert commit() == ""
    git("init")
    git("add", "script.py")
    git("commit", "-m", "a script")
    name = git("rev-parse", "HEAD")[:12]
    assert commit() == name
    script.write_text(f"{code}  # changed")
    assert commit() == f"{name} + changes"


def test_a_launched_run_has_the_command_of_its_launcher(monkeypatch):
    monkeypatch.setenv("HXLA_COMMAND", "hxla run -n 2 train.py")
    start = run_start(0, None, hosts=["a", "b", "a"], devices=["cpu"] * 3, job={})
    assert start.command == "hxla run -n 2 train.py"
    assert (start.hosts, start.num_processes, start.devices) == (("a", "b"), 3, {"cpu": 3})


def test_the_page_of_a_resumed_run_shows_all_its_steps_and_marks_the_resume(tmp_path):
    folder, saved = tmp_path / "run", tmp_path / "checkpoints"
    first = train(folder, steps=3, checkpoint_dir=saved)
    second = train(folder, steps=5, checkpoint_dir=saved)
    page = Page(folder / "report.html")
    losses = [f"{r.loss:#.4g}" for r in (*first.history.steps, *second.history.steps)]
    assert len(losses) == 5
    assert page.facts["Steps"] == "5"
    assert f"first {losses[0]}, last {losses[-1]}" in page.charts[0]
    assert "resumed" in page.text
    assert "All starts of this run" in page.text


def test_steps_that_a_resume_makes_again_count_once(tmp_path, run):
    history, (start,) = read_metrics(run[0] / "metrics.jsonl")
    parts = {0: (start, *history.steps[:5]), 3: (dataclasses.replace(start, step=3),)}
    for first_step, records in parts.items():
        with contextlib.closing(MetricsWriter(tmp_path, first_step=first_step)) as writer:
            for record in records:
                writer.write(record)
    again, starts = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.step for record in again.steps] == [1, 2, 3]
    assert [some.step for some in starts] == [0, 3]


def test_earlier_lines_that_cannot_be_read_are_named_and_left_out(tmp_path, capfd):
    folder, saved = tmp_path / "run", tmp_path / "checkpoints"
    train(folder, steps=2, checkpoint_dir=saved)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    train(folder, steps=3, checkpoint_dir=saved)
    told = "".join(capfd.readouterr())
    assert re.search(r"the report begins after step 2: \S*metrics.jsonl, line 4 is no", told)
    assert "first" in Page(folder / "report.html").charts[0]


def test_the_page_says_that_a_run_goes_on_and_how_it_ended(tmp_path):
    (tmp_path / "report.html").write_text("of an earlier run")
    (tmp_path / "pipeline0-planned.perfetto.json").write_text("of an earlier run")
    seen = []

    def look(record, session):
        seen.append(Page(tmp_path / "report.html").text)
        if record.step == 2:
            raise ValueError("a < b")

    with pytest.raises(ValueError, match="a < b"):
        train(tmp_path, steps=4, callbacks=[look])
    assert "Running: step 1 at" in seen[0]
    assert "of 4, 24 examples each" in seen[0]
    last = Page(tmp_path / "report.html").text
    assert "Failed after 2 steps" in last
    assert "ValueError: a < b" in last
    assert not list(tmp_path.glob("pipeline*"))


def test_a_chart_keeps_the_peak_of_a_long_curve_and_leaves_gaps_out():
    y = np.ones(100_000)
    y[77_777], y[50_000:50_500] = 9.0, np.nan
    curve = Curve(name="loss", color="train", x=np.arange(100_000.0), y=y)
    chart = curve_chart("Loss", [curve], marks={})
    (path,) = re.findall(r'<path class="curve train" d="([^"]*)"', chart)
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", path)[1:]]
    highest = min(points, key=lambda point: point[1])
    assert highest[0] == pytest.approx(777.8, abs=0.1)
    assert path.count("M") == 2
    assert len(path) < 10_000
    assert "from 1.000 to 9.000" in chart


def test_a_noisy_curve_has_its_running_median_over_it():
    x = np.arange(2000.0)
    y = 1.0 + 0.002 * x + np.where(x % 2, 0.5, -0.5)
    y[::97] = np.nan
    curve = Curve(name="norm", color="train", x=x, y=y, is_noisy=True)
    chart = curve_chart("Norm", [curve], marks={}, is_linear=True, from_zero=True)
    assert re.search(r'<path class="curve faint train" d="M', chart)
    (path,) = re.findall(r'<path class="curve train" d="([^"]*)"', chart)
    points = np.array([tuple(map(float, p.split())) for p in re.split("[ML]", path)[1:]])
    # From zero to a little above the largest value; down is positive.
    high = 1.06 * np.nanmax(y)
    middle = points[len(points) // 10 : -len(points) // 10]
    drawn = high * (1 - middle[:, 1] / 1000)
    assert np.abs(drawn - (1.0 + 0.002 * middle[:, 0] * x[-1] / 1000)).max() < 0.6
    assert np.abs(np.diff(drawn)).max() < 1.0 + 1e-2


def test_bands_are_as_high_as_their_numbers_and_the_last_one_has_the_rest():
    """Of ten devices, the colours are for seven and all others."""
    rows = np.tile(np.arange(1, 11), (6, 1))
    rows[3:] = np.arange(10, 0, -1)
    names = [f"device {i}" for i in range(10)]
    chart = band_chart("Counts", names, np.arange(6.0), rows, marks={3.0: "resumed"})
    drawn = re.findall(r'<path class="band k(\d)" d="([^"]*)z"', chart)
    assert [int(band) for band, _ in drawn] == list(range(8))
    expected = np.concatenate([rows[[0, 3], :7], rows[[0, 3], 7:].sum(axis=1)[:, None]], axis=1)
    heights = []
    for _, path in drawn:
        numbers = [int(down) for down in re.findall(r"[ML]\d+ (\d+)H", path)]
        heights.append([numbers[3] - numbers[0], numbers[2] - numbers[1]])
    assert np.allclose(np.array(heights).T / 1000, expected / (1.06 * rows[0].sum()), atol=0.002)
    assert "3 others" in chart
    assert "from step 3: 10/9/8/7/6/5/4/6" in chart


@pytest.mark.parametrize("y", [[np.nan, np.nan], [0.0, 0.0], [1e-9, 1e9], [-5.0, 5.0], [7.0]])
def test_a_chart_of_any_values_has_places_inside_it(y):
    x = np.arange(1.0, len(y) + 1)
    chart = curve_chart("Loss", [Curve(name="a", color="eval", x=x, y=np.array(y))], marks={})
    places = re.findall(r'(?:x|x1|cx|y|y1|cy)="([-\d.naif]+)%"', chart)
    assert places
    assert all(0 <= float(place) <= 100 for place in places)


def test_figures_of_a_run_leave_its_first_step_out(run):
    """It may compile."""
    history = run[1].history
    first, *others = [dataclasses.replace(step, seconds=0.5) for step in history.steps]
    slow = dataclasses.replace(first, seconds=100.0)
    assert summarise(dataclasses.replace(history, steps=(slow, *others))).whole.step_seconds == 0.5
    assert summarise(dataclasses.replace(history, steps=(slow,))).whole.step_seconds == 100.0


def test_times_of_a_pipeline_are_those_of_its_slowest_process():
    """Each process times the parts that it has, and what both sides of a boundary do together."""
    here = PieceTimes(seconds={("F", 0): 1.0}, meeting_seconds={0: 3.0}, fixed_seconds=0.5)
    there = PieceTimes(seconds={("F", 1): 2.0}, meeting_seconds={0: 4.0}, fixed_seconds=0.7)
    together = {("F", 0): 1.0, ("F", 1): 2.0}
    whole = PieceTimes(seconds=together, meeting_seconds={0: 4.0}, fixed_seconds=0.7)
    for order in ((here, there), (there, here)):
        assert times_from_texts([times_as_text({1: times}) for times in order]) == {1: whole}


STEP = PieceTimes(
    seconds={(FORWARD, 0): 1.0, (FORWARD, 1): 2.0, (BACKWARD, 0): 2.0, (BACKWARD, 1): 4.0},
    meeting_seconds={0: 2.25},
    fixed_seconds=0.5,
)


def planned_step(schedule):
    took = [[STEP.seconds[kind, stage] for stage in range(2)] for kind in (FORWARD, BACKWARD)]
    return PredictedStep(schedule=schedule, timeline=replay(schedule, *took), fixed_seconds=0.5)


def test_a_pipeline_is_told_and_drawn_as_planned_and_as_measured(run, tmp_path):
    schedule = one_f_one_b(2, 3)
    planned = planned_step(schedule)
    # The large stage works for 3 * 6 s, and waits 1 s before them and the small one 2 s after.
    assert planned.busy_seconds == 1 + 18 + 2 + 0.5
    words = pipeline_in_words(0, planned, STEP)
    idle = 1 - (9 + 18) / (2 * 21)
    assert f"3 microbatches in 21.5 s, idle {idle:.0%}" in words
    assert "stage 0: 1e+03/2e+03, 1: 2e+03/4e+03 ms; between them 250 ms" in words

    ticks = [[(float(t), t + 0.5) for t, _ in enumerate(schedule.table_TS)] for _ in range(2)]
    drawn = {"planned": planned.timeline, "measured": measured_timeline(schedule, ticks)}
    assert sum(drawn["measured"].busy_seconds) == 0.5 * 2 * 2 * 3
    lanes = tuple(
        lanes_of_timeline(
            timeline, ("small", "large"), title=f"{which}: {timeline.makespan_seconds:g} s"
        )
        for which, timeline in drawn.items()
    )

    result, counts = run[1], [step.counts for step in run[1].history.steps]
    moved = Rebalance(step=3, before=counts[0], after=(1, 7), reason="slower", expected_gain=0.25)
    steps = [
        dataclasses.replace(s, counts=(1, 7)) if s.step >= 3 else s for s in result.history.steps
    ]
    page = tmp_path / "report.html"
    page.write_text(
        html_report(
            dataclasses.replace(result.history, steps=tuple(steps), rebalances=(moved,)),
            [run_start(0, 6, hosts=["here"], devices=["cpu", "cpu"], job={})],
            RunState(kind="finished"),
            title="a run",
            plan=result.plan,
            bits=Determinism(level="D1", reasons=("sums are exact",)),
            pipelines={0: lanes},
        )
    )
    shown = Page(page)
    assert "One step of pipeline 0, planned: 21 s and measured:" in shown.text
    first = "/".join(map(str, counts[0]))
    assert f"Microbatches of each device over steps: {first} at first, 1/7 last" in shown.charts


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
