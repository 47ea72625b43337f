"""Plan values read from JSON that people edit: every fault is listed with its key and reason."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from ..core.errors import PlanError
from ..core.files import listed, parse_json, shown

Value = TypeVar("Value", bound=pydantic.BaseModel)


def from_json(cls: type[Value], text: str | bytes) -> Value:
    """Parse a value and validate it.

    Raises:
        PlanError: With every fault.
    """
    table, faults = parse_json(text, lambda words: refusal([f"the file {words}"]))
    reported: set[tuple[int | str, ...]] = set()
    while True:
        try:
            value = cls.model_validate_json(json.dumps(table))
        except pydantic.ValidationError as error:
            faults += faults_of(error, reported)
            new = {failure["loc"] for failure in error.errors()} - reported
        else:
            new = set()
        if not new:
            break
        reported |= new
        # Contradictions between fields are only checked once each field is valid or gone.
        for path in new:
            _drop(table, path)
    if faults:
        raise refusal(faults)
    return value


def refusal(faults: Iterable[str]) -> PlanError:
    """The error that lists all faults."""
    return PlanError("this is no plan that can be run:" + listed(list(faults)))


def faults_of(
    error: pydantic.ValidationError, reported: Iterable[tuple[int | str, ...]] = ()
) -> list[str]:
    """Each fault as `key: what`.

    Args:
        reported: Keys whose faults are left out.
    """
    failures = error.errors()
    paths = [failure["loc"] for failure in failures]
    return [
        line
        for failure in failures
        if failure["loc"] not in reported and not _follows_from_items(failure, paths)
        for line in _lines(failure)
    ]


def _follows_from_items(failure: Mapping[str, Any], paths: Sequence[tuple[int | str, ...]]) -> bool:
    """Whether a tuple is too short only because its faulty items were dropped."""
    key = failure["loc"]
    return failure["type"] == "too_short" and any(
        len(path) > len(key) and path[: len(key)] == key for path in paths
    )


def _lines(failure: Mapping[str, Any]) -> list[str]:
    if failure["type"] == "value_error":  # of a model validator, a line for each fault
        return str(failure["ctx"]["error"]).splitlines()
    key = ".".join(str(part)[:80] for part in failure["loc"]) or "the file"
    if failure["type"] == "extra_forbidden":
        return [f"{key}: there is no such key"]
    value = "" if failure["type"] == "missing" else f", not {shown(failure['input'])}"
    return [f"{key}: {failure['msg']}{value}"]


def _drop(tree: Any, path: Sequence[int | str]) -> None:
    try:
        for key in path[:-1]:
            tree = tree[key]
    except (KeyError, IndexError, TypeError):
        return  # a parent was dropped already, or has another type
    if path and isinstance(tree, dict):
        tree.pop(path[-1], None)
