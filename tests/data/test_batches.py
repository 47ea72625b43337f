"""Iterables: their position in checkpoints, and one reader for the processes of a host."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import optax
import psutil
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import hxla
from support import elastic_chaos, streams, tiers
from support.inside.data import _data, _host_link, from_text, to_text
from support.inside.jax import is_lost_peer
from support.launched import PATIENCE_SECONDS, own_environment
from support.left_behind import wait_until
from support.models import mesh
from support.paths import JOBS
from support.tiers import examples

SIZE = streams.BATCH_SIZE

# All of Unicode takes seconds to list.
texts = st.text() if tiers.is_all else st.text('a"\\\0ß\U0001f600')
states = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 2**128)
    | st.floats(allow_nan=False)
    | texts
    | st.binary()
    | st.integers(-9, 9).map(np.int32),
    lambda x: (
        st.lists(x)
        | st.lists(x).map(tuple)
        | st.dictionaries(texts | st.integers() | st.just("hxla:tuple"), x)
    ),
)


def same(a, b):
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@settings(max_examples=examples(10, 60))
@given(states)
def test_a_state_comes_back_as_it_was(state):
    assert same(state, from_text(to_text(state)))


def test_the_state_of_a_random_generator_comes_back():
    rng = np.random.Generator(np.random.MT19937(3))
    text = to_text(rng.bit_generator.state)
    drawn = rng.normal(size=700)
    rng.bit_generator.state = from_text(text)
    assert (rng.normal(size=700) == drawn).all()


class OfDataset:
    """Its position is kept by the data set, not by its iterator, as Hugging Face has it."""

    def __init__(self, make):
        self.make, self.next = make, 0

    def __iter__(self):
        stream = streams.Stream(self.make)
        stream.next = self.next * SIZE
        for batch in stream:
            self.next += 1
            yield batch

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Made:
    """Counts the examples that are made."""

    def __init__(self):
        self.numbers = []
        self.make = streams.Make(None)

    def __call__(self, i):
        self.numbers.append(int(i))
        return self.make(i)


def grain_batches(make):
    import grain

    dataset = grain.MapDataset.range(1000).map(make)
    return dataset.to_iter_dataset(grain.ReadOptions(0, 0)).batch(SIZE)


KINDS = [streams.Stream, OfDataset, grain_batches]


def batch_of(source, step):
    return source.fetch(step, np.arange(SIZE))["x"]


def source_of(data, **options):
    return _data.as_source(data, batch_size=SIZE, seed=0, **options)


def test_what_was_read_ahead_of_the_end_is_still_there():
    """A step gets its batch, however far another thread has read."""
    source = source_of(iter([{"x": np.full((SIZE, 2), k)} for k in range(2)]))
    with pytest.raises(hxla.DataError, match="ended after 2 global batches"):
        source.fetch(2, np.arange(1))
    assert source.fetch(1, np.arange(1))["x"].tolist() == [[1, 1]]
    with pytest.raises(hxla.DataError, match="ended after 2 global batches"):
        source.fetch(2, np.arange(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_is_that_of_the_step_and_not_of_what_was_loaded_ahead(kind):
    source = source_of(kind(Made()))
    expected = [batch_of(source, step) for step in range(12)]
    state = source.state(10)  # 11 is loaded ahead
    made = Made()
    resumed = source_of(kind(made))
    resumed.example()
    assert "from the state of its iterator" in resumed.begin(10, state)
    assert (batch_of(resumed, 10) == expected[10]).all()
    assert (batch_of(resumed, 11) == expected[11]).all()
    assert (batch_of(resumed, 0) == expected[0]).all()
    assert sorted(made.numbers) == [*range(SIZE), *range(10 * SIZE, 12 * SIZE)]
    assert resumed.state(11) == source.state(11)


@pytest.mark.parametrize("kind", KINDS)
def test_another_session_of_a_job_begins_anew(kind):
    source = source_of(kind(Made()))
    first = [batch_of(source, step) for step in range(9)][2]
    if kind is streams.Stream:
        with pytest.raises(hxla.DataError, match="batch 2 of the data was read before"):
            batch_of(source, 2)
    elif kind is grain_batches:
        assert (batch_of(source, 2) == first).all()


def test_what_cannot_say_where_it_is_is_read_again_and_that_is_said():
    made = Made()
    source = source_of(streams.generated(made))
    said = source.begin(3, None)
    assert "3 global batches are read again and skipped: it has neither get_state" in said
    assert "a resumed run would read and skip" in source.begin(0, None)
    batch_of(source, 3)
    assert made.numbers == [*range(4 * SIZE)]

    class Odd(streams.Stream):
        def get_state(self):
            return {"next": object()}

    source = source_of(Odd(made))
    batch_of(source, 0)
    assert source.state(1) is None
    assert "its state has a builtins.object" in source.begin(0, None)


def test_a_state_of_other_data_is_refused():
    source = source_of(streams.Stream(Made()))
    with pytest.raises(hxla.DataError, match=r"Stream\.set_state does not accept the saved state"):
        source.begin(3, to_text({"other": 1}))
    source = source_of(streams.generated(Made()))
    with pytest.raises(hxla.DataError, match="was saved, but it has neither"):
        source.begin(3, to_text({"next": 1}))


def train(folder, steps, made):
    return hxla.train(
        hxla.Job(
            nnx.Linear(16, 4, rngs=nnx.Rngs(0)),
            streams.Stream(made),
            streams.loss,
            optax.sgd(1e-2),
            batch_size=SIZE,
        ),
        microbatch_size=2,
        steps=steps,
        checkpoint_dir=folder,
        checkpoint_every=6,
        mesh=mesh(data=2),
    )


def test_a_resumed_run_goes_on_where_the_data_was(tmp_path):
    undisturbed = train(tmp_path, 9, Made()).sha256
    shutil.rmtree(tmp_path / "9")
    made = Made()
    assert train(tmp_path, 9, made).sha256 == undisturbed
    assert made.numbers == [*range(SIZE), *range(6 * SIZE, 9 * SIZE)]


@pytest.fixture
def one_host(monkeypatch):
    """Processes of a host that are threads of this one."""
    keys = {}
    monkeypatch.setattr(_host_link, "num_processes", lambda: 2)
    monkeypatch.setattr(_host_link, "claim", lambda what, value: keys.setdefault(what, value))


def test_processes_of_a_host_read_once(one_host):
    made = [Made() for _ in range(3)]
    sources = [source_of(streams.Stream(m)) for m in made]
    alone = source_of(streams.Stream(Made()), is_shared=False)
    for source in sources:
        source.example()

    read = [sources[0].fetch(step, np.array([1, 2]))["x"] for step in range(30)]
    assert len(made[0].numbers) == 30 * SIZE
    for step in range(27, 30):  # what is kept
        for source in sources[1:]:
            got = source.fetch(step, np.array([1, 2]))["x"]
            assert (got == read[step]).all()
            assert got.flags.writeable
            assert source.state(step + 1) == sources[0].state(step + 1) is not None
    assert [batch_of(alone, step)[1:3].tolist() for step in range(30)] == [x.tolist() for x in read]
    assert [len(m.numbers) for m in made] == [30 * SIZE, 0, 0]


def test_whoever_of_a_host_is_first_goes_to_the_state(one_host):
    made = [Made(), Made()]
    reader, other = (source_of(streams.Stream(m)) for m in made)
    [batch_of(reader, step) for step in range(3)]
    state = reader.state(3)
    later = to_text({"next": (np.int64(7 * SIZE), b"bytes")})
    assert other.begin(7, later) == reader.begin(7, later) != ""
    assert (batch_of(other, 7) == batch_of(reader, 7)).all()
    assert made[0].numbers == [*range(3 * SIZE), *range(7 * SIZE, 8 * SIZE)]
    assert made[1].numbers == []
    assert other.state(7) == later
    assert reader.begin(3, state) == other.begin(3, state)  # the next session's
    assert (batch_of(reader, 3) == batch_of(other, 3)).all()


def test_an_error_of_the_data_is_told_to_all(one_host):
    def broken():
        yield {"x": np.zeros((SIZE, 2), np.float32)}
        raise ValueError("no such file")

    reader, other = source_of(broken()), source_of(broken())
    reader.example()
    with pytest.raises(hxla.DataError, match="failed: ValueError: no such file"):
        other.fetch(1, np.arange(2))
    with pytest.raises(ValueError, match="no such file"):
        reader.fetch(1, np.arange(2))


def test_arrays_of_any_kind_are_handed_over(one_host):
    import ml_dtypes

    batch = {
        "a": np.arange(SIZE, dtype=ml_dtypes.bfloat16),
        "b": (np.zeros((SIZE, 0, 3)), np.arange(2 * SIZE).reshape(2, SIZE).T),
        "c": [np.ones((SIZE, 2), bool)],
    }
    sources = [source_of(itertools.repeat(batch)) for _ in range(2)]
    for source in sources:
        got = source.fetch(0, np.arange(SIZE))
        assert type(got["b"]) is tuple
        pairs = zip(
            [got["a"], *got["b"], *got["c"]], [batch["a"], *batch["b"], *batch["c"]], strict=True
        )
        for x, y in pairs:
            assert x.dtype == y.dtype
            assert (x == y).all()


def test_memory_of_batches_that_nobody_may_ask_for_is_freed(one_host):
    reader, other = (source_of(streams.Stream(Made())) for _ in range(2))
    reader.example()
    [other.fetch(step, np.arange(2)) for step in range(10)]
    before = len(os.listdir("/proc/self/fd"))
    [other.fetch(step, np.arange(2)) for step in range(10, 60)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_the_end_of_the_reader_is_the_end_of_another_process():
    script = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen()\n"
        "print('ready', flush=True); c, _ = s.accept(); c.recv(8)\n"
    )
    name = f"hxla-test-{os.getpid()}"
    process = subprocess.Popen([sys.executable, "-c", script, name], stdout=subprocess.PIPE)
    process.stdout.readline()
    asker = _host_link.Asker("\0" + name)
    with pytest.raises(hxla.DataError, match="the process that reads the data") as caught:
        asker.ask("batch", 0)
    assert is_lost_peer(caught.value)
    process.wait()
    process.stdout.close()


def run(folder, *options, data="grain", steps=60):
    command = [sys.executable, "-m", "hxla", "run", *options, "--data", data, "--steps", str(steps)]
    env = own_environment()
    out = (folder / "printed.txt").open("ab")
    return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)


def is_well(process):
    return process.wait(PATIENCE_SECONDS) == 0


FAILS = """
import hxla, numpy as np, optax
from flax import nnx


