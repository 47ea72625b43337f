"""Metrics on disk: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

The file is strict JSON, which has no NaN: a number that is not finite is null, and the line's
`nonfinite` lists its path. Lines are only appended, one `write` each, so that a kill costs at most
the last line. A resumed run removes such a torn line and the lines of steps that it runs again. A
new run begins a new file, and the file of the earlier run gets another name. A start or resume is a
line too.

Other files have a training's numbers by name: CSV, JSON lines, TensorBoard. A run appends to a text
file, and a resumed run continues it.
"""

import csv
import dataclasses
import io
import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ..core.errors import ConfigError
from ..core.files import set_aside
from .history import EvalRecord, History, Rebalance, RunStart, StepRecord, named_scalars

#: From a line to whether it is kept; None: it does not tell.
IsKept = Callable[[bytes], bool | None]

_BLOCK_BYTES = 1 << 16


class AppendFile:
    """Appends lines, each in one `write`, so that a kill costs at most the last one.

    Args:
        path: Its folder is made if it is not there.
        goes_on: Whether the run continues the file's; otherwise an earlier file is renamed.
        is_kept: Whether a line of an earlier run, and all before it, are still true; None: this
            line does not tell. A torn last line and all from the first that is not true on are cut.

    Attributes:
        earlier: The new path of an earlier run's file; None if there was none.

    Raises:
        ConfigError: If the file cannot be written.
    """

    def __init__(self, path: pathlib.Path, *, goes_on: bool, is_kept: IsKept):
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.earlier: pathlib.Path | None = None
            if path.exists():
                if goes_on:
                    _cut(path, is_kept)
                else:
                    self.earlier = set_aside(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written to {path.parent}: {error.strerror or error} "
                f"({error.filename or path}). Give a folder that this user may write to"
            ) from error

    def append(self, text: str) -> None:
        """Append text that ends with a line.

        Raises:
            ConfigError: If the file can no longer be written (a full disk).
        """
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ConfigError(
                f"{self._path} can no longer be written: {error.strerror or error}. "
                "Make room and resume from the last checkpoint"
            ) from error

    def replace(self, text: str) -> None:
        """Replace everything, by one rename."""
        self._file.close()
        new = self._path.with_name(self._path.name + ".part")
        self._file = new.open("wb", buffering=0)
        self.append(text)
        new.rename(self._path)

    def close(self) -> None:
        """Close the file. More calls do nothing."""
        self._file.close()


def _cut(path: pathlib.Path, is_kept: IsKept) -> None:
    """Cut the end of a file off."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        for begin, line in _from_the_end(file):
            is_true = line.endswith(b"\n") and _is_true(is_kept, line)
            if is_true:
                break
            if is_true is False:
                end = begin
        file.truncate(end)


def _is_true(is_kept: IsKept, line: bytes) -> bool | None:
    """Whether a line is kept; one that is no record, such as a header, is."""
    try:
        return is_kept(line)
    except (ValueError, KeyError, TypeError):
        return True


def _from_the_end(file: Any) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their places, the last one first."""
    place, rest = file.seek(0, os.SEEK_END), b""
    while place:
        begin = max(0, place - _BLOCK_BYTES)
        file.seek(begin)
        first, *lines = (file.read(place - begin) + rest).splitlines(keepends=True)
        end = begin + len(first) + sum(map(len, lines))
        for line in reversed(lines):
            end -= len(line)
            yield end, line
        place, rest = begin, first
    if rest:
        yield 0, rest


_STEP = "step"  # the first column: updates done


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
