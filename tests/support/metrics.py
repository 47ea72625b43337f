"""Reads a metrics file back: what `metrics.jsonl` tells is the history of the run."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from hxla import ConfigError, EvalRecord, History, Rebalance, StepRecord
from support.inside.report import FILE_NAME


def read_metrics(path: str | os.PathLike[str]) -> History:
    """The history that a metrics file tells.

    A run that resumes at step k replaces all that was recorded of steps from k on, so the history
    is that of the parameters which exist now.

    Args:
        path: A `metrics.jsonl`, or the folder that holds one.

    Returns:
        The history. Numbers that were not finite are NaN; `num_compilations` is not in the file
        and is 0. Where a resume changed the devices, the counts change their length.

    Raises:
        ConfigError: The file cannot be read, or a line other than a torn last one is malformed.
    """
    path = pathlib.Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    # What follows the last newline is empty, or torn by a kill.
    steps: dict[int, StepRecord] = {}
    evaluations: dict[int, EvalRecord] = {}
    rebalances: dict[int, Rebalance] = {}
    for i, line in enumerate(lines[:-1], start=1):
        try:
            fields = json.loads(line)
            kind = fields.pop("kind")
            record = _parse(kind, fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {i} is no metrics record ({error}): {line[:80]!r}. "
                "Remove the line to read the rest"
            ) from error
        if isinstance(record, StepRecord):
            if steps and record.step <= next(reversed(steps)):
                _forget(steps, record.step)
                _forget(rebalances, record.step - 1)
                # An evaluation at step k is of parameters with k updates, so it still holds.
                _forget(evaluations, record.step)
            steps[record.step] = record
        elif isinstance(record, EvalRecord):
            evaluations[record.step] = record
        else:
            rebalances[record.step] = record
    for step, record in steps.items():
        if (evaluation := evaluations.get(step)) is not None:
            steps[step] = dataclasses.replace(record, evaluation=evaluation)
    num_devices = max((len(r.counts) for r in steps.values()), default=0)
    return History(
        device_names=tuple(f"device{d}" for d in range(num_devices)),
        steps=tuple(steps.values()),
        evaluations=tuple(evaluations.values()),
        rebalances=tuple(rebalances.values()),
    )


def _forget(records: dict[int, Any], first_step: int) -> None:
    for step in [s for s in records if s >= first_step]:
        del records[step]


def _parse(kind: str, fields: dict[str, Any]) -> StepRecord | EvalRecord | Rebalance:
    nonfinite = set(fields.pop("nonfinite", ()))
    values = {key: _restored(value, key, nonfinite) for key, value in fields.items()}
    if kind == "step":
        return StepRecord(**values)
    if kind == "eval":
        return EvalRecord(**values)
    if kind == "rebalance":
        return Rebalance(**values)
    raise ValueError(f"unknown kind {kind!r}")


def _restored(value: Any, path: str, nonfinite: set[str]) -> Any:
    if isinstance(value, dict):
        return {k: _restored(v, f"{path}.{k}", nonfinite) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_restored(v, f"{path}[{i}]", nonfinite) for i, v in enumerate(value))
    return math.nan if value is None and path in nonfinite else value
