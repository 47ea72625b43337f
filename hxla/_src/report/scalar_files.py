"""A training's numbers by name, and the files that keep them: CSV, JSON lines, TensorBoard."""

import csv
import io
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from ..core.errors import ConfigError
from .append_file import AppendFile
from .history import EvalRecord, StepRecord, scalars

_STEP = "step"  # the first column: updates done


def named_scalars(record: StepRecord | EvalRecord) -> dict[str, float]:
    """The numbers of a record by their names in TensorBoard."""
    which = "train" if isinstance(record, StepRecord) else "eval"
    out = {f"{which}/{key}": value for key, value in scalars(record.metrics).items()}
    out[f"{which}/loss"] = record.loss
    if isinstance(record, EvalRecord):
        return out
    for name in ("epoch", "learning_rate", "gradient_norm"):
        if (value := getattr(record, name)) is not None:
            out[f"train/{name}"] = value
    out["speed/step_seconds"] = record.seconds
    if record.seconds:
        out["speed/examples_per_second"] = record.num_examples / record.seconds
        if record.num_tokens:
            out["speed/tokens_per_second"] = record.num_tokens / record.seconds
    for d, (count, idle) in enumerate(zip(record.counts, record.idle_seconds, strict=True)):
        out[f"microbatches/device{d}"] = float(count)
        out[f"idle_seconds/device{d}"] = idle
    return out


class JsonLinesFile:
    """A JSON object for each step; numbers that are not finite are null.

    Args:
        first_step: Updates before this run; above 0 the file goes on, without later rows.

    Raises:
        ConfigError: If the file cannot be written.
    """

    def __init__(self, path: pathlib.Path, *, first_step: int):
        self._file = AppendFile(
            path,
            goes_on=first_step > 0,
            is_kept=lambda line: json.loads(line)[_STEP] <= first_step,
        )
        self.earlier = self._file.earlier

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Append a row."""
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        row = json.dumps({_STEP: step, **finite}, allow_nan=False, separators=(",", ":"))
        self._file.append(row + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvFile:
    """A row for each step; a new name adds a column to the whole file.

    Args:
        first_step: Updates before this run; above 0 the file goes on, without later rows.

    Raises:
        ConfigError: If the file cannot be written.
    """

    def __init__(self, path: pathlib.Path, *, first_step: int):
        self._path = path
        self._file = AppendFile(
            path,
            goes_on=first_step > 0,
            is_kept=lambda line: int(line.split(b",", 1)[0]) <= first_step,
        )
        self.earlier = self._file.earlier
        with path.open(newline="") as file:
            self._columns = next(csv.reader(file), [])

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Append a row, after a new header if it has new names."""
        row = {_STEP: step, **numbers}
        new = [name for name in row if name not in self._columns]
        if new:
            with self._path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._file.replace(
                _rows(self._columns, [{name: name for name in self._columns}, *rows])
            )
        self._file.append(_rows(self._columns, [row]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _rows(columns: list[str], rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


class TensorBoard:
    """Events for TensorBoard in a folder.

    Args:
        first_step: Updates before this run: TensorBoard hides later events of earlier runs.

    Raises:
        ConfigError: If the package `tensorboardX` is missing, or the folder cannot be written.
    """

    earlier = None  # events of earlier runs are hidden, not renamed

    def __init__(self, folder: str | os.PathLike[str], *, first_step: int):
        try:
            import tensorboardX
        except ImportError as error:
            raise ConfigError(
                "TensorBoard events need the package tensorboardX: pip install 'hxla[tensorboard]'"
            ) from error
        try:
            self._events = tensorboardX.SummaryWriter(str(folder), purge_step=first_step + 1)
        except OSError as error:
            raise ConfigError(
                f"TensorBoard events cannot be written to {folder}: {error.strerror or error}"
            ) from error

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Write numbers by their tags."""
        for tag, value in numbers.items():
            self._events.add_scalar(tag, value, global_step=step)

    def close(self) -> None:
        """Write everything and close the file. More calls do nothing."""
        self._events.close()
