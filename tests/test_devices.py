import pytest

from hxla import MeshError
from hxla._lower import _devices


def test_unlike_accelerators_in_one_process_are_refused_with_the_way_out():
    with pytest.raises(MeshError, match=r"device 1: H100.*\n?.*hxla run"):
        _devices.check_one_kind_per_process([(0, 0, "A100"), (0, 1, "H100")])
    _devices.check_one_kind_per_process([(0, 0, "A100"), (1, 1, "H100")])
