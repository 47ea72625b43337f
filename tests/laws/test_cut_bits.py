"""Why the cut of a pipeline is part of `numerics`."""

import os
import platform
import re
import subprocess
import sys

import pytest

from support.launched import own_environment
from support.paths import JOBS

pytestmark = pytest.mark.optimized

SCRIPT = JOBS / "cut_bits.py"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is of x86 processors")
def test_without_fused_multiply_adds_all_cuts_have_the_same_bits():
    """Two cuts of a perceptron, whose bits differ on processors that fuse them."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_max_isa=AVX"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "mlp", "5", "6", "36"],
        env=own_environment() | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = re.findall(r"^(\d+) ([0-9a-f]{64})$", ran.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["5", "6", "36"]
    assert len({row[1] for row in rows}) == 1
