"""However a session ends, its last whole state is saved and its report written."""

import json
import shutil
import signal

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.launched import end_of, lines_with, start
from support.models import mesh
from support.training import train_with

pytestmark = pytest.mark.usefixtures("every_program_is_cached")

DATA = {"x": np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)}


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean(-1)


@pytest.fixture(autouse=True)
def heeds_ctrl_c():
    """As a script in a terminal does: one in the background may be started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def train(*callbacks, data=DATA, **options):
    arguments = {"batch_size": 16, "microbatch_size": 4, "steps": 6, "shuffle": False} | options
    return train_with(
        nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
        data,
        loss,
        optax.adam(0.1),
        mesh=mesh(data=2),
        callbacks=callbacks,
        **arguments,
    )


def saved(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


class OfUsersOwnError(Exception):
    pass


def raising(error, step=3):
    def callback(record, session):
        if record.step == step:
            raise error

    return callback


def interrupting(record, session):
    if record.step == 3:
        signal.raise_signal(signal.SIGINT)


def test_an_error_saves_the_last_whole_state_and_is_raised_as_it_is(tmp_path):
    whole = train()
    error = OfUsersOwnError("mine")
    with pytest.raises(OfUsersOwnError) as told:
        train(raising(error), checkpoint_dir=tmp_path / "c", run_dir=tmp_path / "r")
    assert told.value is error
    assert saved(tmp_path / "c") == [3]
    assert "<html" in (tmp_path / "r" / "report.html").read_text()
    assert train(checkpoint_dir=tmp_path / "c").sha256 == whole.sha256


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), hxla.DataError("mine")])
def test_whatever_ends_training_is_an_error(tmp_path, error):
    with pytest.raises(type(error)):
        train(raising(error), checkpoint_dir=tmp_path)
    assert saved(tmp_path) == [3]


def test_an_error_of_the_data_or_of_a_gradient_saves_the_step_before(tmp_path):
    batches = ({"x": DATA["x"][:16]} for _ in range(4))
    with pytest.raises(hxla.DataError, match="ended after 4 global batches"):
        train(data=batches, checkpoint_dir=tmp_path / "data")
    assert saved(tmp_path / "data") == [4]
    x = np.where(np.arange(32)[:, None] < 20, DATA["x"], np.inf)
    with pytest.raises(hxla.NonFiniteError, match="step 2"):
        train(data={"x": x}, checkpoint_dir=tmp_path / "gradient")
    assert saved(tmp_path / "gradient") == [1]


def test_what_was_not_trained_is_not_saved_again(tmp_path):
    with pytest.raises(OfUsersOwnError):
        train(raising(OfUsersOwnError(), 1), checkpoint_dir=tmp_path, checkpoint_every=1)
    assert saved(tmp_path) == [1]

    def fails(model, batch):
        raise OfUsersOwnError

    with pytest.raises(OfUsersOwnError):
        train(eval_data=DATA, eval_loss=fails, eval_every=1, checkpoint_dir=tmp_path, steps=1)
    assert saved(tmp_path) == [1]


def test_an_error_is_the_one_seen_where_its_state_cannot_be_saved(tmp_path):
    folder = tmp_path / "c"

    def spoil(record, session):
        if record.step == 2:
            shutil.rmtree(folder)
            folder.write_text("a file")
            raise OfUsersOwnError

    with pytest.raises(OfUsersOwnError):
        train(spoil, checkpoint_dir=folder)


def test_the_first_ctrl_c_ends_as_sigterm_does(tmp_path, capfd):
    whole, handler = train(), signal.getsignal(signal.SIGINT)
    with pytest.raises(
        hxla.Preempted, match="Ctrl-C arrived; training ended after 3 steps"
    ) as left:
        train(interrupting, checkpoint_dir=tmp_path / "c", run_dir=tmp_path / "r")
    assert (left.value.code, left.value.step) == (75, 3)
    assert signal.getsignal(signal.SIGINT) is handler
    assert saved(tmp_path / "c") == [3]
    assert "<html" in (tmp_path / "r" / "report.html").read_text()
    words = "the running step is finished, then training ends; once more ends it at once"
    assert words in capfd.readouterr().err
    assert train(checkpoint_dir=tmp_path / "c").sha256 == whole.sha256


def test_the_step_that_a_signal_meets_is_the_last(tmp_path):
    def end(largest):
        if largest > 50:
            signal.raise_signal(signal.SIGTERM)

    def calling(model, batch):
        jax.debug.callback(end, batch["x"].max())
        return loss(model, batch)

    batches = ({"x": np.full((16, 6), 99 if step == 3 else 1, np.float32)} for step in range(1, 7))
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    options = {"batch_size": 16, "microbatch_size": 4, "steps": 6, "mesh": mesh(data=2)}
    with pytest.raises(hxla.Preempted) as left:
        train_with(model, batches, calling, optax.sgd(0.0), checkpoint_dir=tmp_path, **options)
    assert left.value.step == 3


def test_the_second_ctrl_c_ends_at_once_and_saves_nothing(tmp_path):
    def twice(record, session):
        if record.step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(twice, checkpoint_dir=tmp_path / "c", run_dir=tmp_path / "r")
    assert saved(tmp_path / "c") == []
    assert "<html" in (tmp_path / "r" / "report.html").read_text()


def test_a_script_that_handles_ctrl_c_itself_goes_on_doing_so():
    seen, before = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        assert train(interrupting).step == 6
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_signal_leaves_after_the_callbacks_of_its_step(tmp_path):
    """What they hand in is a part of the step, and a resumed run does not call them again."""
    called = []

    def halve(record, session):
        called.append(record.step)
        whole = session.gather(session.state.params)
        session.replace(params=jax.tree.map(lambda x: x / 2, whole))

    def terminate(record, session):
        if record.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(hxla.Preempted):
        train(halve, terminate, checkpoint_dir=tmp_path)
    resumed = train(halve, checkpoint_dir=tmp_path)
    assert called == [1, 2, 3, 4, 5, 6]
    assert resumed.sha256 == train(halve).sha256


def test_a_report_is_written_where_a_loop_of_ones_own_just_ends(tmp_path):
    job = hxla.Job(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), DATA, loss, optax.sgd(0.1), batch_size=16)
    with job.open(job.plan(microbatch_size=8, mesh=mesh(data=1)), run_dir=tmp_path) as session:
        session.step()
    assert "<html" in (tmp_path / "report.html").read_text()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "step"]


SCRIPT = """
import jax, numpy as np, optax, sys, hxla
from flax import nnx

