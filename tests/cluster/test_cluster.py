"""Described clusters: links, and what measured speeds are worth."""

import itertools
import math

import pydantic
import pytest

from hxla import Cluster, Device, Link, Node, Rate, load_cluster
from support.inside.choose import best_counts, finish_seconds
from support.inside.cluster import ring_transfers

CURVE = Link(bytes_per_second=1e9, latency_seconds=5e-6, curve=((1e3, 1e8), (1e5, 1e9), (1e7, 5e9)))


def test_a_message_takes_its_latency_and_its_bytes():
    link = Link(bytes_per_second=2e9, latency_seconds=1e-5)
    assert link.seconds(0) == 1e-5
    assert link.seconds(4e9) == pytest.approx(2 + 1e-5)


def test_a_curve_is_met_at_its_points_and_interpolated_in_the_logarithms_between():
    for size, rate in CURVE.curve:
        assert CURVE.seconds(size) == pytest.approx(size / rate)
    # Half way between 1e3 and 1e5 in the logarithm is 1e4: the geometric mean of both times.
    assert CURVE.seconds(1e4) == pytest.approx(math.sqrt(1e3 / 1e8 * 1e5 / 1e9))


def test_a_curve_ends_in_its_latency_and_its_last_bandwidth():
    assert CURVE.seconds(0) == pytest.approx(5e-6)
    assert CURVE.seconds(500) == pytest.approx((5e-6 + 1e-5) / 2)
    assert CURVE.seconds(1e9) == pytest.approx(1e9 / 5e9)


@pytest.mark.parametrize("link", [CURVE, Link(bytes_per_second=3e9, latency_seconds=2e-6)])
def test_more_bytes_take_longer(link):
    times = [link.seconds(10 ** (k / 8)) for k in range(80)]
    assert all(a < b for a, b in itertools.pairwise(times))


def test_links_are_found_by_the_nodes_of_the_two_devices():
    inside, near, far = (Link(bytes_per_second=b) for b in (3e9, 2e9, 1e9))
    cluster = Cluster(
        name="x",
        devices=tuple(Device(kind="k", node=n) for n in (0, 0, 1, 2)),
        nodes=(Node(name="b", link=inside), Node(name="a"), Node(name="c")),
        links=(("a", "b", near),),
        default_link=far,
    )
    assert cluster.link(0, 1) == inside
    assert cluster.link(0, 2) == cluster.link(2, 1) == near
    assert cluster.link(0, 3) == cluster.link(3, 2) == far
    assert cluster.link(1, 1) is None
    assert Cluster(name="x", devices=(Device(kind="cpu"),) * 2).link(0, 1) is None


def test_a_ring_is_closed_and_leaves_each_node_once():
    nodes = (0, 1, 0, 1)
    cluster = Cluster(
        name="x",
        devices=tuple(Device(kind="k", node=n) for n in nodes),
        nodes=(Node(name="a"), Node(name="b")),
    )
    sends = ring_transfers(cluster, range(4), 8.0)
    assert sorted(send.sender for send in sends) == [0, 1, 2, 3]
    assert sorted(send.receiver for send in sends) == [0, 1, 2, 3]
    crossings = [(nodes[s.sender], nodes[s.receiver]) for s in sends]
    assert sorted(c for c in crossings if c[0] != c[1]) == [(0, 1), (1, 0)]
    assert ring_transfers(cluster, [2], 8.0) == []


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_values_made_in_python_are_checked_too(bad):
    for make in (
        lambda: Link(bytes_per_second=bad),
        lambda: Rate(dtype="float32", flops_per_second=bad),
        lambda: Device(kind="k", memory_bytes=bad),
    ):
        with pytest.raises(pydantic.ValidationError):
            make()


def step_seconds(speeds, shares):
    """Of a step whose microbatches are dealt out for devices as fast as `shares`."""
    seconds = [1 / speed for speed in speeds]
    num = 100_000  # so many that rounding to whole microbatches does not matter
    counts = best_counts(num, [1 / share for share in shares])
    return max(finish_seconds(counts, seconds, [0.0] * len(seconds)))


@pytest.mark.parametrize(
    ("model", "dtype", "at_least"),
    [
        ("resnet50", "float16", 1.38),
        ("resnet50", "float32", 1.002),
        ("transformer", "float32", 1.09),
        ("lm", "float32", 1.12),
    ],
)
def test_splitting_by_peak_flops_loses_against_splitting_by_measured_time(model, dtype, at_least):
    cluster = load_cluster("whale-8v100-8p100")
    measured = [d.speed(model).steps_per_second for d in cluster.devices]
    peak = [d.rate(dtype).flops_per_second for d in cluster.devices]
    loss = step_seconds(measured, peak) / step_seconds(measured, measured)
    # A device with share p / sum(p) of the work and speed v needs p / sum(p) / v; all together
    # need 1 / sum(v) at best.
    slowest = max(p / v for p, v in zip(peak, measured, strict=True))
    assert loss == pytest.approx(slowest * sum(measured) / sum(peak), rel=1e-3)
    assert loss > at_least
