"""A step of the GPT in float32 and in bfloat16: hxla beside plain Flax, in turns, in one process.

    python benchmarks/precision.py [--rounds 20] [--layers 4] [--microbatch-size 8]

Each contender trains from the same weights on the same text; hxla's model is unmodified and its
`precision` a word, the plain loop casts its parameters by hand. Ratios are to the seconds of hxla
in float32, round by round. The products of one compiled microbatch say what a processor makes of
bfloat16: without matrix units for it XLA widens each operand, and there is nothing to gain.
Writes benchmarks/results/precision.json.
"""

import pathlib
import re
import sys
from typing import Any

import results

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks" / "gpu_parts"), str(ROOT / "examples")]

import gpt  # noqa: E402
import gpu_jobs  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from turns import medians, over, seconds_in_turns  # noqa: E402

import hxla  # noqa: E402

UNITS = ("amx_bf16", "avx512_bf16", "bf16")  # as Linux names them: of x86, and of Arm

parser = results.parser(__doc__, "precision")
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--layers", type=int, default=gpt.LAYERS)
parser.add_argument("--microbatch-size", type=int, default=8)
parser.add_argument("--microbatches", type=int, default=2, help="of a step")
args = parser.parse_args()
BATCH = args.microbatch_size * args.microbatches


def size(dtype: str) -> gpu_jobs.Size:
    """The GPT of examples/ on bytes, its parameters cast to a dtype."""
    return gpu_jobs.Size(
        vocabulary=gpt.BYTES,
        length=gpt.LENGTH,
        width=gpt.WIDTH,
        heads=gpt.HEADS,
        layers=args.layers,
        num_microbatches=args.microbatches,
        dtype=dtype,
    )


TEXT = {"text": size("float32").text()}


def of_hxla(word: str) -> Any:
    """A step of a session, which returns its loss."""
    own = size("float32")
    job = hxla.Job(
        own.make,
        TEXT,
        own.loss,
        gpu_jobs.gpt_optimizer(),
        batch_size=BATCH,
        precision=word,
        shuffle=False,
    )
    plan = job.plan(microbatch_size=args.microbatch_size, mesh={"data": 1})
    session = job.open(plan, steps=args.rounds + 2)

    def step() -> float:
        loss = session.step().loss
        jax.block_until_ready(jax.live_arrays())
        return loss

    return step


def of_flax(dtype: str) -> Any:
    """The same of a plain loop."""
    own, optimizer = size(dtype), gpu_jobs.gpt_optimizer()
    graphdef, params, rest = nnx.split(own.make(), nnx.Param, ...)
    state: list[Any] = [params, optimizer.init(params)]
    run = gpu_jobs.scanned(graphdef, rest, own.loss, optimizer)
    done = 0

    def step() -> float:
        nonlocal done
        rows = {k: x[done * BATCH : (done + 1) * BATCH] for k, x in TEXT.items()}
        loss, *state[:] = run(*state, gpu_jobs.stacked(rows, args.microbatches))
        jax.block_until_ready(state)
        done += 1
        return float(loss)

    return step


def products() -> list[str]:
    """The dtypes in which XLA multiplies matrices of bfloat16 here."""
    x = jnp.ones((512, 512), jnp.bfloat16)
    text = jax.jit(jnp.matmul).lower(x, x).compile().as_text()
    return sorted(set(re.findall(r"= (\w+)\[[\d,]*\]\S* (?:dot|custom-call)\(", text)))


def units() -> list[str]:
    """What the processor says that it has for bfloat16."""
    known = pathlib.Path("/proc/cpuinfo")
    words = set(known.read_text().split()) if known.exists() else set()
    return [unit for unit in UNITS if unit in words]


if len(TEXT["text"]) < BATCH * (args.rounds + 1):
    sys.exit(f"--rounds: there is text for {len(TEXT['text']) // BATCH - 1}")
runs = {
    "hxla float32": of_hxla("fp32"),
    "hxla bfloat16": of_hxla("bf16"),
    "flax float32": of_flax("float32"),
    "flax bfloat16": of_flax("bfloat16"),
}
seconds = seconds_in_turns(runs, args.rounds, tolerance=0.05)
results.write(
    args.out,
    {
        "layers": args.layers,
        "microbatch_size": args.microbatch_size,
        "microbatches": args.microbatches,
        "processor_has": units(),
        "bfloat16_products_are": products(),
        "seconds": medians(seconds),
        "times_as_fast_as_hxla_float32": {
            name: over(seconds["hxla float32"], own) for name, own in seconds.items()
        },
    },
)
