"""Processes that are forked with their imports done."""

import subprocess
import sys

from support.launched import PATIENCE_SECONDS, own_environment
from support.paths import JOBS


def test_they_outlive_the_process_that_they_were_forked_from(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(JOBS / "warm_processes.py")],
        cwd=tmp_path,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ran.stdout.splitlines() == ["alive None None", "killed None -9", "ended 7 7"], ran.stderr
