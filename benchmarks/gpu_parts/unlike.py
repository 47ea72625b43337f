"""A GPU and a processor in one job: they share no library, and meet in host memory."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from report import ROOT, Report, arguments

args = arguments()
report = Report(args.out)
script = pathlib.Path(__file__).with_name("train_gpt.py")
env = dict(os.environ)
env.pop("JAX_PLATFORMS", None)
kinds = ["gpu", "cpu"]
if args.tiny:  # two processors, one of them with a backend that knows its own process only
    kinds = ["cpu", "cpu"]
    env |= {
        "HXLA_LOCAL_CLIENTS": "1",
        "HXLA_COMMUNICATION_OVER": "host",
        "PYTHONPATH": f"{ROOT / 'tests' / 'local_clients'}:{env['PYTHONPATH']}",
    }
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    mesh, out = folder / "mesh.toml", folder / "told.json"
    devices = "".join(f'[[device]]\nkind = "{kind}"\n' for kind in kinds)
    mesh.write_text(f'name = "unlike"\n{devices}')
    options = ["--steps", "4", "--out", str(out), "--counts", "7", "1", *["--tiny"] * args.tiny]
    begun = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", "run", "--mesh", str(mesh), str(script), *options],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begun
    if ran.returncode:
        report.failure((ran.stdout + ran.stderr)[-3000:])
        raise SystemExit(1)
    told = json.loads(out.read_text())
losses = told["losses"]
report.row("a GPU and a processor in one job, loss", f"{losses[0]:.3f} -> {losses[-1]:.3f}")
report.row("seconds of a step there", f"{told['seconds'][-1]:.3f}")
report.row("the job from start to end", f"{seconds:.1f} s")
report.detail("sha256", told["sha256"])
