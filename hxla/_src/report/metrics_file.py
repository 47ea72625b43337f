"""Metrics on disk: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

The file is strict JSON, which has no NaN: a number that is not finite is null, and the line's
`nonfinite` lists its path. Lines are only appended, one `write` each, so that a kill costs at most
the last line. A resumed run removes such a torn line and the lines of steps that it runs again. A
new run begins a new file, and the file of the earlier run gets another name. A start or resume is a
line too.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from ..core.errors import ConfigError
from .append_file import AppendFile
from .history import EvalRecord, History, Rebalance, StepRecord
from .run_start import RunStart
from .scalar_files import TensorBoard, named_scalars

FILE_NAME = "metrics.jsonl"
Record: TypeAlias = RunStart | StepRecord | EvalRecord | Rebalance
_CLASSES = {"run": RunStart, "step": StepRecord, "eval": EvalRecord, "rebalance": Rebalance}
_KINDS = {record_class: kind for kind, record_class in _CLASSES.items()}


class MetricsWriter:
    """Appends the records of a run to `metrics.jsonl`.

    Args:
        folder: Made if it is not there.
        tensorboard: Also write TensorBoard events to the same folder.
        first_step: Updates before this run; above 0 it continues the earlier one of this folder.

    Attributes:
        path: The file.
        earlier: The new path of another run's file; None if there was none.

    Raises:
        ConfigError: The folder cannot be written, or TensorBoard is asked for and its package
            `tensorboardX` is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, tensorboard: bool = False, first_step: int = 0
    ) -> None:
        # Before the file: a run that is refused leaves nothing behind.
        self._events = TensorBoard(folder, first_step=first_step) if tensorboard else None
        self.path = pathlib.Path(folder) / FILE_NAME
        try:
            self._file = AppendFile(
                self.path,
                goes_on=first_step > 0,
                is_kept=lambda line: _is_before(json.loads(line), first_step),
            )
        except BaseException:
            if self._events is not None:
                self._events.close()
            raise
        self.earlier = self._file.earlier

    def write(self, record: Record) -> None:
        """Append a record; a change of counts again once its achieved gain is known.

        Raises:
            ConfigError: The file can no longer be written (a full disk).
        """
        fields = dataclasses.asdict(record)
        fields.pop("evaluation", None)  # has a separate line
        self._line({"kind": _KINDS[type(record)], **fields})
        if self._events is not None and isinstance(record, StepRecord | EvalRecord):
            self._events.write(named_scalars(record), record.step)

    def close(self) -> None:
        """Close the files. More calls do nothing."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _line(self, fields: Mapping[str, Any]) -> None:
        nonfinite: list[str] = []
        clean = _strict(fields, "", nonfinite)
        if nonfinite:
            clean["nonfinite"] = nonfinite
        self._file.append(json.dumps(clean, allow_nan=False, separators=(",", ":")) + "\n")


def read_metrics(path: pathlib.Path) -> tuple[History, tuple[RunStart, ...]]:
    """The records of a metrics file.

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
    by_step: dict[type, dict[int, Any]] = {kind: {} for kind in _KINDS}
    for i, line in enumerate(lines, start=1):
        try:
            record = _parse(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {i} is no metrics record ({error}): {line[:80]!r}. "
                "Remove the line to read the rest"
            ) from error
        by_step[type(record)][record.step] = record
    evaluations = by_step[EvalRecord]
    steps = [
        dataclasses.replace(record, evaluation=evaluations.get(step))
        for step, record in by_step[StepRecord].items()
    ]
    history = History(
        device_names=(),
        steps=tuple(steps),
        evaluations=tuple(evaluations.values()),
        rebalances=tuple(by_step[Rebalance].values()),
    )
    return history, tuple(by_step[RunStart].values())


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


def _is_before(fields: Mapping[str, Any], first_step: int) -> bool | None:
    """Whether a line is of an update before a step, or of an evaluation after such updates."""
    is_before = int(fields["step"]) < first_step + (fields["kind"] in ("step", "eval"))
    # The gain of a change of counts is written many steps after the change.
    return None if is_before and fields["kind"] == "rebalance" else is_before
