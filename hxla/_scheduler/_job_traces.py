"""Files of jobs: our own, and the published traces of EasyScale and of Pollux."""

import csv
import functools
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from .._core._errors import ScheduleError
from .._core._faults import listed, shown
from .._core._files import MOST_TOML_BYTES, named, read_text
from ._elastic_jobs import ElasticJob
from ._published_speeds import (
    EASYSCALE_APPLICATIONS,
    EASYSCALE_DEVICES,
    EASYSCALE_SLOWER,
    POLLUX_APPLICATIONS,
    POLLUX_DEVICES,
)
from ._waste import Capability

_T = TypeVar("_T")
_Row = Mapping[str, str]
_SECONDS = "seconds_"
_OWN = ("name", "time", "steps", "microbatches")
_EASYSCALE = (
    "name",
    "time",
    "application",
    "max_parallelism",
    "batch_size",
    "epochs",
    "enable_heterogeneous_deterministic",
    "preferred_gpu",
)
_POLLUX = ("name", "time", "application", "num_replicas", "batch_size")
_MOST = 10**9  # of a number in a trace
_MOST_MICROBATCHES = 1 << 16


def read_jobs(
    path: str | os.PathLike[str], *, gangs: str = "asked", is_cut: bool = True
) -> tuple[tuple[ElasticJob, ...], dict[str, int]]:
    """The jobs of a trace, and the devices that it was published with.

    A trace is CSV, and its header says whose it is:

    - ours: `name`, `time`, `steps`, `microbatches`, and `seconds_KIND` for each kind of device, the
      seconds of a microbatch; if wished `min_devices` (1), `kind` (the first: that of its gang, and
      its only one if it cannot be mixed), `mixed` (1: devices of several kinds may share a step)
      and `gang` (as many as microbatches);
    - EasyScale's: `max_parallelism`, `epochs`, `preferred_gpu` and others; of rows of one name the
      last counts, as in its artifact;
    - Pollux's: `application`, `num_replicas`, `batch_size`.

    Speeds of published applications are those that were published, see `_published_speeds`.

    Args:
        path: Of the file.
        gangs: How many devices a job gets from schedulers of fixed sets: what it `asked` for, or
            the `most` that it can use.
        is_cut: For Pollux's: whether the batch of a device is cut into the smallest microbatches
            that were measured, so that a job can use more devices than it asked for.

    Returns:
        The jobs in the file's order, and the number of devices by kind: none for ours.

    Raises:
        ScheduleError: If the file cannot be read, with every row that is wrong.
    """
    refuse = named("trace", path, ScheduleError)
    text = read_text(path, MOST_TOML_BYTES, refuse)
    reader = csv.DictReader(io.StringIO(text))
    try:
        head = [field.strip() for field in reader.fieldnames or ()]
        rows = [
            {
                k.strip(): (v or "").strip()
                for k, v in row.items()
                if isinstance(k, str) and not isinstance(v, list)
            }
            for row in reader
        ]
    except csv.Error as error:
        raise refuse(f"is no CSV: {error}") from None
    kinds = [field.removeprefix(_SECONDS) for field in head if field.startswith(_SECONDS)]
    devices: dict[str, int] = {}
    if kinds and set(_OWN) <= set(head):
        make: Callable[[_Row], ElasticJob] = functools.partial(_own, kinds=kinds)
    elif set(_EASYSCALE) <= set(head):
        make, devices = _of_easyscale, dict(EASYSCALE_DEVICES)
        rows = list({row["name"]: row for row in rows}.values())
    elif set(_POLLUX) <= set(head):
        make = functools.partial(_of_pollux, gangs=gangs, is_cut=is_cut)
        devices = dict(POLLUX_DEVICES)
    else:
        raise refuse(
            f"has columns {shown(head)}: give {', '.join(_OWN)} and {_SECONDS}KIND for each kind "
            "of device, or a trace of EasyScale or of Pollux"
        )
    return _jobs(rows, make, refuse), devices


def _jobs(
    rows: Sequence[_Row],
    make: Callable[[_Row], ElasticJob],
    refuse: Callable[[str], Exception],
) -> tuple[ElasticJob, ...]:
    jobs, wrong = [], []
    for number, row in enumerate(rows, 1):
        try:
            jobs.append(make(row))
        except (ScheduleError, ValueError) as error:
            wrong.append(f"job {number}, {shown(row.get('name', ''))}: {error}")
    if wrong:
        raise refuse("has jobs that cannot be read:" + listed(wrong))
    if not jobs:
        raise refuse("has no job")
    return tuple(jobs)


