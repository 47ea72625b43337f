"""What plans run on GPUs, compiled for cards that are not here.

It takes XLA's compiler for CUDA, of jax's own version, and no card: `make test` puts it into a
folder of its own. Where the plugin is installed like other packages, every process that finds no
CUDA libraries begins with a traceback.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
FOLDER = pathlib.Path(sys.prefix) / "gpu-compiler"
SUM = {
    "reduce-scatter of s32 over data",
    "all-gather of f32+s32 over data",
    "all-reduce of s32 over data",
}
INSIDE = {"all-reduce of f32 over tensor"}
#: All-gathers that one version of XLA adds to a microbatch cut over `tensor`, and maxima.
MORE = {"all-gather of f32 over tensor", "all-reduce of s32 over tensor"}
#: Between stages arrays of all dtypes travel as words.
CUT, PASSED = {"all-to-all of u32 over stage"}, {"collective-permute of u32 over stage"}
#: By plan and program the collectives that it must hold, and those that it may hold beside them.
EXPECTED = {
    "data": {
        "microbatch": (set(), set()),
        "update": (set(), set()),
        "evaluation": (set(), set()),
        "sum 0": (SUM, set()),
    },
    "data, float sums": {
        "microbatch": (set(), set()),
        "update": (set(), set()),
        "sum 0": (SUM - {"reduce-scatter of s32 over data"}, {"reduce-scatter of f32 over data"}),
    },
    "tensor": {
        "microbatch": (INSIDE, MORE),
        "update": (INSIDE, set()),
        "evaluation": (INSIDE, MORE),
        "sum 0": (SUM, set()),
    },
    "pipeline": {
        "fill": (CUT, set()),
        "ticks": (PASSED, set()),
        "finish": (CUT, set()),
        "update": ({"all-reduce of f32 over stage"}, set()),
        "sum 0": (SUM, set()),
    },
    "pipeline of tensor stages": {
        "fill": (CUT, set()),
        "ticks": (INSIDE | PASSED, MORE),
        "finish": (CUT, {"all-reduce of s32 over tensor"}),
        "sum 0": (set(), set()),
    },
    "124 million parameters": {"microbatch": (set(), set())},
}


def has_compiler():
    names = ("xla_cuda12", "xla_cuda13")
    found = importlib.util.find_spec("jax_plugins")
    folders = [*(found.submodule_search_locations or ()), FOLDER / "jax_plugins"] if found else []
    folders = folders or [FOLDER / "jax_plugins"]
    return any((pathlib.Path(folder) / name).is_dir() for folder in folders for name in names)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_compiler(),
        reason="no program was compiled for GPUs: XLA's compiler for them is not here "
        "(make gpu-compiler)",
    ),
]


def programs(plan, card):
    """What each program of a plan holds."""
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(FOLDER)]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": flags,
    }
    ran = subprocess.run(
        [sys.executable, str(TESTS / "gpu_programs.py"), plan, card],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def check(plan, card):
    found = programs(plan, card)
    for name, (needed, allowed) in EXPECTED[plan].items():
        kinds = set(found[name]["collectives"])
        assert needed <= kinds <= needed | allowed, (name, kinds)
    for name, program in found.items():
        # Nothing calls back into Python, or waits for the host in the midst of a program.
        assert not program["transfers"], name
        assert not [c for c in program["custom_calls"] if re.search("python|callback|[Hh]ost", c)]
        assert not program["problems"], name
        assert program["fits"], name


@pytest.mark.parametrize("plan", EXPECTED)
def test_programs_compile_for_h100_with_the_collectives_of_their_axes(plan):
    check(plan, "h100")


def test_programs_compile_for_v100():
    check("data", "v100")
