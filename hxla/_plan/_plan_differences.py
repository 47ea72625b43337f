"""What one plan decides otherwise than another, key by key."""

from collections.abc import Iterator
from typing import Any


def differences(a: Any, b: Any, key: str = "") -> Iterator[str]:
    """Where two plans differ, as nested dictionaries and tuples.

    Args:
        a: The one.
        b: The other.
        key: Path of both in the plans.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys((*a, *b)):
            yield from differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and key != "spec":
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            named = x.get("name", i) if isinstance(x, dict) else i
            yield from differences(x, y, f"{key}.{named}")
    elif a != b:
        yield f"{key}: {_brief(a)} here, {_brief(b)} there"


def _brief(value: Any) -> str:
    text = f"{len(value)} entries" if isinstance(value, tuple) and len(value) > 8 else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
