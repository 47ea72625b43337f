"""Ready callbacks, periods and records: on one training, its resume, and two processes."""

import csv
import datetime
import itertools
import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.report import MetricsWriter, read_metrics
from support.inside.weights import read_metadata
from support.launched import end_of, start

NUM, BATCH = 48, 16
EPOCH = NUM // BATCH
PATIENCE = 2
X = np.random.default_rng(0).normal(size=(NUM, 4)).astype(np.float32)
DATA = {"x": X, "y": X.sum(axis=1)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))[:, 0]


def loss(model, batch):
    error = model(batch["x"]) - batch["y"]
    return error**2, {"near": (abs(error) < 1).astype(jnp.float32)}


def schedule(step):
    """Good at first, then so large that the loss grows again."""
    return jnp.where(step < 7, 0.1, 3.0)


def record_norm():
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()), lambda g, state, params=None: (g, optax.tree.norm(g))
    )


def job(**changed):
    optimizer = optax.chain(
        record_norm(),
        optax.clip_by_global_norm(1e3),
        optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
    )
    arguments = {"optimizer": optimizer, "batch_size": BATCH, "seed": 1, **changed}
    return hxla.Job(Net(nnx.Rngs(0)), DATA, loss, **arguments)


def train(folder, steps=99, *, more=(), **changed):
    """A training that stops early, with everything that writes; the steps that it saved."""
    arguments = {
        "eval_data": DATA,
        "eval_every": 2,
        "checkpoint_dir": folder / "checkpoints",
        "checkpoint_every": "epoch",
        "run_dir": folder / "run",
        "callbacks": [
            hxla.keep_best("loss", mode="min"),
            hxla.stop_early("loss", patience=PATIENCE),
            hxla.log_to(folder / "rows.csv"),
            hxla.log_to(str(folder / "rows.jsonl")),
            hxla.log_to(folder / "events"),
            *more,
        ],
        **changed,
    }
    fixed = {"microbatch_size": 8, "mesh": models.mesh(data=1), "counts": "even"}
    return hxla.train(job(), steps=steps, **fixed, **arguments)


class Seen:
    """Everything that a callback sees, in order."""

    def __init__(self):
        self.calls, self.kernels, self.weights = [], [], None

    def on_check(self, arguments):
        self.calls.append(("check", arguments["eval_every"]))

    def on_start(self, session):
        self.calls.append(("start", session.step_number))
        self.names = session.metric_names

    def on_step(self, record, session):
        self.calls.append(("step", record.step))
        self.weights = session.weights

    def on_evaluation(self, record, session):
        self.calls.append(("evaluation", record.step))

    def on_save(self, step, session):
        self.calls.append(("save", step))

    def on_end(self, session):
        self.calls.append(("end", session.step_number))

    def on_close(self):
        self.calls.append(("close", None))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, seen, logged = tmp_path_factory.mktemp("run"), Seen(), []
    tracker = hxla.log_to(lambda metrics, step: logged.append((step, metrics)))
    return folder, train(folder, more=[seen, tracker]), seen, logged


def expected(evaluations):
    """The best evaluation and the step after which training ends, by a plain loop."""
    best, waited = None, 0
    for record in evaluations:
        if best is None or record.loss < best.loss:
            best, waited = record, 0
        else:
            waited += 1
        if waited == PATIENCE:
            return best, record.step + 1
    raise AssertionError("the loss grows at last")


def test_training_stops_when_the_metric_no_longer_improves(run):
    _, result, *_ = run
    best, end = expected(result.history.evaluations)
    assert result.step == end
    assert 0 < best.step < end - PATIENCE


def test_the_best_weights_are_those_of_the_best_evaluation(run):
    folder, result, *_ = run
    best, _ = expected(result.history.evaluations)
    metadata = read_metadata(folder / "run" / "best" / "model.safetensors")
    assert (metadata["metric"], int(metadata["step"])) == ("loss", best.step)
    assert float(metadata["value"]) == best.loss
    fresh = job(weights=folder / "run" / "best")
    with fresh.open(fresh.plan(microbatch_size=8, mesh=models.mesh(data=1))) as session:
        assert session.evaluate(DATA).loss == best.loss
    model = Net(nnx.Rngs(3))
    weights = hxla.load_weights(folder / "run" / "best", nnx.state(model))
    assert np.any(np.asarray(weights["norm"]["mean"][...]))  # the statistics are there too


