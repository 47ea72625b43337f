"""Scatters in a fixed order of additions, and max-pools as slices: as a CPU's, and as NumPy's.

What they become in programs for GPUs is `tests/lower/test_gpu_compile.py`'s part.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.inside.jax import ordered
from support.racing import racing_scatters
from support.tiers import rows

pytestmark = pytest.mark.optimized

HEIGHT, WIDTH = 40, 6
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(HEIGHT, WIDTH)).astype(np.float32)
#: From -HEIGHT on an index counts from the end; outside of that it names no row.
IDS = {
    "none": np.zeros((0,), np.int32),
    "one": np.array([3], np.int32),
    "outside": np.array([[HEIGHT, -1, 0], [1000, -HEIGHT, -HEIGHT - 1], [5, 5, -1]], np.int32),
    "all the same": np.full(300, 7, np.int32),
    "few": (RNG.zipf(1.3, 257) % HEIGHT).astype(np.int32),
    "mixed": RNG.integers(-50, 50, (5, 67)).astype(np.int32),
    "bytes": RNG.integers(0, 255, (33,)).astype(np.uint8),
    "many": RNG.integers(0, HEIGHT, 5000).astype(np.int32),
}


def texts(function, *arguments):
    """The program of the function as it is, and in order."""
    made = [jax.jit(f).lower(*arguments).as_text() for f in (function, ordered(function))]
    return [re.sub(r"\s+", " ", text) for text in made]


def sorts(text):
    return text.count('"stablehlo.sort"')


def both(function, *arguments):
    return [jax.jit(f)(*arguments) for f in (function, ordered(function))]


def resolved(ids, mode):
    """The row that each id reads, and whether it reads one."""
    ids = ids.astype(np.int64)
    if mode == "clip":  # as in NumPy: below zero is the first
        ids = ids.clip(0, HEIGHT - 1)
    elif mode == "wrap":
        ids = ids % HEIGHT
    else:
        ids = np.where(ids < 0, ids + HEIGHT, ids)
    return ids, (ids >= 0) & (ids < HEIGHT)


# -- beside NumPy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "dtype"), [("fill", "float32"), ("clip", "bfloat16"), ("wrap", "float32")]
)
@pytest.mark.parametrize("kind", rows(IDS, "none", "outside", "few"))
def test_the_gradient_of_a_lookup_is_the_sum_of_its_rows(kind, mode, dtype):
    ids = IDS[kind]
    table = jnp.asarray(TABLE, dtype)
    weights = jnp.asarray(RNG.normal(size=(*ids.shape, WIDTH)), dtype)

    def loss(table, ids):
        rows = jnp.take(table, ids, axis=0, mode=mode, fill_value=0)
        return (rows * weights).astype(jnp.float32).sum()

    gradient = jax.grad(loss)
    found = jax.jit(ordered(gradient))(table, ids)
    assert found.dtype == table.dtype
    rows, is_inside = resolved(ids, mode)
    expected, scale = np.zeros((2, HEIGHT, WIDTH))
    terms = np.asarray(weights, np.float64)
    np.add.at(expected, rows[is_inside], terms[is_inside])
    np.add.at(scale, rows[is_inside], np.abs(terms[is_inside]))
    # A bfloat16 is the sum rounded once.
    bound = np.abs(expected) * 2.0**-8 * (dtype == "bfloat16") + scale * 2.0**-21
    assert (np.abs(np.asarray(found, np.float64) - expected) <= bound).all()
    assert racing_scatters(texts(gradient, table, ids)[1]) == 0


def test_rows_are_added_in_a_tree_and_not_one_after_another():
    """A sum of many equal numbers, which a chain of float32 additions gets wrong."""
    ids = jnp.zeros(100_000, jnp.int32)
    [found] = jax.jit(ordered(lambda x: jax.ops.segment_sum(x, ids, 1)))(jnp.full(100_000, 0.1))
    assert abs(float(found) - 10_000) < 0.02


def test_a_row_that_is_not_finite_spoils_no_other():
    values = jnp.array([[1.0], [jnp.nan], [2.0], [jnp.inf], [4.0]])
    ids = jnp.array([2, 0, 2, 1, 2])
    found = jax.jit(ordered(lambda x: jax.ops.segment_sum(x, ids, 3)))(values)
    np.testing.assert_array_equal(found[:, 0], [np.nan, np.inf, 7.0])


@pytest.mark.parametrize("are_sorted", [False, True])
def test_sums_by_segment(are_sorted):
    ids = IDS["few"] - 1
    ids = np.sort(ids) if are_sorted else ids
    values = RNG.normal(size=(len(ids), 3, 2)).astype(np.float32)

    def sums(values, ids):
        return jax.ops.segment_sum(values, ids, HEIGHT, indices_are_sorted=are_sorted)

    expected = np.zeros((HEIGHT, 3, 2))
    np.add.at(expected, ids[ids >= 0], values[ids >= 0].astype(np.float64))
    found = jax.jit(ordered(sums))(values, ids)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    before, after = texts(sums, values, ids)
    assert (racing_scatters(before), racing_scatters(after), sorts(after)) == (1, 0, not are_sorted)
    again = jax.jit(ordered(jax.grad(lambda v, i: (sums(v, i) ** 2).sum())))(values, ids)
    back = np.where((ids >= 0)[:, None, None], 2 * expected[ids.clip(0)], 0)
    np.testing.assert_allclose(again, back, rtol=1e-5, atol=1e-5)


def grid_sample(image, places):
    """As `torch.nn.functional.grid_sample` with zeros around: four corners, weighted."""
    total = jnp.zeros(places.shape[:-1])
    low = jnp.floor(places)
    for corner in np.ndindex(2, 2):
        at = (low + jnp.array(corner)).astype(jnp.int32)
        weight = jnp.prod(1 - jnp.abs(places - at), axis=-1)
        is_inside = jnp.all((at >= 0) & (at < jnp.array(image.shape)), axis=-1)
        total += weight * image.at[at[..., 0], at[..., 1]].get(mode="clip") * is_inside
    return total


def test_the_gradient_of_grid_sampling():
    image = RNG.normal(size=(9, 11)).astype(np.float32)
    places = RNG.uniform(-2, 12, (17, 13, 2)).astype(np.float32)
    weights = RNG.normal(size=(17, 13)).astype(np.float32)
    gradient = jax.grad(lambda image: (grid_sample(image, places) * weights).sum())
    expected, low = np.zeros((9, 11)), np.floor(places).astype(int)
    for corner in np.ndindex(2, 2):
        at = low + np.array(corner)
        terms = np.prod(1 - np.abs(places.astype(np.float64) - at), axis=-1) * weights
        inside = ((at >= 0) & (at < [9, 11])).all(-1)
        np.add.at(expected, tuple(at[inside].T), terms[inside])
    found = jax.jit(ordered(gradient))(image)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


#: The window of a pool, its steps and its padding.
POOLS = {
    "3 / 2": ((3, 3), (2, 2), "SAME"),
    "2 / 2": ((2, 2), (2, 2), "VALID"),
    "overlapping": ((2, 3), (1, 1), ((1, 0), (2, 2))),
    "with holes": ((2, 2), (3, 4), "VALID"),
    "nothing but padding": ((2, 2), (2, 2), ((2, 3), (4, 2))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", rows(POOLS, "3 / 2", "overlapping"))
def test_pools_give_their_gradient_to_the_first_of_equal_elements(kind, dtype):
    window, steps, padding = POOLS[kind]
    # Few values, so that windows have ties; below and above what pads an array.
    images = RNG.choice([-2.0, -1.0, 1.0, 2.0], (2, 9, 8, 3))
    images, shape = jnp.asarray(images, dtype), (1, *window, 1)
    if not isinstance(padding, str):
        padding = ((0, 0), *padding, (0, 0))

    def pool(images, start=-jnp.inf, which=lax.max):
        return lax.reduce_window(images, start, which, shape, (1, *steps, 1), padding)

    options = (jnp.inf, lax.min) if kind == "overlapping" else ()
    made = pool(images, *options)
    weights = jnp.asarray(RNG.normal(size=made.shape), dtype)
    gradient = jax.grad(lambda x: (pool(x, *options) * weights).astype(jnp.float32).sum())
    plain, found = both(gradient, images)
    np.testing.assert_array_equal(found, plain)
    assert [racing_scatters(text) for text in texts(gradient, images)] == [1, 0]


def test_a_pool_beside_numpy():
    image = RNG.integers(0, 4, (7, 7)).astype(np.float32)
    weights = RNG.normal(size=(3, 3)).astype(np.float32)
    _, back = jax.vjp(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 2), "VALID"), image
    )
    expected = np.zeros((7, 7))
    for i, j in np.ndindex(3, 3):
        part = image[2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
        a, b = np.unravel_index(part.argmax(), part.shape)
        expected[2 * i + a, 2 * j + b] += weights[i, j].astype(np.float64)
    [found] = jax.jit(ordered(back))(weights)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


# -- to the last bit -------------------------------------------------------------------------------

X = RNG.normal(size=(6, 9)).astype(np.float32)
LABELS = RNG.integers(0, 9, 6).astype(np.int32)
SORTED_IN_SCAN = jax.grad(
    lambda x: lax.scan(lambda c, y: (c + (jnp.sort(y) * y).sum(), 0), 0.0, x)[0]
)
#: Functions whose scatters write no place twice, whatever the numbers are.
UNIQUE = {
    "sort": jax.grad(lambda x: (jnp.sort(x, axis=-1) * x).sum()),
    "sort, first axis": jax.grad(lambda x: (jnp.sort(x, axis=0) * x).sum()),
    "sort of several": jax.grad(
        lambda x: (lax.sort((jnp.round(x), x, x**3), dimension=1, num_keys=2)[2] * x).sum()
    ),
    "argsort": jax.grad(
        lambda x: (jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1) * x).sum()
    ),
    "median": jax.grad(lambda x: jnp.median(x, axis=-1).sum()),
    "top_k": jax.grad(lambda x: (lax.top_k(x, 3)[0] * jnp.arange(3.0)).sum()),
    "arange": jax.grad(lambda x: (x[jnp.arange(4) + 2] ** 2).sum()),
    "reversed": jax.grad(lambda x: (x[jnp.arange(3)[::-1] * 2 + 1] ** 2).sum()),
    "constant": jax.grad(lambda x: (x[np.array([4, 0, 5])] ** 2).sum()),
    "labels": jax.grad(lambda x: (jnp.take_along_axis(x, LABELS[:, None], axis=1) ** 2).sum()),
    "one of each row": jax.grad(lambda x: (x[jnp.arange(6), LABELS] ** 2).sum()),
    "written by rank": lambda x: jnp.zeros(9).at[jnp.argsort(x[0])].set(x[1]),
    "sort in a scan": SORTED_IN_SCAN,
    "sort, again": jax.grad(jax.checkpoint(lambda x: (jnp.sort(jnp.sin(x), axis=0) * x).sum())),
}


@pytest.mark.parametrize("name", rows(UNIQUE, "sort", "median", "labels", "sort in a scan"))
def test_what_meets_nowhere_is_marked_and_keeps_its_bits(name):
    plain, found = both(UNIQUE[name], X)
    np.testing.assert_array_equal(found, plain)
    before, after = texts(UNIQUE[name], X)
    # The only sorts left are the model's.
    assert racing_scatters(before) > 0
    assert sorts(after) == sorts(before)
    assert racing_scatters(after) == 0


ROWS = RNG.normal(size=(5, 300)).astype(np.float32)
OF_ROWS = np.array([-1, 0, 7, 299, 300])
NUMBERS = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))


@pytest.mark.parametrize("dtype", rows([np.int32, np.int16, np.uint8, np.int8], np.int32, np.int8))
@pytest.mark.parametrize("mode", ["clip", "drop"])
@pytest.mark.parametrize("scatter", [lax.scatter, lax.scatter_add, lax.scatter_sub])
def test_one_element_of_each_row_of_zeros_is_selected(dtype, mode, scatter):
    ids = OF_ROWS.clip(*(np.iinfo(dtype).min, np.iinfo(dtype).max)).astype(dtype)[:, None]

    def write(x, ids):
        return scatter(jnp.zeros(ROWS.shape), ids, x, NUMBERS, mode=mode)

    plain, found = both(write, ROWS[:, 3], ids)
    np.testing.assert_array_equal(found, plain)
    assert [text.count('"stablehlo.scatter"') for text in texts(write, ROWS[:, 3], ids)] == [1, 0]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_gradient_of_labels_along_any_axis_is_a_selection(axis):
    x = RNG.normal(size=(3, 4, 5)).astype(np.float32)
    ids = np.expand_dims(RNG.integers(0, x.shape[axis], np.delete(x.shape, axis)), axis)
    gradient = jax.grad(lambda x: (jnp.take_along_axis(x, ids, axis=axis) ** 3).sum())
    plain, found = both(gradient, x)
    np.testing.assert_array_equal(found, plain)
    assert '"stablehlo.scatter"' not in texts(gradient, x)[1]


#: Scatters that look like those above, but meet.
MEETING = {
    "halves": lambda x: x[jnp.arange(6) // 2],
    "edge": lambda x: x.at[jnp.arange(6) + 3].get(mode="clip"),
    "a byte's end": lambda x: jnp.tile(x, (50, 1))[lax.iota(jnp.uint8, 260) % 200],
    "other rows' ranks": lambda x: x[0][jnp.argsort(x, axis=1)],
    "broadcast": lambda x: x[jnp.broadcast_to(jnp.arange(6), (3, 6))],
    "two of each row": lambda x: jnp.take_along_axis(x, jnp.stack([LABELS, LABELS], 1), axis=1),
    "diagonals": lambda x: jnp.ravel(x)[jnp.arange(6)[:, None] + jnp.arange(9)],
    "either of two": lambda x: x[jnp.where(x[:, 0] > 0, jnp.arange(6), jnp.arange(6)[::-1])],
    "overlapping windows": lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (3, 4)))(
        jnp.arange(3)
    ),
}


@pytest.mark.parametrize("name", rows(MEETING, "edge", "either of two", "other rows' ranks"))
def test_what_may_meet_is_not_marked(name):
    weights = jnp.asarray(RNG.normal(size=jax.eval_shape(MEETING[name], X).shape), jnp.float32)
    gradient = jax.grad(lambda x: (MEETING[name](x) * weights).sum())
    plain, found = both(gradient, X)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)
    before, after = texts(gradient, X)
    assert racing_scatters(after) == 0
    assert sorts(after) > sorts(before)


# -- every kind of scatter -------------------------------------------------------------------------


def numbers(*fields):
    return lax.ScatterDimensionNumbers(*fields)


SCATTERS = {
    "rows": (numbers((1,), (0,), (0,)), (20, 1), (20, 9)),
    "columns": (numbers((0,), (1,), (1,)), (20, 1), (6, 20)),
    "elements": (numbers((), (0, 1), (1, 0)), (4, 5, 2), (4, 5)),
    "parts of rows": (numbers((1,), (0,), (0,)), (20, 1), (20, 4)),
    "windows": (numbers((1, 2), (), (1, 0)), (20, 2), (20, 2, 3)),
    "windows of rows": (numbers((0, 2), (), (0,)), (20, 1), (2, 20, 9)),
    "batches": (numbers((), (1,), (1,), (0,), (1,)), (7, 6, 1), (7, 6)),
    "windows of batches": (numbers((1,), (), (1,), (0,), (0,)), (6, 7, 1), (6, 4, 7)),
}
METHODS = {"clip": lax.scatter_add, "drop": lax.scatter, "promise_in_bounds": lax.scatter_sub}


@pytest.mark.parametrize("mode", METHODS)
@pytest.mark.parametrize("name", rows(SCATTERS, "parts of rows", "windows of batches"))
def test_a_scatter_of_any_shape(name, mode):
    dimension_numbers, places, shape = SCATTERS[name]
    indices = RNG.integers(-2, 11, places).astype(np.int32)
    # Whole numbers, whose sums are the same in any order.
    updates = RNG.integers(-9, 9, shape).astype(np.float32)

    def scatter(x, indices, updates):
        return METHODS[mode](x, indices, updates, dimension_numbers, mode=mode)

    x = np.round(X * 9)
    plain, found = both(scatter, x, indices, updates)
    np.testing.assert_array_equal(found, plain)
    assert racing_scatters(texts(scatter, x, indices, updates)[1]) == 0


def test_sums_of_whole_numbers_stay_as_they_are():
    counts = lambda ids: jnp.zeros(HEIGHT, jnp.int32).at[ids].add(1)  # noqa: E731
    before, after = texts(counts, IDS["few"])
    assert before == after


# -- wherever it is --------------------------------------------------------------------------------


def read_twice(table, ids):
    return jnp.sin(table[ids]).sum() + (table[ids[::-1]] ** 2).sum()


@jax.custom_vjp
def with_rules(table, ids):
    return read_twice(table, ids)


with_rules.defvjp(
    lambda table, ids: (read_twice(table, ids), (table, ids)),
    lambda saved, g: (g * jax.grad(read_twice)(*saved), None),
)
PLACES = {
    "jit": jax.jit(read_twice),
    "remat": jax.checkpoint(read_twice),
    "custom_vjp": with_rules,
    "scan": lambda t, ids: lax.scan(lambda c, i: (c + read_twice(t, i), 0), 0.0, ids)[0],
    "cond": lambda t, ids: lax.cond(t[0, 0] > 0, read_twice, lambda t, i: t[i].sum(), t, ids),
    "vmap": lambda t, ids: jax.vmap(read_twice, (None, 0))(t, ids).sum(),
    "a while in a forward": lambda t, ids: (
        t[0, 0]
        * lax.stop_gradient(
            lax.while_loop(lambda x: x.sum() < 9000, lambda x: x.at[ids[0]].add(1.0), t)
        ).sum()
    ),
    "a function without gradient": lambda t, ids: (
        t.sum() * with_rules(lax.stop_gradient(t).at[ids].add(1.0), ids)
    ),
}


@pytest.mark.parametrize("name", rows(PLACES, "scan", "a function without gradient"))
def test_a_scatter_is_ordered_wherever_it_is(name):
    ids = IDS["mixed"]
    gradient = jax.grad(PLACES[name])
    table = np.abs(TABLE)
    plain, found = both(gradient, table, ids)
    np.testing.assert_allclose(found, plain, rtol=2e-5, atol=1e-5)
    before, after = texts(gradient, table, ids)
    assert racing_scatters(before) > 0
    assert racing_scatters(after) == 0
