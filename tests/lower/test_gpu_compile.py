"""What plans run on GPUs, compiled for cards that are not here.

It takes XLA's compiler for CUDA, of jax's own version, and no card: `make test` puts it
into a folder of its own. Were the plugin installed like other packages, every process that finds no
CUDA libraries would begin with a traceback.
"""

import json
import re
import subprocess
import sys

import pytest

from support.gpu_compiler import ASSEMBLER, FOLDER, environment, is_here
from support.paths import JOBS, ROOT
from support.tiers import rows

GATHERED = {"all-gather of s32 over data", "all-reduce of s32 over data"}
SUM = GATHERED | {"reduce-scatter of s32 over data"}
INSIDE = {"all-reduce of f32 over tensor"}
#: What one process of a copy asks, such as to stop, the others of its copy hear with the sums.
ASKED = "all-reduce of s32 over "
#: All-gathers that one version of XLA adds to a microbatch cut over `tensor`, and maxima.
MORE = {"all-gather of f32 over tensor", "all-reduce of s32 over tensor"}
#: Between stages arrays of all dtypes travel as words.
CUT, PASSED = {"all-to-all of u32 over stage"}, {"collective-permute of u32 over stage"}
NONE = (set(), set())
BLOCK = 4096  # elements that one block of a card's threads sorts
#: Cards of before Hopper, with a precision that each has.
OLDER = {"a100": "bf16", "v100": "fp16", "p100": "fp16"}
CUBLAS = {"__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__cublas$gemm"}
#: cuDNN's attention, forward and backward.
FUSED = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
#: Products that read a parameter: forward, and the gradients of either operand.
FLOAT8 = {"f32 = f8e4m3fn x f8e4m3fn", "f32 = f8e5m2 x f8e4m3fn", "f32 = f8e4m3fn x f8e5m2"}
#: Of a plan's precision the dtype of its products, as HLO has it.
LOW = {"bf16": "bf16", "fp16": "f16"}
#: By plan and program the collectives that it must hold, and those that it may hold beside them.
EXPECTED = {
    "data": {"microbatch": NONE, "update": NONE, "evaluation": NONE, "sum 0": (SUM, set())},
    "data, float sums": {
        "microbatch": NONE,
        "update": NONE,
        "evaluation": NONE,
        "sum 0": (GATHERED | {"reduce-scatter of f32 over data"}, set()),
    },
    "data, float sums in 16 bits": {
        "microbatch": NONE,
        "update": NONE,
        "sum 0": (
            # Bits that are only moved travel as integers, those of small numbers beside them.
            {
                "reduce-scatter of bf16 over data",
                "all-gather of s32+u16 over data",
                "all-reduce of s32 over data",
            },
            set(),
        ),
    },
    "tensor": {
        "microbatch": (INSIDE, MORE),
        "update": NONE,
        "evaluation": (INSIDE, MORE),
        "sum 0": (SUM | {ASKED + "tensor"}, set()),
    },
    "sequence": {
        "microbatch": (
            {f"{kind} of f32 over sequence" for kind in ("all-gather", "reduce-scatter")},
            {
                *("all-reduce of f32 over sequence", "all-reduce of s32 over sequence"),
                # Positions, and the tokens that are shifted.
                *("all-gather of f32+s32 over sequence", "all-gather of s32 over sequence"),
                "collective-permute of s32 over sequence",
            },
        ),
        "update": NONE,
        "evaluation": NONE,
        "sum 0": ({ASKED + "sequence"}, set()),
    },
    "pipeline": {
        "fill": (CUT, set()),
        "ticks": (PASSED, set()),
        "finish": (CUT, set()),
        "update": NONE,
        "sum 0": (SUM | {ASKED + "stage"}, set()),
    },
    "tensor stages": {
        "fill": (CUT, set()),
        "ticks": (INSIDE | PASSED | {"all-gather of u32 over tensor"}, MORE),
        "finish": (CUT, {"all-reduce of s32 over tensor"}),
        "update": NONE,
        "sum 0": ({ASKED + "stage+tensor"}, set()),
    },
    "bf16": {"microbatch": NONE, "update": NONE, "sum 0": NONE, "step": NONE},
    "fp16": {"microbatch": NONE, "update": NONE, "sum 0": NONE, "step": NONE},
    "fp8": {"microbatch": NONE, "update": NONE, "sum 0": NONE, "step": NONE},
    "fused attention": {"microbatch": NONE, "update": NONE, "sum 0": NONE, "step": NONE},
    "fused attention over tensor": {
        "microbatch": (INSIDE, MORE | {"all-reduce of bf16 over tensor"}),
        "update": NONE,
        "sum 0": (SUM | {ASKED + "tensor"}, set()),
    },
    "fused attention in stages": {
        "fill": (CUT, set()),
        "ticks": (PASSED, set()),
        "finish": (CUT, set()),
        "update": NONE,
        "sum 0": ({ASKED + "stage"}, set()),
    },
    # What benchmarks/gpu.py trains.
    "124 million parameters": {"microbatch": NONE, "update": NONE, "sum 0": NONE},
    "perceptron": {"microbatch": NONE, "update": NONE, "sum 0": NONE, "step": NONE},
}
# What all sums, or a pipeline's buffers, begin with.
EXPECTED = {plan: programs | {"empty": NONE} for plan, programs in EXPECTED.items()}