def batches():
    for step in range(6):
        if step == 3:
            raise ValueError("a fault of the user's own")
        yield {"x": np.ones((4, 2), np.float32)}


loss = lambda model, batch: (model(batch["x"]) ** 2).mean(-1)
hxla.train(
    hxla.Job(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), batches(), loss, optax.sgd(0.1), batch_size=4),
    microbatch_size=1, steps=6, counts="even",
)
"""


@pytest.mark.slow
def test_whoever_reads_is_to_blame_for_the_users_own_error(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    command = [sys.executable, "-m", "hxla", "run", "-n", "2", str(script)]
    env = own_environment()
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 1
    assert "ValueError: a fault of the user's own" in ran.stderr
    assert re.search(r"hxla: rank \d failed \(ValueError\) at step 4 in phase 'data'", ran.stderr)


@pytest.mark.slow
def test_killed_processes_resume_without_reading_from_the_start(tmp_path):
    """Two processes, one set of Grain's loaders for both; all are killed at once."""
    job = str(JOBS / "data_job.py")
    saved = tmp_path / "saved"
    options = ["--checkpoints", str(saved), "--checkpoint-every", "10", "--loaders", "2"]
    told = [tmp_path / "first", tmp_path / "second"]
    process = run(tmp_path, "-n", "2", job, *options, "--told", str(told[0]), "--slow", "0.2")
    wait_until(lambda: (saved / "30").exists() or process.poll() is not None, "a checkpoint")
    family = psutil.Process(process.pid).children(recursive=True)
    ranks = [p for p in family if "hxla._src.launch" in p.cmdline()]
    loaders = [p for p in family if "spawn_main" in " ".join(p.cmdline())]
    maps = {row.path for p in loaders for row in p.memory_maps()}
    named = [p for p in maps if p.startswith("/dev/shm/") and os.path.exists(p)]
    for p in ranks:
        os.kill(p.pid, signal.SIGKILL)
    assert process.wait(PATIENCE_SECONDS)
    assert named
    assert not [path for path in named if os.path.exists(path)]
    printed = (tmp_path / "printed.txt").read_text()
    assert len(ranks) == 2, printed
    assert len(loaders) == 2, printed  # and not two for each of the ranks
    _, gone = psutil.wait_procs(loaders, PATIENCE_SECONDS)
    assert not gone
    [step] = [max(int(p.name) for p in saved.iterdir() if p.name.isdecimal())]

    assert (
        run(tmp_path, "-n", "2", job, *options, "--told", str(told[1])).wait(PATIENCE_SECONDS) == 0
    )
    assert run(tmp_path, "-n", "1", job).wait(PATIENCE_SECONDS) == 0
    printed = (tmp_path / "printed.txt").read_text()
    assert f"continues at global batch {step} from the state of its iterator" in printed
    resumed, undisturbed = re.findall(r"sha256 (\w+) after 60 steps", printed)
    assert resumed == undisturbed
    rows = [line.split() for line in told[1].read_text().splitlines()]
    numbers = [int(i) for _, i in rows]
    # What shows an example, with what two loaders begin ahead of it; then nothing before the step.
    first = [i for i in numbers if i < step * SIZE]
    assert len(set(first)) == len(first)
    assert {i for i in range(step * SIZE, 60 * SIZE)} <= set(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "generator"])
