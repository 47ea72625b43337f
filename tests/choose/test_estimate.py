"""Estimated times: products in tiles and waves, and what others measured."""

import dataclasses
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from hxla import Device, LayerSize, LayerTime, Link, MatrixProduct, Profile, Rate, Setting
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "gpu_parts"))

import gpu_jobs

import hxla
from support.inside.choose import Alternative, layer_times, product_flops, split_over
from support.inside.graph import equation_flops, graph_of, leaves, segments
from support.inside.plan import shard_graph
from support.inside.profile import layer_sizes

V100 = Device(
    kind="V100",
    memory_bytes_per_second=9e11,
    multiprocessors=80,
    rates=(Rate(dtype="float32", flops_per_second=15.7e12),),
)


class Layers(nnx.Module):
    def __init__(self, rngs, groups):
        self.conv = nnx.Conv(4, 8, (3, 3), feature_group_count=groups, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.conv(x)).reshape(x.shape[0], -1, 8)
        y = y + self.down(nnx.gelu(self.up(y)))
        return y @ y.swapaxes(1, 2)


def traced(groups=1, num=2):
    model = nnx.eval_shape(lambda: Layers(nnx.Rngs(0), groups))
    data = {"x": jax.ShapeDtypeStruct((num, 6, 6, 4), np.float32)}
    return hxla.trace(model, lambda m, b: (m(b["x"]) ** 2).mean((1, 2)), data)


def sizes_of(graph, tensor=1, num=1):
    opened = graph_of(graph)
    cut = shard_graph(graph, *split_over(graph, tensor))
    return layer_sizes(opened, segments(opened, num), cut.over(opened))


def test_products_are_those_of_the_program():
    graph = traced(groups=2)
    [size] = sizes_of(graph)
    found = {(p.copies, p.rows, p.columns, p.depth) for p in size.products}
    assert found == {(2, 72, 4, 18), (1, 72, 64, 8), (1, 72, 8, 64), (2, 36, 36, 8)}
    wanted = sum(
        equation_flops(op.eqn)
        for op in leaves(graph.ops)
        if op.name in ("dot_general", "conv_general_dilated")
    )
    assert sum(p.flops for p in size.products) == wanted
    for product in size.products:
        assert all(p.flops == product.flops for p in product.backward)


@pytest.mark.parametrize(
    ("dtype", "precision", "said"),
    [
        (jnp.float32, None, "model"),
        (jnp.float32, "highest", "float32"),
        (jnp.bfloat16, None, "bfloat16"),
        (jnp.float16, None, "float16"),
    ],
)
def test_a_product_is_timed_at_the_rate_of_what_it_is_computed_in(dtype, precision, said):
    """As the model has it, without a word of hxla's."""

    def loss(model, batch):
        w = model.kernel[...].astype(dtype)
        return jnp.dot(batch["x"].astype(dtype), w, precision=precision).sum(-1)

    data = {"x": jax.ShapeDtypeStruct((4096, 4096), np.float32)}
    model = nnx.eval_shape(lambda: nnx.Linear(4096, 4096, use_bias=False, rngs=nnx.Rngs(0)))
    sizes = sizes_of(hxla.trace(model, loss, data))
    assert {p.arithmetic for size in sizes for p in size.products} == {said}
    figures = {"float32": 1e12, "tensorfloat32": 8e12, "bfloat16": 16e12, "float16": 32e12}
    rates = tuple(
        Rate(dtype=name, flops_per_second=own, measured=True) for name, own in figures.items()
    )
    device = Device(kind="a card", rates=rates)
    seconds, how = layer_times(device, Alternative(4096), sizes, None)
    rate = figures["tensorfloat32" if said == "model" else said]
    assert seconds[0].sum() == pytest.approx(2 * 4096**3 / rate, rel=0.02)
    assert how.endswith(f"measured rate of {'tensorfloat32' if said == 'model' else said}")


@pytest.mark.parametrize(("word", "rate"), [("fp32", 1e12), ("tf32", 8e12), ("bf16", 16e12)])
def test_products_by_a_word_are_timed_at_its_rate(word, rate):
    data = {"x": jax.ShapeDtypeStruct((4096, 4096), np.float32)}
    model = nnx.eval_shape(lambda: nnx.Linear(4096, 4096, use_bias=False, rngs=nnx.Rngs(0)))
    job = hxla.Job(
        model, data, lambda m, b: m(b["x"]).sum(-1), optax.sgd(1.0), batch_size=4096, precision=word
    )
    figures = {"float32": 1e12, "tensorfloat32": 8e12, "bfloat16": 16e12}
    rates = tuple(Rate(dtype=name, flops_per_second=own) for name, own in figures.items())
    cluster = hxla.Cluster(name="one", devices=(Device(kind="a card", rates=rates),))
    [device] = job.plan(cluster, microbatch_size=4096).prediction.devices
    # A backward has one product here: nobody asks for the gradient of the data.
    assert device.compute_seconds == pytest.approx(3 * 2 * 4096**3 / rate / 0.9, rel=0.02)


