import pytest

from hxla import Cluster, Device, MeshError
from hxla._cluster import _job_devices as _devices


def test_unlike_accelerators_in_one_process_are_refused_with_the_way_out():
    with pytest.raises(MeshError, match=r"device 1: H100.*\n?.*hxla run"):
        _devices.check_one_kind_per_process([(0, 0, "A100"), (0, 1, "H100")])
    _devices.check_one_kind_per_process([(0, 0, "A100"), (1, 1, "H100")])


def test_described_accelerators_do_not_become_the_processor():
    cluster = Cluster(name="pair", devices=(Device(kind="NVIDIA H100 PCIe"),) * 8)
    with pytest.raises(MeshError, match=r"'pair' describes device 0 as NVIDIA H100.*JAX has cpu"):
        _devices.resolve(None, cluster)
    assert len(_devices.resolve(None, Cluster(name="x", devices=(Device(kind="cpu"),) * 8))) == 8
