"""Runs a script up to its first job, for `hxla plan` and `hxla profile`."""

import contextvars
from collections.abc import Sequence

from ..choose.planning import PlanRequest
from ..core.errors import ConfigError
from ..jax.tracing import brief_absence
from ..job.context import JobContext
from ..launch.join import run_as_main

_is_wanted = contextvars.ContextVar("hxla_capture", default=False)


class Captured(BaseException):
    """Carries a job out of its script, past any `except Exception` of the script."""

    def __init__(self, job: JobContext, request: PlanRequest):
        super().__init__("a job was captured")
        self.job, self.request = job, request


def offer(job: JobContext, request: PlanRequest) -> None:
    """End the script here if it runs for its job only."""
    if _is_wanted.get():
        raise Captured(job, request)


def job_of(command: Sequence[str]) -> tuple[JobContext, PlanRequest]:
    """The first job that a script plans, opens or trains, and its plan request.

    Args:
        command: A Python script and its arguments.

    Raises:
        ConfigError: If the script ends without a job.
    """
    token = _is_wanted.set(True)
    try:
        with brief_absence():  # scripts often make shapes only
            run_as_main(command)
    except Captured as captured:
        return captured.job, captured.request
    finally:
        _is_wanted.reset(token)
    raise ConfigError(f"{command[0]} ended without a call of hxla.train, Job.plan or Job.open")