def test_no_kernel_takes_less_than_it_takes_to_launch_the_next():
    [size] = sizes_of(traced())
    num = sum(p.count for p in size.products)
    rates = (Rate(dtype="float32", flops_per_second=1e15),)
    device = Device(kind="a card", rates=rates, launch_seconds=1e-3)
    seconds, _ = layer_times(device, Alternative(2), [size], None)
    assert seconds[0, 0] == pytest.approx(3.25e-3 * num, rel=0.01)
    assert seconds[1, 0] == pytest.approx(6.5e-3 * num, rel=0.01)


def test_a_group_of_devices_shares_what_is_cut_and_repeats_the_rest():
    graph = traced()
    [whole], [half] = sizes_of(graph), sizes_of(graph, 2)
    assert {(p.rows, p.columns, p.depth) for p in half.products} >= {(72, 32, 8), (72, 8, 32)}
    assert (
        sum(p.flops for p in whole.products) / 2
        <= sum(p.flops for p in half.products)
        <= sum(p.flops for p in whole.products)
    )
    assert whole.moved_bytes / 2 <= half.moved_bytes <= whole.moved_bytes


def test_the_cut_of_one_microbatch_size_serves_another():
    large, small = traced(num=8), traced(num=2)
    solved = shard_graph(large, *split_over(large, 2))
    wanted = shard_graph(small, *split_over(small, 2)).axes["tensor"]
    found = shard_graph(small, *split_over(small, 2), like=solved).axes["tensor"]
    assert found.made == solved.axes["tensor"].made == wanted.made
    assert found.sent_bytes == pytest.approx(wanted.sent_bytes)
    other = traced(groups=2)  # another program is solved anew, and says what is wrong with it
    with pytest.raises(hxla.AnnotationError, match="cannot be cut into 2"):
        shard_graph(other, *split_over(other, 2), like=solved)


@pytest.mark.parametrize("shape", [(1, 128, 128, 7), (3, 200, 100, 5), (1, 4096, 4096, 9)])
def test_tiles_of_a_product_run_in_waves(shape):
    """Dealt one by one to the multiprocessors, the fullest of which the product waits for."""
    copies, rows, columns, depth = shape
    product = MatrixProduct(copies=copies, rows=rows, columns=columns, depth=depth)
    best = math.inf
    for side in (128, 64, 32):
        load = np.zeros(7)
        for _ in itertools.product(range(copies), range(0, rows, side), range(0, columns, side)):
            wide = [min(side, 32 * math.ceil(n / 32)) for n in (rows, columns)]
            load[load.argmin()] += 2.0 * wide[0] * wide[1] * depth
        best = min(best, load.max() * 7 / math.sqrt(side / 128))
    assert product_flops(product, 7) == pytest.approx(best)
    assert product_flops(product, 7) >= product.flops == product_flops(product, None)


def test_small_microbatches_are_less_efficient():
    seconds = [
        layer_times(V100, Alternative(b), [transformer_layer(b, 1, 1024, 16, 4096, 128)], None)[0]
        for b in (1, 2, 4, 8, 16, 32)
    ]
    each = [float(s[:2].sum()) / b for s, b in zip(seconds, (1, 2, 4, 8, 16, 32), strict=True)]
    assert each == sorted(each, reverse=True)
    assert each[0] > 1.7 * each[-1]