def test_members_of_an_elastic_job_take_the_position_over(tmp_path, kind):
    """Whoever reads is killed, then whoever does not; then a device joins."""
    told, go, steps = tmp_path / "told", tmp_path / "go", 300
    options = ("--data", kind, "--told", str(told), "--slow-until", str(go))
    script = JOBS / "data_job.py"
    job = elastic_chaos.Job(tmp_path, steps, 0.3, [0.45, 0.45], options, script=script)
    try:
        for reads in (True, False, None):
            job.wait(elastic_chaos.runs, "a generation")
            before = elastic_chaos.last_step(job.events())[0]
            job.wait(lambda e, n=before: elastic_chaos.last_step(e)[0] >= n + 8, "steps")
            reader = int(told.read_text().split("\n")[-2].split()[0])
            assert reader in job.pids().values()
            if reads is None:
                job.add(0.3)
                job.write_mesh()
            else:
                victims = [p for p in job.pids().values() if (p == reader) == reads]
                os.kill(victims[0], signal.SIGKILL)
            number = len([e for e in job.events() if e["what"] == "Form"])
            job.wait(lambda e, n=number: len([x for x in e if x["what"] == "Form"]) > n, "change")
        go.touch()
        assert job.end() == 0, job.tail()
    finally:
        job.stop()
    assert (
        run(tmp_path, "-n", "1", str(script), data="stream", steps=steps).wait(PATIENCE_SECONDS)
        == 0
    )
    found = re.findall(rf"sha256 (\w+) after {steps} steps", job.printed_text())
    assert len(set(found)) == 1, job.tail()
    assert len(found) == 2
    ledger = job.ledger()
    assert ledger["num_lost"] == 0
    pids = [line.split()[0] for line in told.read_text().splitlines()]
    generations = len(set(pids))
    # Of each generation the batch that shows an example, and what was loaded ahead of its end.
    is_kept = len(pids) <= (steps + generations * 5) * SIZE
    assert is_kept == (kind == "stream")
    assert ("read again and skipped: it has neither" in job.printed_text()) != is_kept