pytestmark = pytest.mark.skipif(
    not is_here(),
    reason=f"no program was compiled for GPUs: XLA's compiler for them is not in {FOLDER} "
    "(make test installs it)",
)


def compiled(plan, *card, flags=()):
    """What each program of a plan holds."""
    return printed(JOBS / "gpu_programs.py", plan, *card, flags=flags)


def printed(script, *arguments, flags=()):
    """The JSON that a script prints last, in a process that can compile for GPUs."""
    ran = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env=environment(*flags),
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("plan", rows(EXPECTED, "perceptron"))
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
        computes = name in ("microbatch", "ticks", "step")
        fused = FUSED if "fused" in plan and computes else set()
        assert fused <= set(own["custom_calls"]) <= CUBLAS | fused, name
        if "float" not in plan:
            assert not own["racing_scatters"], name
            assert own["widest_sort"] <= BLOCK, name
    # The new state takes the place of the old one, and new sums that of those before.
    scale = 4 if plan == "fp16" else 0  # the loss scale's exponent takes no place of an old one
    assert programs["update"]["donated_bytes"] >= found["state_bytes"] - scale
    if "step" in programs:
        assert programs["step"]["donated_bytes"] >= found["state_bytes"] - scale
    if "microbatch" in programs:
        num_parts = 1 if "float" in plan else 2
        assert programs["microbatch"]["donated_bytes"] >= num_parts * found["param_bytes"]
    if "fused" in plan:
        computed = programs.get("microbatch", programs.get("ticks"))
        assert set(computed["products"]) == {"bf16 = bf16 x bf16"}
    if plan in LOW or "million" in plan:  # no product of float32 is left, forward or backward
        low = LOW.get(plan, "bf16")  # the large model's loss casts by hand
        assert set(programs["microbatch"]["products"]) == {f"{low} = {low} x {low}"}
    if plan == "fp8":  # all else is the attention's
        assert set(programs["microbatch"]["products"]) == FLOAT8 | {"bf16 = bf16 x bf16"}
    if "predicted_bytes" in found:
        # An estimate counts what a fused program never stores, and nothing is missing from it.
        assert 0.3 < found["memory_bytes"] / found["predicted_bytes"] < 1


def test_the_microbatches_of_a_step_and_a_small_step_are_one_cuda_graph(tmp_path):
    """Otherwise the host waits in each iteration, because their number is an argument."""
    names = "hxla_(micro|step)"
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={names}"
    compiled("perceptron", flags=(dump,))
    paths = list(tmp_path.glob("*hxla_*thunk_sequence_after_thunk_passes.txt"))
    assert len(paths) == 2
    for text in (path.read_text() for path in paths):
        # What belongs to a graph, or to a loop, is indented.
        assert re.findall(r"^\d+: (\w+)", text, re.MULTILINE) == ["kCommandBuffer"]
        assert len(re.findall(r"^ +\d+: kWhile", text, re.MULTILINE)) == 1


@pytest.mark.slow
def test_gradients_that_are_scatters_sort_no_more_than_their_indices():
    found = compiled("gradients")
    for name, own in found.items():
        if name.startswith("ordered"):
            assert own["widest_sort"] <= BLOCK, name
            assert not own["loops"], name
            assert not own["racing_scatters"], name
    # Without it XLA sorts every scalar, or runs a loop over them.
    assert found["plain segment_sum"]["widest_sort"] == 4096 * 256
    assert found["plain sort"]["loops"] == 1


#: The most that programs of a step may launch and move; less is better, and lowers these.
MOST = {
    "microbatch": {"kernels": 48, "products": 21, "copies": 8, "loops": 1, "sorts": 1},
    "empty": {"kernels": 6},
    "sum 0": {"kernels": 10, "copies": 2},
    "update": {"kernels": 36, "copies": 1},
    "step": {"kernels": 94, "products": 21, "copies": 9, "loops": 1, "sorts": 1},
}
#: Bytes that kernels of a microbatch read and write.
MOST_MICROBATCH_BYTES = 9.0e6


@pytest.mark.slow
def test_each_program_of_a_step_is_one_graph_and_no_larger_than_it_was(tmp_path):
    found = compiled("step", flags=(f"--xla_dump_to={tmp_path}",))
    assert set(found) <= set(MOST)
    for name, own in found.items():
        num_bytes = own.pop("bytes", 0)
        # All of a program is one CUDA graph: nothing in it stops for the host.
        assert own.pop("graphs") == 1, name
        assert all(num <= MOST[name].get(what, 0) for what, num in own.items()), (name, own)
        if name == "microbatch":
            assert 0 < num_bytes <= MOST_MICROBATCH_BYTES


