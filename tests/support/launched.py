"""Scripts under `hxla run`."""

import os
import subprocess
import sys

from support.paths import PYTHONPATH


def start(tmp_path, code, *options, env=None, module=("-m", "hxla", "run")):
    script = tmp_path / "script.py"
    script.write_text(code)
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, *module, *options, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | {"PYTHONPATH": PYTHONPATH} | (env or {}),
        cwd=tmp_path,
    )