def _own(row: _Row, kinds: Sequence[str]) -> ElasticJob:
    num = _whole(row, "microbatches")
    if num > _MOST_MICROBATCHES:
        raise ValueError(f"microbatches {num:,}, at most {_MOST_MICROBATCHES:,} are scheduled")
    alone = 0
    if row.get("kind"):
        if row["kind"] not in kinds:
            raise ValueError(f"kind {shown(row['kind'])}, of which there is no {_SECONDS} column")
        alone = kinds.index(row["kind"])
    gang = _whole(row, "gang") if row.get("gang") else num
    return ElasticJob(
        name=row["name"],
        arrival_seconds=_number(row, "time"),
        num_steps=_whole(row, "steps"),
        num_microbatches=num,
        min_devices=_whole(row, "min_devices") if row.get("min_devices") else 1,
        capabilities=tuple(
            Capability(kind=k, microbatches_per_second=1 / _positive(row, _SECONDS + k))
            for k in kinds
        ),
        gang=tuple(gang * (k == alone) for k in range(len(kinds))),
        mixed=bool(_whole(row, "mixed")) if row.get("mixed") else True,
        alone=alone,
    )


def _of_easyscale(row: _Row) -> ElasticJob:
    application = _known(row, EASYSCALE_APPLICATIONS)
    size, num = _whole(row, "batch_size"), _whole(row, "max_parallelism")
    kinds = [kind.lower() for kind in EASYSCALE_DEVICES]
    if row["preferred_gpu"] not in kinds:
        raise ValueError(f"preferred_gpu {shown(row['preferred_gpu'])}, known are {kinds}")
    alone = kinds.index(row["preferred_gpu"])
    if min(size, num) < 1 or num > _MOST_MICROBATCHES:
        raise ValueError(
            f"batch_size {size} and max_parallelism {num}, give at least 1, and at most "
            f"{_MOST_MICROBATCHES:,} of the latter"
        )
    # A mini-batch of another size than the measured one takes as much longer as it is larger.
    scale = EASYSCALE_SLOWER * size / application.batch_size
    return ElasticJob(
        name=row["name"],
        arrival_seconds=_number(row, "time"),
        num_steps=math.ceil(_whole(row, "epochs") * application.num_examples / (size * num)),
        num_microbatches=num,
        capabilities=tuple(
            Capability(kind=kind, microbatches_per_second=1 / (scale * seconds))
            for kind, seconds in zip(EASYSCALE_DEVICES, application.seconds, strict=True)
        ),
        gang=tuple(num * (k == alone) for k in range(len(kinds))),
        mixed=bool(_whole(row, "enable_heterogeneous_deterministic")),
        alone=alone,
    )


def _of_pollux(row: _Row, gangs: str, is_cut: bool) -> ElasticJob:
    application = _known(row, POLLUX_APPLICATIONS)
    batch, asked = _whole(row, "batch_size"), _whole(row, "num_replicas")
    if batch not in application.num_steps:
        raise ValueError(f"batch_size {batch}, measured were {sorted(application.num_steps)}")
    size = (min if is_cut else max)(application.seconds)
    num = batch // size
    on_two, on_four, on_more = application.sums_seconds
    [kind] = POLLUX_DEVICES
    return ElasticJob(
        name=row["name"],
        arrival_seconds=_number(row, "time"),
        num_steps=application.num_steps[batch],
        num_microbatches=num,
        capabilities=(
            Capability(kind=kind, microbatches_per_second=1 / application.seconds[size]),
        ),
        gang=(num if gangs == "most" else min(asked, num),),
        sums_seconds=((1, 0.0), (2, on_two), (4, on_four), (_MOST, on_more)),
    )


def _known(row: _Row, applications: Mapping[str, _T]) -> _T:
    name = row["application"]
    if name not in applications:
        raise ValueError(f"application {shown(name)}, known are {', '.join(applications)}")
    return applications[name]


def _number(row: _Row, key: str) -> float:
    try:
        value = float(row[key])
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST:
        raise ValueError(f"{key} {shown(row[key])}, give a number from 0 to {_MOST:,}")
    return value


def _positive(row: _Row, key: str) -> float:
    value = _number(row, key)
    if value < 1 / _MOST:
        raise ValueError(f"{key} {shown(row[key])}, give a positive number")
    return value


def _whole(row: _Row, key: str) -> int:
    value = _number(row, key)
    if value != int(value):
        raise ValueError(f"{key} {shown(row[key])}, give a whole number")
    return int(value)
