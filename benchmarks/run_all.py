"""Every ratio that hxla promises, measured in one go on this machine, as one table.

    python benchmarks/run_all.py [--torch PYTHON] [--quick] [--only NAME ...]

Runs the other benchmarks one after another, at sizes that take about 20 minutes on two cores, and
writes benchmarks/results/bench.md and bench.json with the commit, the date and the machine's
description. A ratio is the median over rounds, with the quartiles behind it. PYTHON is an
interpreter that has torch; without one the comparisons with PyTorch are left out, and the table
says so. `--quick` runs each with its smallest setting, to see that it works: its figures mean
nothing, and they are written to the folder of `--folder` only.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import paced_links
import results

ROOT = pathlib.Path(__file__).parent.parent
MESH = "cpu-1.0-0.5"
RUN = ["-m", "hxla", "run"]
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
        torch: Whether it `needs` an interpreter that has torch, or compares less without one.
        environment: Variables beside those of this process.
        lacking: Says what this machine lacks for it, or nothing.
    """

    name: str
    before: Sequence[str] = ()
    options: Sequence[str]
    quick: Sequence[str]
    rows: Callable[[Any], list[Row]]
    torch: Literal["", "needs", "takes"] = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    lacking: Callable[[], str] = str


def spread(ratio: dict[str, float]) -> str:
    """A ratio of `turns.over`."""
    return f"{ratio['ratio']:.3f}x ({ratio['low']:.3f} to {ratio['high']:.3f})"


def of_ratios(result: Any, where: str) -> list[Row]:
    """Rows of a result that names its ratios `a / b`."""
    seconds, rows = result.get("step_seconds"), []
    for name, ratio in result["ratios"].items():
        figures = []
        for one in name.split(" / "):
            if seconds is None:
                figures.append(f"{result['tokens_per_second'][one]} tokens/s")
            else:
                figures.append(f"{seconds[one]} s")
        rows.append((f"{where}: {name}", *figures, spread(ratio)))
    return rows


def plain_jax(result: Any) -> list[Row]:
    sizes, rows = result["microbatch_sizes"], []
    for (_, *figures), name in zip(of_ratios(result, ""), result["ratios"], strict=True):
        a, b = name.split(" / ")
        what = f"two equal cores: {a} ({sizes[a]} a microbatch) / {b} ({sizes[b]})"
        rows.append((what, *figures))
    return rows


def mixed_speed(result: Any) -> list[Row]:
    out: list[Row] = []
    for mesh, row in result["meshes"].items():
        tokens = row["tokens_per_second"]
        for form, ratio in row["attainable"].items():
            out.append(
                (
                    f"{mesh}: {form} beside the sum of each device alone",
                    f"{tokens[form]} tokens/s",
                    f"{round(tokens[form] / ratio['ratio'])} tokens/s",
                    spread(ratio),
                )
            )
        first = next(iter(row["attainable"]))
        for form, ratio in row["beside the first"].items():
            out.append(
                (
                    f"{mesh}: {first} beside {form}",
                    f"{tokens[first]} tokens/s",
                    f"{tokens[form]} tokens/s",
                    spread(ratio),
                )
            )
    return out


def scanned_layers(result: Any) -> list[Row]:
    where, out = f"{result['layers']} layers", []
    for cut, row in result["rows"].items():
        seconds = [f"{row[name]['compile_seconds']} s" for name in ("scanned", "loop")]
        ratio = f"{row['scanned / loop']['compile_seconds']}x"
        out.append((f"compiling {where}, stages {cut}: scanned / loop", *seconds, ratio))
    for name, ratio in result["steps"]["ratios"].items():
        figures = (f"{result['steps']['step_cpu_seconds'][cut]} s" for cut in name.split(" / "))
        what = f"a step of {where} scanned, processor's seconds, stages {name}"
        out.append((what, *figures, spread(ratio)))
    return out


def torch_ddp(result: Any) -> list[Row]:
    return of_ratios(result, result["mesh"])


def torch_fsdp(result: Any) -> list[Row]:
    return [row for mesh, found in result["meshes"].items() for row in of_ratios(found, mesh)]


def pipeline(result: Any) -> list[Row]:
    out: list[Row] = []
    for mesh, row in result["meshes"].items():
        cut = row.get("PyTorch's best cut")
        where = f"{mesh}, pipeline" + (f" (PyTorch's best cut: {cut})" if cut else "")
        out += of_ratios(row, where)
    return out


