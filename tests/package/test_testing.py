"""The assertions for users' own tests pass on good steps and name what is wrong with others."""

import functools

import jax
import pytest

import hxla
from hxla import testing
from support import programs


@functools.cache
def step(name):
    made, args, _ = programs.ALL[name]()
    return hxla.inspect(made, *args)


def test_numbers_of_collectives():
    testing.assert_collectives(step("fsdp"), all_gather=2, reduce_scatter=2, all_reduce=0)
    testing.assert_collectives(step("fsdp"), all_gather=2, axis="data")
    testing.assert_collectives(step("fsdp_and_tensor"), all_gather=0, axis="tensor")
    testing.assert_collectives(step("linen"), all_reduce=1, module="blocks/down")
    testing.assert_collectives(step("linen"), all_reduce=0, module="blocks/up")
    with pytest.raises(AssertionError) as error:
        testing.assert_collectives(step("fsdp"), all_gather=0, all_reduce=1)
    message = str(error.value)
    assert "2 all-gathers where 0 should be" in message
    assert "all-gather of f32[32,64] over data" in message
    assert "programs.py:" in message
    assert "0 all-reduces where 1 should be: none" in message


def test_a_jitted_function_is_taken_with_its_arguments():
    made, args, _ = programs.tensor()
    testing.assert_collectives(made, *args, all_reduce=1)
    testing.assert_collectives(made.lower(*args), all_reduce=1)


def test_a_limit_for_each_block():
    limit = functools.partial(testing.assert_at_most, kind="all-reduce", axis="tensor")
    limit(step("linen"), number=1, each=r"blocks/\w+")
    with pytest.raises(AssertionError, match="1 all-reduces in blocks/down where at most 0"):
        limit(step("linen"), number=0, each=r"blocks/\w+")
    with pytest.raises(AssertionError, match="in the program where at most 0"):
        limit(step("linen"), number=0)
    with pytest.raises(hxla.InspectError, match=r"Block.*finds no block.*blocks/down"):
        limit(step("linen"), number=0, each=r"Block_\d+")


def test_gathers_of_parameters():
    testing.assert_no_all_gather_of_parameters(step("tensor"))
    with pytest.raises(AssertionError, match=r"params\['up'\]"):
        testing.assert_no_all_gather_of_parameters(step("fsdp"))
    with pytest.raises(hxla.InspectError, match="owners="):
        testing.assert_no_all_gather_of_parameters(step("unknown_trips"))


def test_peak_memory():
    memory = step("nnx_adam").main.memory
    testing.assert_peak_memory_below(step("nnx_adam"), "1MiB")
    testing.assert_peak_memory_below(step("nnx_adam"), memory.total_bytes + 1)
    with pytest.raises(AssertionError) as error:
        testing.assert_peak_memory_below(step("nnx_adam"), memory.total_bytes)
    assert "optimizer state 32.0 KiB" in str(error.value)
    with pytest.raises(hxla.InspectError, match="is no size"):
        testing.assert_peak_memory_below(step("nnx_adam"), "much")
    text = jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()
    with pytest.raises(hxla.InspectError, match="is not known"):
        testing.assert_peak_memory_below(text, "1GiB")


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("500 MB", 5 * 10**8), ("0.5KiB", 512), ("7", 7), ("8B", 8), (9, 9)],
)
def test_sizes(text, size):
    assert testing.num_bytes(text) == size


def test_warnings_as_failures():
    testing.assert_no_warnings(step("data"))
    made = jax.jit(lambda w: w.sum())
    where = programs.mesh(data=4)
    idle = programs.jitted(lambda w: w.sum(), where, programs.P())
    testing.assert_no_warnings(made, programs.like(8, 8))
    with pytest.raises(AssertionError, match="nothing is cut over data"):
        testing.assert_no_warnings(idle, programs.like(8, 8))
    testing.assert_no_warnings(idle, programs.like(8, 8), kinds=("padding",))