def callback(record, session):
    print("done", record.step, flush=True)
    if record.step == {step} and jax.process_index() in {ranks}:
        raise ValueError("mine")

job = hxla.Job(
    nnx.Linear(6, 3, rngs=nnx.Rngs(0)), {{"x": np.ones((32, 6), "f")}},
    lambda model, batch: (model(batch["x"]) ** 2).mean(-1), optax.adam(0.1), batch_size=16,
    config={{"watchdog": {{"heartbeat_timeout_seconds": 4.0}}}},
)
hxla.train(
    job, microbatch_size=4, steps={steps}, checkpoint_dir={folder!r}, counts="even",
    callbacks=[callback],
)
"""


def job(tmp_path, *options, step=2, ranks=(0, 1), steps=4):
    folder = str(tmp_path / "c")
    code = SCRIPT.format(step=step, ranks=ranks, steps=steps, folder=folder)
    return start(tmp_path, code, "-n", "2", *options)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_is_not_saved_is_not_said_to_resume(tmp_path, number, code):
    def callback(record, session):
        if record.step == 2:
            signal.raise_signal(number)

    with pytest.raises(hxla.Preempted, match="which are lost: there is no checkpoint_dir") as lost:
        train(callback)
    with pytest.raises(hxla.Preempted) as kept:
        train(callback, checkpoint_dir=tmp_path)
    assert (lost.value.code, kept.value.code) == (code, 75)


@pytest.mark.slow
def test_processes_without_a_checkpoint_folder_end_by_the_signal(tmp_path):
    code = SCRIPT.format(step=-1, ranks=(), steps=10_000, folder=None)
    running = start(tmp_path, code, "-n", "2")
    lines_with(running, "[1] done 3")
    running.send_signal(signal.SIGTERM)
    _, err = end_of(running)
    assert running.returncode == 143, err
    assert "SIGTERM: ended after " in err
    assert "run again to resume" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [((0, 1), [2]), ((1,), [])])
def test_processes_save_what_the_same_error_left_to_all_of_them(tmp_path, ranks, steps):
    running = job(tmp_path, ranks=ranks)
    end_of(running)
    assert running.returncode not in (0, None)
    assert saved(tmp_path / "c") == steps


def test_all_processes_stop_when_one_asks(tmp_path):
    code = SCRIPT.format(step=2, ranks=(1,), steps=8, folder=str(tmp_path / "c"))
    code = code.replace('raise ValueError("mine")', "session.stop()")
    out, err = end_of(start(tmp_path, code, "-n", "2"))
    done = [[line for line in out.splitlines() if f"[{rank}] done" in line] for rank in (0, 1)]
    assert len(done[0]) == len(done[1]) < 8, err
    assert max(saved(tmp_path / "c")) == len(done[0])


@pytest.mark.slow
def test_ctrl_c_ends_processes_as_sigterm_does(tmp_path):
    running = job(tmp_path, step=-1, steps=10_000)
    lines_with(running, "[1] done 3")
    running.send_signal(signal.SIGINT)
    _, err = end_of(running)
    assert running.returncode == 75, err
    assert "hxla: Ctrl-C: the running step is finished, then training ends" in err
    assert max(saved(tmp_path / "c")) >= 4
