"""Metrics on disk: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

The file is strict JSON, which has no NaN: a number that is not finite is null, and the line's
`nonfinite` lists its path. Lines are only appended, one `write` each, so that a kill costs at most
the last line. A resumed run removes such a torn line and the lines of steps that it runs again. A
new run begins a new file, and the file of the earlier run gets another name.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .append_file import AppendFile
from .history import EvalRecord, Rebalance, StepRecord
from .scalar_files import TensorBoard, named_scalars

FILE_NAME = "metrics.jsonl"
_KINDS = {StepRecord: "step", EvalRecord: "eval", Rebalance: "rebalance"}


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
        try:
            self._file = AppendFile(
                pathlib.Path(folder) / FILE_NAME,
                goes_on=first_step > 0,
                is_kept=lambda line: _is_before(json.loads(line), first_step),
            )
        except BaseException:
            if self._events is not None:
                self._events.close()
            raise
        self.earlier = self._file.earlier

    def write(self, record: StepRecord | EvalRecord | Rebalance) -> None:
        """Append a record; a change of counts again once its achieved gain is known.

        Raises:
            ConfigError: The file can no longer be written (a full disk).
        """
        fields = dataclasses.asdict(record)
        fields.pop("evaluation", None)  # has a separate line
        self._line({"kind": _KINDS[type(record)], **fields})
        if self._events is not None and not isinstance(record, Rebalance):
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
    is_before = int(fields["step"]) < first_step + (fields["kind"] != "rebalance")
    # The gain of a change of counts is written many steps after the change.
    return None if is_before and fields["kind"] == "rebalance" else is_before
