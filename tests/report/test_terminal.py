"""What a run says: to a terminal, a pipe, a launcher, and to a program that configured logging."""

import contextlib
import io
import logging
import os
import pty
import sys
import threading

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.launch import SAID, Forwarder, Output
from support.inside.report import Progress, line
from support.training import train_with

STEPS = 6


def loss(model, batch):
    return models.squared_error(model, batch), {"absolute": abs(model(batch["x"])).mean(axis=-1)}


def train(**more):
    return train_with(
        nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
        models.regression(),
        loss,
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.01),
        **{
            "batch_size": 16,
            "microbatch_size": 2,
            "steps": STEPS,
            "mesh": models.mesh(data=2),
            "counts": "even",
        }
        | more,
    )


@pytest.fixture(scope="module")
def run():
    """A run into a pipe: its result, and what it wrote to standard output and standard error."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        result = train(eval_data=models.regression(), eval_every=3)
    return result, out.getvalue(), err.getvalue()


def test_results_of_a_script_have_standard_output_to_themselves(run):
    assert run[1] == ""
    assert "16 examples a step in 8 microbatches of 2, exact sums\n" in run[2]


def test_steps_are_counted_by_updates_done_everywhere(run):
    result, _, said = run
    assert [record.step for record in result.history.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.step for record in result.history.evaluations] == [3, 6]
    for words in ("step 1/6 ", "step 3: evaluation  loss ", "step 6/6 ", "hxla: 6 steps on 2 dev"):
        assert words in said


def test_what_users_measure_is_on_the_line(run):
    last = run[0].history.steps[-1]
    text = line(last, STEPS, ("RTX 4090 #1 + RTX 3090 #0", "T4 #2"), 0.01)
    for words in (
        "epoch 1.00",
        "absolute ",
        "lr 0.01",
        "left 0:00",
        "RTX 4090 #1 + RTX 3090 #0 4/8",
    ):
        assert words in text, text


def test_a_single_replica_waits_for_nobody():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train(mesh=models.mesh(data=1), steps=2)
    assert "idle" not in said.getvalue()


def test_bits_take_one_line(run):
    [bits] = [text for text in run[2].splitlines() if "bits: " in text]
    assert len(bits) < 120
    assert bits.endswith("(details: hxla plan)")


@contextlib.contextmanager
def root_logger(level):
    """What a root logger with one handler gets."""
    said, before = io.StringIO(), (logging.root.handlers[:], logging.root.level)
    logging.root.handlers[:], logging.root.level = [logging.StreamHandler(said)], level
    logging.root.manager._clear_cache()
    try:
        yield said
    finally:
        logging.root.handlers[:], logging.root.level = before
        logging.root.manager._clear_cache()


def test_a_program_that_configured_logging_gets_plain_records(capsys):
    with root_logger(logging.INFO) as said:
        train(log_every=2)
    steps = [text for text in said.getvalue().splitlines() if text.startswith("step")]
    assert [text.split()[1] for text in steps] == ["2/6", "4/6", "6/6"]
    assert capsys.readouterr().err == ""


def test_a_root_logger_at_warning_was_configured_by_nobody(capsys):
    """Such as that of absl, which an import makes."""
    with root_logger(logging.WARNING) as said:
        train(steps=1)
    assert "step 1/1" in capsys.readouterr().err
    assert said.getvalue() == ""


def test_a_quiet_run_says_warnings_only(capsys):
    assert train(quiet=True).step == STEPS
    assert capsys.readouterr() == ("", "")

    def nan(model, batch):
        return loss(model, batch)[0] * np.float32("nan")

    train_with(
        nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
        models.regression(),
        nan,
        optax.sgd(0.1),
        batch_size=16,
        microbatch_size=8,
        steps=1,
        mesh=models.mesh(data=1),
        nonfinite="skip",
        quiet=True,
    )
    assert "step 1: not finite in the gradient" in capsys.readouterr().err


class Screen:
    """A terminal of 60 columns, and what was written to it."""

    def __enter__(self):
        self._read, write = pty.openpty()
        self._patched = pytest.MonkeyPatch()
        self._patched.setattr(sys, "stderr", os.fdopen(write, "w"))
        for name, value in {"COLUMNS": "60", "NO_COLOR": "1", "TERM": "xterm"}.items():
            self._patched.setenv(name, value)
        self._parts = []
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()
        return self

    def _collect(self):
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self._read, 65536):
                self._parts.append(part)

    def __exit__(self, *_):
        sys.stderr.close()
        self._patched.undo()
        self._thread.join()
        os.close(self._read)

    @property
    def text(self):
        return b"".join(self._parts).decode()


def test_a_narrow_terminal_has_one_live_line_without_colours(run):
    with Screen() as screen:
        progress = Progress(STEPS, ("cpu #0", "cpu #1"), log_every=None)
        for record in run[0].history.steps:
            progress.update(record)
        progress.close()
    lines = [text for text in screen.text.replace("\r", "\n").split("\n") if "step" in text]
    assert "step 6/6" in lines[-1]
    assert any("…" in text or "..." in text for text in lines)  # cut, not wrapped
    assert "\x1b[3" not in screen.text  # a colour


@pytest.mark.parametrize(("is_alone", "name"), [(False, b"[0] "), (True, b"")])
def test_a_launcher_paints_the_line_of_rank_0_without_its_name(run, is_alone, name, monkeypatch):
    said = io.StringIO()
    monkeypatch.setenv("HXLA_LIVE", "60")
    with contextlib.redirect_stderr(said):
        progress = Progress(STEPS, ("cpu #0", "cpu #1"), log_every=None)
        for record in run[0].history.steps:
            progress.update(record)
    *painted, last = said.getvalue().split("\r")
    assert all(text.startswith(SAID.decode()) and len(text) <= 60 for text in painted)
    assert last.startswith(SAID.decode() + "step 6/6")

    read, write = os.pipe()
    os.write(write, SAID + b"step 6/6\nmine\n")
    os.close(write)
    shown = io.BytesIO()
    with os.fdopen(read, "rb") as pipe:
        shown_by = Forwarder(0, pipe, Output(shown, threading.Lock()), None, is_alone=is_alone)
        shown_by.join(10, shows_delayed=True)
    assert shown.getvalue() == b"step 6/6\n" + name + b"mine\n"


def test_values_are_shown_in_one_line_and_in_a_notebook_as_a_table(run):
    result = run[0]
    history = result.history
    job = hxla.Job(
        nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
        models.regression(),
        loss,
        optax.sgd(0.1),
        batch_size=16,
    )
    values = [result, history, history.steps[0], history.evaluations[0], result.plan, job]
    for value in values:
        text = repr(value)
        assert text.startswith(f"{type(value).__name__}(")
        assert "\n" not in text
        assert len(text) < 120
    assert repr(history).startswith("History(6 steps, 2 evaluations, loss ")
    page = result._repr_html_()
    assert page.startswith("<p>6 steps on 2 devices")
    assert len(page) < 2000
