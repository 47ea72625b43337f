"""Values written by people: read from JSON with every fault, its key and the reason."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from ..core.errors import PlanError
from ..core.files import listed, parse_json, shown

Value = TypeVar("Value", bound=pydantic.BaseModel)


def from_json(cls: type[Value], text: str | bytes) -> Value:
    """A value of a class.

    Raises:
        PlanError: With every fault.
    """
    given, found = parse_json(text, lambda words: refusal([f"the file {words}"]))
    told: set[tuple[int | str, ...]] = set()
    while True:
        try:
            value = cls.model_validate_json(json.dumps(given))
        except pydantic.ValidationError as error:
            found += faults_of(error, told)
            new = {failure["loc"] for failure in error.errors()} - told
        else:
            new = set()
        if not new:
            break
        told |= new
        # Without what is wrong by itself, what does not go together can be seen, too.
        for path in new:
            _drop(given, path)
    if found:
        raise refusal(found)
    return value


def refusal(faults: Iterable[str]) -> PlanError:
    """The error that tells of all faults."""
    return PlanError("this is no plan that can be run:" + listed(list(faults)))


def faults_of(
    error: pydantic.ValidationError, told: Iterable[tuple[int | str, ...]] = ()
) -> list[str]:
    """Each fault as `key: what`.

    Args:
        told: Keys whose faults are known already.
    """
    failures = error.errors()
    paths = [failure["loc"] for failure in failures]
    return [
        line
        for failure in failures
        if failure["loc"] not in told and not _is_of_items(failure, paths)
        for line in _lines(failure)
    ]


def _is_of_items(failure: Mapping[str, Any], paths: Sequence[tuple[int | str, ...]]) -> bool:
    """Whether a tuple is only too short without its items that are faulty themselves."""
    own = failure["loc"]
    return failure["type"] == "too_short" and any(
        len(path) > len(own) and path[: len(own)] == own for path in paths
    )


def _lines(failure: Mapping[str, Any]) -> list[str]:
    if failure["type"] == "value_error":  # of the whole, a line for each fault
        return str(failure["ctx"]["error"]).splitlines()
    key = ".".join(str(part)[:80] for part in failure["loc"]) or "the file"
    if failure["type"] == "extra_forbidden":
        return [f"{key}: there is no such key"]
    given = "" if failure["type"] == "missing" else f", not {shown(failure['input'])}"
    return [f"{key}: {failure['msg']}{given}"]


def _drop(tree: Any, path: Sequence[int | str]) -> None:
    try:
        for key in path[:-1]:
            tree = tree[key]
    except (KeyError, IndexError, TypeError):
        return  # above it something is gone already, or is of another type itself
    if path and isinstance(tree, dict):
        tree.pop(path[-1], None)
