"""What plans run on GPUs, compiled for H100s that are not here.

It takes XLA's compiler for CUDA, of jax's own version, and no card: `make test` puts it
into a folder of its own. Were the plugin installed like other packages, every process that finds no
CUDA libraries would begin with a traceback.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from hxla._launch._launcher import _GPU_FLAGS, _MIXED_GPU_FLAGS

TESTS = pathlib.Path(__file__).parent
FOLDER = pathlib.Path(os.environ.get("GPU_COMPILER", pathlib.Path(sys.prefix, "gpu-compiler")))
GATHERED = {"all-gather of f32+s32 over data", "all-reduce of s32 over data"}
SUM = GATHERED | {"reduce-scatter of s32 over data"}
INSIDE = {"all-reduce of f32 over tensor"}
#: What one process of a copy asks, such as to stop, the others of its copy hear with the sums.
ASKED = "all-reduce of s32 over "
#: All-gathers that one version of XLA adds to a microbatch cut over `tensor`, and maxima.
MORE = {"all-gather of f32 over tensor", "all-reduce of s32 over tensor"}
#: Between stages arrays of all dtypes travel as words.
CUT, PASSED = {"all-to-all of u32 over stage"}, {"collective-permute of u32 over stage"}
NONE = (set(), set())
#: By plan and program the collectives that it must hold, and those that it may hold beside them.
EXPECTED = {
    "data": {"microbatch": NONE, "update": NONE, "evaluation": NONE, "sum 0": (SUM, set())},
    "data, float sums": {
        "microbatch": NONE,
        "update": NONE,
        "evaluation": NONE,
        "sum 0": (GATHERED | {"reduce-scatter of f32 over data"}, set()),
    },
    "tensor": {
        "microbatch": (INSIDE, MORE),
        "update": (INSIDE, set()),
        "evaluation": (INSIDE, MORE),
        "sum 0": (SUM | {ASKED + "tensor"}, set()),
    },
    "pipeline": {
        "fill": (CUT, set()),
        "ticks": (PASSED, set()),
        "finish": (CUT, set()),
        "update": ({"all-reduce of f32 over stage"}, set()),
        "sum 0": (SUM | {ASKED + "stage"}, set()),
    },
    "tensor stages": {
        "fill": (CUT, set()),
        "ticks": (INSIDE | PASSED, MORE),
        "finish": (CUT, {"all-reduce of s32 over tensor"}),
        "update": (
            {"all-reduce of f32 over stage"},
            # Over one device nothing is sent: jaxlib 0.10 leaves such a one behind.
            {"all-reduce of f32 over stage+tensor", "all-reduce of f32 over 1 devices"},
        ),
        "sum 0": ({ASKED + "stage+tensor"}, set()),
    },
    # What benchmarks/gpu.py trains.
    "124 million parameters": {"microbatch": NONE, "update": NONE, "sum 0": NONE, "sum 1": NONE},
    "perceptron": {"microbatch": NONE, "update": NONE, "sum 0": NONE},
}
# What all sums, or a pipeline's buffers, begin with.
EXPECTED = {plan: programs | {"empty": NONE} for plan, programs in EXPECTED.items()}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any((FOLDER / "jax_plugins" / f"xla_cuda{n}").is_dir() for n in (12, 13)),
        reason=f"no program was compiled for GPUs: XLA's compiler for them is not in {FOLDER} "
        "(make test installs it)",
    ),
]


def compiled(plan):
    """What each program of a plan holds."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(FOLDER)]),
        # A flag that XLA does not know ends the process.
        "XLA_FLAGS": " ".join([*_GPU_FLAGS, *_MIXED_GPU_FLAGS]),
    }
    ran = subprocess.run(
        [sys.executable, str(TESTS / "gpu_programs.py"), plan],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("plan", EXPECTED)
def test_programs_compile_for_h100(plan):
    found = compiled(plan)
    programs = found["programs"]
    assert set(EXPECTED[plan]) == set(programs)
    for name, (needed, allowed) in EXPECTED[plan].items():
        own = programs[name]
        kinds = set(own["collectives"])
        assert needed <= kinds <= needed | allowed, (name, kinds)
        # Nothing calls back into Python, or waits for the host in the midst of a program.
        assert not own["transfers"], name
        assert not own["problems"], name
        assert set(own["custom_calls"]) <= {"__cublas$lt$matmul", "__cublas$gemm"}, name
        if "float" not in plan:
            assert not own["racing_scatters"], name
    # The new state takes the place of the old one, and new sums that of those before.
    assert programs["update"]["donated_bytes"] >= found["state_bytes"]
    if "microbatch" in programs:
        num_parts = 1 if "float" in plan else 2
        assert programs["microbatch"]["donated_bytes"] >= num_parts * found["param_bytes"]
    if "plain" in found:  # what is looked for above is found where nobody asks for determinism
        assert found["plain"]["racing_scatters"]
    if "predicted_bytes" in found:
        # An estimate counts what a fused program never stores, and nothing is missing from it.
        assert 0.3 < found["memory_bytes"] / found["predicted_bytes"] < 1
