"""Files of jobs: traces to simulate, and jobs to run.

A job to run has a script, and its figures for the scheduler.
"""

import csv
import dataclasses
import functools
import io
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeVar

import pydantic

from ..core.errors import ScheduleError
from ..core.files import MOST_TOML_BYTES, fault, listed, named, read_text, read_toml, shown
from .elastic_jobs import Capability, ElasticJob

#: The devices of EasyScale's simulation, by kind.
EASYSCALE_DEVICES = {"V100": 32, "P100": 16, "T4": 16}
#: EasyScale published the mini-batch times of `overhead.csv`, not those of its simulation. With the
#: former all jobs one after another, decided on once a minute, end after 11,190 s; 16,560 s were
#: published. Times this factor they end after 16,710 s, and EasyScale's policy on like devices
#: gives a mean completion of 1,019 s; 1,071 s were published.
EASYSCALE_SLOWER = 1.7
#: The devices of Pollux's simulation: 16 nodes of 4.
POLLUX_DEVICES = {"T4": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedApplication:
    """An application of EasyScale's trace.

    Attributes:
        batch_size: The examples of a worker's timed mini-batch.
        seconds: Its time on a V100, a P100 and a T4, deterministic (D1).
        num_examples: The examples of an epoch in the simulation, a hundredth of the data set's.
    """

    batch_size: int
    seconds: tuple[float, float, float]
    num_examples: float


#: Seconds are of `overhead.csv`, column `ddp_determinism`; where a job's devices may be of several
#: kinds they are of `ddp_hetero` (the kernels that do not depend on the device, D2). Examples are
#: the data sets' sizes in `simulator/applications.py`. Both are of EasyScale's artifact
#: (sUntvoOk/EasyScale_info_for_SC23 at c5ff7b6).
EASYSCALE_APPLICATIONS = {
    "shufflenetv2": TracedApplication(
        batch_size=128, seconds=(0.2167, 0.3310, 0.4022), num_examples=12800
    ),
    "resnet50": TracedApplication(
        batch_size=64, seconds=(0.2688, 0.4393, 0.6591), num_examples=12800
    ),
    "vgg19": TracedApplication(batch_size=32, seconds=(0.3924, 0.6514, 0.9439), num_examples=12800),
    "yolov3": TracedApplication(
        batch_size=8, seconds=(0.4590, 0.7169, 0.8133), num_examples=165.51
    ),
    "ncf": TracedApplication(
        batch_size=1024, seconds=(0.0107, 0.0127, 0.0118), num_examples=49708.45
    ),
    "bert": TracedApplication(batch_size=8, seconds=(0.4390, 0.5998, 0.6661), num_examples=886.41),
    "electra": TracedApplication(
        batch_size=8, seconds=(0.4420, 0.5958, 0.6654), num_examples=886.41
    ),
    "swintransformer": TracedApplication(
        batch_size=32, seconds=(0.4289, 0.5941, 0.6153), num_examples=12800
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfiledApplication:
    """An application of Pollux's traces.

    Attributes:
        seconds: The time of one device's step without the all-reduce, on a T4, by its examples.
        num_steps: The steps of the whole training, by batch size.
        sums_seconds: The time of the all-reduce on 2 and on 4 devices of a node, and over several
            nodes.
    """

    seconds: dict[int, float]
    num_steps: dict[int, int]
    sums_seconds: tuple[float, float, float]


#: Of the simulator of Pollux's artifact (petuum/adaptdl, branch osdi21-artifact at c793c70,
#: Apache-2.0), nodes of 4 T4: `placements.csv`, the step's time less its sum's, rows of placement
#: 1; the sums' times of the smallest size, rows of placements 2, 4 and 4444; the iterations that
#: its validation runs took.
POLLUX_APPLICATIONS = {
    "cifar10": ProfiledApplication(
        seconds={32: 0.0423, 64: 0.0593, 128: 0.1033},
        num_steps={128: 39062, 256: 20377, 512: 10615, 1024: 5722},
        sums_seconds=(0.0042, 0.0143, 0.1082),
    ),
    "ncf": ProfiledApplication(
        seconds={256: 0.0071},
        num_steps={256: 194174, 512: 97094, 1024: 48625, 2048: 24308},
        sums_seconds=(0.0041, 0.0053, 0.0257),
    ),
    "deepspeech2": ProfiledApplication(
        seconds={10: 0.4649, 20: 0.6797},
        num_steps={20: 28536, 40: 14711, 80: 7683, 160: 4041},
        sums_seconds=(0.0379, 0.1096, 0.3219),
    ),
    "bert": ProfiledApplication(
        seconds={4: 0.4416, 12: 0.9078},
        num_steps={12: 14774, 24: 7427, 48: 3732, 96: 1885},
        sums_seconds=(0.0550, 0.1224, 1.3905),
    ),
    "yolov3": ProfiledApplication(
        seconds={4: 0.2645, 8: 0.3237},
        num_steps={8: 103444, 16: 52905, 32: 27430, 64: 14577, 128: 8075},
        sums_seconds=(0.0202, 0.1216, 0.8399),
    ),
    "imagenet": ProfiledApplication(
        seconds={20: 0.1462, 40: 0.2523, 200: 0.9223},
        num_steps={1600: 78453, 3200: 42123, 6400: 23972},
        sums_seconds=(0.0016, 0.0037, 0.2584),
    ),
}


_T = TypeVar("_T")
_Row = Mapping[str, str]
_SECONDS = "seconds_"
_HXLA = ("name", "time", "steps", "microbatches")
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
    """The jobs of a trace, and the devices with which it was published.

    A trace is CSV, and its header shows its origin:

    - hxla's: `name`, `time`, `steps`, `microbatches`, and `seconds_KIND` for each kind of device,
      the seconds of a microbatch. Optional are `min_devices` (default 1), `kind` (of its gang, and
      its only one if it is not mixed; default the first), `mixed` (default 1: devices of several
      kinds may share a step) and `gang` (default as many as microbatches);
    - EasyScale's: `max_parallelism`, `epochs`, `preferred_gpu` and others; among rows of one name
      the last counts, as in its artifact;
    - Pollux's: `application`, `num_replicas`, `batch_size`.

    Published applications have their published speeds.

    Args:
        gangs: The devices of a job under schedulers of fixed sets: `asked`, its request, or `most`,
            the most that it can use.
        is_cut: For Pollux's: whether the batch of a device is cut into the smallest measured
            microbatches, so that a job can use more devices than it asked for.

    Returns:
        The jobs in the file's order, and the number of devices by kind: none for hxla's.

    Raises:
        ScheduleError: If the file cannot be read, with every wrong row.
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
    if kinds and set(_HXLA) <= set(head):
        make: Callable[[_Row], ElasticJob] = functools.partial(_hxla_job, kinds=kinds)
    elif set(_EASYSCALE) <= set(head):
        make, devices = _easyscale_job, dict(EASYSCALE_DEVICES)
        rows = list({row["name"]: row for row in rows}.values())
    elif set(_POLLUX) <= set(head):
        make = functools.partial(_pollux_job, gangs=gangs, is_cut=is_cut)
        devices = dict(POLLUX_DEVICES)
    else:
        raise refuse(
            f"has columns {shown(head)}: give {', '.join(_HXLA)} and {_SECONDS}KIND for each kind "
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


def _hxla_job(row: _Row, kinds: Sequence[str]) -> ElasticJob:
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


def _easyscale_job(row: _Row) -> ElasticJob:
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
    # The time of a mini-batch is proportional to its size.
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


def _pollux_job(row: _Row, gangs: str, is_cut: bool) -> ElasticJob:
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
