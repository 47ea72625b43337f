"""Patterns of names: literal but for placeholders, so that one pass says whether a name matches.

`{n}` stands for the rest of one component of a path (`blocks/{n}/up`, `Dense_{n}`), and `{path*}`
for any number of whole components. No regular expressions: a few letters of one can take longer
than training.
"""

import dataclasses
import functools
import string
from collections.abc import Mapping

#: What stands for each placeholder: one text, or components.
Bound = Mapping[str, str | tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class NamePattern:
    """A pattern of names.

    Attributes:
        text: As it was written.
        separator: Between components.
    """

    text: str
    separator: str

    def __post_init__(self) -> None:
        """Refuse what has no meaning, with a ValueError."""
        several = [part for part in self._parts if part[1].endswith("*")]
        if len(several) > 1:
            raise ValueError(f"{self.text!r} has two placeholders for several components; use one")
        if any(before or after for before, _, after in several):
            raise ValueError(f"{self.text!r}: {{...*}} stands for whole components")

    @functools.cached_property
    def _parts(self) -> tuple[tuple[str, str, str], ...]:
        """For each component the text before its placeholder, the placeholder, the text after."""
        return tuple(_part(text, self.text) for text in self.text.split(self.separator))

    @property
    def placeholders(self) -> frozenset[str]:
        """Their names, with a star for several components."""
        return frozenset(name for _, name, _ in self._parts if name)

    def match(self, name: str) -> Bound | None:
        """What the placeholders stand for in a name, or None if it does not match."""
        parts, components = self._parts, name.split(self.separator)
        star = next((i for i, part in enumerate(parts) if part[1].endswith("*")), None)
        if star is None and len(parts) != len(components):
            return None
        if len(components) < len(parts) - 1:
            return None
        bound: dict[str, str | tuple[str, ...]] = {}
        if star is not None:
            end = len(components) - (len(parts) - star - 1)
            bound[parts[star][1]] = tuple(components[star:end])
            parts = parts[:star] + parts[star + 1 :]
            components = components[:star] + components[end:]
        for (before, key, after), text in zip(parts, components, strict=True):
            if not key:
                if text != before:
                    return None
                continue
            if len(text) <= len(before) + len(after):
                return None
            if not (text.startswith(before) and text.endswith(after)):
                return None
            found = text[len(before) : len(text) - len(after)]
            if bound.setdefault(key, found) != found:
                return None
        return bound

    def fill(self, bound: Bound) -> str:
        """The name with the placeholders replaced."""
        out: list[str] = []
        for before, key, after in self._parts:
            value = bound[key] if key else ""
            out += value if isinstance(value, tuple) else [f"{before}{value}{after}"]
        return self.separator.join(out)


@functools.cache
def pattern(text: str, separator: str) -> NamePattern:
    """The pattern of a text; a map's few are each matched with every array of a model."""
    return NamePattern(text, separator)


def _part(text: str, whole: str) -> tuple[str, str, str]:
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{whole!r} is no pattern: {error}") from None
    before, key, after = "", "", ""
    for literal, field, spec, conversion in parsed:
        if key and field is not None:
            raise ValueError(f"{whole!r} has two placeholders in one component; use one")
        before, after = (before, literal) if key else (before + literal, after)
        if field is None:
            continue
        if spec or conversion or not field.removesuffix("*").isidentifier():
            raise ValueError(f"{whole!r}: {{{field}}} is no placeholder; write {{n}} or {{path*}}")
        key = field
    return before, key, after
