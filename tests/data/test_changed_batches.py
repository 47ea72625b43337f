"""Batches and examples that change in the midst, and rows that are no arrays."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.data import _data

SIZE = 4


def batch(number=0, dtype=np.float32, size=SIZE):
    x = np.random.default_rng(number).normal(size=(size, 3, 2)).astype(dtype)
    return {"x": x, "y": np.arange(size, dtype=np.int32)}


#: What is another in a batch, and the words for it. A leaf has its leading dimension.
CHANGES = {
    "longer": (lambda b: b | {"x": b["x"].repeat(2, 1)}, r"\['x'\] has shape \((4, )?6, 2\)"),
    "shorter": (lambda b: b | {"x": b["x"][:, :1]}, r"\['x'\] has shape \((4, )?1, 2\)"),
    "wider": (lambda b: b | {"x": b["x"].repeat(2, 2)}, r"\['x'\] has shape \((4, )?3, 4\)"),
    "flat": (lambda b: b | {"x": b["x"][..., 0]}, r"\['x'\] has shape \((4, )?3,?\)"),
    "one more": (lambda b: b | {"x": b["x"][..., None]}, r"\['x'\] has shape \((4, )?3, 2, 1\)"),
    "missing": (lambda b: {"x": b["x"]}, r"\['y'\] is missing"),
    "besides": (lambda b: b | {"z": b["y"]}, r"\['z'\] is not in "),
    "renamed": (lambda b: {"x": b["x"], "Y": b["y"]}, r"\['y'\] is missing; \['Y'\] is not in "),
    "float labels": (lambda b: b | {"y": b["y"] / 2}, r"\['y'\] is float64, in .* int32"),
    "whole numbers": (lambda b: b | {"x": b["x"].astype(int)}, r"\['x'\] is int64, in .* float32"),
    "half": (lambda b: b | {"x": b["x"].astype("f2")}, r"\['x'\] is float16, in .* float32"),
    "a tuple": (lambda b: (b["x"], b["y"]), r"\['x'\] is missing"),
    "nested": (
        lambda b: b | {"x": {"a": b["x"]}},
        r"\['x'\] is missing; \['x'\]\['a'\] is not in ",
    ),
    "a list of it": (lambda b: b | {"x": [b["x"]]}, r"\['x'\] is missing; \['x'\]\[0\] is not in "),
    "nothing": (lambda b: b | {"y": None}, r"\['y'\] is missing"),
    "texts": (lambda b: b | {"y": b["y"].astype(str)}, r"\['y'\] has dtype <U"),
}


def batches(change, position):
    """Global batches of which one is another."""
    for number in itertools.count():
        own = batch(number)
        yield change(own) if number == position else own


def refused_at(position, source, examples):
    """The error of a step of a source, whose steps before are right."""
    for step in range(position):
        source.fetch(step, examples)
    with pytest.raises(hxla.DataError) as told:
        source.fetch(position, examples)
    return told


def as_iterable(change, position):
    source = _data.as_source(batches(change, position), batch_size=SIZE, seed=0)
    told = refused_at(position, source, np.arange(2))
    return told, f"global batch {position}: "


def as_examples(change, position):
    """Read one by one: what is stacked together is compared, and what is not."""

    def example(i):
        own = batch(i)
        return jax.tree.map(lambda x: x[0], change(own) if i == position else own)

    source = _data.as_source(example, batch_size=1, seed=0)
    told = refused_at(position, source, np.arange(1))
    return told, f"example {position}: "


def as_evaluation(change, position):
    with pytest.raises(hxla.DataError) as told:
        _data.eval_batches(itertools.islice(batches(change, position), position + 1), 2)
    return told, f"eval_data, batch {position}: "


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", [as_iterable, as_examples, as_evaluation])
@pytest.mark.parametrize("position", [1, 3])
def test_what_is_another_than_the_first_is_named(read, change, position):
    made, words = CHANGES[change]
    told, where = read(made, position)
    assert told.match(f"^{where}.*{words}")
    if words.endswith("2\\)"):
        assert told.match(r"in .*\((4, )?3, 2\); pad it to one shape")


@pytest.fixture(scope="module")
def session():
    job = hxla.Job(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
        batch(size=8),
        lambda model, b: (model(b["x"])[..., 0].mean(-1) - b["y"]) ** 2,
        optax.sgd(1e-3),
        batch_size=SIZE,
    )
    plan = job.plan(microbatch_size=2, mesh=models.mesh(data=1))
    with job.open(plan, mesh=models.mesh(data=1)) as session:
        yield session


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_of_ones_own_is_that_of_the_data(session, change):
    made, words = CHANGES[change]
    step = session.step_number + 1
    with pytest.raises(hxla.DataError, match=f"^the batch of step {step}: .*{words}"):
        session.step(made(batch()))
    assert session.step(batch()).step == step


def test_an_iterable_that_changes_ends_training_with_its_name():
    with pytest.raises(hxla.DataError, match=r"global batch 2: \['x'\] has shape \(4, 6, 2\), in"):
        hxla.train(
            hxla.Job(
                nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
                batches(CHANGES["longer"][0], 2),
                lambda model, b: model(b["x"]).mean((1, 2)) ** 2,
                optax.sgd(1e-3),
                batch_size=SIZE,
            ),
            microbatch_size=2,
            steps=4,
            mesh=models.mesh(data=1),
        )


#: The same batch for the devices, however it comes.
ALIKE = {
    "float64": lambda b: b | {"x": b["x"].astype(np.float64)},
    "int64": lambda b: b | {"y": b["y"].astype(np.int64)},
    "another order": lambda b: dict(reversed(b.items())),
    "lists": lambda b: {k: x.tolist() for k, x in b.items()},
    "UserDict": collections.UserDict,
    "OrderedDict": lambda b: dict(collections.OrderedDict(b)),
    "a subclass of dict": type("Encoding", (dict,), {}),
    "big-endian": lambda b: {k: x.astype(x.dtype.newbyteorder(">")) for k, x in b.items()},
    "jax arrays": lambda b: jax.tree.map(jnp.asarray, b),
    "not contiguous": lambda b: b | {"x": np.asfortranarray(b["x"])},
    "numbers of NumPy in lists": lambda b: b | {"y": list(b["y"])},
}


@pytest.mark.parametrize("kind", ALIKE)
def test_what_is_the_same_for_devices_is_taken_as_it_is(session, kind):
    made, plain = ALIKE[kind], batch()
    given = [batch(), batch(), made(batch())]
    source = _data.as_source(iter(given), batch_size=SIZE, seed=0)
    examples = [jax.tree.map(lambda x, i=i: x[i], plain) for i in range(SIZE)]
    if kind in ("lists", "UserDict", "a subclass of dict", "numbers of NumPy in lists"):
        rows = [made({"x": e["x"], "y": np.asarray(e["y"])[None]}) for e in examples]
        own = _data.as_source(rows, batch_size=SIZE, seed=0, shuffle=False).fetch(0, np.arange(4))
        np.testing.assert_array_equal(own["x"], plain["x"])
        np.testing.assert_array_equal(own["y"][:, 0], plain["y"])
    size, fetch = _data.eval_batches(iter(given), 12)
    for found in (source.fetch(2, np.arange(SIZE)), jax.tree.map(lambda x: x[8:], fetch(0))):
        assert type(found) is dict
        for name, x in plain.items():
            assert found[name].dtype.isnative
            np.testing.assert_array_equal(found[name], x)
    assert size == 3 * SIZE
    assert session.step(made(batch())).num_examples == SIZE


#: Columns that no device holds, or not as they are.
REFUSED = {
    "masked": (np.ma.masked_less(np.arange(8.0), 3), "is a masked array, whose mask"),
    "dates": (np.arange(8).astype("datetime64[s]"), r"has dtype datetime64\[s\]"),
    "durations": (np.arange(8).astype("timedelta64[s]"), r"has dtype timedelta64\[s\]"),
    "records": (np.zeros(8, [("a", "f4")]), r"has dtype \[\('a'"),
    "long doubles": (np.zeros(8, np.longdouble), "has dtype float128"),
    "objects": (np.array([{}] * 8, object), "has dtype object"),
    "texts": (np.array(["a"] * 8), "has dtype <U1"),
    "bytes": (np.array([b"a"] * 8), r"has dtype \|S1"),
    "keys": (jax.random.split(jax.random.key(0), 8), "has random keys"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_columns_that_no_device_holds_are_refused(session, kind):
    column, words = REFUSED[kind]
    data = {"x": np.zeros((8, 1), np.float32), "y": column}
    ways = {
        r"data: \['y'\] ": lambda: _data.as_source(data, batch_size=4, seed=0),
        r"global batch 0: \['y'\] ": lambda: _data.as_source(
            iter([data]), batch_size=8, seed=0
        ).example(),
        r"example 0: \['y'\] ": lambda: _data.as_source(
            lambda i: {"x": data["x"][i], "y": column[i : i + 1]}, batch_size=1, seed=0
        ).example(),
        r"eval_data: \['y'\] ": lambda: session.evaluate(data),
        r"the batch of step \d+: \['y'\] ": lambda: session.step(data),
    }
    for where, way in ways.items():
        with pytest.raises(hxla.DataError, match=f"^{where}{words}"):
            way()


def test_rows_of_lists_train_as_their_arrays_do():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    class Rows:  # as Hugging Face's data sets give them
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return {"x": x[i].tolist(), "y": float(x[i].sum()), "ids": [[1, 2], [3, int(i)]]}

    def train(data):
        return hxla.train(
            hxla.Job(
                nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
                data,
                lambda m, b: (m(b["x"])[:, 0] - b["y"] + 0 * b["ids"][:, 1, 0]) ** 2,
                optax.sgd(0.1),
                batch_size=16,
            ),
            microbatch_size=4,
            steps=3,
            mesh=models.mesh(data=1),
        )

    ids = np.array([[[1, 2], [3, i]] for i in range(64)], np.int32)
    y = np.array([float(row.sum()) for row in x])
    assert train(Rows()).sha256 == train({"x": x, "y": y, "ids": ids}).sha256


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([[1, 2], [3]], r"example 0: \['x'\]: its lists have unlike lengths"),
        (["a", "b"], r"example 0: \['x'\] has dtype <U1"),
        ([1, None], r"example 0: \['x'\] has dtype object"),
    ],
)
def test_lists_that_are_no_arrays_are_refused(row, words):
    with pytest.raises(hxla.DataError, match=words):
        _data.as_source([{"x": row}] * 4, batch_size=4, seed=0).example()


def test_a_list_of_arrays_stays_one():
    source = _data.as_source(lambda i: [np.ones(3) * i, i], batch_size=2, seed=0)
    x, y = source.fetch(0, np.arange(2))
    assert (x.shape, y.tolist()) == ((2, 3), [0, 1])


def test_data_that_is_read_once_is_refused_where_it_is_evaluated_often(session):
    with pytest.raises(hxla.DataError, match=r"eval_data is a generator, .*eval_every=1"):
        hxla.train(
            hxla.Job(
                nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
                batch(),
                lambda model, b: model(b["x"]).mean(),
                optax.sgd(1e-3),
                batch_size=SIZE,
            ),
            steps=2,
            eval_data=(batch(i) for i in range(2)),
            eval_every=1,
        )
    once = iter([batch()])
    assert session.evaluate(once).num_examples == SIZE
    with pytest.raises(hxla.DataError, match="is empty, or was read before"):
        session.evaluate(once)
