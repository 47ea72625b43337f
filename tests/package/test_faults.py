"""The faults that `make mutants` plants are lines that the package has."""

import collections

from support import mutants
from support.paths import ROOT


def test_each_fault_is_one_line_of_the_package():
    for fault in mutants.faults():
        path, text = fault.planted(ROOT / "hxla")
        assert path.read_text() != text
    rooms = collections.Counter(fault.room for fault in mutants.faults())
    assert min(rooms.values()) >= 3
    assert sum(rooms.values()) >= 60
