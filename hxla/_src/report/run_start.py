"""How a run was started, which begins its lines in `metrics.jsonl`, and how it stands."""

import collections
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ... import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_GIT_SECONDS = 5.0  # a large repository on a slow disk


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of a run, or of its continuation from a checkpoint.

    Attributes:
        step: The number of updates before the start; 0 unless the run resumes.
        num_steps: The planned total number of updates; None if there is no end.
        time: The date and time with the offset of the local zone, in ISO 8601.
        command: The command line of the process, or of its `hxla run`.
        commit: The git commit of the script, with `+ changes` for an edited tree; empty without a
            repository.
        hosts: The names of the hosts.
        num_processes: The number of processes.
        devices: The number of devices of each kind.
        job: The arguments of the job that describe it, by name.
        versions: The version of each package.
    """

    step: int
    num_steps: int | None
    time: str
    command: str
    commit: str
    hosts: tuple[str, ...]
    num_processes: int
    devices: Mapping[str, int]
    job: Mapping[str, str]
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """Whether a run goes on or how it ended.

    Attributes:
        kind: `stopped` is an end before the last step without an error.
        why: The error or signal that ended the run; empty if there was none.
    """

    kind: Literal["running", "finished", "stopped", "failed"]
    why: str = ""


def run_start(
    step: int,
    num_steps: int | None,
    *,
    hosts: Sequence[str],
    devices: Iterable[str],
    job: Mapping[str, str],
) -> RunStart:
    """The start of a run by this process at this moment.

    Args:
        hosts: The host of each process.
        devices: The kind of each device.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return RunStart(
        step=step,
        num_steps=num_steps,
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        command=_command(),
        commit=_commit(),
        hosts=tuple(dict.fromkeys(hosts)),
        num_processes=len(hosts),
        devices=dict(collections.Counter(devices)),
        job=dict(job),
        versions={"hxla": __version__, **versions, "Python": platform.python_version()},
    )


def _command() -> str:
    if launched := os.environ.get("HXLA_COMMAND"):
        return launched
    interpreter, *arguments = sys.orig_argv or [sys.executable]
    return shlex.join([pathlib.Path(interpreter).name, *arguments])


def _commit() -> str:
    """The commit of the script's folder; in a notebook, of the current folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = pathlib.Path(script).resolve().parent if script else pathlib.Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*command, "--dirty= + changes"],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
