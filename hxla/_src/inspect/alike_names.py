"""Joins names that differ in numbers only: `Block_0/up` and on become `Block_0-11/up`."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_NUMBER = re.compile(r"\d+")
_MAX_RANGES = 8
_Value = TypeVar("_Value")


def alike(names: Iterable[str]) -> str:
    """One name for names that differ in numbers only."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    words = _NUMBER.split(distinct[0])
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in distinct), strict=True)
    numbers = (ranges(column) for column in columns)
    return "".join(word + number for word, number in zip(words, [*numbers, ""], strict=True))


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,6` of 0, 1, 2, 3 and 6; of many ranges only the first and the last number."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    if len(out) > _MAX_RANGES:
        return f"{out[0][0]}..{out[-1][1]}"
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def group(
    values: Iterable[_Value], name: Callable[[_Value], str], *keys: Callable[[_Value], object]
) -> list[Sequence[_Value]]:
    """Values whose names differ in numbers only and whose keys are equal, in order."""
    out: dict[object, list[_Value]] = {}
    for value in values:
        shape = _NUMBER.sub("#", name(value))
        out.setdefault((shape, *(key(value) for key in keys)), []).append(value)
    return list(out.values())
