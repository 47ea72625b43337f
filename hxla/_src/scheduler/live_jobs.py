"""Files of jobs to run: the script of each, and its figures for the scheduler."""

import dataclasses
import os
import re
from typing import Annotated

import pydantic

from ..core.errors import ScheduleError
from ..core.files import fault, listed, named, read_toml, shown
from .elastic_jobs import ElasticJob
from .waste import Capability

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)  # of a file, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveJob:
    """A job with the command that runs it.

    Attributes:
        command: A Python script and its arguments.
    """

    job: ElasticJob
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name


class _JobsValue(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_Seconds = Annotated[float, pydantic.Field(ge=0, le=1e9)]


class _JobTable(_JobsValue):
    name: str
    script: str = pydantic.Field(min_length=1)
    arguments: list[str] = []
    steps: int = pydantic.Field(ge=1, le=10**9)
    microbatches: int = pydantic.Field(ge=1, le=1 << 16)
    min_devices: int = pydantic.Field(1, ge=1)
    arrival_seconds: _Seconds = 0.0
    seconds: dict[str, Annotated[float, pydantic.Field(ge=1e-9, le=1e9)]] = pydantic.Field(
        min_length=1
    )
    kind: str | None = None
    mixed: bool = True

    @pydantic.field_validator("name")
    @classmethod
    def _names_files(cls, name: str) -> str:
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise ValueError("its files are named so: use letters, digits, '_', '-' and '.'")
        return name


class _JobsFileTable(_JobsValue):
    job: list[_JobTable] = pydantic.Field(min_length=1, max_length=1024)


def read_live_jobs(path: str | os.PathLike[str]) -> tuple[LiveJob, ...]:
    """The jobs of a TOML file.

    Args:
        path: Of the file; scripts are relative to its folder.

    Returns:
        The jobs in the file's order. Their kinds of devices are in the order of the first one's.

    Raises:
        ScheduleError: If the file cannot be read, with all its faults at once.
    """
    refuse = named("file of jobs", path, ScheduleError)
    table = read_toml(path, refuse)
    try:
        rows = _JobsFileTable.model_validate(table).job
    except pydantic.ValidationError as error:
        faults = [fault(failure, _JobsFileTable) for failure in error.errors()]
        raise refuse("has faults:" + listed(faults)) from None
    kinds, jobs, faults = tuple(rows[0].seconds), list[LiveJob](), list[str]()
    names = [row.name for row in rows]
    faults += [
        f"{n}: several jobs of this name" for n in sorted({n for n in names if names.count(n) > 1})
    ]
    for row in rows:
        script = os.path.join(os.path.dirname(os.path.abspath(path)), row.script)
        if not os.path.isfile(script):
            faults.append(f"{row.name}: no script {shown(script)}")
        if set(row.seconds) != set(kinds):
            faults.append(
                f"{row.name}: seconds on {', '.join(sorted(row.seconds))}, those of {names[0]} are "
                f"on {', '.join(sorted(kinds))}: give a figure for each kind in every job"
            )
        elif row.kind is not None and row.kind not in kinds:
            faults.append(f"{row.name}: kind {shown(row.kind)} has no seconds")
        else:
            try:
                jobs.append(LiveJob(job=_job(row, kinds), command=(script, *row.arguments)))
            except ScheduleError as error:
                faults.append(str(error))
    if faults:
        raise refuse("has faults:" + listed(faults))
    return tuple(jobs)


def _job(row: _JobTable, kinds: tuple[str, ...]) -> ElasticJob:
    alone = 0 if row.kind is None else kinds.index(row.kind)
    return ElasticJob(
        name=row.name,
        arrival_seconds=row.arrival_seconds,
        num_steps=row.steps,
        num_microbatches=row.microbatches,
        min_devices=row.min_devices,
        capabilities=tuple(
            Capability(kind=kind, microbatches_per_second=1 / row.seconds[kind]) for kind in kinds
        ),
        gang=tuple(row.microbatches * (k == alone) for k in range(len(kinds))),
        mixed=row.mixed,
        alone=alone,
    )
