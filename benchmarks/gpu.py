"""What hxla does on a GPU, measured for the first time on any machine that has one: eight minutes.

    python benchmarks/gpu.py [--only NAME ...] [--torch PYTHON] [--folder DIR]
    python benchmarks/gpu.py --dry

Runs the parts below one after another, each in a process of its own with a time limit, so that a
crash, a hang or a lack of memory loses that part only. After each part benchmarks/results/gpu/
holds NAME.json with what it found, the machine, and the last lines of what failed; at the end
table.md shows all of them. `--dry` runs every part at a tiny size on the CPU, to see that the
script works: its figures mean nothing, and they go to a temporary folder.

Nothing is installed: the interpreter needs jax with its CUDA plugin and hxla's other dependencies.
hxla is that of this checkout.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results" / "gpu"
PARTS = ROOT / "benchmarks" / "gpu_parts"
SECONDS = 480.0  # for all parts together
DRY_SECONDS = 3600.0  # for each of a dry run: the machine may be busy
NEEDED = ("jax", "flax", "optax", "orbax.checkpoint", "pydantic", "rich", "pynvml", "scipy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One of the parts.

    Attributes:
        name: Of its file.
        seconds: After which it is ended.
        what: It shows.
    """

    name: str
    seconds: float
    what: str


ALL = (
    Part(name="first_example", seconds=60, what="the README's first example"),
    Part(name="same_bits", seconds=150, what="one SHA-256, however the work is spread"),
    Part(name="gpt_speed", seconds=200, what="124 million parameters beside JAX and PyTorch"),
    Part(name="sums", seconds=100, what="exact beside float sums"),
    Part(name="dispatch", seconds=60, what="what a microbatch of a tiny model costs"),
    Part(name="prediction", seconds=100, what="the predicted step beside the measured one"),
)

# Run in a process of its own, for it takes the card.
_MACHINE = """
import importlib.metadata as m, json, jax
names = ("jax", "jaxlib", "flax", "optax", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin",
         "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
         "nvidia-nccl-cu12", "nvidia-nccl-cu13")
found = {}
for name in names:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
device = jax.devices()[0]
import pynvml
driver = ""
try:
    pynvml.nvmlInit()
    driver = str(pynvml.nvmlSystemGetDriverVersion())
except pynvml.NVMLError:
    pass
print(json.dumps({"device": device.device_kind, "platform": device.platform,
                  "number": jax.device_count(), "driver": driver, "versions": found}))
"""


def environment(is_dry: bool) -> dict[str, str]:
    """Of every process: hxla of this checkout, and memory taken as it is needed."""
    env = dict(os.environ)
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH", "")])]
    env["PYTHONPATH"] = os.pathsep.join(path)
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the card
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if is_dry:
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    return env


def said(command: Sequence[str], **options: Any) -> str:
    """What a command prints; nothing if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def machine(is_dry: bool, torch: str) -> dict[str, Any]:
    """What the figures depend on.

    Raises:
        SystemExit: If a package is missing, or jax has no GPU.
    """
    missing = [name for name in NEEDED if not _is_here(name)]
    if missing:
        raise SystemExit(f"{sys.executable} lacks {', '.join(missing)}: install hxla[cuda] there")
    probe = subprocess.run(
        [sys.executable, "-c", _MACHINE],
        capture_output=True,
        text=True,
        check=False,
        env=environment(is_dry),
    )
    if probe.returncode:
        raise SystemExit(f"jax does not start:\n{probe.stderr[-3000:]}")
    found = json.loads(probe.stdout.splitlines()[-1])
    if not is_dry and found["platform"] == "cpu":
        raise SystemExit(f"jax sees no GPU here:\n{probe.stderr[-3000:]}\n--dry needs none")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": said(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT) or "not known",
        "python": sys.version.split()[0],
        "torch": said([torch, "-c", "import torch; print(torch.__version__)"]) or "none",
        "is_dry": is_dry,
        **found,
    }


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def run(
    part: Part, facts: dict[str, Any], folder: pathlib.Path, torch: str, left: float
) -> dict[str, Any]:
    """Run a part, and write what it found.

    Args:
        part: To run.
        facts: Of the machine.
        folder: For results.
        torch: Interpreter that has torch.
        left: Seconds for this and all other parts.
    """
    begun, file = time.monotonic(), folder / f"{part.name}.json"
    with tempfile.TemporaryDirectory() as name:
        out, log = pathlib.Path(name, "out.json"), pathlib.Path(name, "log")
        command = [sys.executable, str(PARTS / f"{part.name}.py"), "--out", str(out)]
        command += ["--torch", torch] + (["--dry"] if facts["is_dry"] else [])
        limit = DRY_SECONDS if facts["is_dry"] else min(part.seconds, left)
        code: int | str = 0
        with log.open("w") as text, _process(command, text, environment(facts["is_dry"])) as own:
            try:
                code = own.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = f"not done after {limit:.0f} s"
        found = json.loads(out.read_text()) if out.exists() else {"rows": [], "details": {}}
        lines = log.read_text().strip().splitlines()
    found["failures"] = found.get("failures", [])
    if code:
        found["failures"].append("\n".join([f"exit: {code}", *lines[-25:]]))
    result = {
        "part": part.name,
        "shows": part.what,
        "machine": facts,
        "seconds": round(time.monotonic() - begun, 1),
        **found,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    return result


@contextlib.contextmanager
def _process(command: Sequence[str], log: Any, env: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process, ended with all that it started when the block is left."""
    own = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
    )
    try:
        yield own
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(own.pid, signal.SIGKILL)
        own.wait()


def table(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """All results as Markdown."""
    lines = ["# On a GPU", ""]
    if facts["is_dry"]:
        lines += ["A dry run on the CPU: the figures mean nothing.", ""]
    versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items())
    lines += [
        f"- {facts['number']} x {facts['device']}, driver {facts['driver'] or 'none'}",
        f"- Python {facts['python']}, {versions}, torch {facts['torch']}",
        f"- commit {facts['commit']}, {facts['date']}",
        "",
        "| | hxla | beside it | ratio |",
        "|---|---|---|---|",
    ]
    for result in results:
        lines.append(f"| **{result['shows']}** ({result['seconds']} s) | | | |")
        for row in result["rows"]:
            cells = [row["what"], row["hxla"], row["beside"], row["ratio"]]
            lines.append(f"| {' | '.join(cells)} |")
        for failure in result["failures"]:
            lines.append(f"| FAILED: {failure.splitlines()[0]} | | | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="every part at a tiny size on the CPU")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in ALL], metavar="NAME")
    parser.add_argument("--torch", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--folder", type=pathlib.Path, help="for results")
    args = parser.parse_args()
    begun = time.monotonic()
    folder = args.folder or (pathlib.Path(tempfile.mkdtemp()) if args.dry else FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine(args.dry, args.torch)
    results = []
    for part in ALL:
        if args.only and part.name not in args.only:
            continue
        left = SECONDS - (time.monotonic() - begun)
        if left < 5 and not args.dry:
            none = {"rows": [], "failures": [f"not begun: {SECONDS:.0f} s are over"]}
            results.append({"part": part.name, "shows": part.what, "seconds": 0, **none})
        else:
            results.append(run(part, facts, folder, args.torch, left))
        own = results[-1]
        print(f"{part.name}: {own['seconds']} s", flush=True)
        for failure in own["failures"]:
            print(f"{part.name} FAILED: {failure}", flush=True)
        (folder / "table.md").write_text(table(facts, results))
    print(table(facts, results))
    print(f"written: {folder}")
    return 1 if any(r["failures"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
