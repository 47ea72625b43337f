"""The safetensors format, beside the package of that name, and files that are damaged."""

import contextlib
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hxla import WeightsError
from support.inside.weights import files_of, make_file, read_header
from support.tiers import examples

DTYPES = (np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.int8, np.bool_)


def arrays():
    rng = np.random.default_rng(0)
    found = {f"{np.dtype(d).name}.x": (rng.normal(size=(3, 5)) * 9).astype(d) for d in DTYPES}
    found |= {"scalar": np.array(3.5, np.float32), "none": np.zeros((0, 4), np.float32)}
    return found | {"half": rng.normal(size=(2, 3)).astype(jnp.bfloat16)}


def write(path, tensors):
    made = make_file(path, {n: (x.shape, x.dtype) for n, x in tensors.items()}, {"format": "pt"})
    for name, x in tensors.items():
        made[name].view(writable=True)[...] = x


def equal(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a
    )


def test_the_package_reads_what_is_written_here(tmp_path):
    write(tmp_path / "x.safetensors", arrays())
    assert equal(safetensors.numpy.load_file(tmp_path / "x.safetensors"), arrays())
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_the_package_writes_is_read_here(tmp_path):
    safetensors.numpy.save_file(arrays(), tmp_path / "x.safetensors", {"format": "np"})
    found = read_header(tmp_path / "x.safetensors")
    assert equal({n: np.array(t.view()) for n, t in found.items()}, arrays())


def test_an_index_and_a_folder_name_several_files(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {name: np.ones(2, np.float32)})
    assert files_of(tmp_path).keys() == {"a", "b"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    assert files_of(index).keys() == files_of(tmp_path).keys() == {"a"}
    for text in ('{"weight_map": {"a": "../a.safetensors"}}', "[]", "{", "[" * 100_000, ""):
        index.write_text(text)
        with pytest.raises(WeightsError, match="is no index"):
            files_of(index)
    index.unlink()
    write(tmp_path / "c.safetensors", {"a": np.ones(2, np.float32)})
    with pytest.raises(WeightsError, match=r"a: in a\.safetensors and c\.safetensors"):
        files_of(tmp_path)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("pipe.safetensors", "missing.safetensors"):
        with pytest.raises(WeightsError, match="is no file"):
            read_header(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="0 indices"):
        files_of(tmp_path / "empty")


def damaged(tmp_path, table, data=b"\0" * 24):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F31"}, "dtype 'F31'; known are I64"),
        ({"dtype": ["F32"]}, "has the dtype"),
        ({"shape": [2, True]}, "has the shape"),
        ({"shape": [2, -3]}, "has the shape"),
        ({"shape": [2, 1.5]}, "has the shape"),
        ({"shape": [1 << 62, 1 << 62]}, "is in the bytes 0 to 24"),
        ({"shape": [1] * 1000}, "has the shape"),
        ({"data_offsets": [0, 25]}, "is in the bytes"),
        ({"data_offsets": [8, 32]}, "is in the bytes 8 to 32 of 24"),
        ({"data_offsets": [0, 24, 3]}, "data_offsets"),
        ({"data_offsets": None}, "data_offsets"),
        ({"extra": 1}, "other fields"),
    ],
)
def test_a_header_is_believed_in_nothing(entry, words, tmp_path):
    with pytest.raises(WeightsError, match=words):
        read_header(damaged(tmp_path, {"x": GOOD | entry}))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b"", "begin with a header of 0"),
        (b"[]", "no table"),
        (b"{  ", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"x": ' + b"1" * 10_000 + b"}", "no JSON"),
        (b'{"x": 1, "x": 2}', "'x' is listed twice"),
        ({}, "end at byte 0 of 24"),
        ({"x": GOOD, "y": GOOD}, "'y' begins at byte 0, not at 24"),
        ({"x": 3}, "other fields"),
    ],
)
def test_a_header_of_another_form_is_refused(table, words, tmp_path):
    with pytest.raises(WeightsError, match=words):
        read_header(damaged(tmp_path, table))


@settings(max_examples=examples(50, 300))
@given(st.data())
def test_any_change_of_a_file_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    write(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(WeightsError):
        assert all(t.view().shape == t.shape for t in read_header(path).values())


def test_a_length_beyond_the_file_reads_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightsError, match="at most 2 are possible"):
        read_header(path)
