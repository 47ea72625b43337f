import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hxla import Cluster, Device, MeshError
from support.inside.cluster import _job_devices as _devices
from support.inside.model import given_bytes


def test_unlike_accelerators_in_one_process_are_refused_with_the_way_out():
    with pytest.raises(MeshError, match=r"device 1: H100.*\n?.*hxla run"):
        _devices.check_one_kind_per_process([(0, 0, "A100"), (0, 1, "H100")])
    _devices.check_one_kind_per_process([(0, 0, "A100"), (1, 1, "H100")])


def test_described_accelerators_do_not_become_the_processor():
    cluster = Cluster(name="pair", devices=(Device(kind="NVIDIA H100 PCIe"),) * 8)
    with pytest.raises(MeshError, match=r"'pair' describes device 0 as NVIDIA H100.*JAX has cpu"):
        _devices.resolve(None, cluster)
    assert len(_devices.resolve(None, Cluster(name="x", devices=(Device(kind="cpu"),) * 8))) == 8


def test_what_comes_with_a_linen_model_takes_memory_where_it_lies():
    first, second, third = jax.devices()[:3]
    mesh = jax.sharding.Mesh(np.array([second, third]), "x")
    halves = jax.NamedSharding(mesh, jax.P("x"))
    a, c = jax.device_put(jnp.zeros(16), halves), jnp.zeros(2, "int8")
    given = {"a": a, "b": np.zeros(9), "c": c}
    assert [given_bytes(given, d) for d in (first, second, third)] == [2, 32, 32]
    given["c"].delete()
    assert [given_bytes(given, first), given_bytes(None, first)] == [0, 0]


def test_memory_is_what_the_models_arrays_leave_of_an_accelerators():
    class Card:
        """Of another process's kind: no such device is here."""

        platform, device_kind, process_index = "rocm", "MI300X", 0

        def memory_stats(self):
            return {"bytes_limit": 1000}

    def gather(what, text):
        return (text,)

    cards = (Card(), Card())
    told = _devices.job_cluster(cards, None, gather, lambda card: 300 * (card is cards[0]))
    assert [device.memory_bytes for device in told.devices] == [700, 1000]
    described = Cluster(name="", devices=(Device(kind="MI300X", memory_bytes=500),) * 2)
    told = _devices.job_cluster(cards, described, gather, lambda card: 300 * (card is cards[0]))
    assert [device.memory_bytes for device in told.devices] == [200, 500]
