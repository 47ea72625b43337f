"""Detects tasks of batch systems, each of which is a process of a job."""

import os

_TASK_COUNTS = {
    "Slurm": "SLURM_NTASKS",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
}


def cluster_in_sight() -> str | None:
    """The batch job of several processes with this one, in words; None without one."""
    if "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        for name, variable in _TASK_COUNTS.items():
            number = os.environ.get(variable, "1")
            if number.isdigit() and int(number) > 1:
                return f"{name} with {number} tasks"
    return None
