"""Every ratio that hxla promises, measured in one go on this machine, as one table.

    python benchmarks/run_all.py [--torch PYTHON] [--quick] [--only NAME ...]

Runs the other benchmarks one after another, at sizes that take about 20 minutes on two cores, and
writes benchmarks/results/bench.md and bench.json with the machine's description. PYTHON is an
interpreter that has torch; without one the comparisons with PyTorch are left out, and the table
says so. `--quick` runs each with its smallest setting, to see that it works: its figures mean
nothing, and they are written to the folder of `--folder` only.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
MESH = "cpu-1.0-0.5"
RUN = ["-m", "hxla", "run", "--mesh"]
# What is compared, hxla's figure, the other's, and hxla's over it (or what else the ratio is).
Row = tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One benchmark.

    Attributes:
        name: Of its file.
        before: What comes between the interpreter and the file.
        options: Of a whole run.
        quick: Of the smallest run.
        rows: Of the table, from the result that it writes.
        needs_torch: Whether it takes `--torch`.
        environment: Variables beside those of this process.
    """

    name: str
    before: Sequence[str] = ()
    options: Sequence[str]
    quick: Sequence[str]
    rows: Callable[[Any], list[Row]]
    needs_torch: bool = False
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def plain_jax(result: Any) -> list[Row]:
    seconds = result["seconds_per_step"]
    best = min(v for k, v in seconds.items() if k.startswith("plain"))
    exact, plain = seconds["hxla exact"], seconds["hxla float"]
    ratio = result["hxla exact over the faster plain loop"]
    return [
        (
            "a step beside the faster plain JAX loop, two equal cores",
            f"{exact} s",
            f"{best} s",
            f"{ratio}x",
        ),
        ("exact sums beside float sums", f"{exact} s", f"{plain} s", f"{plain / exact:.3f}x"),
    ]


def mixed_speed(result: Any) -> list[Row]:
    out: list[Row] = []
    for row in result:
        last = row["rounds"][-1]
        planned, even = last["planned_tokens_per_second"], last["even_tokens_per_second"]
        alone = round(planned / last["fraction_planned"])
        mesh = row["mesh"]
        out += [
            (
                f"{mesh}: planned counts beside the sum of each device alone",
                f"{planned} tokens/s",
                f"{alone} tokens/s",
                f"{row['fraction_planned']}x",
            ),
            (
                f"{mesh}: planned counts beside even ones",
                f"{planned} tokens/s",
                f"{even} tokens/s",
                f"{row['speed_up']}x",
            ),
        ]
    return out


def torch_ddp(result: Any) -> list[Row]:
    own, best = result["hxla_tokens_per_second"], max(result["ddp_tokens_per_second"].values())
    what = f"{result['mesh']}: beside PyTorch DDP's best microbatch"
    return [(what, f"{own} tokens/s", f"{best} tokens/s", f"{result['hxla over the best ddp']}x")]


def pipeline(result: Any) -> list[Row]:
    out: list[Row] = []
    for mesh, row in result["meshes"].items():
        seconds = {k: f"{row[k]['step_seconds']:.4g} s" for k in ("planned", "even", "torch")}
        own = seconds["planned"]
        cut = row["torch"]["cut"]
        out += [
            (
                f"{mesh}: pipeline cut as planned beside an even cut",
                own,
                seconds["even"],
                f"{row['planned_over_even']:.2f}x",
            ),
            (
                f"{mesh}: pipeline beside PyTorch's 1F1B cut {cut}",
                own,
                seconds["torch"],
                f"{row['over_torch']:.2f}x",
            ),
        ]
    return out


def hand_sharded(result: Any) -> list[Row]:
    seconds = result["seconds_per_step"]
    chosen = result["microbatches that hxla chooses"]
    out = [
        (
            f"rules over data and tensor, {r} sums, {n} microbatches, beside {m} by hand",
            f"{seconds[f'hxla {r}, {n}']} s",
            f"{seconds[f'by hand, {m}']} s",
            f"{result[f'hxla {r}, {n} over by hand, {m}']}x",
        )
        for r in ("exact", "float")
        for n, m in ((chosen, 1), (chosen, chosen), (1, 1))
    ]
    share = result["tracing and planning over compilation"]
    own, other = result["tracing_and_planning_seconds"], result["compilation_seconds"]
    return [
        *out,
        ("tracing and planning beside compilation", f"{own} s", f"{other} s", f"{share:.1%}"),
    ]


def planner_scale(result: Any) -> list[Row]:
    return [
        (
            f"search over {name}: step beside its proven bound, in {row['seconds']} s",
            f"{row['step_seconds']} s",
            f"{row['bound_seconds']} s",
            f"gap {row['gap']:.2%}",
        )
        for name, row in result.items()
    ]


def prediction(result: Any) -> list[Row]:
    return [
        (
            f"{row['model']} on cores of {row['cluster']}: predicted beside measured step",
            f"{row['predicted_seconds']} s",
            f"{row['measured_seconds']} s",
            f"{row['error']:+.1%}",
        )
        for row in result["rows"]
    ]


