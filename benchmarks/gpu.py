"""What hxla does on one GPU, in at most ten minutes; nothing is installed.

    make bench-gpu PYTHON=python3                                all of it
    python benchmarks/gpu.py [--only NAME ...] [--torch PYTHON]
    python benchmarks/gpu.py --tiny                              on the CPU, to see that it works

The interpreter needs jax with its CUDA plugin and hxla's other dependencies; hxla is that of this
checkout. The parts below run one after another, each in a process of its own with a time limit, so
that a crash, a hang or a lack of memory loses that part only. After each of them
benchmarks/results/gpu.json holds what was found so far with the commit, the date, the versions and
the last lines of what failed, and gpu.md the same as a table; with `--only` they keep what they had
of the other parts. Figures of `--tiny` mean nothing, and go to a temporary folder.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 570.0  # for all parts together
TINY_SECONDS = 1800.0  # for each: the machine may be busy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One of the parts.

    Attributes:
        name: Of its file in gpu_parts.
        seconds: After which it is ended.
        what: It shows.
    """

    name: str
    seconds: float
    what: str


#: In the order of their weight: what the time does not suffice for is left out at the end.
ALL = (
    Part(name="causes", seconds=120, what="what each part of an exact step costs, in plain JAX"),
    Part(name="first_example", seconds=30, what="the README's first example"),
    Part(name="gpt_speed", seconds=160, what="124 million parameters beside JAX and PyTorch"),
    Part(name="dispatch", seconds=40, what="what a microbatch of a tiny model costs"),
    Part(name="kernels", seconds=80, what="kernels of an exact step, and the busy card"),
    Part(name="attention", seconds=80, what="fused and unfused attention"),
    Part(name="models", seconds=80, what="a ResNet-50 and embeddings beside JAX"),
    Part(name="same_bits", seconds=150, what="one SHA-256, however the work is spread"),
    Part(name="unlike", seconds=90, what="a GPU and a processor in one job"),
    Part(name="prediction", seconds=150, what="what is predicted beside what is measured"),
    Part(name="memory", seconds=120, what="state on the host and recomputation"),
    Part(name="precision", seconds=120, what="bf16 and fp16 by a word, beside casts by hand"),
)

# In a process of its own, for it takes the card.
_MACHINE = """
import importlib.metadata, json, sys, jax
sys.path.append("benchmarks")
from results import facts
wanted = ("jax", "flax", "optax", "numpy", "cuda", "nvidia")
names = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
device = jax.devices()[0]
limit = (device.memory_stats() or {}).get("bytes_limit")
from pynvml import *
try:
    nvmlInit()
    driver = nvmlSystemGetDriverVersion()
except NVMLError:
    driver = None
print(json.dumps({
    **facts(),
    "device": device.device_kind, "platform": device.platform, "number": jax.device_count(),
    "gib": limit and limit / 2**30, "driver": driver,
    "versions": {n: importlib.metadata.version(n) for n in sorted(names) if n.startswith(wanted)},
}))
"""


def environment(is_tiny: bool) -> dict[str, str]:
    """Of every process: hxla of this checkout, and memory taken as it is needed."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the card
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if is_tiny:
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    return env


def said(*command: str) -> str | None:
    """What a command prints; None if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ran.stdout.strip()


def machine(is_tiny: bool, torch: str) -> dict[str, Any]:
    """What the figures depend on.

    Raises:
        SystemExit: If a package is missing, or jax has no GPU.
    """
    command, env = [sys.executable, "-c", _MACHINE], environment(is_tiny)
    probe = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    if probe.returncode:
        raise SystemExit(
            f"{probe.stderr[-3000:]}\n{sys.executable} needs hxla's dependencies, and jax with its "
            "CUDA plugin: pip install 'hxla[cuda13]' brings both"
        )
    found = json.loads(probe.stdout.splitlines()[-1])
    if not is_tiny and found["platform"] == "cpu":
        raise SystemExit(f"{probe.stderr[-3000:]}\njax sees no GPU here; --tiny needs none")
    seen = said(torch, "-c", "import torch; print(torch.__version__)")
    return {**found, "torch": seen, "is_tiny": is_tiny}


