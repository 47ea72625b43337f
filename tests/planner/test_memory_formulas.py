"""Closed formulas of memory and offload: published figures, and what is counted in a trace."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import hxla
from hxla import PlanError
from support import families
from support.inside.graph import AS_THEY_ARE, cut_points, parts_of, segments_at
from support.inside.lower import StagePart
from support.inside.planner import (
    MIXED_ADAM,
    Decoder,
    checkpoint_intensity,
    efficiency,
    float32_state,
    needed_bandwidth,
    optimizer_intensity,
    parameter_intensity,
    zero_table,
)

GB, GIB, TIB = 1e9, 2**30, 2**40


def test_the_classical_table_and_ours():
    """ZeRO, figure 1: 7.5 billion parameters on 64 devices."""
    exact, one_limb = float32_state(2), float32_state(1)
    table = zero_table(7.5e9, 64, [MIXED_ADAM, exact, one_limb])
    rounded = {name: [round(b / GB, 1) for b in own] for name, own in table}
    assert rounded == {
        "mixed-precision Adam": [120.0, 31.4, 16.6, 1.9],
        "hxla, exact sums": [180.0, 120.9, 32.3, 2.8],
        "hxla, one array of sums": [150.0, 90.9, 31.9, 2.3],
    }
    # With a group of layers whole at a time, 50 million parameters.
    assert exact.on_device(7.5e9, 3, 1 / 64, num_whole=50e6) <= 4 * GB


def test_shares_add_up_to_what_is_divided():
    state, shares = float32_state(2), (0.5, 0.3, 0.2)
    whole = state.total * 1000
    assert sum(state.on_device(1000, 3, s) for s in shares) == pytest.approx(whole)
    both = sum(state.on_device(1000, 1, s) for s in shares)
    assert both == pytest.approx(3 * 16_000 + 8_000)
    with pytest.raises(PlanError, match="stages are 0 to 3"):
        state.on_device(1000, 4, 0.5)


@pytest.mark.parametrize(
    ("num_blocks", "width", "num_heads", "published"),
    [
        (80, 10, 128, (1.83, 2.03, 0.05, None, 1.63)),
        (100, 20, 160, (9.16, 3.91, 0.12, 6.25, 2.50)),
        (128, 25, 256, (18.31, 7.13, 0.20, 9.77, 3.56)),
        (195, 64, 512, (182.81, 24.38, 0.76, 64.00, 8.00)),
        (315, 160, 1024, (1845.70, 88.59, 3.08, 400.00, 18.00)),
    ],
)
def test_the_table_of_zero_infinity(num_blocks, width, num_heads, published):
    """ZeRO-Infinity, figure 2a: 1024 positions, 32 examples on a node of 16, 2 on a device.

    The first row's working memory of model states, 1.95, is not 16 hd^2 = 1.56.
    """
    model = Decoder(num_blocks=num_blocks, width=width * 1024, num_heads=num_heads, length=1024)
    found = (
        20 * model.num_parameters / TIB,  # with float32 gradients beside 16 bytes
        model.kept_bytes(32, num_blocks=num_blocks) / TIB,
        model.checkpoint_bytes(32) / TIB,
        model.largest_operator_bytes() / GIB,
        model.kept_bytes(2) / GIB,
    )
    for ours, theirs in zip(found, published, strict=True):
        assert theirs is None or ours == pytest.approx(theirs, abs=0.006)


def test_published_bandwidths_of_zero_infinity():
    """Section 4.2, at 70 TFLOP/s of a V100 and 1024 positions."""
    rate = 70e12
    assert parameter_intensity(1024) == 1024
    assert efficiency(parameter_intensity(1024), 70 * GB, rate) == pytest.approx(0.506, abs=1e-3)
    assert optimizer_intensity(1024) * 4 == parameter_intensity(1024)
    assert needed_bandwidth(0.9, optimizer_intensity(2048), rate) == pytest.approx(
        1.23e12, rel=0.01
    )
    assert efficiency(optimizer_intensity(2048), 1.5e12, rate) > 0.9
    assert checkpoint_intensity(2048) == 24 * 2048
    assert efficiency(checkpoint_intensity(2048), 2 * GB, rate) > 0.5
    assert efficiency(checkpoint_intensity(8192), 1 * GB, rate) > 0.5
    for wanted in (0.5, 0.9):
        bandwidth = needed_bandwidth(wanted, 300.0, rate)
        assert efficiency(300.0, bandwidth, rate) == pytest.approx(wanted)


def test_intensities_are_operations_over_traffic():
    model = Decoder(num_blocks=7, width=640, num_heads=8, length=512)
    tokens, every = 3 * model.length, 2
    flops = 2 * 4 * model.num_parameters * tokens
    traffic = 4 * model.num_blocks / every * model.width * tokens
    assert 2 * model.checkpoint_bytes(3, blocks_between=every) == traffic
    assert checkpoint_intensity(640, blocks_between=every) == pytest.approx(flops / traffic)
    moved = (3 * 2 + 2) * model.num_parameters
    assert parameter_intensity(tokens) == pytest.approx(flops / moved)


def test_a_traced_gpt_agrees_with_the_formulas():
    gpt = families.example("gpt")
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), width=512, layers=3))
    graph = hxla.trace(
        model, gpt.loss, {"text": jax.ShapeDtypeStruct((2, gpt.LENGTH + 1), jnp.uint8)}
    )
    closed = Decoder(num_blocks=3, width=512, num_heads=gpt.HEADS, length=gpt.LENGTH)
    num_parameters = sum(graph.values[v].num_bytes for v in graph.param_values) / 4
    assert num_parameters == pytest.approx(closed.num_parameters, rel=0.05)
    points = cut_points(graph, 3)
    chain = segments_at(graph, points)
    boundaries = sum(s.output_bytes for s in chain[:-1])
    checkpoints = closed.checkpoint_bytes(2, element_bytes=4)
    assert boundaries == pytest.approx(checkpoints * 2 / 3, rel=0.05)  # none behind the last
    part = StagePart(
        graph,
        parts_of(graph, points)[1],
        AS_THEY_ARE,
        trained=range(len(graph.param_values)),
        on_cpu=False,
    )
    kept = sum(r.size * r.dtype.itemsize for r in part.residuals)
    assert kept == pytest.approx(closed.kept_bytes(2, element_bytes=4, cut=True), rel=0.05)
