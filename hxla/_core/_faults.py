"""What pydantic finds wrong with a table that a person wrote, in words."""

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic

_MOST_LINES = 60  # of an error
_MOST_LETTERS = 80  # of a value or a key


def fault(failure: Mapping[str, Any], model: type[pydantic.BaseModel], source: str = "") -> str:
    """One line: the key, what is wrong with it, and what was found or the nearest known key.

    Args:
        failure: Of `pydantic.ValidationError.errors()`.
        model: That was validated.
        source: Where the value came from, if that is worth a word.
    """
    path = ".".join(_brief(str(key)) for key in failure["loc"])
    if failure["type"] == "extra_forbidden":
        near = nearest(str(failure["loc"][-1]), _keys_beside(model, failure["loc"]))
        return f"{path}: unknown key, did you mean {near!r}?"
    if failure["type"] == "missing":
        return f"{path}: missing, add it"
    found = failure["input"]
    told = "" if isinstance(found, dict | list) else f", found {shown(found)}"
    return f"{path}{source}: {failure['msg'].removeprefix('Value error, ')}{told}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like another."""
    # A name of a megabyte would be compared letter by letter.
    return difflib.get_close_matches(name[:_MOST_LETTERS], list(known), n=1, cutoff=0)[0]


def shown(value: object) -> str:
    """A value that was found, as Python writes it, cut off where it is long."""
    if isinstance(value, int) and abs(value) > 10**_MOST_LETTERS:
        return "a whole number of more than 80 digits"  # writing it out takes long, or fails
    if isinstance(value, str | bytes):
        value = value[:_MOST_LETTERS]
    return _brief(repr(value))


def listed(faults: Sequence[str]) -> str:
    """A line for each fault, for the first of very many."""
    more = len(faults) - _MOST_LINES
    lines = [f"\n  {line}" for line in faults[:_MOST_LINES]]
    return "".join(lines + ([f"\n  and {more} more"] if more > 0 else []))


def _brief(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS + 2 else text[:_MOST_LETTERS] + "..."


def _keys_beside(model: Any, path: Sequence[int | str]) -> list[str]:
    for key in path[:-1]:
        fields = [field for name, field in model.model_fields.items() if key in _names(name, field)]
        if fields:
            model = _model_in(fields[0].annotation) or model
    return list(model.model_fields)


def _names(name: str, field: Any) -> tuple[Any, ...]:
    """What a file may call a field."""
    alias = field.validation_alias
    return name, *(alias.choices if isinstance(alias, pydantic.AliasChoices) else ())


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)
