"""What the processes of a job of the tests tell of what they ended with."""

import json
import os
import subprocess
import sys

from support.paths import JOBS, PYTHONPATH


def results_of(script, num, *arguments, timeout, **settings):
    """Run a script of `tests/jobs` by `hxla run`; for each process what it printed as its result.

    Args:
        script: Its name; each process prints `RESULT`, its number, and JSON.
        num: Of processes.
        arguments: Of the script.
        timeout: Seconds for all of it.
        settings: More of the environment.
    """
    known = {"PYTHONPATH": PYTHONPATH, "NPROC": "1"}
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "hxla", "run", "-n", str(num), str(JOBS / script)),
            *map(str, arguments),
        ],
        env=os.environ | known | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [line.split("RESULT ", 1)[1] for line in ran.stdout.splitlines() if "RESULT " in line]
    found = dict(line.split(" ", 1) for line in lines)
    return [json.loads(found[rank]) for rank in sorted(found)]
