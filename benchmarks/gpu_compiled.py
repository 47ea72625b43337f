"""What a step launches, moves and holds on a card, from programs compiled for an H100 without one.

    python benchmarks/gpu_compiled.py [--models gpt resnet] [--forms plain exact float]

`plain` is one `jax.jit` of a scan over microbatches and the optax update, without any option.
`exact` and `float` are all programs of a step of hxla with that reduction. It takes XLA's compiler
for CUDA (`make test` installs it), and a few minutes for each program of the GPT.

Kernels are launches in XLA's own list: kernels, library calls and copies, bodies of loops times
their trips. Bytes are operands read and results written in the optimized HLO. Calls and host arrays
are counted in a session of a tiny model of the same form, which takes a GPU's way on the CPU.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from flax import nnx

ROOT = results.ROOT
sys.path[:0] = [str(ROOT / name) for name in ("tests", "examples", "benchmarks/gpu_parts")]

import gpu_jobs  # noqa: E402
import resnet  # noqa: E402

import hxla  # noqa: E402
from support import gpu_compiler  # noqa: E402
from support.host_calls import host_calls  # noqa: E402
from support.inside.job import JobContext  # noqa: E402
from support.inside.lower import lower  # noqa: E402


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its step.

    Attributes:
        make: Makes the model.
        shapes: Of a microbatch's arrays, without the dimension of examples.
        size: Examples of a microbatch.
        num: Microbatches of a step.
    """

    make: Callable[[], nnx.Module]
    loss: Callable[[Any, Any], jax.Array]
    optimizer: optax.GradientTransformation
    shapes: dict[str, tuple[tuple[int, ...], Any]]
    size: int
    num: int

    def data(self, make: Callable[..., Any], num: int) -> dict[str, Any]:
        """Some examples, made from shapes and dtypes."""
        return {name: make((num, *shape), dtype) for name, (shape, dtype) in self.shapes.items()}

    def job(self, make: Callable[..., Any], **more: Any) -> hxla.Job:
        """The job of hxla, with data made as `data` does."""
        model = self.make if make is np.zeros else nnx.eval_shape(self.make)
        num = self.size * self.num
        return hxla.Job(
            model,
            self.data(make, num),
            self.loss,
            self.optimizer,
            batch_size=num,
            mixes_examples=True,
            shuffle=False,
            **more,
        )


def gpt(size: gpu_jobs.Size) -> Case:
    """A GPT of benchmarks/gpu_parts, in microbatches of 4."""
    return Case(
        make=size.make,
        loss=size.loss,
        optimizer=gpu_jobs.gpt_optimizer(),
        shapes={"text": ((size.length + 1,), np.int32)},
        size=4,
        num=8,
    )


def images(size: int, edge: int, stages: tuple[int, ...], width: int) -> Case:
    """A ResNet of benchmarks/resnet.py in four microbatches."""
    return Case(
        make=lambda: resnet.ResNet(stages, width, 3, 1000, nnx.Rngs(0)),
        loss=lambda model, batch: resnet.loss(model, batch)[0],
        optimizer=optax.adam(1e-3),
        shapes={"image": ((edge, edge, 3), np.float32), "label": ((), np.int32)},
        size=size,
        num=4,
    )


#: By name a model, and a tiny one of the same form.
CASES = {
    "gpt": (gpt(gpu_jobs.SIZES["124m"]), gpt(gpu_jobs.SIZES["tiny"])),
    "resnet": (images(64, 224, (3, 4, 6, 3), 64), images(2, 32, (1, 1), 8)),
}


def plain(case: Case) -> tuple[list[tuple[Any, int, int]], float]:
    """The program of plain JAX with its calls and trips, and the bytes that it needs."""
    sharding = jax.sharding.SingleDeviceSharding(gpu_compiler.cards(1)[0])
    graphdef, params, rest = nnx.split(nnx.eval_shape(case.make), nnx.Param, ...)
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    rest = jax.tree.map(lambda x: x if is_key(x) else jnp.zeros(x.shape, x.dtype), rest)
    shapes = params, jax.eval_shape(case.optimizer.init, params)
    parts = gpu_jobs.stacked(case.data(np.zeros, case.size * case.num), case.num)
    here = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (*shapes, parts)
    )
    step = gpu_jobs.scanned(graphdef, rest, case.loss, case.optimizer)
    program = step.lower(*here).compile()
    stats = program.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return [(program, 1, case.num)], total - stats.alias_size_in_bytes


