"""What public functions share: a remedy for unknown keywords, and errors without hxla's frames."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import ConfigError, HxlaError
from .files import meant
from .tracebacks import hide_frames

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class")


def suggests_keywords(
    name: str, elsewhere: Callable[[], Mapping[str, str]] = dict
) -> Callable[[Function], Function]:
    """Make a function refuse unknown keyword arguments with a remedy, and hide its frames.

    Args:
        name: The public name, for the message.
        elsewhere: Keywords of other public functions, and the names of these.
    """

    def decorate(function: Function) -> Function:
        known = [p for p in inspect.signature(function).parameters if p != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                unknown = [word for word in kwargs if word not in known]
                if unknown:
                    lines = [f"{word}: {_remedy(word, known, elsewhere())}" for word in unknown]
                    raise ConfigError(f"{name} has no such argument: " + "; ".join(lines))
                return function(*args, **kwargs)
            except HxlaError as error:
                hide_frames(error)
                raise

        return checked  # type: ignore[return-value]

    return decorate


def suggests_arguments(
    name: str, elsewhere: Callable[[], Mapping[str, str]]
) -> Callable[[type[Class]], type[Class]]:
    """The same for the constructor of a class."""

    def decorate(cls: type[Class]) -> type[Class]:
        setattr(cls, "__init__", suggests_keywords(name, elsewhere)(cls.__init__))  # noqa: B010
        return cls

    return decorate


def _remedy(word: str, known: list[str], elsewhere: Mapping[str, str]) -> str:
    if word in elsewhere:
        return f"it belongs to {elsewhere[word]}"
    near = meant(word, [*known, *elsewhere]) or next((n for n in known if n in word), None)
    if near is None:
        return f"the arguments are {', '.join(known)}"
    return f"did you mean {near}" + (f" of {elsewhere[near]}?" if near in elsewhere else "?")
