"""Metrics on disk: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

The file is strict JSON, which has no NaN: a number that is not finite is null, and the line's
`nonfinite` lists its path. Lines are only appended, one `write` each, so that a kill costs at most
the last line; a resumed run removes such a torn line. A new run begins a new file, and the file of
the earlier run gets another name. A start or resume is a line too; a resume after k steps voids the
lines of later steps above it.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from ..core.errors import ConfigError
from .history import EvalRecord, History, Rebalance, StepRecord, scalars
from .run_start import RunStart

FILE_NAME = "metrics.jsonl"
Record: TypeAlias = RunStart | StepRecord | EvalRecord | Rebalance
_CLASSES = {"run": RunStart, "step": StepRecord, "eval": EvalRecord, "rebalance": Rebalance}
_KINDS = {record_class: kind for kind, record_class in _CLASSES.items()}


class MetricsWriter:
    """Appends the records of a run to `metrics.jsonl`.

    Args:
        folder: Made if it is not there.
        tensorboard: Also write TensorBoard events to the same folder.
        goes_on: Whether this run continues the earlier one of this folder.

    Attributes:
        path: The file.
        earlier: The new path of another run's file; None if there was none.

    Raises:
        ConfigError: The folder cannot be written, or TensorBoard is asked for and its package
            `tensorboardX` is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, tensorboard: bool = False, goes_on: bool = False
    ) -> None:
        # Before the file: a run that is refused leaves nothing behind.
        make_events = _event_writer() if tensorboard else None
        self.path = pathlib.Path(folder) / FILE_NAME
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.earlier = None if goes_on else _set_aside(self.path)
            _mend(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written to {self.path.parent}: {error.strerror or error} "
                f"({error.filename or self.path}). Give a folder that this user may write to"
            ) from error
        try:
            self._events = make_events(str(self.path.parent)) if make_events else None
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Record) -> None:
        """Append a record; a change of counts again once its achieved gain is known.

        Raises:
            ConfigError: The file can no longer be written (a full disk).
        """
        fields = dataclasses.asdict(record)
        fields.pop("evaluation", None)  # has a separate line
        self._line({"kind": _KINDS[type(record)], **fields})
        if self._events is not None and isinstance(record, StepRecord | EvalRecord):
            for tag, value in _scalars(record).items():
                self._events.add_scalar(tag, value, global_step=record.step)

    def close(self) -> None:
        """Close the files. More calls do nothing."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _line(self, fields: Mapping[str, Any]) -> None:
        nonfinite: list[str] = []
        clean = _strict(fields, "", nonfinite)
        if nonfinite:
            clean["nonfinite"] = nonfinite
        text = json.dumps(clean, allow_nan=False, separators=(",", ":")) + "\n"
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ConfigError(
                f"{self.path} can no longer be written: {error.strerror or error}. "
                "Make room and resume from the last checkpoint"
            ) from error


def read_metrics(path: pathlib.Path) -> tuple[History, tuple[RunStart, ...]]:
    """The records of a metrics file, without steps that a resume made again.

    Returns:
        The history, whose devices have no names, and the start and each resume of the run. Numbers
        that were not finite are NaN.

    Raises:
        ConfigError: The file cannot be read, or a line is malformed.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    starts: list[RunStart] = []
    by_step: dict[type, dict[int, Any]] = {StepRecord: {}, EvalRecord: {}, Rebalance: {}}
    for i, line in enumerate(lines, start=1):
        try:
            record = _parse(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {i} is no metrics record ({error}): {line[:80]!r}. "
                "Remove the line to read the rest"
            ) from error
        if isinstance(record, RunStart):
            starts.append(record)
            for kind, records in by_step.items():
                # An evaluation after k updates still holds for a run that resumes after k.
                first_lost = record.step + (kind is EvalRecord)
                by_step[kind] = {k: r for k, r in records.items() if k < first_lost}
        else:
            by_step[type(record)][record.step] = record
    evaluations = by_step[EvalRecord]
    steps = [
        dataclasses.replace(record, evaluation=evaluations.get(step + 1))
        for step, record in by_step[StepRecord].items()
    ]
    history = History(
        device_names=(),
        steps=tuple(steps),
        evaluations=tuple(evaluations.values()),
        rebalances=tuple(by_step[Rebalance].values()),
    )
    return history, tuple(starts)


def _parse(fields: dict[str, Any]) -> Record:
    record_class, nonfinite = _CLASSES[fields.pop("kind")], set(fields.pop("nonfinite", ()))
    return record_class(**{k: _restored(v, k, nonfinite) for k, v in fields.items()})


def _restored(value: Any, path: str, nonfinite: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {k: _restored(v, f"{path}.{k}", nonfinite) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_restored(v, f"{path}[{i}]", nonfinite) for i, v in enumerate(value))
    return math.nan if value is None and path in nonfinite else value


def _strict(value: Any, path: str, nonfinite: list[str]) -> Any:
    """The value in JSON's types; the paths of numbers that are not finite go to a list."""
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {str(k): _strict(v, f"{prefix}{k}", nonfinite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v, f"{path}[{i}]", nonfinite) for i, v in enumerate(value)]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item"):  # a user's metric may be a NumPy scalar
        return _strict(value.item(), path, nonfinite)
    if not math.isfinite(value):
        nonfinite.append(path)
        return None
    return float(value)


def _set_aside(path: pathlib.Path) -> pathlib.Path | None:
    """Rename the file of another run."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.stem}.{i}{path.suffix}") for i in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def _mend(path: pathlib.Path) -> None:
    """Cut a torn last line off the file."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        if file.seek(0, os.SEEK_END):  # an empty file cannot be mapped
            with mmap.mmap(file.fileno(), 0) as lines:
                end = lines.rfind(b"\n") + 1
            file.truncate(end)


def _event_writer() -> Callable[[str], Any]:
    try:
        import tensorboardX
    except ImportError as error:
        raise ConfigError(
            "tensorboard=True needs the package tensorboardX: pip install 'hxla[tensorboard]'"
        ) from error
    return tensorboardX.SummaryWriter


def _scalars(record: StepRecord | EvalRecord) -> dict[str, float]:
    which = "train" if isinstance(record, StepRecord) else "eval"
    out = {f"{which}/{key}": value for key, value in scalars(record.metrics).items()}
    out[f"{which}/loss"] = record.loss
    if isinstance(record, EvalRecord):
        return out
    out["speed/step_seconds"] = record.seconds
    if record.seconds:
        out["speed/examples_per_second"] = record.num_examples / record.seconds
        if record.num_tokens:
            out["speed/tokens_per_second"] = record.num_tokens / record.seconds
    for d, (count, idle) in enumerate(zip(record.counts, record.idle_seconds, strict=True)):
        out[f"microbatches/device{d}"] = count
        out[f"idle_seconds/device{d}"] = idle
    return out
