"""Checks of whole numbers that users pass to public functions."""

import operator
from typing import Any

from .errors import ConfigError


def check_whole_numbers(least: int | None = None, **numbers: Any) -> None:
    """Refuse arguments that are no whole numbers.

    Args:
        least: The smallest allowed; None: any.
        numbers: Values by the names of the arguments; None is skipped.

    Raises:
        ConfigError: With every fault.
    """
    present = {name: value for name, value in numbers.items() if value is not None}
    wrong = [f"{name}={value!r}" for name, value in present.items() if not _is_whole(value)]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} is no whole number")
    low = [
        f"{k}={v}" for k, v in present.items() if least is not None and operator.index(v) < least
    ]
    if low:
        raise ConfigError(f"{', '.join(low)} must be at least {least}")


def as_whole_number(value: Any) -> Any:
    """NumPy's whole numbers as Python's, and any other value unchanged."""
    return operator.index(value) if _is_whole(value) else value


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
