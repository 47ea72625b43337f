"""Metrics on disk: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

The file is strict JSON, which has no NaN: a number that is not finite is null, and the line's
`nonfinite` lists its path. Lines are only appended, one `write` each, so that a kill costs at most
the last line; a resumed run removes such a torn line. A new run begins a new file, and the file of
the earlier run gets another name.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import ConfigError
from .history import EvalRecord, Rebalance, StepRecord, scalars

FILE_NAME = "metrics.jsonl"
_KINDS = {StepRecord: "step", EvalRecord: "eval", Rebalance: "rebalance"}


class MetricsWriter:
    """Appends the records of a run to `metrics.jsonl`.

    Args:
        folder: Made if it is not there.
        tensorboard: Also write TensorBoard events to the same folder.
        goes_on: Whether this run continues the earlier one of this folder.

    Attributes:
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
        self._path = pathlib.Path(folder) / FILE_NAME
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.earlier = None if goes_on else _set_aside(self._path)
            _mend(self._path)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written to {self._path.parent}: {error.strerror or error} "
                f"({error.filename or self._path}). Give a folder that this user may write to"
            ) from error
        try:
            self._events = make_events(str(self._path.parent)) if make_events else None
        except BaseException:
            self._file.close()
            raise

    def write(self, record: StepRecord | EvalRecord | Rebalance) -> None:
        """Append a record; a change of counts again once its achieved gain is known.

        Raises:
            ConfigError: The file can no longer be written (a full disk).
        """
        fields = dataclasses.asdict(record)
        fields.pop("evaluation", None)  # has a separate line
        self._line({"kind": _KINDS[type(record)], **fields})
        if self._events is not None and not isinstance(record, Rebalance):
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
                f"{self._path} can no longer be written: {error.strerror or error}. "
                "Make room and resume from the last checkpoint"
            ) from error


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