def test_every_hook_is_called_in_order(run):
    _, result, seen, _ = run
    wanted = [("check", 2), ("start", 0)]
    for step in range(1, result.step + 1):
        wanted.append(("step", step))
        wanted += [("evaluation", step)] if step % 2 == 0 else []
        wanted += [("save", step)] if step % EPOCH == 0 or step == result.step else []
    assert seen.calls == [*wanted, ("end", result.step), ("close", None)]
    assert seen.names == ("loss", "near")


def test_a_record_has_epoch_learning_rate_and_gradient_norm(run):
    _, result, *_ = run
    steps = result.history.steps
    assert [r.epoch for r in steps] == [r.step / EPOCH for r in steps]
    np.testing.assert_array_equal(
        [r.learning_rate for r in steps], [float(schedule(r.step - 1)) for r in steps]
    )
    assert steps[-1].gradient_norm == pytest.approx(float(result.opt_state[0]), rel=1e-5)


def test_files_and_functions_get_the_same_numbers(run):
    folder, result, _, logged = run
    with (folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [step for step, _ in logged] == [*range(1, result.step + 1)]
    evaluations = {e.step: e.loss for e in result.history.evaluations}
    for (step, metrics), row, line, record in zip(
        logged, rows, lines, result.history.steps, strict=True
    ):
        assert {k: float(v) for k, v in row.items() if v} == metrics | {"step": step}
        assert line == metrics | {"step": step}
        assert metrics["train/loss"] == record.loss
        assert metrics["train/near"] == record.metrics["near"]
        assert metrics.get("eval/loss") == evaluations.get(step)
    assert list((folder / "events").glob("events.out.tfevents.*"))


class EndedError(Exception):
    pass


class Failing(Seen):
    """Fails while it is closed."""

    def on_close(self):
        super().on_close()
        raise OSError("planted")


def test_all_callbacks_are_closed_after_an_error():
    first, failing, last = Seen(), Failing(), Seen()
    fixed = {"microbatch_size": 8, "mesh": models.mesh(data=1), "counts": "even"}
    with pytest.raises(OSError, match="planted") as caught:
        hxla.train(job(), steps=99, callbacks=[first, failing, last, end_after_7], **fixed)
    assert isinstance(caught.value.__context__, EndedError)
    for seen in (first, failing, last):
        assert seen.calls[-2:] == [("step", 7), ("close", None)]


def test_a_metric_of_evaluations_alone_is_followed(tmp_path):
    def eval_loss(model, batch):
        return loss(model, batch)[0], {"far": (abs(model(batch["x"])) > 1).astype(jnp.float32)}

    hxla.train(
        job(eval_loss=eval_loss),
        steps=1,
        microbatch_size=8,
        mesh=models.mesh(data=1),
        eval_data=DATA,
        callbacks=[hxla.keep_best("far", folder=tmp_path)],
    )
    assert read_metadata(tmp_path / "model.safetensors")["metric"] == "far"


@pytest.mark.parametrize("ready", [hxla.keep_best, hxla.stop_early])
def test_an_unknown_metric_is_refused_before_the_first_step(ready, tmp_path):
    seen = Seen()
    with pytest.raises(hxla.ConfigError, match="returns loss, near; did you mean 'near'"):
        train(tmp_path, callbacks=[seen, ready("nera")])
    assert seen.calls == [("check", 2), ("start", 0), ("close", None)]


def end_after_7(record, session):
    if record.step == 7:
        raise EndedError


def test_a_resumed_run_ends_as_the_whole_one_and_its_files_have_no_row_twice(run, tmp_path, capsys):
    _, result, *_ = run
    with pytest.raises(EndedError):
        train(tmp_path, more=[end_after_7])
    shutil.rmtree(tmp_path / "checkpoints" / "7")  # which a kill would not have written
    resumed = train(tmp_path)
    assert resumed.history.steps[0].step == 7
    assert (resumed.step, resumed.sha256) == (result.step, result.sha256)
    best, _ = expected(result.history.evaluations)
    path = tmp_path / "run" / "best" / "model.safetensors"
    assert f"best loss {best.loss:.6g} at step {best.step}: {path}" in capsys.readouterr().err
    every = [*range(1, result.step + 1)]
    with (tmp_path / "rows.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == every
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == every
    kinds = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in kinds if x["kind"] == "step"] == every
    assert [x["step"] for x in kinds if x["kind"] == "eval"] == [*range(2, result.step + 1, 2)]
    history, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert history.steps[-1].loss == result.history.steps[-1].loss

    again = train(tmp_path)  # a run that has ended early is over
    assert (again.step, again.sha256, again.history.steps) == (result.step, result.sha256, ())
    assert "the run has ended at step" in capsys.readouterr().err


def test_no_callback_or_period_moves_a_bit(run):
    _, result, *_ = run
    fixed = {"microbatch_size": 8, "mesh": models.mesh(data=2), "counts": "even"}
    plain = hxla.train(job(), steps=result.step, **fixed)
    assert plain.sha256 == result.sha256
    for name in ("epoch", "learning_rate", "gradient_norm", "loss"):
        alone, together = (
            [getattr(record, name) for record in each.history.steps] for each in (result, plain)
        )
        assert alone == together
    weights = plain.weights
    assert sorted(weights) == ["norm", "out"]  # no random streams
    assert sorted(weights["norm"]) == ["bias", "mean", "scale", "var"]


def test_one_session_refuses_what_it_cannot_do_and_keeps_what_it_is_given(tmp_path):
    plain = job(optimizer=optax.sgd(0.1))
    plan = plain.plan(microbatch_size=8, mesh=models.mesh(data=1))
    rate = optax.linear_schedule(0.5, 0.0, 10)
    folder = tmp_path / "checkpoints"
    options = {"checkpoint_dir": folder, "checkpoint_every": 2, "logged_learning_rate": rate}
    saved = []
    with plain.open(plan, steps=3, **options) as session:
        session.after_save.append(lambda: saved.append(session.step_number))
        session.metadata["mine"] = {"numbers": [1, 2.5]}
        records = list(session)
        evaluation = session.evaluate(DATA)
        with pytest.raises(hxla.ConfigError, match="returns loss, near; did you mean 'near'"):
            hxla.keep_best("nera").on_evaluation(evaluation, session)
        session.metadata["array"] = X
        with pytest.raises(hxla.ConfigError, match=r"metadata\['array'\] is no JSON value"):
            session.save()
        del session.metadata["array"]
        session.save()
        saved_names = {"norm", "out"}
        assert set(session.weights) == saved_names
    assert [r.learning_rate for r in records] == [0.5, pytest.approx(0.45), pytest.approx(0.4)]
    assert [r.gradient_norm for r in records] == [None] * 3  # nothing clips
    assert saved == [2, 3]
    with plain.open(plan, steps=4, checkpoint_dir=folder) as session:
        assert session.metadata == {"mine": {"numbers": [1, 2.5]}}
        best = hxla.keep_best("loss", mode="min", folder=tmp_path / "best")
        best.on_start(session)
        best.on_evaluation(evaluation, session)
        other = hxla.keep_best("near", folder=tmp_path / "best")
        with pytest.raises(hxla.ConfigError, match=r"was kept by another metric \(loss\)"):
            other.on_start(session)


def test_a_fresh_run_renames_what_an_earlier_one_has_kept(run, tmp_path, capsys):
    shutil.copytree(run[0] / "run" / "best", tmp_path / "run" / "best")
    shutil.copy(run[0] / "rows.csv", tmp_path)
    train(tmp_path, 2)
    assert (tmp_path / "run" / "best.1" / "model.safetensors").exists()
    assert (tmp_path / "rows.1.csv").read_bytes() == (run[0] / "rows.csv").read_bytes()
    out = capsys.readouterr().err
    assert f"the best weights of an earlier run are now in {tmp_path / 'run' / 'best.1'}" in out
    assert f"the metrics of an earlier run are now in {tmp_path / 'rows.1.csv'}" in out


def test_a_resume_cuts_lines_of_later_steps_though_an_earlier_gain_comes_after_them(run, tmp_path):
    with (run[0] / "run" / "metrics.jsonl").open() as file:
        lines = list(itertools.islice(file, 8))
    gain = '{"kind":"rebalance","step":2}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join([*lines, gain]))
    MetricsWriter(tmp_path, first_step=3).close()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["kind"], x["step"]) for x in kept] == [
        ("run", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3)
    ]  # fmt: skip
    path.write_text("".join([*lines[:4], gain]))
    MetricsWriter(tmp_path, first_step=3).close()
    assert path.read_text() == "".join([*lines[:4], gain])


