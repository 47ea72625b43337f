import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hxla import DataError
from support.inside.data import _data
from support.inside.data import _data as _order
from support.tiers import examples


@settings(max_examples=examples(30, 300))
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 50))
def test_order_is_a_permutation(size, seed, epoch):
    order = _order.permute(np.arange(size), size, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(size))


def test_order_never_changes():
    # Golden: a change here changes every user's training.
    assert _order.permute(np.arange(8), 8, seed=0, epoch=0).tolist() == [6, 4, 0, 5, 3, 2, 1, 7]


def test_order_looks_random():
    first = [_order.permute(np.arange(100), 100, seed=0, epoch=e) for e in range(400)]
    mean = np.mean(first, axis=0)
    assert np.abs(mean - 49.5).max() < 6  # 4 standard deviations of a mean of 400
    assert not (first[0] == first[1]).all()


def source(data, **options):
    return _data.as_source(data, **({"batch_size": 4, "seed": 0} | options))


def test_every_example_comes_once_an_epoch_and_none_is_dropped():
    s = source({"x": np.arange(10)})
    stream = np.concatenate([s.fetch(step, np.arange(4))["x"] for step in range(5)])
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10].tolist() != stream[10:].tolist()
    assert _data.num_steps(s, batch_size=4, epochs=2) == 5


def test_all_kinds_of_random_access_give_the_same_stream():
    x = np.arange(12) * 10
    kinds = [
        source({"x": x}),
        source([{"x": v} for v in x]),
        source(lambda i: {"x": x[i]}, num_examples=12),
    ]
    for step in range(5):
        batches = [k.fetch(step, np.array([1, 3]))["x"].tolist() for k in kinds]
        assert batches[0] == batches[1] == batches[2]


def test_plain_arrays_are_converted_once_and_other_ones_whenever_they_are_read(
    monkeypatch, tmp_path
):
    """A small step would feel 45 microseconds for each of its microbatches."""
    calls, convert = [], _data.as_arrays
    monkeypatch.setattr(_data, "as_arrays", lambda *args: calls.append(args) or convert(*args))
    plain = np.arange(12.0).reshape(6, 2)
    np.save(tmp_path / "x.npy", plain)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for array, num in ((plain, 0), (mapped, 0), (plain.astype(">f8"), 3)):
        source = _data.as_source({"x": array}, batch_size=2, seed=0, shuffle=False)
        calls.clear()
        rows = [source.fetch(step, np.arange(2))["x"] for step in range(3)]
        assert len(calls) == num
        assert {(type(x), x.dtype.str) for x in rows} == {(np.ndarray, plain.dtype.str)}
        np.testing.assert_array_equal(np.concatenate(rows), plain)
        rows[0][:] = 0
        assert array[0, 1] == 1, "what is read is no view of the user's arrays"


def test_grain_keeps_its_own_order():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(10).map(lambda i: {"x": i}).shuffle(seed=1)
    expected = [dataset.repeat()[i]["x"] for i in range(20)]
    s = source(dataset)
    got = np.concatenate([s.fetch(step, np.arange(4))["x"] for step in range(5)]).tolist()
    assert got == expected
    batches = dataset.repeat().to_iter_dataset().batch(4)
    s = source(batches)
    got = np.concatenate([s.fetch(step, np.arange(4))["x"] for step in range(5)]).tolist()
    assert got == expected


def test_each_process_loads_its_own_microbatches_only():
    asked = []
    lock = threading.Lock()

    def example(i):
        with lock:
            asked.append(i)
        return {"x": i}

    s = source(example)
    with _data.Loader(s, microbatch_size=1, num_steps=3) as loader:
        loader.start(0, range(1, 3))
        got = [int(b["x"][0]) for b in loader.get(0, range(1, 3))]
        assert got == [1, 2]
        # A re-balance: one more microbatch, what was loaded ahead is kept.
        got = [int(b["x"][0]) for b in loader.get(1, range(1, 4))]
        assert got == [5, 6, 7]
        assert [int(b["x"][0]) for b in loader.get(2, range(3, 4))] == [11]
    assert 5 in asked
    assert len(asked) == len(set(asked))
    assert all(i % 4 for i in asked)  # microbatch 0 is another process's
    assert max(asked) < 12  # nothing beyond the last step
    assert not [t for t in threading.enumerate() if "hxla-loader" in t.name]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"x": np.zeros(8), "y": np.zeros(7)}, "found .*8.*7"),
        ({"x": np.zeros(3)}, "3 examples, fewer than one global batch of 4"),
        ({"x": np.array(["a"] * 8)}, "encode it as numbers"),
        (7, "data is int; data is one of"),
    ],
)
def test_bad_data_is_one_clear_error(data, words):
    with pytest.raises(DataError, match=words):
        source(data)


def test_examples_of_unequal_shape_are_named():
    s = source(lambda i: {"x": np.zeros(i + 1)})
    with pytest.raises(DataError, match=r"example 1: \['x'\] has shape \(2,\)"):
        s.fetch(0, np.arange(2))


def test_iterables_are_checked_and_end_with_a_message():
    s = source({"x": np.arange(4) + 4 * i} for i in range(2))
    assert s.fetch(1, np.array([2]))["x"].tolist() == [6]
    with pytest.raises(DataError, match="ended after 2 global batches"):
        s.fetch(2, np.arange(4))
    with pytest.raises(DataError, match="has 3 examples, batch_size is 4"):
        source(iter([{"x": np.zeros(3)}])).fetch(0, np.arange(4))


def test_evaluation_reads_all_in_order():
    size, fetch = _data.eval_batches({"x": np.arange(7)}, 3)
    assert [fetch(i)["x"].tolist() for i in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert size == 7


@pytest.mark.parametrize(("size", "per_file"), [(24, 4), (26, 4), (7, 7), (5, 8), (12, 1)])
def test_examples_of_a_file_stay_together(size, per_file):
    order = _order.shuffled(np.arange(size), size, per_file, seed=3, epoch=1)
    assert sorted(order.tolist()) == list(range(size))
    files = (order // per_file).tolist()
    changes = sum(a != b for a, b in itertools.pairwise(files))
    assert changes == len(set(files)) - 1
    other = _order.shuffled(np.arange(size), size, per_file, seed=3, epoch=2)
    assert size == 5 or order.tolist() != other.tolist()


def test_a_device_opens_only_the_files_of_its_own_microbatches():
    opened = []

    def example(i):
        opened.append(i // 8)
        return {"x": np.float32(i)}

    source = _data.as_source(example, batch_size=32, seed=0, num_examples=64, examples_per_file=8)
    source.fetch(0, np.arange(8, 24))
    assert len(set(opened)) == 2


def test_data_with_an_order_of_its_own_is_not_shuffled_by_file():
    batches = iter([{"x": np.zeros((4, 1), np.float32)}])
    with pytest.raises(DataError, match="has a fixed order"):
        _data.as_source(batches, batch_size=4, seed=0, examples_per_file=2)
