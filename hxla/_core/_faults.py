"""What pydantic finds wrong with a table that a person wrote, in words."""

import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic


def fault(failure: Mapping[str, Any], model: type[pydantic.BaseModel], source: str = "") -> str:
    """One line: the key, what is wrong with it, and what was found or the nearest known key.

    Args:
        failure: Of `pydantic.ValidationError.errors()`.
        model: That was validated.
        source: Where the value came from, if that is worth a word.
    """
    path = ".".join(map(str, failure["loc"]))
    if failure["type"] == "extra_forbidden":
        known = _keys_beside(model, failure["loc"])
        near = difflib.get_close_matches(str(failure["loc"][-1]), known, n=1, cutoff=0)
        return f"{path}: unknown key, did you mean {near[0]!r}?"
    if failure["type"] == "missing":
        return f"{path}: missing, add it"
    found = failure["input"]
    shown = "" if isinstance(found, dict | list) else f", found {found!r}"
    return f"{path}{source}: {failure['msg'].removeprefix('Value error, ')}{shown}"


def _keys_beside(model: Any, path: Sequence[int | str]) -> list[str]:
    for key in path[:-1]:
        if key in model.model_fields:
            model = _model_in(model.model_fields[key].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)
