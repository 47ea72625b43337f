"""A script run for the job it describes: `hxla plan` and `hxla profile` stop it at the first."""

import contextlib
import contextvars
import os
import runpy
import sys
from collections.abc import Iterator, Sequence

from .._core._errors import ConfigError
from ._planning import Wishes
from ._traced_job import TracedJob

_is_wanted = contextvars.ContextVar("hxla_capture", default=False)


class Captured(BaseException):
    """Carries a job out of the script that made it; no script's `except Exception` takes it."""

    def __init__(self, job: TracedJob, wishes: Wishes):
        super().__init__("a job was captured")
        self.job, self.wishes = job, wishes


def offer(job: TracedJob, wishes: Wishes) -> None:
    """End the script here, if its job is all that is wanted."""
    if _is_wanted.get():
        raise Captured(job, wishes)


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    token = _is_wanted.set(True)
    try:
        yield
    finally:
        _is_wanted.reset(token)


def job_of(command: Sequence[str]) -> tuple[TracedJob, Wishes]:
    """The first job that a script plans, opens or trains, and what it asks of its plan.

    Args:
        command: A Python script and its arguments.

    Raises:
        ConfigError: If the script ends without one.
    """
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    try:
        with _capturing():
            runpy.run_path(command[0], run_name="__main__")
    except Captured as found:
        return found.job, found.wishes
    raise ConfigError(f"{command[0]} ended without a call of hxla.train, Job.plan or Job.open")
