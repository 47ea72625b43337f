"""Processes that make examples, of which a host has one set."""

import gc
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import psutil
import pytest

import hxla
from support import streams
from support.inside.data import _data, _host_link
from support.launched import PATIENCE_SECONDS
from support.paths import PYTHONPATH


def source_of(data, num_workers, **options):
    options = {"batch_size": 8, "seed": 0, "num_examples": 100} | options
    return _data.as_source(data, num_workers=num_workers, **options)


def workers():
    """Worker processes that this one has started."""
    children = psutil.Process().children(recursive=True)
    alive = [p for p in children if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "hxla._src.data.worker" in p.cmdline()]


@pytest.fixture
def one_host(monkeypatch):
    """Processes of a host that are threads of this one."""
    keys = {}
    monkeypatch.setattr(_host_link, "num_processes", lambda: 2)
    monkeypatch.setattr(_host_link, "claim", lambda what, value: keys.setdefault(what, value))


def same(a, b):
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


def test_workers_make_what_a_thread_makes_and_a_host_has_one_set(tmp_path, one_host):
    told = tmp_path / "told"
    make = streams.Make(str(told))  # a bound object, no module of the package knows it
    before = {p.pid for p in workers()}
    # Twice the same data: two processes have an object each.
    sources = [source_of(lambda i: make(i), 3) for _ in range(2)]
    alone = source_of(streams.Make(None), 0)
    for step in range(14):
        for source, positions in zip(sources, [np.arange(5), np.arange(5, 8)], strict=True):
            assert same(source.fetch(step, positions), alone.fetch(step, positions))
    own = [p for p in workers() if p.pid not in before]
    assert len(own) == 3
    for p in own:  # as a batch system does, before the last checkpoint is written
        p.terminate()
    assert same(sources[0].fetch(14, np.arange(2)), alone.fetch(14, np.arange(2)))
    rows = [line.split() for line in told.read_text().splitlines()]
    assert len(rows) == 14 * 8 + 2
    assert os.getpid() not in {int(pid) for pid, _ in rows}


def test_what_fails_in_a_worker_is_told(one_host):
    def broken(i):
        if i == 3:
            raise ValueError("example three")
        if i == 4:
            os._exit(1)
        return {"x": np.zeros(2)}

    source, other = (source_of(broken, 2, shuffle=False) for _ in range(2))
    source.fetch(0, np.arange(3))
    for one in (source, other):
        with pytest.raises(hxla.DataError, match=r"(?s)ValueError: example three, in a worker .*l"):
            one.fetch(0, np.arange(8)[[0, 3]])
    with pytest.raises(hxla.DataError, match="ended while it made examples 4 to 4"):
        other.fetch(0, np.array([4]))


@pytest.mark.slow
def test_workers_end_with_the_process_that_they_work_for():
    script = (
        "import numpy as np, os, signal\n"
        "from support.inside.data import _data\n"
        "s = _data.as_source(lambda i: {'x': np.zeros(2)}, batch_size=4, seed=0, num_workers=2)\n"
        "s.fetch(0, np.arange(4)); print('made', flush=True); input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert process.stdout.readline() == b"made\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()
    _, left = psutil.wait_procs(family, PATIENCE_SECONDS)
    assert not left


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (iter([]), r"an iterable \(list_iterator\) is read in order by one process"),
        ({"x": np.zeros((9, 2))}, "the data is arrays, which need no work"),
    ],
)
def test_data_for_which_there_is_nothing_to_do_is_refused(data, words):
    with pytest.raises(hxla.DataError, match=words):
        source_of(data, 2)


def test_data_that_cannot_be_sent_is_refused():
    lock = threading.Lock()
    source = source_of(lambda i: {"x": np.zeros(lock.locked() + 1)}, 2)
    assert source.example()["x"].shape == (1, 1)
    with pytest.raises(hxla.DataError, match=r"cannot be sent to processes .*lock"):
        source.fetch(0, np.arange(4))


def test_shapes_can_be_planned_with_the_settings_of_the_run():
    shapes = {"x": jax.ShapeDtypeStruct((100, 2), np.float32)}
    assert source_of(shapes, 2).example()["x"].shape == (1, 2)


def test_workers_end_with_their_data():
    before = {p.pid for p in workers()}
    source = source_of(lambda i: {"x": np.zeros(2)}, 2)
    source.fetch(0, np.arange(4))
    own = [p for p in workers() if p.pid not in before]
    assert len(own) == 2
    del source
    gc.collect()
    _, left = psutil.wait_procs(own, PATIENCE_SECONDS)
    assert not left