SCRIPT = """
import datetime
import jax, optax, hxla
from flax import nnx
from support import models

class Saves:
    def __init__(self):
        self.steps = []
    def on_save(self, step, session):
        self.steps.append(step)

saves = Saves()
job = hxla.Job(
    models.Dense(nnx.Rngs(0)), models.regression(), models.squared_error, optax.sgd(1e-2),
    batch_size=16,
)
ready = [
    hxla.keep_best("loss", mode="min"), hxla.stop_early("loss", patience=9),
    hxla.log_to({folder!r} + ".csv"),
]
result = hxla.train(
    job, microbatch_size=4, steps={steps}, counts="even", checkpoint_dir={folder!r},
    checkpoint_every=datetime.timedelta(microseconds=1), eval_data=models.regression(),
    eval_every=1, callbacks=[saves, *ready],
)
print("saved", jax.process_index(), saves.steps, result.sha256, flush=True)
"""


@pytest.mark.slow
def test_two_processes_save_by_the_clock_of_rank_0_after_the_same_steps(tmp_path):
    folder = tmp_path / "checkpoints"
    for steps, saved in ((3, "[1, 2, 3]"), (5, "[4, 5]")):  # the second run resumes
        code = SCRIPT.format(folder=str(folder), steps=steps)
        out, err = end_of(start(tmp_path, code, "-n", "2"))
        said = re.findall(r"saved (\d) (\[.*?\]) (\w+)", out)
        assert len(said) == 2, out + err
        assert {steps for _, steps, _ in said} == {saved}
        assert len({sha for *_, sha in said}) == 1
        assert "best loss" in err
        assert read_metadata(folder / "best" / "model.safetensors")["step"] == str(steps)
    with (tmp_path / "checkpoints.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 3, 4, 5]


class Misspelt:
    def on_evaluate(self, record, session):
        pass


class Short:
    def on_save(self, session):
        pass


def of_one(record):
    pass


CALLS = {
    "a function of one argument": (
        dict(callbacks=[of_one]),
        r"callbacks\[0\] \(of_one\): of_one\(record\) is called as of_one\(record, session\)",
    ),
    "a method of one argument": (
        dict(callbacks=[Short()]),
        r"\(Short\): on_save\(session\) is called as on_save\(step, session\)",
    ),
    "a misspelt method": (
        dict(callbacks=[Misspelt()]),
        "on_evaluate, .*did you mean on_evaluation",
    ),
    "a class": (dict(callbacks=[Seen]), r"Seen\) is a class: pass an instance, Seen\(\.\.\.\)"),
    "no callback": (dict(callbacks=[3]), "neither a function of .* nor an object with any"),
    "one object": (dict(callbacks=Seen()), r"is no list: pass callbacks=\[Seen\]"),
    "nothing to monitor": (
        dict(callbacks=[hxla.keep_best("near")]),
        r"keep_best\('near'\) needs eval_data",
    ),
    "no folder": (
        dict(callbacks=[hxla.keep_best("near")], eval_data=DATA),
        r"keep_best\('near'\) needs a folder",
    ),
    "one folder for two": (
        dict(
            callbacks=[hxla.keep_best("near"), hxla.keep_best("loss", mode="min")],
            eval_data=DATA,
            run_dir="run",
        ),
        r"keep_best\('loss'\) and keep_best\('near'\) write to the same folder",
    ),
    "a word for a period": (
        dict(eval_data=DATA, eval_every="epochs"),
        "eval_every='epochs': pass a number of steps, 'epoch'",
    ),
    "evaluations by the clock": (
        dict(eval_data=DATA, eval_every=datetime.timedelta(minutes=1)),
        "do not evaluate by the clock",
    ),
    "no time": (
        dict(checkpoint_dir="c", checkpoint_every=datetime.timedelta()),
        "must be longer than no time",
    ),
    "a checkpoint of each epoch nowhere": (
        dict(checkpoint_every="epoch"),
        "needs a checkpoint_dir",
    ),
    "epochs of another name": (dict(num_epochs=3), "num_epochs: did you mean epochs"),
    "an argument of the job": (dict(batchsize=3), "did you mean batch_size of hxla.Job"),
    "the job's own": (dict(optimizer=3), "optimizer: it belongs to hxla.Job"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_to_write_instead(name):
    given, words = CALLS[name]
    with pytest.raises(hxla.ConfigError, match=words):
        hxla.train(job(), **({"steps": 1} | given))


WAYS = {
    "another mode": (lambda: hxla.keep_best("near", mode="best"), "use 'max' or 'min'"),
    "no patience": (lambda: hxla.stop_early("loss", patience=0), "patience=0 must be at least 1"),
    "a difference below 0": (lambda: hxla.stop_early("loss", min_delta=-1.0), "at least 0"),
    "a file of another kind": (lambda: hxla.log_to("m.txt"), r"ends in \.csv or \.jsonl"),
    "a function of one": (lambda: hxla.log_to(of_one), "is called as f.metrics, step"),
    "epochs of the job": (lambda: job(epochs=3), "epochs: it belongs to hxla.train"),
    "rates of the job": (lambda: job(batchsize=3), "did you mean batch_size"),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_callback_that_has_no_meaning_is_refused(name):
    make, words = WAYS[name]
    with pytest.raises(hxla.ConfigError, match=words):
        make()