def inspect_speed(result: Any) -> list[Row]:
    size, peak = result["megabytes"], result["peak_bytes"] / 1e6
    best = min(result["rounds"], key=lambda row: row["cpu_seconds"])
    return [
        (
            f"inspect of {size:g} MiB of HLO text beside a bare match of its lines, {peak:.0f} MB",
            f"{best['cpu_seconds']} s",
            f"{best['bare_seconds']} s",
            f"{best['ratio']}x",
        )
    ]


PARTS = (
    Part(
        name="plain_jax",
        before=[*RUN, "cpu-1.0-1.0"],
        options=["--rounds", "3"],
        quick=["--rounds", "1"],
        rows=plain_jax,
    ),
    Part(
        name="mixed_speed",
        options=["--meshes", MESH, "--rounds", "1", "--batch-size", "32"],
        quick=["--meshes", MESH, "--rounds", "1", "--batch-size", "16"],
        rows=mixed_speed,
    ),
    Part(
        name="hand_sharded", options=["--rounds", "3"], quick=["--rounds", "1"], rows=hand_sharded
    ),
    Part(
        name="planner_scale",
        options=[],
        quick=["--instances", "1"],
        rows=planner_scale,
        environment={"OMP_NUM_THREADS": "1"},
    ),
    Part(
        name="inspect_speed",
        options=[],
        quick=["--megabytes", "1", "--rounds", "1"],
        rows=inspect_speed,
    ),
    Part(
        name="prediction",
        options=["--clusters", "1.0-0.5", "--models", "bert"],
        quick=["--clusters", "1.0", "--models", "conv"],
        rows=prediction,
    ),
    Part(
        name="torch_ddp",
        options=["--mesh", MESH, "--batch-size", "32", "--steps", "3"],
        quick=["--mesh", MESH, "--batch-size", "16", "--steps", "2"],
        rows=torch_ddp,
        needs_torch=True,
    ),
    Part(
        name="pipeline",
        options=["--mesh", MESH, "--steps", "3"],
        quick=["--mesh", MESH, "--microbatches", "4", "--microbatch-size", "2", "--steps", "2"],
        rows=pipeline,
        needs_torch=True,
    ),
)


def said(command: Sequence[str]) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def machine(torch: str) -> dict[str, str]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        models = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        cpu = models[0] if models else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": cpu,
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "jax": jax.__version__,
        "torch": torch or "none: the comparisons with PyTorch are left out",
        "commit": said(["git", "rev-parse", "--short", "HEAD"]) or "not known",
    }


def measure(
    part: Part, folder: pathlib.Path, torch: str, is_quick: bool
) -> tuple[list[Row], float]:
    """Rows of the table, and the seconds that they took.

    Raises:
        RuntimeError: If the benchmark fails.
    """
    out = folder / f"{part.name}.json"
    command = [sys.executable, *part.before, str(ROOT / "benchmarks" / f"{part.name}.py")]
    command += [*(part.quick if is_quick else part.options), "--out", str(out)]
    command += ["--torch", torch] if part.needs_torch else []
    begun = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | part.environment
    with (folder / f"{part.name}.log").open("w+") as log:
        code = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, check=False, cwd=ROOT, env=environment
        ).returncode
        log.seek(0)
        lines = log.read().strip().splitlines()
    if code or not out.exists():
        raise RuntimeError("\n".join([f"exit code {code}", *lines[-30:]]))
    return part.rows(json.loads(out.read_text())), time.monotonic() - begun


def table(facts: dict[str, str], rows: Sequence[Row], notes: Sequence[str]) -> str:
    lines = ["# Benchmarks", "", "Made by `make bench`; other work on the machine disturbs it.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| compared | hxla | beside it | ratio |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="", metavar="PYTHON", help="interpreter that has torch")
    parser.add_argument("--quick", action="store_true", help="smallest settings")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in PARTS], metavar="NAME")
    parser.add_argument("--folder", type=pathlib.Path, help="of bench.md and bench.json")
    args = parser.parse_args()
    if (args.quick or args.only) and args.folder is None:
        parser.error("--quick and --only need --folder: the committed table is that of a whole run")
    version = (
        said([args.torch, "-c", "import torch; print(torch.__version__)"]) if args.torch else ""
    )
    facts, rows, notes, failed = machine(version), [], [], []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for part in PARTS:
            if args.only and part.name not in args.only:
                continue
            if part.needs_torch and not version:
                notes.append(f"{part.name}: skipped, there is no interpreter with torch")
                print(notes[-1], flush=True)
                continue
            try:
                found, seconds = measure(part, pathlib.Path(name), args.torch, args.quick)
            except RuntimeError as error:
                failed.append(part.name)
                notes.append(f"{part.name}: failed, {str(error).splitlines()[0]}")
                print(f"{part.name}: {error}", file=sys.stderr, flush=True)
                continue
            rows += found
            print(f"{part.name}: {seconds:.0f} s", flush=True)
            for row in found:
                print("  " + " | ".join(row), flush=True)
    facts["took"] = f"{(time.monotonic() - begun) / 60:.1f} minutes"
    folder = args.folder or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.md").write_text(table(facts, rows, notes))
    keys = ("compared", "hxla", "beside it", "ratio")
    result = {
        "machine": facts,
        "rows": [dict(zip(keys, r, strict=True)) for r in rows],
        "notes": notes,
    }
    (folder / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {folder / 'bench.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
