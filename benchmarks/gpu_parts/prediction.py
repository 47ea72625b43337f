"""`hxla devices --measure`, `hxla profile`, and a prediction beside what is measured."""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from report import ROOT, Report, arguments

sys.path.insert(0, str(ROOT))

from hxla import Plan, load_cluster

args = arguments()
report = Report(args.out)
script = [str(pathlib.Path(__file__).with_name("train_gpt.py"))]
script += ["--tiny", "--steps", "6"] if args.tiny else []


def hxla(*command: str) -> float:
    """Seconds of a command of hxla.

    Raises:
        RuntimeError: With the last lines, if it fails.
    """
    return ran([sys.executable, "-m", "hxla", *command])


def ran(command: list[str]) -> float:
    """Seconds of a command; what it prints goes to this part's log, with the time of each line."""
    begun, lines = time.perf_counter(), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            print(f"{time.perf_counter() - begun:6.1f} {line.rstrip()}", flush=True)
    if process.returncode:
        raise RuntimeError("".join([f"{' '.join(command[:4])}\n", *lines[-15:]]))
    seconds = time.perf_counter() - begun
    report.detail(f"seconds of {' '.join(pathlib.Path(own).name for own in command[1:4])}", seconds)
    return seconds


def devices(mesh: pathlib.Path) -> None:
    hxla("devices", "--measure", "--write", str(mesh))
    [device] = load_cluster(str(mesh)).devices
    rates = {rate.dtype: rate.flops_per_second / 1e12 for rate in device.rates}
    report.row(
        f"hxla devices: {device.kind}, TFLOP/s",
        ", ".join(f"{dtype} {value:.4g}" for dtype, value in rates.items()),
    )
    report.row("memory, GB/s", f"{(device.memory_bytes_per_second or 0) / 1e9:.4g}")
    report.row("memory, GiB that JAX may take", f"{(device.memory_bytes or 0) / 2**30:.1f}")


def planned(folder: pathlib.Path, mesh: pathlib.Path) -> Plan:
    profile, plan = folder / "profile.json", folder / "plan.json"
    seconds = hxla("profile", "--write", str(profile), *script)
    report.row("hxla profile takes", f"{seconds:.1f} s")
    options = ["--mesh", str(mesh), "--profile", str(profile), "--stages", "1"]
    hxla("plan", *options, "--write", str(plan), *script)
    return Plan.read(plan)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        mesh = folder / "here.toml"
        report.attempt("hxla devices", lambda: devices(mesh))
        if not mesh.exists():
            return
        plan = report.attempt("hxla profile and hxla plan", lambda: planned(folder, mesh))
        out = folder / "run.json"
        report.attempt("training", lambda: ran([sys.executable, *script, "--out", str(out)]))
        if plan is None or not out.exists():
            return
        told = json.loads(out.read_text())
        measured = statistics.median(told["seconds"][len(told["seconds"]) // 4 :])
        predicted = plan.prediction.step_seconds
        report.detail("steps", told)
        report.row(
            "predicted beside measured step",
            f"{1e3 * predicted:.2f} ms",
            f"{1e3 * measured:.2f} ms",
            f"{predicted / measured - 1:+.1%}",
        )
        own, peak = plan.prediction.devices[0].memory_bytes, told["peak_bytes"]
        report.row(
            "predicted memory beside the most that JAX held",
            f"{own / 2**20:.0f} MiB",
            f"{peak / 2**20:.0f} MiB" if peak else "not told here",
            f"{own / peak - 1:+.1%}" if peak else "",
        )


main()