def hand_sharded(result: Any) -> list[Row]:
    own, other = result["planning_seconds"], result["opening_seconds"]
    return [
        *of_ratios(result, "rules over data and tensor, microbatches per copy"),
        ("tracing and planning beside opening", f"{own} s", f"{other} s", f"{own / other:.1%}"),
    ]


def planner_scale(result: Any) -> list[Row]:
    return [
        (
            f"search over {name}: step beside the summed speeds, in {row['seconds']} s",
            f"{row['step_seconds']} s",
            f"{row['bound_seconds']} s",
            f"{row['step_seconds'] / row['bound_seconds']:.2f}x",
        )
        for name, row in result["rows"].items()
    ]


def dispatch(result: Any) -> list[Row]:
    rows = result["microseconds"]
    return [
        (
            f"a microbatch of {result['parameters']} parameters beside its bare program, {r} sums",
            f"{rows[f'step of hxla over its microbatches, {r} sums']} us",
            f"{rows['bare program, called back to back']} us",
            f"{rows[f'overhead of a microbatch, {r} sums']} us more",
        )
        for r in ("exact", "float")
    ]


def tiny(result: Any) -> list[Row]:
    what = f"a step of {result['microbatches']} microbatches of 2,762 parameters: "
    seconds, ratios = result["step_seconds"], result["ratios"]
    return [
        (what + name, *(f"{1e3 * seconds[own]:.3g} ms" for own in name.split(" / ")), spread(ratio))
        for name, ratio in ratios.items()
    ]


def prediction(result: Any, of: str) -> list[Row]:
    return [
        (
            f"{row[of]} on cores of {row['cluster']}: predicted beside measured step",
            f"{row['predicted_seconds']} s",
            f"{row['measured_seconds']} s",
            f"{row['error']:+.1%}",
        )
        for row in result["rows"]
    ]


def collectives(result: Any) -> list[Row]:
    return [
        (
            f"{row['form']} of {row['workers']} processes, {row['bytes']} bytes: predicted beside "
            "measured",
            f"{row['predicted_seconds']} s",
            f"{row['measured_seconds']} s",
            f"measured {row['ratio']}x",
        )
        for row in result["rows"]
    ]


def staggered(result: Any) -> list[Row]:
    return [
        row
        for devices, own in result["devices"].items()
        for row in of_ratios(own, f"two pipelines behind one card a node, {devices}")
    ]


