"""Runs a script of another interpreter in each process of `hxla run`, in its throttle.

    hxla run --mesh MESH benchmarks/run_torch.py FOLDER PORT PYTHON SCRIPT [arguments]

What `torchrun` would set is in the environment; FOLDER is the script's first argument.
"""

import os
import subprocess
import sys

import jax

folder, port, python, script, *arguments = sys.argv[1:]
environment = os.environ | {
    "RANK": str(jax.process_index()),
    "WORLD_SIZE": str(jax.process_count()),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": port,
    "OMP_NUM_THREADS": "1",
}
environment.pop("PYTHONPATH", None)
ran = subprocess.run([python, script, folder, *arguments], env=environment, check=False)
sys.exit(ran.returncode)