def transformer_layer(b, t, width, heads, inner, length, stash_bytes=0.0):
    """A layer of a Transformer on one of `t` devices, as Megatron cuts it."""
    rows, own = b * length, heads * b // t
    products = (
        MatrixProduct(rows=rows, columns=3 * width // t, depth=width),
        MatrixProduct(copies=own, rows=length, columns=length, depth=width // heads),
        MatrixProduct(copies=own, rows=length, columns=width // heads, depth=length),
        MatrixProduct(rows=rows, columns=width, depth=width // t),
        MatrixProduct(rows=rows, columns=inner // t, depth=width),
        MatrixProduct(rows=rows, columns=width, depth=inner // t),
    )
    return LayerSize(
        parameter_bytes=4.0 * (4 * width**2 + 2 * width * inner) / t,
        output_bytes=4.0 * rows * width,
        stash_bytes=1.0,
        products=products,
        # PyTorch fuses nothing: what a backward keeps is written, and read again.
        moved_bytes=2 * stash_bytes * b / t,
    )


# Sailor (SOSP 2025, commit cf2c8e3), `profiles` and `llm_info`: milliseconds of the forward of a
# middle layer on V100s with NVLink, in float32, of 2048 tokens; what a layer keeps of an example.
OPT_350 = (1024, 16, 4096, 2048, 360726528.0)
GPT_NEO = (2560, 20, 10240, 2048, 681607168.0)
OPT_30B = (7168, 56, 28672, 2048, 1761640448.0)
MEASURED = [
    (OPT_350, {(1, 1): 7.321, (2, 1): 14.086, (4, 1): 28.839}),
    (OPT_350, {(1, 2): 4.224, (2, 2): 8.285, (4, 2): 16.014, (8, 2): 30.993}),
    (OPT_350, {(1, 4): 2.968, (2, 4): 5.193, (4, 4): 9.555, (8, 4): 19.003}),
    (OPT_350, {(2, 8): 3.195, (4, 8): 5.284, (8, 8): 10.317}),
    (GPT_NEO, {(1, 2): 15.067, (2, 2): 30.106, (4, 2): 60.505, (8, 2): 123.724}),
    (GPT_NEO, {(1, 4): 8.557, (2, 4): 17.192, (4, 4): 33.648, (8, 4): 65.842}),
    (OPT_30B, {(1, 4): 53.8, (2, 4): 103.8, (4, 4): 206.2}),
    (OPT_30B, {(1, 8): 27.3, (2, 8): 54.4, (4, 8): 107.6}),
]
NVLINK = Link(bytes_per_second=68.28e9)


def all_reduced(shape, b, t):
    """Two all-reduces of the forward, and as many of the backward."""
    return [4 * 2 * (t - 1) / t * 4.0 * b * shape[3] * shape[0]]


@pytest.mark.parametrize(("shape", "measured"), MEASURED)
def test_layers_of_unmeasured_groups_are_near_what_was_measured(shape, measured):
    """The form of the tiles was chosen with these in view; the limits are what it reaches."""
    errors = []
    for (b, t), milliseconds in measured.items():
        size = transformer_layer(b, t, *shape)
        seconds, _ = layer_times(
            V100, Alternative(b, t), [size], None, sent_bytes=all_reduced(shape, b, t), link=NVLINK
        )
        errors.append(float(seconds[0, 0]) / (milliseconds / 1e3) - 1)
    assert max(map(abs, errors)) <= 0.29
    assert abs(np.mean(errors)) <= 0.24


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(("shape", "alone"), [(OPT_350, 14.086), (GPT_NEO, 56.482)])
def test_a_group_follows_from_a_device_that_was_measured(shape, alone, t):
    """With microbatches of two."""
    one, own = (transformer_layer(2, n, *shape) for n in (1, t))
    times = {Setting("V100", 2): (LayerTime(forward=alone / 1e3, backward=2 * alone / 1e3),)}
    profile = Profile(model="m", layers=("0",), sizes={(2, 1): (one,)}, times=times)
    seconds, how = layer_times(
        V100,
        Alternative(2, t),
        [own],
        profile,
        whole=[one],
        sent_bytes=all_reduced(shape, 2, t),
        link=NVLINK,
    )
    assert "measured alone" in how
    measured = {s: m for shape_, m in MEASURED if shape_ == shape for s, m in m.items()}
    assert float(seconds[0, 0]) == pytest.approx(measured[2, t] / 1e3, rel=0.13)


class Bottleneck(nnx.Module):
    def __init__(self, ins, width, stride, rngs):
        def conv(i, o, k, s=1):
            return nnx.Conv(i, o, (k, k), s, use_bias=False, rngs=rngs)

        self.conv1, self.norm1 = conv(ins, width, 1), nnx.BatchNorm(width, rngs=rngs)
        self.conv2, self.norm2 = conv(width, width, 3, stride), nnx.BatchNorm(width, rngs=rngs)
        self.conv3, self.norm3 = conv(width, 4 * width, 1), nnx.BatchNorm(4 * width, rngs=rngs)
        self.project = conv(ins, 4 * width, 1, stride) if ins != 4 * width else None

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        return nnx.relu(self.norm3(self.conv3(y)) + (self.project(x) if self.project else x))


class ResNet50(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 64, (7, 7), 2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        blocks, ins = [], 64
        for i, num in enumerate((3, 4, 6, 3)):
            for j in range(num):
                blocks.append(Bottleneck(ins, 64 << i, 2 if i and not j else 1, rngs))
                ins = 4 * (64 << i)
        self.blocks, self.head = nnx.List(blocks), nnx.Linear(ins, 1000, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(x))), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


@pytest.mark.slow
def test_resnet_50_is_near_what_was_measured():
    """Seconds of a step with images of 224 x 224 in float32.

    Of Gavel (OSDI 2020, commit c4fa400), the mean of its two files. The sizes of 16 and 32 took its
    input pipeline and PyTorch's host longer than what is estimated here, the card's own time.
    """
    measured = {
        ("V100", 16): 0.0848, ("V100", 32): 0.1273, ("V100", 64): 0.2243, ("V100", 128): 0.3979,
        ("P100", 16): 0.1062, ("P100", 32): 0.2046, ("P100", 64): 0.3818, ("P100", 128): 0.6228,
    }  # fmt: skip
    devices = hxla.load_cluster("whale-4v100-4p100").devices
    model = nnx.eval_shape(lambda: ResNet50(nnx.Rngs(0)))

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])

    errors = {}
    for size in (16, 64, 128):
        images = jax.ShapeDtypeStruct((size, 224, 224, 3), np.float32)
        batch = {"x": images, "y": jax.ShapeDtypeStruct((size,), np.int32)}
        sizes = sizes_of(hxla.trace(model, loss, batch))
        for kind in ("V100", "P100"):
            device = next(d for d in devices if kind in d.kind)
            seconds, _ = layer_times(device, Alternative(size), sizes, None, state_factor=4.0)
            errors[kind, size] = float(seconds.sum()) / measured[kind, size] - 1
    assert max(map(abs, errors.values())) <= 0.26, errors
    assert np.mean(np.abs(list(errors.values()))) <= 0.15, errors


def _card(kind, gib, bytes_per_second, rates, launch_seconds=None):
    """As `hxla devices --measure` found it."""
    return Device(
        kind=kind,
        memory_bytes=int(gib * 2**30),
        memory_bytes_per_second=bytes_per_second,
        multiprocessors=132,
        launch_seconds=launch_seconds,
        rates=tuple(
            Rate(dtype=dtype, flops_per_second=1e12 * own, measured=True)
            for dtype, own in zip(
                ("float32", "tensorfloat32", "bfloat16", "float16"), rates, strict=True
            )
        ),
    )


H100 = _card("NVIDIA H100 80GB HBM3", 59.4, 2.736e12, (50.18, 353.3, 678.9, 601.1))
H200 = _card("NVIDIA H200", 104.85, 3.375e12, (49.58, 351.6, 684.3, 570.3), 3.073e-6)
BF16, RECOMPUTED = {"precision": "bf16"}, {"memory": {"recompute": "boundaries"}}
# What steps took by `make bench-gpu` (benchmarks/results/gpu_h100.json, gpu.json): 8 microbatches
# of so many sequences of 1024, by what the settings say; seconds, and GiB that JAX held.
MEASURED_STEPS = [
    (H100, 4, BF16, 0.1575, 7.97),
    (H100, 4, {"precision": "fp16"}, 0.1572, 8.43),
    (H100, 4, {"precision": "fp32"}, 0.8085, 11.22),
    (H100, 4, BF16 | RECOMPUTED, 0.2024, 4.90),
    (H200, 8, BF16, 0.2457, 12.80),
    (H200, 8, {"precision": "fp16"}, 0.2454, 13.26),
    (H200, 8, {"precision": "fp32"}, 1.5162, 20.71),
    (H200, 8, BF16 | RECOMPUTED, 0.3168, 6.54),
    (H200, 4, BF16, 0.1507, 9.09),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "sequences", "config", "seconds", "gib"),
    MEASURED_STEPS,
    ids=lambda value: value.kind if isinstance(value, Device) else None,
)
def test_a_gpt_of_124_million_parameters_is_near_what_cards_took(
    card, sequences, config, seconds, gib
):
    """Nothing here was chosen with those cards in view."""
    size = dataclasses.replace(gpu_jobs.SIZES["124m"], dtype="float32")
    job = hxla.Job(
        nnx.eval_shape(size.make),
        {"text": jax.ShapeDtypeStruct((64, size.length + 1), np.int32)},
        size.loss,
        gpu_jobs.gpt_optimizer(),
        batch_size=8 * sequences,
        config=config,
    )
    cluster = hxla.Cluster(name="one", devices=(card,))
    found = job.plan(cluster, microbatch_size=sequences).prediction
    assert found.step_seconds == pytest.approx(seconds, rel=0.16)
    # Estimated before compilation; the script's own model is held beside it.
    most = 1.2 if card is H100 else 1.25
    assert 0.7 < found.devices[0].memory_bytes / 2**30 / gib < most