#: Beside plain JAX without any option, of 8 microbatches of the GPT of benchmarks/gpu.py, and of 4
#: of a ResNet-50: the most that an exact step may have.
MOST_OF_PLAIN = {
    "gpt": {"kernels": 0.94, "hlo_gb": 0.89, "peak_mib": 0.98},
    "resnet": {"kernels": 0.96},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MOST_OF_PLAIN)
def test_an_exact_step_takes_no_more_than_plain_jax(tmp_path, model):
    rows = []
    for form in ("plain", "exact"):
        dump = f"--xla_dump_to={tmp_path / form}"
        rows.append(
            printed(ROOT / "benchmarks" / "gpu_compiled.py", "--row", model, form, flags=(dump,))
        )
    plain, exact = rows
    ratios = {what: exact[what] / plain[what] for what in MOST_OF_PLAIN[model]}
    assert all(x <= MOST_OF_PLAIN[model][what] for what, x in ratios.items()), ratios
    assert exact["wide_sort_kernels"] == 0
    if model == "gpt":
        assert (exact["calls"], exact["host_arrays"]) == (3, 2)


@pytest.mark.slow
def test_scatters_race_where_nobody_asks_for_determinism():
    """What no program above may hold is found in a loop without hxla."""
    assert compiled("plain")["racing_scatters"]


@pytest.mark.slow
@pytest.mark.parametrize("card", OLDER)
def test_low_programs_compile_for_older_cards(card):
    if not ASSEMBLER.exists():
        pytest.skip(f"nothing was compiled for older cards: there is no {ASSEMBLER}")
    word = OLDER[card]
    programs = compiled(word, card)["programs"]
    assert set(programs["microbatch"]["products"]) == {"{0} = {0} x {0}".format(LOW[word])}
    for name, own in programs.items():
        assert own["has_bf16"] == (
            word == "bf16" and name in ("microbatch", "evaluation", "step")
        ), name
        assert not own["problems"], name
        assert not own["racing_scatters"], name


@pytest.mark.slow
def test_a_gpus_multiprocessors_are_what_its_backend_says():
    found = compiled("multiprocessors")
    assert {card: found[card] for card in ("h100", "v100", "p100")} == {
        "h100": 132, "v100": 80, "p100": 56,
    }  # fmt: skip


@pytest.mark.slow
def test_all_products_of_all_families_are_low():
    """Forward and backward, convolutions too, in what XLA made of them."""
    found = compiled("families")
    assert len(found) == 8
    for name, products in found.items():
        # A long sum inside a product may be cut into parts, which XLA keeps in float32.
        assert {kind.split(" = ")[1] for kind in products} == {"bf16 x bf16"}, (name, products)
        assert sum(products.values()) > 5, name


@pytest.mark.slow
def test_what_waits_for_the_backward_of_a_layer_halves():
    found = compiled("waiting")
    for word in LOW:
        assert found[word] <= 0.55 * found["fp32"], found


@pytest.mark.slow
def test_segments_of_cut_copies_send_between_copies_what_is_shared_out():
    """A segment's programs send inside a copy; gathers and sums send parts between copies."""
    found = compiled("cut segments")
    assert not any(own["problems"] for own in found.values())
    kinds = {name: set(own["collectives"]) for name, own in found.items()}
    assert kinds["segments"] >= INSIDE
    assert all(kind.endswith("over tensor") for kind in kinds["segments"]), kinds
    assert kinds["gathers"] == {"all-gather of f32 over data"}
    assert "reduce-scatter of s32 over data" in kinds["sums"]
    assert kinds["sums"] <= SUM | {ASKED + "tensor"}


@pytest.mark.slow
def test_a_streamed_update_moves_the_state_and_keeps_little_of_it():
    """Copies to and from the host are real, run beside the arithmetic, and are no more than asked.

    No more of the state is on the card than a group that is updated, one that comes and one that
    goes.
    """
    found = compiled("offload")
    sizes, param_bytes = found["group_bytes"], found["param_bytes"]
    assert sum(sizes) == found["state_bytes"] == 2 * param_bytes
    for own in found["programs"]:
        g = own["group"]
        coming, going = sizes[g + 1 : g + 2], sizes[max(g - 1, 0) : g]
        assert own["host_in_bytes"] == sum(coming)
        assert own["host_out_bytes"] == sum(going)
        assert own["copies"] >= bool(coming) + bool(going)
        assert own["new_bytes"] <= sum(coming) * 1.01 + 4096
        on_card = own["temporary_bytes"] + sizes[g] + sum(coming) + sum(going)
        assert on_card <= 0.35 * param_bytes, on_card / param_bytes
