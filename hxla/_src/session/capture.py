"""A script run for the job it describes: `hxla plan` and `hxla profile` stop it at the first."""

import contextvars
from collections.abc import Sequence

from ..choose.planning import PlanRequest
from ..core.errors import ConfigError
from ..jax.absent_sharding import brief_absence
from ..job.context import JobContext
from ..launch.join import run_as_main

_is_wanted = contextvars.ContextVar("hxla_capture", default=False)


class Captured(BaseException):
    """Carries a job out of the script that made it; no script's `except Exception` takes it."""

    def __init__(self, job: JobContext, wishes: PlanRequest):
        super().__init__("a job was captured")
        self.job, self.wishes = job, wishes


def offer(job: JobContext, wishes: PlanRequest) -> None:
    """End the script here, if its job is all that is wanted."""
    if _is_wanted.get():
        raise Captured(job, wishes)


def job_of(command: Sequence[str]) -> tuple[JobContext, PlanRequest]:
    """The first job that a script plans, opens or trains, and what it asks of its plan.

    Args:
        command: A Python script and its arguments.

    Raises:
        ConfigError: If the script ends without one.
    """
    token = _is_wanted.set(True)
    try:
        with brief_absence():  # scripts often make shapes only
            run_as_main(command)
    except Captured as found:
        return found.job, found.wishes
    finally:
        _is_wanted.reset(token)
    raise ConfigError(f"{command[0]} ended without a call of hxla.train, Job.plan or Job.open")
