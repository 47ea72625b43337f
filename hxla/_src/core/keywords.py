"""What public functions share: checks of their arguments, and errors without hxla's frames.

A wrong keyword gets a remedy. Tracebacks of hxla's errors have no frames of hxla, as jax shortens
the tracebacks of its errors. The message of an `HxlaError` names what is wrong and where; frames of
hxla would only hide the line of the user's script. `JAX_TRACEBACK_FILTERING=off` keeps them, for
hxla's errors too.

"""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from .errors import ConfigError, HxlaError
from .files import meant

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


_PACKAGE = __name__.partition(".")[0]
_is_kept_whole = False


def keep_whole() -> None:
    """Leave all frames from now on, to a launcher that logs them and shows fewer."""
    global _is_kept_whole
    _is_kept_whole = True


def hide_frames(error: HxlaError) -> None:
    """Remove the frames of hxla from an error; a bare `raise` then adds none."""
    if not _is_kept_whole and jax.config.values["jax_traceback_filtering"] != "off":
        error.__traceback__ = _without_hxla(error.__traceback__)


def _without_hxla(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept = []
    while trace is not None:
        # Not the file's name: the constructor of a dataclass has none.
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            kept.append(trace)
        trace = trace.tb_next
    for own in reversed(kept):
        trace = types.TracebackType(trace, own.tb_frame, own.tb_lasti, own.tb_lineno)
    return trace


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
