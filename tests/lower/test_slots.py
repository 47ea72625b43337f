"""Slots: each stage's parameters, filled and collected on four devices as plain indexing does."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from support import models
from support.inside.lower import make_slots
from support.inside.plan import storage_specs, without_stages
from support.tiers import rows

S = 4
SHAPES = [(8, 3), (8, 3), (3, 8), (7, 5), (), (8, 3), (0, 4), (12,), (5,), (4, 4), (7, 5)]
DTYPES = ["float32", "float32", "float32", "float32", "float32", "bfloat16", "float32", "bfloat16"]
DTYPES += ["bfloat16", "float16", "float32"]
READ_BY = [[0, 3, 4, 6], [1, 2, 5, 7], [], [0, 1, 8, 10, 3]]  # 9 by none


def arrays():
    rng = np.random.default_rng(0)
    return [
        np.asarray(rng.normal(size=s).astype(np.float32)).astype(jnp.dtype(d))
        for s, d in zip(SHAPES, DTYPES, strict=True)
    ]


def bits(x):
    return np.asarray(x).tobytes()


def slots_of(shapes, dtypes, read_by):
    specs = storage_specs(shapes, [P()] * len(shapes), {}, len(read_by))
    return make_slots(shapes, dtypes, read_by, specs)


def made():
    return slots_of(SHAPES, DTYPES, READ_BY)


def on_stages(run, ins, outs):
    mesh = models.mesh(stage=S)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))


def stored(slots, params):
    mesh = models.mesh(stage=S)
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(params, slots.specs, strict=True)
    ]


def test_a_stage_holds_what_it_reads_and_the_first_what_nobody_does():
    slots = made()
    assert [set(held) for held in slots.of] == [
        {0, 3, 4, 6, 9},
        {1, 2, 5, 7},
        set(),
        {0, 1, 8, 10, 3},
    ]
    for stage, held in enumerate(slots.of):
        for param, i in held.items():
            slot = slots.slots[i]
            assert slot.params[stage] == param
            assert (slot.shape, jnp.dtype(slot.dtype)) == (SHAPES[param], jnp.dtype(DTYPES[param]))
    # The last stage holds two of shape (8, 3), so there are two such slots and no third.
    assert sum(s.shape == (8, 3) and s.dtype == "float32" for s in slots.slots) == 2


def test_storage_is_cut_in_the_first_dimension_that_divides():
    dims = tuple(without_stages(spec)[1] for spec in made().specs)
    assert dims == (0, 0, 1, None, None, 0, 1, 0, None, 0, None)
    assert made().specs[2] == P(None, "stage")
    assert made().specs[3] == P()


def test_padding_is_the_share_of_the_slots_that_holds_nothing():
    slots = slots_of([(8,), (8,), (4,)], ["float32", "float32", "bfloat16"], [[0], [1, 2]])
    # Two stages with 32 and 8 bytes each, of which the first has no use for the 8.
    sizes = [math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in slots.slots]
    empty = [n * s.params.count(None) for n, s in zip(sizes, slots.slots, strict=True)]
    assert (sum(empty), sum(sizes) * slots.num_stages) == (8, 80)
    assert slots_of([], [], [[], []]).slots == ()


def test_slots_are_filled_with_the_parameters_of_each_stage_bit_for_bit():
    slots, params = made(), arrays()
    fill = on_stages(
        lambda own: [x[None] for x in slots.fill(own)],
        (list(slots.specs),),
        [P("stage")] * len(slots.slots),
    )
    filled = fill(stored(slots, params))
    for slot, got in zip(slots.slots, filled, strict=True):
        assert got.dtype == jnp.dtype(slot.dtype)
        got = np.asarray(got)
        for stage, param in enumerate(slot.params):
            expected = np.zeros(slot.shape, got.dtype) if param is None else params[param]
            assert bits(got[stage]) == bits(expected)


@pytest.mark.parametrize("num_parts", rows([1, 2], 2))
def test_what_stages_sum_comes_back_added_over_those_that_read_it(num_parts):
    slots = made()
    rng = np.random.default_rng(1)
    sums = [
        tuple(rng.integers(-99, 99, (S, *slot.shape)).astype(np.int32) for _ in range(num_parts))
        for slot in slots.slots
    ]
    small = [rng.integers(0, 9, (S, 3)).astype(np.int32), rng.normal(size=(S, 2, 2)).astype("f")]
    specs = [(s,) * num_parts for s in slots.specs], [P()] * len(small)
    collect = on_stages(
        lambda sums, small: slots.collect(*jax.tree.map(lambda x: x[0], (sums, small))),
        (P("stage"), P("stage")),
        specs,
    )
    totals, gathered = collect(sums, small)
    for param, parts in enumerate(totals):
        assert len(parts) == num_parts
        for k, part in enumerate(parts):
            expected = sum(
                sums[held[param]][k][stage] for stage, held in enumerate(slots.of) if param in held
            )
            np.testing.assert_array_equal(part, expected)
    for ours, theirs in zip(gathered, small, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_parameters_that_no_dimension_divides_travel_with_the_small_arrays():
    """One collective each way, whatever the shapes: see the counts in test_pipeline."""
    slots = slots_of([(7, 5), (), (3,)], ["float32"] * 3, [[0], [1], [2], [0, 2]])
    params = [np.arange(35.0, dtype="f").reshape(7, 5), np.float32(2), np.arange(3.0, dtype="f")]
    run = functools.partial(on_stages, outs=[P("stage")] * len(slots.slots))
    filled = run(lambda own: [x[None] for x in slots.fill(own)], (list(slots.specs),))(params)
    for stage, held in enumerate(slots.of):
        for param, i in held.items():
            np.testing.assert_array_equal(np.asarray(filled[i])[stage], params[param])