def islands(result: Any) -> list[Row]:
    what = f"a GPT over links of {result['megabits_per_second']:g} Mb/s: islands, meeting every "
    what += f"{result['every']} steps, beside one sum each step"
    return [
        (
            f"{what}: {'a step' if unit else 'loss at equal examples'}",
            f"{result[key]['islands']} {unit}".strip(),
            f"{result[key]['together']} {unit}".strip(),
            f"{result[key]['islands'] / result[key]['together']:.3f} of it",
        )
        for unit, key in (("s", "step_seconds"), ("", "loss"))
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


def startup(result: Any) -> list[Row]:
    rows = result["rows"]
    out: list[Row] = []
    for name, ratio in result["ratios"]["seconds"].items():
        a, b = name.split(" / ")
        figures = (f"{rows[one]['seconds']} s" for one in (a, b))
        out.append((f"until the first step is done: {a} / {b}", *figures, spread(ratio)))
    return out


def vocabulary(result: Any) -> list[Row]:
    own, [[name, ratio]] = result["rows"]["seconds"], result["ratios"]["seconds"].items()
    figures = (f"{own[one]} s" for one in ("hxla", "plain JAX"))
    return [(f"a step with a vocabulary of {result['height']:,}: {name}", *figures, spread(ratio))]


PARTS = (
    Part(
        name="plain_jax",
        before=[*RUN, "--mesh", "cpu-1.0-1.0"],
        options=["--rounds", "5"],
        quick=["--rounds", "1", "--sizes", "2"],
        rows=plain_jax,
    ),
    Part(
        name="mixed_speed",
        options=["--meshes", MESH, "--rounds", "4", "--batch-size", "32"],
        quick=["--meshes", MESH, "--rounds", "1", "--batch-size", "8"],
        rows=mixed_speed,
    ),
    Part(
        name="hand_sharded",
        before=[*RUN, "-n", "1"],
        options=["--rounds", "3"],
        quick=["--rounds", "1"],
        rows=hand_sharded,
    ),
    Part(
        name="planner_scale",
        options=[],
        quick=["--decoders", "0.35e9"],
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
        name="startup",
        options=["--rounds", "3"],
        quick=["--rounds", "1"],
        rows=startup,
    ),
    Part(
        name="vocabulary",
        options=["--rounds", "10"],
        quick=["--rounds", "1", "--height", "2000"],
        rows=vocabulary,
    ),
    Part(
        name="scanned_layers",
        options=["--cuts", "1,1", "3,1"],
        quick=["--layers", "4", "--cuts", "1,1", "3,1", "--rounds", "1"],
        rows=scanned_layers,
    ),
    Part(
        name="dispatch",
        options=["--rounds", "20"],
        quick=["--rounds", "2", "--microbatches", "32"],
        rows=dispatch,
    ),
    Part(
        name="tiny",
        options=["--rounds", "40"],
        quick=["--rounds", "2", "--microbatches", "4"],
        rows=tiny,
    ),
    Part(
        name="prediction",
        options=["--clusters", "1.0-0.5", "--models", "bert"],
        quick=["--clusters", "1.0", "--models", "conv", "--chunk", "8"],
        rows=functools.partial(prediction, of="model"),
    ),
    Part(
        name="prediction_forms",
        options=["--forms", "zero 3", "split", "pipeline", "--meshes", "1.0-0.5"],
        quick=["--forms", "zero 3", "--meshes", "1.0-0.5", "--chunk", "8"],
        rows=functools.partial(prediction, of="form"),
    ),
    Part(
        name="collectives",
        options=["--workers", "4", "--sizes", "245760", "983040"],
        quick=["--workers", "2", "--sizes", "61440", "122880", "--rounds", "1"],
        rows=collectives,
        lacking=paced_links.lacking,
    ),
    Part(
        name="staggered",
        options=["--devices", "waiting", "--rounds", "4"],
        quick=["--devices", "waiting", "--rounds", "1", "--microbatches", "2", "--rows", "256"],
        rows=staggered,
        lacking=paced_links.lacking,
    ),
    Part(
        name="islands",
        options=["--steps", "100"],
        quick=["--steps", "4", "--every", "2", "--width", "32", "--layers", "1"],
        rows=islands,
        lacking=paced_links.lacking,
    ),
    Part(
        name="torch_ddp",
        options=["--mesh", MESH, "--batch-size", "32", "--rounds", "5"],
        quick=["--mesh", MESH, "--batch-size", "8", "--rounds", "1", "--microbatch-sizes", "2"],
        rows=torch_ddp,
        torch="needs",
    ),
    Part(
        name="torch_fsdp",
        options=["--meshes", MESH, "--batch-size", "32", "--rounds", "4"],
        quick=["--meshes", MESH, "--batch-size", "8", "--rounds", "1"],
        rows=torch_fsdp,
        torch="needs",
    ),
    Part(
        name="pipeline",
        options=["--meshes", MESH, "--rounds", "4"],
        quick=["--meshes", MESH, "--microbatches", "4", "--microbatch-size", "1", "--rounds", "1"],
        rows=pipeline,
        torch="takes",
    ),
)


def said(command: Sequence[str]) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


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
    command += ["--torch", torch] if part.torch and torch else []
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
    return part.rows(results.read(out)), time.monotonic() - begun


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
    torch = args.torch if version else ""
    facts = results.facts() | {
        "torch": version or "none: the comparisons with PyTorch are left out",
    }
    rows: list[Row] = []
    notes, failed = [], []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for part in PARTS:
            if args.only and part.name not in args.only:
                continue
            if why := part.lacking():
                notes.append(f"{part.name}: skipped, {why}")
                print(notes[-1], flush=True)
                continue
            if part.torch and not torch:
                without = "skipped" if part.torch == "needs" else "without PyTorch"
                notes.append(f"{part.name}: {without}, for there is no interpreter with torch")
                print(notes[-1], flush=True)
                if part.torch == "needs":
                    continue
            try:
                found, seconds = measure(part, pathlib.Path(name), torch, args.quick)
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
    folder = args.folder or results.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.md").write_text(table(facts, rows, notes))
    keys = ("compared", "hxla", "beside it", "ratio")
    result = {
        "measured": facts,
        "rows": [dict(zip(keys, r, strict=True)) for r in rows],
        "notes": notes,
    }
    (folder / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {folder / 'bench.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