def run(part: Part, facts: dict[str, Any], torch: str, left: float) -> dict[str, Any]:
    """What a part found.

    Args:
        part: To run.
        facts: Of the machine.
        torch: Interpreter that has torch.
        left: Seconds for this and all other parts.
    """
    begun, code = time.monotonic(), "interrupted"
    limit = TINY_SECONDS if facts["is_tiny"] else max(1.0, min(part.seconds, left))
    with tempfile.TemporaryDirectory() as name:
        out, log = pathlib.Path(name, "out.json"), pathlib.Path(name, "log")
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_parts" / f"{part.name}.py")]
        command += ["--out", str(out), "--torch", torch, *["--tiny"] * facts["is_tiny"]]
        command += ["--gib", str(facts["gib"])] if facts["gib"] else []
        with log.open("w") as text:
            process = subprocess.Popen(
                command,
                stdout=text,
                stderr=text,
                env=environment(facts["is_tiny"]),
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = f"not done after {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # with all that it started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = json.loads(out.read_text()) if out.exists() else {}
        lines = log.read_text().strip().splitlines()
    failures = [*found.get("failures", [])]
    if code:
        failures.append("\n".join([f"exit: {code}", *lines[-25:]]))
    return {
        "shows": part.what,
        **{name: facts[name] for name in ("commit", "date")},
        "seconds": round(time.monotonic() - begun, 1),
        "rows": found.get("rows", []),
        "failures": failures,
        "details": found.get("details", {}),
    }


def left_out(part: Part, facts: dict[str, Any]) -> dict[str, Any]:
    """The result of a part for which no time is left."""
    row = {"what": f"LEFT OUT: --only {part.name} runs it", "hxla": "", "beside": "", "ratio": ""}
    measured = {name: facts[name] for name in ("commit", "date")}
    return {"shows": part.what, **measured, "seconds": 0, "rows": [row], "failures": []}


def table(facts: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """All results as Markdown."""
    lines = ["# On a GPU", ""]
    if facts["is_tiny"]:
        lines += ["A tiny run on the CPU: the figures mean nothing.", ""]
    versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items())
    lines += [
        f"- {facts['number']} x {facts['device']}, driver {facts['driver'] or 'none'}",
        f"- Python {facts['python']}, torch {facts['torch'] or 'none'}, {versions}",
        f"- commit {facts['commit']}, {facts['date']}, `make bench-gpu`",
        "",
        "| | hxla | beside it | hxla / beside it |",
        "|---|---|---|---|",
    ]
    for result in results.values():
        lines.append(
            f"| **{result['shows']}** ({result['seconds']} s{_elsewhen(result, facts)}) | | | |"
        )
        for row in result["rows"]:
            lines.append(f"| {' | '.join(row[k] for k in ('what', 'hxla', 'beside', 'ratio'))} |")
        for failure in result["failures"]:
            lines.append(f"| FAILED: {failure.splitlines()[0]} | | | |")
    return "\n".join(lines) + "\n"


def _elsewhen(result: dict[str, Any], facts: dict[str, Any]) -> str:
    own = [result[name] for name in ("commit", "date")]
    return "" if own == [facts["commit"], facts["date"]] else f"; {', '.join(own)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="every part at a tiny size on the CPU")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in ALL], metavar="NAME")
    parser.add_argument("--torch", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--folder", type=pathlib.Path, help="for gpu.json and gpu.md")
    args = parser.parse_args()
    begun = time.monotonic()
    usual = ROOT / "benchmarks" / "results"
    folder = args.folder or (pathlib.Path(tempfile.mkdtemp()) if args.tiny else usual)
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine(args.tiny, args.torch)
    kept = folder / "gpu.json"
    results = json.loads(kept.read_text())["parts"] if args.only and kept.exists() else {}
    for part in ALL:
        if args.only and part.name not in args.only:
            continue
        left = SECONDS - (time.monotonic() - begun)
        if not args.tiny and left < part.seconds / 2:
            own = left_out(part, facts)
        else:
            own = run(part, facts, args.torch, left)
        results[part.name] = own
        print(f"{part.name}: {own['seconds']} s", flush=True)
        for failure in own["failures"]:
            print(f"{part.name} FAILED: {failure}", flush=True)
        found = {"measured": facts, "parts": results}
        (folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "gpu.md").write_text(table(facts, results))
    print(table(facts, results))
    print(f"written: {folder}/gpu.json and gpu.md")
    return 1 if any(r["failures"] for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