def ours(case: Case, tiny: Case, form: str) -> tuple[list[tuple[Any, int, int]], float, Any]:
    """The same of hxla, and the calls and host arrays of a step."""
    job, card = case.job(jax.ShapeDtypeStruct), gpu_compiler.CARDS["h100"]
    device = hxla.Device(kind=card.kind, memory_bytes=card.memory_gib << 30)
    cluster, wishes = hxla.Cluster(name="", devices=(device,)), {"mesh": {"data": 1}}
    plan = job.plan(cluster, auto=False, microbatch_size=case.size, reduction=form, **wishes)
    training = JobContext(job).training(case.size, 0)
    programs = lower(training, job.graph(case.size), plan, gpu_compiler.cards(1))
    per_call = plan.microbatches_per_call
    made = []
    for name, program in gpu_compiler.compiled_programs(programs):
        if name == "a microbatch":
            made.append((program, -(-case.num // per_call), min(per_call, case.num)))
        elif name not in ("empty sums", "step"):  # a step reuses sums; a large one has no program
            made.append((program, 1, 1))
    config = {"cluster": {"microbatches_per_call": per_call}}
    calls = host_calls(tiny.job(np.zeros, config=config), tiny.size, reduction=form)
    return made, programs.memory_bytes(programs.state_bytes), calls


def told(name: str, form: str) -> dict[str, Any]:
    """A row of the table."""
    case, tiny = CASES[name]
    if form == "plain":
        programs, num_bytes = plain(case)
        calls = 1, len(case.shapes)
    else:
        programs, num_bytes, calls = ours(case, tiny, form)
    files = collections.defaultdict(list)
    for module, path in gpu_compiler.launch_files():
        files[module].append(path)
    found: collections.Counter[str] = collections.Counter()
    for program, times, trips in programs:
        module = hxla.inspect(program).main.name
        # Programs of one name are compiled in the order of their files.
        text = files[module].pop(0).read_text()
        for what, num in gpu_compiler.launches(text, trips).items():
            found[what] += times * num
        found["bytes"] += times * gpu_compiler.moved_bytes(program.as_text(), trips)
    return {
        "model": name,
        "form": form,
        "kernels": found["kernels"] + found["products"] + found["copies"],
        "sort_kernels": found["sorts"],
        "wide_sort_kernels": found["wide_sorts"],
        "graphs": found["graphs"],
        "hlo_gb": round(found["bytes"] / 1e9, 2),
        "calls": calls[0],
        "host_arrays": calls[1],
        "peak_mib": round(num_bytes / 2**20),
    }


def child(name: str, form: str) -> dict[str, Any]:
    """A row, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, __file__, "--row", name, form],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=gpu_compiler.environment(f"--xla_dump_to={folder}"),
        )
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows beside plain's."""
    lines = []
    for row in rows:
        base = next((r for r in rows if r["model"] == row["model"] and r["form"] == "plain"), None)
        cells = []
        for what, x in list(row.items())[2:]:
            is_ratio = base is not None and base is not row and what in _COMPARED and base[what]
            cells.append(f"{what} {x}" + (f" ({x / base[what]:.3f})" if is_ratio and base else ""))
        lines.append(f"{row['model']}, {row['form']}: " + ", ".join(cells))
    return "\n".join(lines)


_COMPARED = ("kernels", "hlo_gb", "peak_mib")


def main() -> None:
    parser = results.parser(__doc__, "gpu_compiled")
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
    forms = ("plain", "exact", "float")
    parser.add_argument("--forms", nargs="+", default=list(forms), choices=forms)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(told(*args.row)))
        return
    if not gpu_compiler.is_here():
        raise SystemExit(f"XLA's compiler for GPUs is not in {gpu_compiler.FOLDER}: run make test")
    out: pathlib.Path = args.out
    rows = results.read(out).get("steps", [])
    for name in args.models:
        for form in args.forms:
            rows = [r for r in rows if (r["model"], r["form"]) != (name, form)]
            rows.append(child(name, form))
            print(table(rows[-1:]), flush=True)
    order = {key: k for k, key in enumerate((m, f) for m in CASES for f in forms)}
    rows.sort(key=lambda r: order[r["model"], r["form"]])
    results.write(out, {"card": gpu_compiler.CARDS["h100"].kind, "steps": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
